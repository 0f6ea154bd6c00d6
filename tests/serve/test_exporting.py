"""`splitveil export --attacker`: the audit's strongest decoder, the same again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.test_serve_commands import call, error, own_hash, run, without_exporter
from test_public_api import RECORD
from torch import nn

import splitveil as sv
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.profiles import PROFILES
from splitveil.audits.suite import attempt
from splitveil.audits.trained_run import fit_attacker, open_run, strongest_decoder
from splitveil.errors import AuditError
from splitveil.record import files
from splitveil.serve import export as serving
from splitveil.serve.manifest import ATTACKER, read_manifest
from splitveil.threat import FittedAttack

__all__ = ["run", "without_exporter"]  # fixtures


def record(**changes: Any) -> sv.Record:  # noqa: ANN401
    attacks = {
        "decoder": {"mse": 0.05}, "decoder-small": {"mse": 0.04}, "linear": {"mse": 0.01},
        "rmle": {"mse": 0.02},
    }  # fmt: skip
    facts: dict[str, Any] = {
        "audit": {"profile": "smoke", "aux": "train"}, "seeds": {"attack": 3}, "attacks": attacks,
        "training": {"steps": 9},
    }  # fmt: skip
    return sv.Record.from_dict(RECORD | facts | changes)


def test_the_strongest_decoder_is_the_one_with_the_lowest_error() -> None:
    assert strongest_decoder(record(), "smoke") == "decoder-small"
    alone = record(attacks={"linear": {"mse": 0.01}})
    with pytest.raises(AuditError, match="has no decoder attack to export"):
        strongest_decoder(alone, "smoke")


def test_the_attacker_is_the_audits_own(run: Path) -> None:
    loaded = sv.load_run(run)
    net, facts = fit_attacker(loaded, record())
    target, _ = open_run(loaded, aux="train", seed=3)
    again = attempt(target, "decoder-small", PROFILES["smoke"]["decoder-small"])
    assert facts == {
        "attack": "decoder-small", "profile": "smoke", "aux": "train", "seed": 3,
        "mse": float(again.mse.mean()), "audited_mse": 0.04,
    }  # fmt: skip
    with torch.no_grad():
        images = net(target.sent.z)
    error = (images - target.scored.images).square().flatten(1).mean(1)
    torch.testing.assert_close(error.mean().item(), facts["mse"], rtol=1e-5, atol=0)


def test_class_names_come_from_the_audits_gallery(run: Path) -> None:
    gallery = run / "gallery.json"
    try:
        assert files.saved_class_names(run, 10) == ()
        for text in ("{", "[]", '{"classes": ["a"]}', '{"classes": 3}'):
            gallery.write_text(text)
            assert files.saved_class_names(run, 10) == ()
        gallery.write_text('{"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "nine"]}')
        assert files.saved_class_names(run, 10)[-1] == "nine"
    finally:
        gallery.unlink(missing_ok=True)


def test_an_attack_that_names_no_network_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "fit", lambda *_: FittedAttack(lambda seen: seen.z))
    with pytest.raises(AuditError, match="'decoder-small' does not name its network"):
        fit_attacker(sv.load_run(run), record())


@pytest.mark.usefixtures("without_exporter")
def test_export_takes_the_attacker_along(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    words = ("export", str(run), "--out", str(target), "--attacker")
    assert "--attacker needs an audit of" in error(call(*words))
    assert not target.exists()

    def write(net: nn.Module, z: torch.Tensor, shape: tuple[int, ...], place: Path) -> Any:  # noqa: ANN401
        assert net(z).shape == (len(z), *shape)
        (place / ATTACKER).write_bytes(b"attacker")
        return {"attacker_max_abs_diff": 0.0}

    audit = {"profile": "smoke", "aux": "train", "model": own_hash(run)}
    monkeypatch.setattr(sv.Run, "record", record(audit=audit))
    monkeypatch.setattr(serving, "write_attacker", write)
    result = call(*words)
    assert result.exit_code == 0, result.output
    found = read_manifest(target)
    assert found.attacker is not None
    assert found.attacker["attack"] == "decoder-small"
    assert ATTACKER in found.files
    told = f"mean squared error {found.attacker['mse']:.4f} (audit: 0.0400)"
    shown = " ".join(result.output.split())
    assert f"attacker: 'decoder-small' of the audit, {told}" in shown


@pytest.mark.usefixtures("without_exporter")
def test_an_unfinished_training_is_exported_with_a_warning(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    planned = sv.load_run(run).config.epochs
    assert planned is not None
    for done in (planned, planned - 1):
        line = {"kind": "epoch", "step": 1, "epoch": done}
        (copy / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        made = call("export", str(copy), "--out", str(tmp_path / f"out{done}"))
        assert made.exit_code == 0, made.output
        told = " ".join((made.output + made.stderr).split())
        words = f"has not ended, it is at epoch {done} of {planned}; finish it with --resume"
        assert (words in told) == (done < planned)
