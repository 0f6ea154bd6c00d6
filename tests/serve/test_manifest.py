"""The manifest: what is written is read back, and what does not agree is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from serve.made import NOISY, manifest, write_export

from splitveil.errors import ExportError
from splitveil.serve.manifest import (
    CLIENT,
    CLIENT_INT8,
    FILE,
    SERVER,
    check_name,
    read_manifest,
    read_verified,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_export(tmp_path / "e")


def edit(folder: Path, **changes: Any) -> None:  # noqa: ANN401
    data = json.loads((folder / FILE).read_text()) | changes
    (folder / FILE).write_text(json.dumps(data))


def test_what_is_written_is_read_back(folder: Path) -> None:
    found = read_manifest(folder)
    assert found == manifest(stages=NOISY, files=found.files)
    assert found.files.keys() == {CLIENT, SERVER}
    assert json.loads(found.to_json()) == json.loads((folder / FILE).read_text())


def test_the_facts_a_client_needs_are_stated(folder: Path) -> None:
    data = json.loads((folder / FILE).read_text())
    assert data["noise_std"] == 0.5
    assert data["noise_source"] == "os.urandom"
    assert data["preprocessing"] == {
        "layout": "NCHW", "range": [0.0, 1.0], "uint8_divisor": 255
    }  # fmt: skip
    assert (data["datatype"], data["wire_shape"], data["num_classes"]) == ("FP32", [1, 2, 3], 4)
    assert read_manifest(folder).wire_floats == 6


def test_classes_have_their_names_or_their_numbers(folder: Path) -> None:
    assert read_manifest(folder).class_name(2) == "class 2"
    names = ["cat", "dog", "car", "ship"]
    edit(folder, classes=names)
    assert read_manifest(folder).class_name(2) == "car"
    for bad in (names[:3], [1, 2, 3, 4]):
        edit(folder, classes=bad)
        with pytest.raises(ExportError, match=r"classes must be 4 names, or empty|is broken"):
            read_manifest(folder)


def test_the_identity_changes_with_either_half(folder: Path) -> None:
    files = read_manifest(folder).files
    found = {
        manifest(files=f).identity
        for f in (files, {**files, CLIENT: "0"}, {**files, SERVER: "0"}, {**files, "other": "0"})
    }
    assert len(found) == 3


def test_verified_bytes_are_the_files(folder: Path) -> None:
    found = read_manifest(folder)
    assert read_verified(folder, found, CLIENT) == (folder / CLIENT).read_bytes()


def test_a_file_that_changed_by_one_bit_is_refused(folder: Path) -> None:
    content = bytearray((folder / SERVER).read_bytes())
    content[100] ^= 1
    (folder / SERVER).write_bytes(content)
    with pytest.raises(ExportError, match=r"server\.onnx is not the file that was exported"):
        read_verified(folder, read_manifest(folder), SERVER)


def test_a_file_that_is_gone_or_was_never_there_is_refused(folder: Path) -> None:
    found = read_manifest(folder)
    with pytest.raises(ExportError, match=r"has no client-int8\.onnx, only client\.onnx, server"):
        read_verified(folder, found, CLIENT_INT8)
    (folder / CLIENT).unlink()
    with pytest.raises(ExportError, match=r"cannot read .*client\.onnx: No such file"):
        read_verified(folder, found, CLIENT)


@pytest.mark.parametrize("noise", [0.0, 0.4, None])
def test_a_total_that_the_stages_do_not_add_up_to_is_refused(
    folder: Path, noise: float | None
) -> None:
    edit(folder, noise_std=noise)
    with pytest.raises(ExportError, match=r"contradicts itself: noise_std .* its stages add 0\.5"):
        read_manifest(folder)


BROKEN = [
    ({"format": "splitveil-export-9"}, "has format 'splitveil-export-9'"),
    ({"stages": [{"kind": "mist"}]}, "unknown channel stage"),
    ({"stages": 3}, "is broken"),
    ({"name": "../up"}, "a model's name must be"),
    ({"wire_shape": [8, 0]}, "wire_shape must be positive"),
    ({"image_shape": ["8"]}, "image_shape must be positive"),
    ({"num_classes": True}, "num_classes must be at least 1"),
    ({"files": None}, "is broken"),
    ({"datatype": "FP16"}, "contradicts itself"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=lambda v: str(v)[:40])
@pytest.mark.usefixtures("as_users_run")
def test_a_broken_manifest_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit(folder, **changes)
    with pytest.raises(ExportError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "splitveil-export-1"}'])
def test_text_that_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    with pytest.raises(ExportError, match="is broken"):
        read_manifest(folder)


def test_a_folder_without_one_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"is not an export: it has no manifest\.json; make one"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "é", "a" * 65, "-x", "a\n"])
def test_names_that_do_not_fit_an_address_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="a model's name must be 1 to 64"):
        check_name(name)


def test_ordinary_names_pass() -> None:
    for name in ("veil-1", "a", "A.b_c", "9" * 64):
        check_name(name)
