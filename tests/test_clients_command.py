"""`splitveil clients`, and training the clients it names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli import app

BUDGET = ("clients", "--macs", "21.9e6", "--wire", "512")


def call(*words: str) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, list(words))


def text(result: Any) -> str:  # noqa: ANN401
    """Everything printed, wrapped lines joined."""
    return re.sub(r"\s+", " ", result.output + result.stderr)


def test_each_client_has_one_line_with_its_costs() -> None:
    result = call(*BUDGET, "--limit", "5")
    assert result.exit_code == 0, text(result)
    lines = result.stdout.splitlines()
    assert lines[0] == "5 of 1197 clients that fit, for images 3x32x32"
    assert lines[1].split() == ["net", "MMAC", "params", "wire", "depth", "sees"]
    assert lines[2].split() == ["thin-mobilenet", "20.96", "168696", "512", "30", "55"]
    assert lines[3].split() == ["thin-resnet", "19.87", "137624", "512", "11", "49"]
    assert lines[4].startswith("client:strided-")
    assert lines[-1] == "next: splitveil train --net thin-mobilenet --dataset NAME"
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


def test_help_has_an_example() -> None:
    assert "splitveil clients --macs 21.9e6 --wire 512" in text(call("clients", "--help"))


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


@pytest.mark.parametrize(
    ("net", "said"),
    [
        ("client:residual-16", "malformed client 'residual-16'; write FAMILY-STEM-"),
        ("client:strided-8-8.8.8.8.8-c1", "at least 16×16, got (1, 8, 8); use --net small"),
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
