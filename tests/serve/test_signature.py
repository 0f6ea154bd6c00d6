"""Signed exports: what the owner of the key signed opens, and nothing else."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serve.made import write_export
from serve.test_export import tiny_model, without_exporter
from serve.test_serve_commands import call, error

from splitveil.errors import ExportError
from splitveil.serve.client import Client
from splitveil.serve.export import export_model
from splitveil.serve.manifest import FILE, read_manifest
from splitveil.serve.server import load_app
from splitveil.serve.signature import FILE as SIGNATURE
from splitveil.serve.signature import read_signing_key, signature_json

__all__ = ["without_exporter"]  # a fixture


def key_pair(folder: Path, name: str, kind: str = "ed25519") -> tuple[Path, Path]:
    """As the guide makes one."""
    key, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", kind, "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    return key, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path, "own")


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    folder = write_export(tmp_path / "e")
    sign(folder, keys[0])
    return folder


def sign(folder: Path, key: Path) -> None:
    content, identity = (folder / FILE).read_bytes(), read_manifest(folder).identity
    (folder / SIGNATURE).write_text(signature_json(read_signing_key(key), identity, content))


def test_a_signed_export_opens_with_its_key_and_without_one(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    assert read_manifest(signed, verify=keys[1]) == read_manifest(signed)
    Client(signed, "http://localhost:1", verify=str(keys[1]))
    load_app(signed, verify=keys[1], threads=1)


def test_an_export_without_a_signature_is_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = write_export(tmp_path / "e")
    with pytest.raises(ExportError, match=r"is not signed: it has no manifest\.sig, and --verify"):
        Client(folder, "http://localhost:1", verify=keys[1])
    with pytest.raises(ExportError, match="is not signed"):
        load_app(folder, verify=keys[1])


def test_an_export_of_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"is signed by the key '.*', but .*other\.pub is the key"
    ):
        read_manifest(signed, verify=key_pair(tmp_path, "other")[1])


def test_an_edited_manifest_is_refused_even_if_all_its_hashes_agree(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    quieter = replace(read_manifest(signed), stages=({"kind": "gaussian", "std": 0.001},))
    noted = replace(read_manifest(signed), audit={"leakage": 0.0})
    spaced = (signed / FILE).read_text() + " "
    for content in (quieter.to_json(), noted.to_json(), spaced):
        (signed / FILE).write_text(content)
        assert read_manifest(signed)  # without --verify nobody notices
        with pytest.raises(ExportError, match="is not what was signed: its manifest was changed"):
            read_manifest(signed, verify=keys[1])


@pytest.mark.parametrize("how", ["{", "[]", '{"format": "other"}', "twice", "short"])
def test_a_broken_signature_is_refused(signed: Path, keys: tuple[Path, Path], how: str) -> None:
    told = json.loads((signed / SIGNATURE).read_text())
    text = {
        "twice": json.dumps(told)[:-1] + ', "key": "0"}',
        "short": json.dumps(told | {"signature": "00"}),
    }.get(how, how)
    (signed / SIGNATURE).write_text(text)
    with pytest.raises(ExportError, match=r"manifest\.sig is broken|is not what was signed"):
        read_manifest(signed, verify=keys[1])


def test_keys_that_are_no_keys_are_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    key, public = keys
    signed = write_export(tmp_path / "e")
    rsa, rsa_public = key_pair(tmp_path, "rsa", "rsa")
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    for wrong in (public, tmp_path / "text", tmp_path / "absent", rsa):
        wrong.chmod(0o600) if wrong.exists() else None
        with pytest.raises(ExportError, match=r"openssl genpkey -algorithm ed25519 -out key\.pem"):
            read_signing_key(wrong)
    for wrong in (key, tmp_path / "text", tmp_path / "absent", rsa_public):
        with pytest.raises(ExportError, match=r"public key|is not an Ed25519 key"):
            read_manifest(signed, verify=wrong)
    key.chmod(0o644)
    with pytest.raises(ExportError, match=r"others can read the private key .*chmod 600"):
        read_signing_key(key)


@pytest.mark.usefixtures("without_exporter")
def test_an_export_is_signed_when_it_is_written(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    torch.manual_seed(0)
    target = tmp_path / "out"
    with pytest.raises(ExportError, match="cannot read the private key"):
        export_model(tiny_model(), (1, 2, 2), target, name="a", sign=tmp_path / "absent")
    assert not target.exists()
    export_model(tiny_model(), (1, 2, 2), target, name="a", sign=keys[0])
    assert read_manifest(target, verify=keys[1]).name == "a"
    export_model(tiny_model(), (1, 2, 2), target, name="a", overwrite=True)
    assert not (target / SIGNATURE).exists()


def test_commands_refuse_what_is_not_signed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    from PIL import Image

    folder = write_export(tmp_path / "e")
    Image.new("L", (3, 2)).save(tmp_path / "a.png")
    ask = ("infer", str(tmp_path / "a.png"), "--server", "http://localhost:1", "--export")
    for words in (("serve", str(folder)), (*ask, str(folder))):
        assert "is not signed" in error(call(*words, "--verify", str(keys[1])))
