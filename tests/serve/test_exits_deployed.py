"""Digits end to end: trained, exported, and asked as a user would, with a server and without."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from cli.calling import TINY
from cli.calling import call as any_command
from numpy.typing import NDArray
from serve.test_serve_commands import call, error, picture, text
from short_runs import config

import splitveil as sv
from splitveil.attacks.profiles import PROFILES
from splitveil.cli.deploy import export_lines
from splitveil.errors import ConfigError, ExportError
from splitveil.runs import export_run
from splitveil.serve.client import DEVICE, NOT_REACHED, SERVED, Client
from splitveil.serve.export import export_model
from splitveil.serve.manifest import CLIENT_INT8, SERVER, read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    run = sv.fit(config(tmp_path_factory.mktemp("runs"), "alone", epochs=3, device="cpu"))
    export_run(run, run.path / "export", int8=True)
    return run


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    run = sv.fit(config(tmp_path_factory.mktemp("runs"), "early-exit", epochs=3, device="cpu"))
    export_run(run, run.path / "export", int8=True)
    return run


def some_images(run: sv.Run, n: int = 200) -> NDArray[np.float32]:
    dataset, splits = run.data()
    return np.asarray(dataset.images[splits.test[:n]].numpy() / 255, np.float32)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server process and its address; it is killed at the end if it still runs."""
    words = [sys.executable, "-m", "splitveil", "serve", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "}\n")
            yield json.loads("".join(lines) + "}")["url"], process
        finally:
            process.kill()


def test_a_client_alone_answers_as_its_model(alone: sv.Run, tmp_path: Path) -> None:
    folder, x = alone.path / "export", some_images(alone)
    assert not (folder / SERVER).exists()
    assert not (folder / "repository").exists()
    with torch.no_grad():
        expected = alone.model(torch.from_numpy(x)).numpy()
    with Client(folder) as client:
        logits, where = client.answer(x)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert set(where) == {DEVICE}
    with Client(folder, int8=True) as small:
        assert (small.infer(x).argmax(1) == expected.argmax(1)).mean() > 0.9
    file = picture(tmp_path / "a.png", x[0])
    done = call("infer", file, "--export", str(folder))
    assert done.exit_code == 0, text(done)
    assert text(done).strip().endswith("%), device")
    assert "there is nothing to serve" in error(call("serve", str(alone.path)))


def test_an_early_exit_asks_the_server_where_it_is_not_sure(unsure: sv.Run) -> None:
    folder, x = unsure.path / "export", some_images(unsure)
    rule = read_manifest(folder).rule
    assert rule is not None
    assert rule.send == pytest.approx(0.3, abs=0.01)
    assert rule.levels is not None
    model, deployed = unsure.model, unsure.model.exit
    assert deployed is not None
    with torch.no_grad():
        own, _ = model.both_answers(torch.from_numpy(x))
        asked = deployed.asks(own).numpy()
        alone = own.double().div(deployed.temperature).log_softmax(1).numpy()
    assert 0 < asked.sum() < len(x)
    with served(folder) as (url, process), Client(folder, url, patience=0.2, timeout=5.0) as client:
        logits, where = client.answer(x)
        assert where == tuple(SERVED if a else DEVICE for a in asked)
        np.testing.assert_allclose(logits[~asked], alone[~asked], atol=1e-4)
        labels = unsure.data()[0].labels[unsure.data()[1].test[: len(x)]].numpy()
        assert (logits.argmax(1) == labels).mean() > 0.5
        process.send_signal(signal.SIGKILL)
        process.wait()
        logits, where = client.answer(x)
        assert where == tuple(NOT_REACHED if a else DEVICE for a in asked)
        np.testing.assert_allclose(logits, alone, atol=1e-4)


def test_infer_says_who_answered_and_ends_well_without_a_server(
    unsure: sv.Run, tmp_path: Path
) -> None:
    folder, x = unsure.path / "export", some_images(unsure)
    with Client(folder, never_ask=True) as client:
        rule = client.manifest.rule
        assert rule is not None
        bytes_read = np.rint(255 * x).astype(np.float32) / np.float32(255)
        asked = rule.asks(client._outputs(bytes_read)[1])
    rows = [int(np.flatnonzero(asked)[0]), int(np.flatnonzero(~asked)[0])]
    files = [picture(tmp_path / f"{k}.png", x[k]) for k in rows]
    words = ["infer", *files, "--export", str(folder), "--server"]
    with served(folder) as (url, process):
        done = call(*words, url)
        assert done.exit_code == 0, text(done)
        assert [line.rsplit(", ", 1)[1] for line in done.stdout.splitlines()] == [SERVED, DEVICE]
        every = json.loads(call(*words, url, "--always-ask", "--json").stdout)
        assert [row["where"] for row in every] == [SERVED, SERVED]
        process.send_signal(signal.SIGKILL)
        process.wait()
        for extra, code, where in (
            ([], 0, [NOT_REACHED, DEVICE]),
            (["--always-ask"], 3, [NOT_REACHED, NOT_REACHED]),
            (["--never-ask"], 0, [DEVICE, DEVICE]),
        ):
            done = call(*words, url, *extra, "--json")
            assert done.exit_code == code, text(done)
            assert [row["where"] for row in json.loads(done.stdout)] == where
    assert "give its address" in error(call(*words[:-1]))
    both = call(*words, url, "--always-ask", "--never-ask")
    assert "always_ask and never_ask contradict each other" in error(both)


def test_a_client_in_eight_bits_decides_by_its_own_threshold(unsure: sv.Run) -> None:
    made = read_manifest(unsure.path / "export")
    small, rule = made.rule_of(CLIENT_INT8), made.rule
    assert small is not None
    assert rule is not None
    assert small.send == pytest.approx(rule.send, abs=0.01)
    assert small.changed is not None
    assert 0 <= small.changed < 0.2
    lines = " ".join(export_lines(unsure.path / "export", made))
    assert f"decides otherwise for {100 * small.changed:.2f} % of the validation images" in lines
    x = some_images(unsure)
    with Client(unsure.path / "export", never_ask=True, int8=True) as client:
        assert client._rule == small
        answered = client.answer(x)
    with torch.no_grad():
        own, _ = unsure.model.both_answers(torch.from_numpy(x))
    assert (answered.logits.argmax(1) == own.argmax(1).numpy()).mean() > 0.9


def test_what_cannot_be_exported_is_said_before_anything_is_written(
    unsure: sv.Run, alone: sv.Run, tmp_path: Path
) -> None:
    target = tmp_path / "e"
    with pytest.raises(ConfigError, match="nothing that an attacker could see; export without"):
        export_run(alone, target, attacker=True)
    few = np.zeros((4, 1, 8, 8), np.float32)
    with pytest.raises(ExportError, match="needs validation images for a threshold of its own"):
        export_model(unsure.model, (1, 8, 8), target, name="e", calibration=few)
    assert not target.exists()


def test_alone_split_and_early_exit_are_audited_compared_and_reported(
    alone: sv.Run, unsure: sv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, Any], PROFILES), "smoke", TINY)
    split = sv.fit(config(tmp_path, "noise", epochs=3, device="cpu"))
    runs = {"alone": alone, "noise": split, "early-exit": unsure}
    records = {name: run.audit("smoke") for name, run in runs.items()}
    told = {name: (r.sent, r.exposure) for name, r in records.items()}
    assert told["alone"] == (0, 0)
    assert told["noise"][0] == 1
    assert 0.1 < (told["early-exit"][0] or 0) < 0.6
    certificates = records["early-exit"].to_dict()["certificates"]
    assert certificates["gallery"]["bit_nats"] == pytest.approx(np.log(2))
    assert certificates["population"]["nats"] > 0
    assert 0 < certificates["list"]["mse_at_least"] < certificates["list"]["variance"]
    best = records["early-exit"].strongest.mse
    assert best is not None
    folders = [str(run.path) for run in runs.values()]
    done = any_command("compare", *folders, "--json")
    assert done.exit_code == 0, text(done)
    found = json.loads(done.stdout)
    assert {row["row"].removesuffix("-s0") for part in found for row in part["rows"]} >= {
        "digits-alone", "digits-noise", "digits-early-exit"
    }  # fmt: skip
    done = any_command("report", *folders, "--out", str(tmp_path / "page"))
    assert done.exit_code == 0, text(done)
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in runs)
