"""`splitveil export`, `serve` and `infer`: what a user types and sees."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from serve.conftest import Exported
from serve.made import write_export
from serve.test_export import quick
from typer.testing import CliRunner

import splitveil as sv
from splitveil import runs as exporting_run
from splitveil.cli import deploy as commands_serve
from splitveil.cli.app import app as whole_app
from splitveil.config.resolve import DataFacts, resolve
from splitveil.config.run_config import write_toml
from splitveil.data.catalogue import load
from splitveil.data.dataset import fingerprint
from splitveil.errors import SplitVeilError
from splitveil.provenance import model_hash
from splitveil.serve import export as exporting
from splitveil.serve import server as serving
from splitveil.serve.admission import Limits
from splitveil.serve.connections import ConnectionLimits
from splitveil.serve.draws import KEY, TABLE
from splitveil.serve.manifest import FILE, read_manifest
from splitveil.serve.server import load_app, running
from splitveil.train.state import Checkpoint, prefixed, write_checkpoint

TOKEN = "0123456789abcdef"  # noqa: S105

app = typer.Typer()
for command in (commands_serve.export, commands_serve.serve, commands_serve.infer):
    app.command()(command)


def call(*words: str) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, [str(w) for w in words])


def text(result: Any) -> str:  # noqa: ANN401
    """Everything printed, wrapped lines joined."""
    return re.sub(r"\s+", " ", result.output + result.stderr)


def error(result: Any) -> str:  # noqa: ANN401
    """The words of an error that the whole command line shows with exit code 2."""
    assert isinstance(result.exception, SplitVeilError), result.exception
    return str(result.exception)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits as `fit` leaves it, untrained."""
    dataset = load("digits", None)
    plan = resolve(
        sv.RunConfig(
            dataset="digits", defence="noise", name="first",
            runs_dir=str(tmp_path_factory.mktemp("runs")),
        ),
        dataset,
    )  # fmt: skip
    config = plan.config
    config.folder.mkdir()
    built = DataFacts(dataset.image_shape, dataset.num_classes, fingerprint(dataset))
    text = write_toml(plan.settings() | asdict(built))
    (config.folder / "config.toml").write_text(text, encoding="utf-8")
    model = plan.build_model()
    saved = Checkpoint(prefixed("model", model.state_dict()), {"step": 9})
    write_checkpoint(config.folder / "checkpoint.safetensors", saved)
    return config.folder


def own_hash(run: Path) -> str:
    return model_hash(sv.load_run(run).model)


@pytest.fixture
def without_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(*_: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"logits_max_abs_diff": 0.0, "int8_same_answer": 1.0, "int8_images": 512}

    def nothing(source: Path, target: Path, images: Any) -> None:  # noqa: ANN401
        assert images.shape == (512, 1, 8, 8)
        assert images.dtype == np.float32
        assert 0 == images.min() < images.max() == 1
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(exporting, "write_onnx", quick)
    monkeypatch.setattr(exporting, "measure_parity", same)
    monkeypatch.setattr(exporting, "compare_int8", same)
    monkeypatch.setattr(exporting, "quantise_client", nothing)


def test_certificates_keys_and_tokens_that_are_pipes_are_refused_without_waiting(
    tmp_path: Path,
) -> None:
    export, pipe, file = write_export(tmp_path / "export"), tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("no key")
    Image.new("L", (3, 2)).save(tmp_path / "x.png")
    infer = ("infer", tmp_path / "x.png", "--export", export, "--no-draws", "--server")
    serve = ("serve", export, "--port", 0)
    for words in (
        (*infer, "https://localhost:1", "--ca", pipe),
        (*infer, "http://localhost:1", "--token-file", pipe),
        (*serve, "--tls-cert", pipe, "--tls-key", file),
        (*serve, "--tls-cert", file, "--tls-key", pipe),
        (*serve, "--token-file", pipe),
    ):
        assert "pipe or a device" in error(call(*words)), words


@pytest.fixture
def not_killed() -> Iterator[None]:
    """A signal that nobody catches fails the test instead of ending all tests."""

    def uncaught(number: int, frame: FrameType | None) -> None:
        raise RuntimeError(f"nobody caught signal {number}")

    before = signal.signal(signal.SIGTERM, uncaught)
    # Tests that a script starts in the background inherit an ignored SIGINT.
    asked = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, asked)
    assert signal.signal(signal.SIGTERM, before) is uncaught


@pytest.mark.usefixtures("not_killed")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_an_export_leaves_nothing_half_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    seen: list[str] = []

    def interrupted(*_: object) -> None:
        seen.extend(path.name for path in tmp_path.iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(exporting, "write_onnx", interrupted)
    result = CliRunner().invoke(whole_app, ["export", str(run), "--out", str(tmp_path / "e")])
    assert result.exit_code == code, text(result)
    assert "interrupted; what was complete is saved" in text(result)
    assert ".e.new" in seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_exporter")
def test_export_writes_into_the_run_and_warns_without_an_audit(run: Path) -> None:
    result = call("export", str(run), "--overwrite")
    assert result.exit_code == 0, text(result)
    assert "has no audit: nobody has measured" in text(result)
    assert f"next: splitveil serve {run}/export" in text(result)
    found = read_manifest(run / "export")
    assert (found.name, found.image_shape, found.audit) == ("first", (1, 8, 8), None)
    assert found.noise_std == sv.load_run(run).noise_std > 0
    assert found.source == exporting_run.source_of(run)
    again = call("export", str(run))
    assert "exists already" in error(again)


@pytest.mark.usefixtures("without_exporter")
def test_export_warns_of_an_audit_to_choose_by(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_public_api import RECORD

    for aux, warned in (("val", True), ("train", False)):
        record = RECORD | {"training": {"steps": 9}, "audit": {"aux": aux, "model": own_hash(run)}}
        monkeypatch.setattr(sv.Run, "record", sv.Record.from_dict(record))
        result = call("export", str(run), "--out", str(tmp_path / aux))
        assert result.exit_code == 0, text(result)
        assert ("scored validation images, by which settings are chosen" in text(result)) is warned
        told = read_manifest(tmp_path / aux).audit
        assert told is not None
        assert told["audit"]["aux"] == aux


@pytest.mark.usefixtures("without_exporter")
def test_export_has_the_audits_verdict_and_calibrates_int8(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_public_api import RECORD

    record = RECORD | {
        "leakage": 0.5, "training": {"steps": 9}, "audit": {"model": own_hash(run)}
    }  # fmt: skip
    monkeypatch.setattr(sv.Run, "record", sv.Record.from_dict(record))
    target = tmp_path / "out"
    words = ("export", str(run), "--out", str(target), "--name", "mine", "--int8")
    result = call(*words, "--json")
    assert result.exit_code == 0, text(result)
    told = json.loads(result.stdout)
    assert told["export"] == str(target)
    assert told["manifest"]["audit"]["leakage"] == 0.5
    assert (told["manifest"]["name"], (target / "client-int8.onnx").is_file()) == ("mine", True)
    shown = call(*words, "--overwrite")
    assert "int8 client: same answer for 100.00 % of 512 images" in text(shown)
    stale = sv.Record.from_dict(record | {"training": {"steps": 8}})
    monkeypatch.setattr(sv.Run, "record", stale)
    assert "was trained further after its audit, which is left out" in text(
        call(*words, "--overwrite")
    )
    assert read_manifest(target).audit is None


@pytest.mark.usefixtures("without_exporter")
@pytest.mark.parametrize("extra", [[], ["--attacker"]])
def test_export_refuses_the_verdict_of_another_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    from test_public_api import RECORD

    record = RECORD | {"training": {"steps": 9}, "audit": {"model": "0123456789abcdef"}}
    monkeypatch.setattr(sv.Run, "record", sv.Record.from_dict(record))
    said = error(call("export", str(run), "--out", str(tmp_path / "out"), *extra))
    assert f"about model 0123456789abcdef, but the checkpoint holds model {own_hash(run)}" in said
    assert "audit it again" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("without_exporter")
def test_serve_finds_the_export_of_a_run_and_refuses_a_stale_one(run: Path) -> None:
    call("export", str(run), "--overwrite")
    assert exporting_run.find_export(run) == run / "export"
    assert exporting_run.find_export(run / "export") == run / "export"
    data = json.loads((run / "export" / FILE).read_text())
    data["source"]["checkpoint"] = "0"
    (run / "export" / FILE).write_text(json.dumps(data))
    result = call("serve", str(run))
    assert "was made from another checkpoint" in error(result)


@pytest.mark.usefixtures("without_exporter")
def test_serve_exports_a_run_that_has_no_export(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("export")))
    assert read_manifest(exporting_run.find_export(copy)).name == "copy"


def test_serve_passes_on_what_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake_serve(app: Any, **options: Any) -> None:  # noqa: ANN401
        options.pop("ready")("http://1.2.3.4:5")
        seen.update(options, app=app)

    monkeypatch.setattr(serving, "serve", fake_serve)
    monkeypatch.setenv("SPLITVEIL_TOKEN", "")
    folder = write_export(tmp_path / "e")
    result = call("serve", str(folder), "--port", "0", "--host", "0.0.0.0", "--json")  # noqa: S104
    assert result.exit_code == 0, text(result)
    assert json.loads(result.stdout) == {"url": "http://1.2.3.4:5"}
    assert (seen["port"], seen["host"], seen["tls"]) == (0, "0.0.0.0", None)  # noqa: S104
    assert "without a token" in text(result)
    half = call("serve", str(folder), "--tls-cert", str(folder / FILE))
    assert "TLS needs both --tls-cert and --tls-key" in error(half)
    assert "is not an export" in error(call("serve", str(tmp_path)))
    assert "max_waiting at least max_batch" in error(call("serve", str(folder), "--max-batch", "0"))
    assert "idle_seconds must be ≥" in error(call("serve", str(folder), "--idle-seconds", "0"))
    nowhere = str(tmp_path / "no" / "log")
    assert "cannot write the log" in error(call("serve", str(folder), "--log-file", nowhere))


def test_serve_says_at_once_that_the_page_lacks_its_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_serve(app: object, *, ready: Callable[[str], None], **_: object) -> None:
        ready("http://localhost:8000")

    folder = write_export(tmp_path / "e")
    monkeypatch.setattr(serving, "serve", fake_serve)
    for here, told in ((True, False), (False, True)):
        monkeypatch.setattr("splitveil.serve.page.has_runtime", lambda here=here: here)
        result = call("serve", str(folder))
        assert "open it in a browser" in text(result)
        assert ("make web" in text(result)) is told


def test_every_limit_of_the_server_is_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def fake_load(folder: Path, **options: Any) -> None:  # noqa: ANN401
        seen.update(options)

    def fake_serve(app: Any, **options: Any) -> None:  # noqa: ANN401
        seen.update(options)

    monkeypatch.setattr(serving, "load_app", fake_load)
    monkeypatch.setattr(serving, "serve", fake_serve)
    folder = write_export(tmp_path / "e")
    assert call("serve", str(folder)).exit_code == 0
    assert seen["limits"] == Limits()
    assert seen["connections"] == ConnectionLimits()
    words = [
        "--max-in-flight", "7", "--max-connections", "8", "--max-per-address", "5",
        "--max-header-bytes", "999", "--header-seconds", "1", "--body-seconds", "2",
        "--answer-seconds", "3", "--send-seconds", "4", "--idle-seconds", "6",
    ]  # fmt: skip
    assert call("serve", str(folder), *words).exit_code == 0
    assert seen["limits"] == Limits(max_in_flight=7, read_seconds=2.0, answer_seconds=3.0)
    assert seen["connections"] == ConnectionLimits(
        total=8, per_address=5, header_bytes=999, header_seconds=1.0, body_seconds=7.0,
        send_seconds=4.0, idle_seconds=6.0,
    )  # fmt: skip


def test_an_export_without_noise_is_served_and_asked_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_export(tmp_path / "e", ())
    Image.new("L", (3, 2)).save(tmp_path / "a.png")
    served: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda app, **_: served.append(app))
    ask = ("infer", str(tmp_path / "a.png"), "--server", "http://localhost:1", "--export")
    for words in (("serve", str(folder)), (*ask, str(folder))):
        assert "allow it by name: --allow-no-noise" in error(call(*words))
    assert served == []
    assert call("serve", str(folder), "--allow-no-noise").exit_code == 0
    with running(load_app(folder, allow_no_noise=True)) as url:
        words = ("infer", str(tmp_path / "a.png"), "--server", url, "--export", str(folder))
        assert call(*words, "--allow-no-noise").exit_code == 0


def picture(path: Path, image: Any) -> str:  # noqa: ANN401
    Image.fromarray(np.rint(255 * image[0]).astype(np.uint8)).save(path)
    return str(path)


@pytest.mark.parametrize("extra", [[], ["--int8"]])
def test_infer_classifies_files(exported: Exported, tmp_path: Path, extra: list[str]) -> None:
    with torch.no_grad():
        z = exported.model.encoder(torch.from_numpy(exported.images[:200]))
        sure = exported.model.head(z).softmax(1).max(1).values.argsort(descending=True)[:4]
    files = [picture(tmp_path / f"{k}.png", exported.images[k]) for k in sure.tolist()]
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    with running(load_app(exported.folder, token=TOKEN, threads=1)) as url:
        words = ["infer", *files, "--server", url, "--export", str(exported.folder), *extra]
        result = call(*words, "--token-file", str(token), "--json")
        assert result.exit_code == 0, text(result)
        rows = json.loads(result.stdout)
        assert [r["class"] for r in rows] == exported.labels[sure.numpy()].tolist()
        assert [int(np.argmax(r["logits"])) for r in rows] == [r["class"] for r in rows]
        shown = call(*words, "--token-file", str(token))
        assert f"{files[0]}: class {rows[0]['class']} (" in text(shown)
        assert "refused with 401" in error(call(*words))


def test_infer_keeps_draws_for_the_next_start_unless_told_not_to(tmp_path: Path) -> None:
    folder, state = write_export(tmp_path / "e"), tmp_path / "state"
    Image.new("L", (3, 2), 77).save(tmp_path / "a.png")

    def sent(name: str, *words: str) -> bytes:
        file = tmp_path / name
        done = call(*ask, "--capture", str(file), *words)
        assert done.exit_code == 0, text(done)
        return file.read_bytes()

    with running(load_app(folder)) as url:
        ask = ("infer", str(tmp_path / "a.png"), "--server", url, "--export", str(folder))
        with patch.dict("os.environ", {"XDG_STATE_HOME": str(state)}):
            assert sent("1") == sent("2")
            assert sent("3", "--no-draws") != sent("4", "--no-draws")
        assert {p.name for p in (state / "splitveil" / "draws").iterdir()} == {KEY, TABLE}
        mine = ("--draws", str(tmp_path / "mine"))
        assert sent("5", *mine) == sent("6", *mine) != (tmp_path / "1").read_bytes()
        assert "give --draws or --no-draws, not both" in error(call(*ask, "--no-draws", *mine))
        assert "budget must be at least 1" in error(call(*ask, "--budget", "0"))


def test_infer_rejects_files_that_do_not_fit_the_model(exported: Exported, tmp_path: Path) -> None:
    rest = ("--server", "http://localhost:1", "--export", str(exported.folder))
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    assert "is 9×8, the model takes 8×8" in error(call("infer", str(tmp_path / "wide.png"), *rest))
    (tmp_path / "no.png").write_text("no")
    assert "cannot read" in error(call("infer", str(tmp_path / "no.png"), *rest))


def test_the_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPLITVEIL_TOKEN", raising=False)
    assert commands_serve.read_token(None) is None
    monkeypatch.setenv("SPLITVEIL_TOKEN", TOKEN)
    assert commands_serve.read_token(None) == TOKEN
    file = tmp_path / "token"
    with pytest.raises(SplitVeilError, match="cannot read the token"):
        commands_serve.read_token(file)
    file.write_text("\n")
    with pytest.raises(SplitVeilError, match="is empty"):
        commands_serve.read_token(file)


def test_missing_libraries_are_named_with_what_installs_them() -> None:
    with pytest.raises(
        SplitVeilError, match=r"needs nosuchlib; .* pip install 'splitveil\[serve\]"
    ):
        commands_serve.with_extra("json", "nosuchlib")
    commands_serve.with_extra()


@pytest.mark.parametrize("mode", ["RGB", "LA", "P", "I;16"])
def test_infer_converts_no_picture_silently(exported: Exported, tmp_path: Path, mode: str) -> None:
    Image.new(mode, (8, 8)).save(tmp_path / "a.png")
    words = ("infer", str(tmp_path / "a.png"), "--server", "http://localhost:1", "--export")
    said = error(call(*words, str(exported.folder)))
    assert f"has mode {mode}, the model takes grey (L)" in said


def test_infer_that_sends_nothing_leaves_no_capture(exported: Exported, tmp_path: Path) -> None:
    file, sent = picture(tmp_path / "a.png", exported.images[0]), tmp_path / "sent.jsonl"
    with running(load_app(exported.folder, token=TOKEN, threads=1)) as url:
        words = ["infer", file, "--server", url, "--export", str(exported.folder)]
        words += ["--capture", str(sent)]
        assert "refused with 401" in error(call(*words))
        assert not sent.exists()
        sent.write_text("precious")
        assert "File exists" in error(call(*words))
        assert sent.read_text() == "precious"


def test_a_long_wait_is_told_once_and_a_short_one_never(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notice = commands_serve.retry_notice("http://h:1")
    notice("answered 429", 0.9)
    assert capsys.readouterr() == ("", "")
    notice("answered 503", 1.0)
    notice("answered 503", 2.0)
    out, err = capsys.readouterr()
    assert (out, err.count("no answer from http://h:1 yet (answered 503)")) == ("", 1)


def test_serve_says_what_to_do_where_the_checkpoint_is_gone(tmp_path: Path) -> None:
    write_export(tmp_path / "export")
    (tmp_path / "config.toml").write_text("")
    said = error(call("serve", str(tmp_path)))
    assert f"serve the export itself: splitveil serve {tmp_path / 'export'}" in said
