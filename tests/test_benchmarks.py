"""Benchmark results are strict JSON of one shape, and the script produces it."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import splitveil as sv
from splitveil.config.machine import has_bf16
from splitveil.defences.catalogue import DEFENCES

ROOT = Path(__file__).parents[1]
STORE = ROOT / "benchmarks" / "results"
STEPS = sorted((STORE / "gpu").glob("*.json"))  # of benchmarks/gpu.py
RESULTS = sorted(set(STORE.glob("**/*.json")) - {*STEPS})


def check_precision(found: dict[str, Any]) -> None:
    assert {"splitveil", "torch", "python", "threads", "commit"} <= set(found["versions"])
    assert "precision.py" in found["command"]
    kinds = {(row["defence"], row["seed"]) for row in found["rows"]}
    assert len(found["rows"]) == 2 * len(kinds)  # each in float32 and in bf16
    for row in found["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert row["mse"] > 0
    for mean in found["means"]:
        of = [r for r in found["rows"] if all(r[k] == mean[k] for k in ("defence", "precision"))]
        assert mean["n"] == len(of)
        assert mean["mse"] == pytest.approx(sum(row["mse"] for row in of) / len(of))


BRIEF = 4  # epochs of the trainings that compare settings


# Suites whose rows have columns of their own.
OWN_ROWS = {
    "demo", "quick", "grid", "decoders", "settings", "alone", "exit-rules", "taps", "profile",
    "advise",
}  # fmt: skip


def check(found: dict[str, Any]) -> None:
    if found["suite"] == "precision":
        check_precision(found)
        return
    if found["suite"] in OWN_ROWS:
        assert {"splitveil", "torch", "python", "threads", "commit"} <= set(found["versions"])
        assert found["command"]
        assert found["rows"]
        return
    suites = ("surrogates", "oracle", "step", "epoch", "recipe", "serve", "cpu", "exit")
    assert found["suite"] in suites
    assert isinstance(found["device"], str)
    assert {"splitveil", "torch", "python", "threads", "commit"} <= set(found["versions"])
    assert found["batch"] > 0
    for row in found["rows"]:
        assert row["best_ms"] > 0
        assert row["repeats"] > 0
        if found["suite"] == "recipe":
            assert found["command"].startswith(f"splitveil train --recipe {row['recipe']}")
            assert row["epochs"] > 0
        elif found["suite"] == "epoch":
            assert row["ratio"] == 1.0 or row["preset"] != "none"
        elif found["suite"] == "cpu":
            assert row["best_ms"] <= row["median_ms"]
            assert row["gflops"] > 0
            assert row["ratio"] == 1.0 or row["way"] != "NCHW float32"
        elif found["suite"] == "step":
            assert row["mode"] in ("eager", "captured")
            assert row["ratio"] == 1.0 or row["surrogate"] != "plain"
        else:
            assert row["best_ms"] <= row["median_ms"]
            assert row["classes"] > 0
    if found["suite"] in ("step", "epoch", "recipe"):
        assert found["net"]
    elif found["suite"] != "cpu":
        assert found["dim"] > 0
    assert all(value > 0 for value in found["ratios"].values())


def written_by(script: str, target: Path, *options: str) -> dict[str, Any]:
    """What a script of the folder writes, after the check of its schema."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), str(target), *options]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(target.read_text())
    check(found)
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_stored_results_have_the_schema(path: Path) -> None:
    check(json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail))


@pytest.mark.parametrize("path", STEPS, ids=lambda p: p.name)
def test_a_stored_step_of_the_gpu_says_how_it_was_made(path: Path) -> None:
    step = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert step["step"] == path.stem
    assert step["command"].startswith("python ")
    assert "cuda" in step["device"]
    assert step["seconds"] > 0
    if "suite" in step["found"]:
        check(step["found"])
    if "record" in step["found"]:
        record = json.loads((ROOT / step["found"]["record"]).read_text(encoding="utf-8"))
        assert record["strongest"]["mse"] == step["found"]["mse"]


def test_there_are_results() -> None:
    assert RESULTS


def test_times_per_epoch_are_of_known_defences_and_cover_the_documents() -> None:
    timed = set()
    for path in RESULTS:
        if path.name.startswith("epoch--"):
            found = json.loads(path.read_text(encoding="utf-8"))
            timed |= {row["preset"] for row in found["rows"]}
    assert {part for name in timed for part in name.split("+")} <= set(DEFENCES)
    # Without a GPU nobody can time a new defence, so only these have to be timed.
    assert {"none", "cem", "gated-att", "slot-cross", "veil"} <= timed


def test_the_script_writes_the_schema(tmp_path: Path) -> None:
    sizes = ("--batch", "32", "--dim", "8", "--repeats", "1")
    found = written_by("surrogate_speed.py", tmp_path / "b.json", *sizes)
    assert len(found["rows"]) == 15


@pytest.mark.slow
def test_the_speed_of_a_cpu_is_measured_by_one_command(tmp_path: Path) -> None:
    sizes = ("--batch", "4", "--repeats", "1", "--threads", "1")
    found = written_by("cpu_speed.py", tmp_path / "b.json", *sizes)
    cases = {row["case"] for row in found["rows"]}
    assert {"VGG11", "thin-deep", "small pair", "decoder N8C64", "encoding"} <= cases


@pytest.mark.slow
def test_where_the_time_goes_is_measured_by_one_command(tmp_path: Path) -> None:
    brief = ("--pair", "digits", "--client", "auto", "--profile", "smoke", "--no-compile")
    sizes = ("--epochs", "1", "--digits-epochs", "1", "--threads", "1")
    rows = written_by("cpu_profile.py", tmp_path / "b.json", *brief, *sizes)["rows"]
    assert [row["case"] for row in rows] == ["epoch", "smoke on digits", "smoke on digits"]
    for row in rows:
        assert sum(row["shares"].values()) == pytest.approx(1, abs=0.01)
    assert rows[0]["shares"]["convolutions"] > 0.05
    assert rows[1]["shares"]["decoder"] > 0


@pytest.mark.slow
def test_exit_rules_are_judged_by_one_command(tmp_path: Path) -> None:
    config = sv.RunConfig(dataset="digits", defence="early-exit", epochs=2, seed=0, name="asks",
                          runs_dir=str(tmp_path), threads=1)  # fmt: skip
    run = sv.fit(config)
    rows = written_by("exit_rules.py", tmp_path / "b.json", str(run.path), "--shares", "0.5")[
        "rows"
    ]
    assert {(row["rule"], row["average"]) for row in rows} == {
        (rule, average) for rule in ("confidence", "margin", "entropy") for average in (False, True)
    }
    assert not any(row["per_class"] for row in rows)  # fewer than 50 images of a class
    assert all(0.3 < row["sent"] < 0.7 for row in rows)


@pytest.mark.slow
def test_what_an_answer_costs_is_measured_by_one_command(tmp_path: Path) -> None:
    sizes = ("--net", "small", "--images", "20", "--rounds", "1", "--send", "0.25")
    rows = {
        row["mode"]: row for row in written_by("exit_cost.py", tmp_path / "b.json", *sizes)["rows"]
    }
    assert {way: row["sent"] for way, row in rows.items()} == {
        "alone": 0, "split": 1, "early exit": 0.25
    }  # fmt: skip
    assert rows["alone"]["bytes_per_image"] == 0
    split, early = (rows[way]["bytes_per_image"] for way in ("split", "early exit"))
    assert early == pytest.approx(0.25 * split, rel=0.05)


def test_the_page_on_deployment_says_what_was_measured() -> None:
    folder = ROOT / "benchmarks" / "results"
    page = (ROOT / "docs" / "guides" / "deploy.md").read_text(encoding="utf-8")
    for column, kind in enumerate(("serve", "serve-small"), start=1):
        found = json.loads((folder / f"{kind}--2-core-x86--cpu.json").read_text(encoding="utf-8"))
        speed = {row["mode"]: row["images_per_second"] for row in found["rows"]}
        statuses, lost = found["overload"]["statuses"], "neither_answered_nor_shed"
        single, full = (
            f"{found['latency'][when]['p99_ms']:.2g} ms"
            for when in ("one at a time", "at the best throughput")
        )
        counts = (statuses["200"], statuses.get("429", 0), found["overload"][lost])
        expected = {
            "images per second": f"{speed['server']:,.0f}",
            "of onnxruntime": f"{found['ratios']['server to direct']:.2f}",
            "99th percentile of the latency": single,
            "the same at full": full,
            "at four times the load": ", ".join(map(str, counts)),
        }
        for words, number in expected.items():
            [row] = [line for line in page.splitlines() if line.startswith(f"| {words}")]
            assert row.split("|")[column + 1].strip() == number
    among = json.loads((folder / "serve-strangers--2-core-x86--cpu.json").read_text("utf-8"))
    alone, beside = (among["strangers"][k]["p99_ms"] for k in ("alone", "among_strangers"))
    assert f"{alone:.1f} and {beside:.1f} ms" in page
    assert beside <= 2 * alone


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16(), reason="the processor has no bf16")
def test_the_script_on_precision_runs(tmp_path: Path) -> None:
    options = ("--defences", "none", "--seeds", "0", "--epochs", "1", "--profile", "smoke")
    found = written_by("precision.py", tmp_path / "out.json", *options, "--attacks", "linear")
    assert [row["precision"] for row in found["rows"]] == ["float32", "bf16"]


def read(name: str, page: str) -> tuple[dict[str, Any], str]:
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    return json.loads((STORE / name).read_text(encoding="utf-8")), " ".join(text.split())


def test_figures_of_the_pages_are_those_of_the_records() -> None:
    """What the pages say of `quick` on digits, and of noise on the grid on CIFAR-10."""

    found, text = read("quick--digits--2-core-x86.json", "attacks.md")
    at = {(row["defence"], row["version"]): row for row in found["rows"]}
    for key, digits in (("user_s", 1), ("mse", 4)):
        shown = {k: f"{row[key]:.{digits}f}" for k, row in at.items()}
        assert f"{shown['none', '0.1.0']} and {shown['veil', '0.1.0']}" in text
        assert f"became {shown['none', 'now']} and {shown['veil', 'now']}" in text

    found, text = read("quick--cifar10--2-core-x86.json", "attacks.md")
    old, new = found["rows"]
    for sentence in (
        f"{old['user_s']:.0f} CPU seconds became {new['user_s']:.0f}",
        f"strongest MSE {old['mse']:.4f} became {new['mse']:.4f}",
        *(
            f"`{name}` {old['attacks'][name]:.4f} became {new['attacks'][name]:.4f}"
            for name in ("k-query", "rmle", "prior")
        ),
    ):
        assert sentence in text
    assert new["mse"] <= old["mse"]

    found, text = read("exit--2-core-x86--2-threads.json", "../guides/deploy.md")
    for row in found["rows"]:
        assert (
            f"| {row['median_ms']:.2f} | {row['sent']:.2f} | {row['bytes_per_image']:.0f} |" in text
        )

    found, text = read("grid--cifar10--2-core-x86.json", "certificates.md")
    means = [f"{100 * statistics.mean(row['accuracy']):.2f}" for row in found["rows"]]
    spreads = [
        f"{100 * statistics.stdev(row['accuracy']):.2f}".lstrip("0") for row in found["rows"]
    ]
    assert " and ".join(f"{m} ± {s} %" for m, s in zip(means, spreads, strict=True)) in text
    linear = [f"{statistics.mean(row['linear']):.4f}".lstrip("0") for row in found["rows"]]
    assert " and ".join(linear) in text
    assert " and ".join(f"{row['decoder']:.4f}".lstrip("0") for row in found["rows"]) in text

    found, text = read("decoders--cifar10--2-core-x86.json", "attacks.md")
    fits = {(row["arm"], row["client"]): row for row in found["rows"]}
    for arm in dict.fromkeys(arm for arm, _ in fits):
        own = [fits.get((arm, client)) for client in ("none", "noise", "veil")]
        cells = (f"{r['mse']:.4f} ({r['cpu_seconds']:.0f})" if r else "–" for r in own)
        assert " | ".join(cells) in text
    of_all = {
        arm: sum(fits[arm, client]["mse"] for client in ("none", "noise", "veil"))
        for arm in ("S2C64", "S2C96", "S2C128", "N8C64")
    }
    assert min(of_all, key=lambda arm: of_all[arm]) == "S2C64"
    for client in ("none", "noise", "veil"):
        assert fits["S2C64", client]["mse"] <= fits["N8C64", client]["mse"]
    more = [
        100 * (fits["S2C64", c]["mse"] / fits["N8C64-16", c]["mse"] - 1)
        for c in ("none", "noise", "veil")
    ]
    assert f"leaves {more[0]:.0f}, {more[1]:.0f} and {more[2]:.0f} % more error" in text


def test_figures_of_clients_alone_are_those_of_the_records() -> None:
    """The searches for the best client alone, and where the early exits take their wire."""
    for place in ("B1--2-core-x86", "B5--h200--cuda"):
        found, text = read(f"alone--cifar10-{place}.json", "../guides/do-i-need-a-server.md")
        last = [row for row in found["rows"] if row["epochs"] == 12]
        best = max(last, key=lambda row: row["accuracy"])
        assert f"`{best['client']}`" in text
        assert f"({100 * best['accuracy']:.1f} % of the validation images" in text
        assert f"{best['macs'] / 1e6:.2f} million" in text
        assert f"{best['stored']:,}" in text
    found, text = read("alone--cifar10-B1--2-core-x86.json", "../guides/do-i-need-a-server.md")
    right = [100 * row["accuracy"] for row in found["best_on_test"]]
    assert f"{statistics.mean(right):.1f} ± {statistics.stdev(right):.1f} %" in text

    found, text = read("taps--cifar10--h200--cuda.json", "../project/results/frontier.md")
    for track in ("B1", "B5"):
        rows = [row for row in found["rows"] if row["track"] == track]
        best = max(rows, key=lambda row: row["val_rule_accuracy"])
        assert best["client"].endswith("@4"), "the rows of the frontier have their wire there"


def test_figures_of_advice_and_exit_rules_are_those_of_the_records() -> None:
    """How long `advise` takes, and which rule answers best."""
    found, text = read("advise--2-core-x86.json", "../guides/do-i-need-a-server.md")
    for row, name in zip(found["rows"], ("digits", "Fashion-MNIST"), strict=True):
        assert f"{row['seconds'] // 60}:{row['seconds'] % 60:02d} on {name}" in text

    half = {}
    for track in ("B1", "B5"):
        found, text = read(f"exit-rules--cifar10-{track}--2-core-x86.json", "defences.md")
        half[track] = {
            (row["rule"], row["average"], row["per_class"], row["share"]): 100 * row["accuracy"]
            for row in found["rows"]
        }
    for rule in ("confidence", "margin", "entropy"):
        first, second = (half[track][rule, False, False, 0.2] for track in ("B1", "B5"))
        assert re.search(rf"{rule} (answers )?{first:.1f} and {second:.1f} %", text)
    first, second = (half[track]["confidence", False, True, 0.2] for track in ("B1", "B5"))
    assert f"({first:.1f} and {second:.1f} % by confidence)" in text
    for track in ("B1", "B5"):
        plain, mixed = (half[track]["confidence", average, False, 0.5] for average in (False, True))
        assert f"({track}: {mixed:.1f} instead of {plain:.1f} %)" in text


def test_figures_of_the_settings_page_are_those_of_the_records() -> None:
    """What the page says of the laptop recipe, its settings and bf16."""
    text = " ".join((ROOT / "docs/guides/settings.md").read_text(encoding="utf-8").split())
    found = json.loads((STORE / "precision--cifar10--2-core-x86.json").read_text("utf-8"))
    assert " and ".join(f"{100 * row['accuracy']:.1f} %" for row in found["rows"]) in text
    assert " and ".join(f"{row['mse']:.4f}" for row in found["rows"]) in text
    found = json.loads((STORE / "settings--cifar10-laptop--2-core-x86.json").read_text("utf-8"))
    for arm in ("plain", "nesterov", "flips"):
        got = [row for row in found["rows"] if row["arm"] == arm and row["epochs"] == BRIEF]
        right = ", ".join(f"{100 * row['val_accuracy']:.1f}" for row in got)
        seconds = ", ".join(f"{row['cpu_seconds']:.0f}" for row in got)
        assert f"| {right} | {seconds} |" in text
    one = json.loads((STORE / "cifar10-laptop--2-core-x86.json").read_text("utf-8"))
    low = 100 * one["leakage_bands"]["low"]
    for words in (
        f"accuracy {100 * one['accuracy']:.1f} %",
        f"strongest attack MSE {one['strongest']['mse']:.4f}",
        f"leakage {100 * one['leakage']:.0f} %, of the 4×4 block means {low:.0f} %",
    ):
        assert words in text
    minutes, rest = divmod(int(one["rows"][0]["wall_s"]), 60)
    assert f"takes {minutes}:{rest:02d} on these two cores" in text
    seen = json.loads((STORE / "profile--2-core-x86--2-threads.json").read_text("utf-8"))["rows"]
    epoch, compiling, large, small = seen
    for row, kinds in (
        (epoch, ("convolutions", "batch norm", "augmentation and indexing")),
        (large, ("rmle", "decoder", "k-query")),
        (small, ("rmle", "decoder")),
    ):
        for kind in kinds:
            assert f"{100 * row['shares'][kind]:.1f} %" in text
    assert f"takes {large['seconds']:.0f} s:" in text
    assert f"digits {small['seconds']:.0f} s:" in text
    assert compiling["pays_after_steps"] is None
    eager, quick = compiling["eager_ms"], compiling["compiled_ms"]
    assert f"{compiling['first_s']:.0f} s at first, then {quick:.1f} ms" in text
    assert f"instead of {eager:.1f}" in text
    at = {(row["arm"], row["seed"], row["epochs"]): row for row in found["rows"]}
    for epochs in (4, 8, 12, 16):
        row = at["nesterov", 0, epochs]
        shown = f"{100 * row['val_accuracy']:.1f} | {row['cpu_seconds']:.0f}"
        assert f"| {epochs} | {shown} |" in text
    for arm, where in (("nesterov-float32", "in float32"), ("nesterov", "in bf16")):
        pair = [100 * at[arm, seed, BRIEF]["val_accuracy"] for seed in (0, 1)]
        assert f"{pair[0]:.1f} and {pair[1]:.1f} % {where}" in text
