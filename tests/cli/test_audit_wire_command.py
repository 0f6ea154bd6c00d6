"""`splitveil audit-wire`: what a user types and sees."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits.test_captured_requests import capture
from cli.calling import call, text
from serve.made import SHAPE, pictures, write_export
from torch import Generator

import splitveil as sv
from splitveil.attacks import profiles
from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.audits import captured_requests as wiretap
from splitveil.audits import pipeline
from splitveil.audits.captured_requests import read_captured, send_and_capture
from splitveil.cli.audits import wire_lines
from splitveil.data.splits import aux_view
from splitveil.errors import ServerError
from splitveil.serve.server import load_app, running
from splitveil.serve.transport import Reply


@pytest.fixture(scope="module", autouse=True)
def tiny_profile() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "PROFILES", {"smoke": {"m": MeanImage(), "l": Linear()}})
        patch.setattr(pipeline, "leaks_beyond_pixels", lambda *_: {})
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = str(tmp_path_factory.mktemp("runs"))
    config = sv.RunConfig(dataset="digits", defence="noise", epochs=1, runs_dir=folder)
    return sv.fit(config).path


@pytest.fixture(scope="module")
def captured(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run's client sends for the scored images."""
    loaded = sv.load_run(run)
    dataset, splits = loaded.data()
    images = dataset.labelled(aux_view(dataset, splits, "train").scored).images
    z = loaded.victim.send(images, Generator(loaded.victim.device).manual_seed(1))
    return capture(tmp_path_factory.mktemp("captures") / "sent.jsonl", z)


def test_a_capture_is_audited_beside_the_run(run: Path, captured: Path) -> None:
    own = call("audit", run, "--profile", "smoke")
    assert own.exit_code == 0, text(own)
    before = (run / "record.json").read_bytes()
    result = call("audit-wire", run, captured, "--profile", "smoke")
    assert result.exit_code == 0, text(result)
    assert "sent.jsonl: 359 rows in 12 calls" in text(result)
    assert "tests of the noise: 11, failed: none" in text(result)
    assert "in the run's audit, on the wire" in text(result)
    assert (run / "record.json").read_bytes() == before
    record = json.loads((run / "wire" / "record.json").read_text())
    assert record["audit"]["wire"]["captures"][0]["rows"] == 359
    assert (run / "wire" / "report.html").is_file()
    replayed = call("replay", run / "wire" / "record.json")
    assert (replayed.exit_code, "made with captured requests" in text(replayed)) == (2, True)


@pytest.mark.usefixtures("no_page")
def test_what_is_sent_to_an_address_is_audited(
    run: Path, captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def send(export: Path, server: str, images: torch.Tensor, folder: Path, **more: Any) -> Any:  # noqa: ANN401
        seen.update(more, export=export, server=server, images=len(images), folder=folder)
        return [captured]

    monkeypatch.setattr(wiretap, "send_and_capture", send)
    monkeypatch.setattr("splitveil.runs.find_export", lambda path: path / "export")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    words = ("audit-wire", run, "http://host:1", "--token-file", token, "--profile", "smoke")
    result = call(*words, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, text(result)
    assert callable(seen.pop("waiting"))
    assert seen == {
        "export": run / "export", "server": "http://host:1", "images": 359, "int8": False,
        "folder": tmp_path / "out", "token": "0123456789abcdef", "ca_file": None,
        "allow_no_noise": False,
    }  # fmt: skip
    assert json.loads(result.stdout)["audit"]["wire"]["failed"] == []


def test_two_starts_of_a_client_are_recorded(tmp_path: Path) -> None:
    export = write_export(tmp_path / "export")
    images = torch.from_numpy(pictures(300))
    with running(load_app(export, threads=1)) as url:
        for _ in range(2):  # a second audit takes the place of the first
            files = send_and_capture(export, url, images, tmp_path)
    before = files[0].read_bytes()
    with pytest.raises(ServerError, match="refused with 404"):  # and a failed one leaves them
        send_and_capture(export, lambda *_: Reply(404, b""), images, tmp_path)
    assert files[0].read_bytes() == before
    assert not list(tmp_path.glob(".capture-*"))
    first, second = (read_captured(file, SHAPE, 300).z for file in files)
    assert (len(first), len(second)) == (300, wiretap.AGAIN)
    noise = (first[: len(second)] - second).flatten()
    assert float(noise.std()) == pytest.approx(0.5 * np.sqrt(2), rel=0.1)  # another draw each


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://h:1", "b.jsonl"], "give one address, or one or two captures"),
        (["a.jsonl", "--ca", "x"], "are for a server's address"),
        (["none.jsonl"], "cannot read the capture none.jsonl"),
        (["a.jsonl", "--sent", "digitz"], "unknown dataset 'digitz'"),
    ],
)
def test_bad_sources_exit_with_2(run: Path, words: list[str], said: str) -> None:
    result = call("audit-wire", run, *words, "--profile", "smoke")
    assert result.exit_code == 2, text(result)
    assert said in text(result)


def test_results_never_replace_a_runs_own(run: Path, captured: Path) -> None:
    result = call("audit-wire", run, captured, "--out", run)
    assert (result.exit_code, "is a trained run; choose another" in text(result)) == (2, True)


def test_the_results_folder_is_tried_before_the_audit(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call("audit-wire", run, "none.jsonl", "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert f"cannot write {tmp_path / 'file'}" in text(result)
    assert "Choose another folder with --out" in text(result)


@pytest.mark.usefixtures("no_page")
def test_captured_images_have_an_accuracy_of_their_own(run: Path, tmp_path: Path) -> None:
    loaded = sv.load_run(run)
    rng, file = np.random.default_rng(0), tmp_path / "ten.npz"
    x = rng.integers(0, 256, (10, 8, 8), np.uint8)
    np.savez(file, x=x, y=np.arange(10), classes=[str(c) for c in range(10)])
    images = torch.from_numpy(x)[:, None].to(loaded.victim.device) / 255
    z = loaded.victim.send(images, Generator(loaded.victim.device).manual_seed(1))
    sent = capture(tmp_path / "ten.jsonl", z)
    words = ("--sent", f"npz:{file}", "--profile", "smoke", "--out", tmp_path / "out")
    result = call("audit-wire", run, sent, *words)
    assert result.exit_code == 0, text(result)
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    right = record["audit"]["wire"]["accuracy"]
    assert right == float(
        (loaded.model.head(z).argmax(1).cpu() == torch.arange(10)).double().mean()
    )
    assert f"accuracy on what was captured: {100 * right:.2f} %; the table's acc%" in text(result)


def test_infer_keeps_what_it_sends(tmp_path: Path) -> None:
    from PIL import Image

    export, file = write_export(tmp_path / "export"), tmp_path / "sent.jsonl"
    Image.fromarray(np.full(SHAPE[1:], 51, np.uint8)).save(tmp_path / "a.png")
    with running(load_app(export, threads=1)) as url:
        words = ("infer", tmp_path / "a.png", "--server", url, "--export", export)
        result = call(*words, "--capture", file)
        assert result.exit_code == 0, text(result)
        again = call(*words, "--capture", file)
    assert read_captured(file, SHAPE, 9).z.shape == (1, *SHAPE)
    assert (again.exit_code, "cannot write a capture" in text(again)) == (2, True)


def test_a_capture_in_another_order_is_told_to_look_there() -> None:
    heard = {"captures": [], "tests": {"slope": {}}, "offline": {}}
    hint = "these tests also fail if rows and images differ in order: check that first"
    assert hint in wire_lines(heard | {"failed": ["slope"]})
    assert hint not in wire_lines(heard | {"failed": []})
