"""`splitveil clients`, and training the clients it names."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cli.calling import call, text
from experiments.made import Instant

import splitveil as sv
from splitveil.attacks.profiles import PROFILES
from splitveil.config.run_config import RunConfig

BUDGET = ("clients", "--macs", "21.9e6", "--wire", "512")


def test_each_client_has_one_line_with_its_costs() -> None:
    result = call(*BUDGET, "--limit", "5")
    assert result.exit_code == 0, text(result)
    lines = result.stdout.splitlines()
    assert lines[0] == "5 of 1198 clients that fit, for images 3x32x32"
    assert lines[1].split() == ["net", "MMAC", "params", "wire", "stored", "track", "depth", "sees"]
    assert lines[2].split() == ["thin-deep", "19.85", "483136", "512", "477912", "B21", "33", "91"]
    assert lines[3].split() == [
        "thin-resnet",
        "19.87",
        "137624",
        "512",
        "137096",
        "B21",
        "11",
        "49",
    ]
    assert lines[4].startswith("client:strided-")
    assert lines[-1] == "next: splitveil train --net thin-deep --dataset NAME"
    assert len(lines) == 2 + 5 + 2


def test_json_says_the_same_in_exact_numbers() -> None:
    found = json.loads(call(*BUDGET, "--family", "residual", "--limit", "2", "--json").stdout)
    assert found["image_shape"] == [3, 32, 32]
    assert found["fitting"] > 2
    assert found["clients"][0] == {
        "net": "thin-resnet",
        "spec": "residual-16-16.32x2.64-c8",
        "family": "residual",
        "macs": 19_873_792,
        "params": 137_624,
        "stored": 137_096,
        "track": "B21",
        "wire_floats": 512,
        "depth": 11,
        "receptive_field": 49,
    }
    assert found["clients"][1]["net"] == f"client:{found['clients'][1]['spec']}"


def test_budget_of_parameters_and_smaller_wires() -> None:
    words = ("clients", "--macs", "1e6", "--wire", "100", "--image", "1x28x28",
             "--family", "strided", "--limit", "9999", "--json")  # fmt: skip
    plain = json.loads(call(*words).stdout)["clients"]
    few = json.loads(call(*words, "--params", "5000").stdout)["clients"]
    more = json.loads(call(*words, "--smaller").stdout)["clients"]
    assert 0 < len(few) < len(plain) < len(more)
    assert few == [c for c in few if c["params"] <= 5000]
    assert {c["wire_floats"] for c in plain} < {c["wire_floats"] for c in more}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--macs", "-5", "--wire", "512"), "macs must be a finite number > 0, got -5.0"),
        (("--macs", "nan", "--wire", "512"), "macs must be a finite number > 0, got nan"),
        (("--macs", "1e6", "--wire", "0"), "wire must be at least 1, got 0"),
        (("--macs", "1e6", "--wire", "512", "--limit", "0"), "limit must be at least 1, got 0"),
        (("--macs", "100", "--wire", "512"), "no client fits 100 multiply-adds and 512 numbers"),
        (("--macs", "100", "--wire", "512"), "costs 82,944 multiply-adds"),
        (("--macs", "1e6", "--wire", "5"), "the smallest wire has 16"),
        (("--macs", "1e6", "--wire", "512", "--family", "mobile"), "unknown client family"),
        (("--macs", "1e6", "--wire", "512", "--image", "32x32"), "as 3x32x32; got '32x32'"),
        (("--macs", "1e6", "--wire", "512", "--image", "1x2x8"), "at least 1×4×4"),
        (("--macs", "many", "--wire", "512"), "number"),
        (("--wire", "512"), "--macs"),
    ],
)
def test_a_bad_budget_exits_with_2_and_says_why(words: tuple[str, ...], said: str) -> None:
    result = call("clients", *words)
    assert result.exit_code == 2
    assert said in text(result)


def test_a_listed_client_can_be_trained_and_read_back(tmp_path: Path) -> None:
    listed = call("clients", "--macs", "1e5", "--wire", "64", "--image", "1x8x8", "--family",
                  "strided", "--limit", "1", "--json")  # fmt: skip
    client = json.loads(listed.stdout)["clients"][0]
    words = ("train", "--dataset", "digits", "--defence", "none", "--net", client["net"],
             "--epochs", "1", "--runs-dir", str(tmp_path), "--name", "a")  # fmt: skip
    result = call(*words)
    assert result.exit_code == 0, text(result)
    assert f'net = "{client["net"]}"' in (tmp_path / "a" / "config.toml").read_text()
    run = sv.load_run(tmp_path / "a")
    assert run.config.net == client["net"]
    assert run.model.macs((1, 8, 8)) == client["macs"]
    assert run.model.wire_floats((1, 8, 8)) == client["wire_floats"]
    assert run.model.client_params() == client["params"]
    with torch.no_grad():
        assert run.model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert call(*words, "--resume").exit_code == 0


RANK = ("clients", "--macs", "2e4", "--wire", "16", "--family", "strided", "--rank", "--dataset",
        "digits", "--defence", "noise", "--epochs", "8", "--top", "2",
        "--profile", "smoke")  # fmt: skip


def test_clients_are_trained_once_and_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: PROFILES["smoke"][name] for name in ("class-mean", "linear", "rmle")}
    monkeypatch.setitem(cast("dict[str, Any]", PROFILES), "smoke", few)
    first = call(*RANK, "--runs-dir", str(tmp_path), "--json")
    assert first.exit_code == 0, text(first)
    assert re.search(r"client:strided-\S+ \S+ 1/1 .+? 0 failed", text(first))
    found = json.loads(first.stdout)
    assert found["image_shape"] == [1, 8, 8]
    assert (found["dataset"], found["defence"], found["epochs"]) == ("digits", "noise", 8)
    assert found["failed"] == []
    rows = found["clients"]
    assert [r["score"] for r in rows] == sorted((r["score"] for r in rows), reverse=True)
    assert any(r["pareto"] for r in rows)
    for row in rows:
        gain = max(row["accuracy"] - 0.1, 0.0) / 0.9 * min(row["mse"] / row["ceiling"], 1.0)
        assert row["score"] == pytest.approx(gain)
        assert row["attack"] in few.keys() - {"rmle"}
        assert Path(row["run"]).parent == tmp_path / "advisor"
        assert sv.load_run(row["run"]).model.macs((1, 8, 8)) == row["macs"] <= 2e4

    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "advisor").rglob("*") if p.is_file()}
    again = call(*RANK, "--runs-dir", str(tmp_path))
    assert again.exit_code == 0, text(again)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    lines = again.stdout.splitlines()
    assert lines[0] == "2 clients on digits with noise, 8 epochs, seed 0, profile smoke"
    for line, row in zip(lines[2:4], rows, strict=True):
        assert line.startswith(f"{'*' if row['pareto'] else ' '}  {row['net']} ")
        assert f" {100 * row['accuracy']:.2f} " in line
        assert f" {row['mse']:.4f} " in line
        assert f" {row['leakage']:.3f} " in line
    assert rows[0]["score"] > 0
    assert lines[-1] == f"next: splitveil train --net {rows[0]['net']} " + (
        "--dataset digits --defence noise"
    )


def test_a_client_at_chance_is_not_recommended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(config: RunConfig) -> tuple[float, float]:
        if "x3" in config.net:
            raise RuntimeError("out of memory")
        return 0.1, 0.2

    Instant(monkeypatch, work)
    result = call(*RANK, "--runs-dir", str(tmp_path))
    assert result.exit_code == 3, text(result)  # one failed
    assert "client:strided-4s2-4.8x3.16x3-c16 failed: out of memory" in text(result)
    assert "the same command tries again what failed" in text(result)
    assert call(*RANK, "--runs-dir", str(tmp_path), "--json").exit_code == 3
    assert result.stdout.startswith("1 clients on digits")
    assert "no client answers better than chance; try more --epochs" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rank",), "needs --dataset"),
        (("--rank", "--dataset", "digit"), "did you mean 'digits'"),
        (("--rank", "--dataset", "digits", "--defence", "vell"), "did you mean 'veil'"),
        (("--rank", "--dataset", "digits", "--profile", "smok"), "did you mean 'smoke'"),
        (("--rank", "--dataset", "digits", "--top", "0"), "top must be at least 1, got 0"),
        (("--rank", "--dataset", "digits", "--epochs", "0"), "epochs must be at least 1"),
        (("--rank", "--dataset", "digits", "--image", "3x8x8"), "are (1, 8, 8); leave out"),
        (("--rank", "--dataset", "digits", "--params", "9"), "no client fits 100,000"),
        (("--rank", "--dataset", "digits", "--smaller"), "--smaller: not together with --rank"),
        (("--dataset", "digits", "--top", "3"), "--dataset, --top: only with --rank"),
        (("--classes", "3"), "--classes: only with --backbone"),
        (("--backbone", "a:b", "--params", "9"), "--params: not together with --backbone"),
        (("--backbone", "a"), "unknown backbone 'a'; choose from: mobilenetv2, resnet20, small"),
        (("--backbone", "resnet2"), "did you mean 'resnet20'?"),
        (("--backbone", "a"), "or give your own as MODULE:FUNCTION, for example mynets"),
        (("--backbone", ":a"), "--backbone must be MODULE:FUNCTION, for example mynets"),
    ],
)
def test_options_that_contradict_exit_with_2(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("clients", "--macs", "1e5", "--wire", "64", *words)
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("net", "said"),
    [
        ("client:residual-16", "malformed client 'residual-16'; write FAMILY-STEM-"),
        ("client:strided-8-8.8.8.8.8-c1", "at least 16×16, got (1, 8, 8); use larger images"),
        ("thin-mobile", "unknown net 'thin-mobile'; did you mean 'thin-mobilenet'?"),
    ],
)
def test_a_bad_client_is_refused_before_anything_is_written(
    net: str, said: str, tmp_path: Path
) -> None:
    result = call("train", "--dataset", "digits", "--net", net, "--runs-dir", str(tmp_path))
    assert result.exit_code == 2
    assert said in text(result)
    assert list(tmp_path.iterdir()) == []
