"""The manifest: what is written is read back, and what does not agree is refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden.first_reader import check_format
from serve.made import NOISY, manifest, write_export

from splitveil.errors import ExportError
from splitveil.serve.manifest import (
    ATTACKER,
    CLIENT,
    CLIENT_INT8,
    FILE,
    FIRST_FORMAT,
    NOTES,
    SERVER,
    check_name,
    open_export,
    read_manifest,
    read_verified,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_export(tmp_path / "e")


def edit(folder: Path, **changes: Any) -> None:  # noqa: ANN401
    data = json.loads((folder / FILE).read_text()) | changes
    (folder / FILE).write_text(json.dumps(data))


def rewrite(folder: Path, **changes: Any) -> None:  # noqa: ANN401
    """An edit by someone who knows how an identity is computed."""
    made = replace(read_manifest(folder), **changes)
    (folder / FILE).write_text(made.to_json())


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
    rewrite(folder, classes=tuple(names))
    assert read_manifest(folder).class_name(2) == "car"
    for bad in (names[:3], [1, 2, 3, 4]):
        edit(folder, classes=bad)
        with pytest.raises(ExportError, match=r"classes must be 4 names, or empty|is broken"):
            read_manifest(folder)


DECISIVE: list[dict[str, Any]] = [
    {"files": {CLIENT: "0", SERVER: "1"}},
    {"files": {CLIENT: "1", SERVER: "0"}},
    {"files": {CLIENT: "1", SERVER: "1", CLIENT_INT8: "0"}},
    {"files": {CLIENT: "1", SERVER: "1", "noise-0.f32": "0"}},
    {"stages": ()},
    {"stages": ({"kind": "gaussian", "std": 0.25},)},
    {"stages": (*NOISY, {"kind": "quantise", "bits": 4})},
    {"image_shape": (1, 3, 2)},
    {"wire_shape": (6,)},
    {"num_classes": 5},
    {"classes": ("cat", "dog", "car", "ship")},
    {"name": "other"},
]
NOTED: list[dict[str, Any]] = [
    {"files": {CLIENT: "1", SERVER: "1", ATTACKER: "0"}},
    {"files": {CLIENT: "1", SERVER: "1", "repository/tiny/config.pbtxt": "0"}},
    {"audit": {"leakage": 0.5}},
    {"parity": {"images": 16}},
    {"versions": {"torch": "2"}},
    {"source": {"run": "first"}},
    {"attacker": {"attack": "decoder"}},
]


def identity(**changes: Any) -> str:  # noqa: ANN401
    return manifest(**{"stages": NOISY, "files": {CLIENT: "1", SERVER: "1"}} | changes).identity


def test_the_identity_changes_with_all_that_decides_what_is_sent_or_what_it_means() -> None:
    found = [identity(), *(identity(**changes) for changes in DECISIVE)]
    assert len(set(found)) == len(DECISIVE) + 1
    assert {len(name) for name in found} == {64}


@pytest.mark.parametrize("part", ["preprocessing", "datatype", "noise_source", "exit", "format"])
def test_the_identity_covers_what_no_field_changes_today(part: str) -> None:
    stated = manifest(stages=NOISY).to_dict()
    found = stated.pop("identity")
    decisive = {k: v for k, v in stated.items() if k not in NOTES}
    assert found == slow_identity(decisive)
    assert found != slow_identity(decisive | {part: "other"})


def slow_identity(decisive: dict[str, Any]) -> str:
    text = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_identity_is_the_same_for_notes_and_copies() -> None:
    assert {identity(**changes) for changes in NOTED} == {identity()}


def test_the_identity_of_a_first_export_is_that_of_its_halves(folder: Path) -> None:
    as_first(folder)
    files = read_manifest(folder).files
    halves = hashlib.sha256(f"{files[CLIENT]}/{files[SERVER]}".encode()).hexdigest()
    assert read_manifest(folder).identity == halves[:16]


def as_first(folder: Path) -> None:
    """Turn an export into one of 0.1.0."""
    data = json.loads((folder / FILE).read_text())
    del data["identity"], data["exit"], data["grid"]
    (folder / FILE).write_text(json.dumps(data | {"format": FIRST_FORMAT}))


def test_a_first_export_opens_with_a_warning_and_is_told_as_it_was(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    as_first(folder)
    found = open_export(folder)
    assert "was exported by 0.1.0: its clients add noise in floating point" in caplog.text
    assert json.loads(found.to_json()) == json.loads((folder / FILE).read_text())


def test_the_reader_of_010_refuses_a_new_manifest(folder: Path) -> None:
    """It knows one format, and would have ignored keys that it does not know."""
    with pytest.raises(ExportError, match="has format 'splitveil-export-2', expected 'splitveil-"):
        check_format(folder / FILE)
    as_first(folder)
    edit(folder, exit={"threshold": 0.5})
    assert check_format(folder / FILE)["exit"] == {"threshold": 0.5}


UNKNOWN = [
    ({"gate": None}, r"has unknown keys: 'gate'; a reader that ignored them could send more"),
    ({"stages": [{"kind": "gaussian", "std": 0.5, "off": True}]}, r"has 'off', which this client"),
    (
        {"exit": {"threshold": 0.5}},
        r"unknown exit rule .*threshold.* could send more than was audited",
    ),
]


@pytest.mark.parametrize(("changes", "message"), UNKNOWN, ids=lambda v: str(v)[:20])
def test_a_manifest_that_asks_for_more_than_we_know_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(ExportError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("part", [{"identity": "0" * 64}, {"num_classes": 5}, {"name": "other"}])
def test_an_edit_that_the_identity_does_not_know_is_refused(
    folder: Path, part: dict[str, Any]
) -> None:
    edit(folder, **part)
    with pytest.raises(ExportError, match="contradicts itself: identity is"):
        read_manifest(folder)


def test_an_export_without_noise_is_opened_only_by_name(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drops = ({"kind": "dropout", "p": 0.001},)
    for stages, words in (((), "no noise"), (drops, "dropout of 0.001 of the values")):
        rewrite(folder, stages=stages)
        with pytest.raises(ExportError, match=rf"adds no noise .*\({words}\)\. If .* --allow-no-n"):
            open_export(folder)
        assert open_export(folder, allow_no_noise=True).stages == stages
        assert "adds no noise: the server gets the features as they are" in caplog.text


def test_less_noise_than_was_audited_is_refused(folder: Path) -> None:
    rewrite(folder, audit={"leakage": 0.1, "noise_std": 0.5})
    assert open_export(folder).audit == {"leakage": 0.1, "noise_std": 0.5}
    with pytest.raises(ExportError, match=r"holds for noise of std 0\.5, but the stages add 0\.25"):
        rewrite(folder, stages=({"kind": "gaussian", "std": 0.25},))


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
    with pytest.raises(
        ExportError, match=r"contradicts itself: noise_std is .* the rest of it gives 0\.5"
    ):
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
    (
        {"datatype": "FP16"},
        "datatype must be one of FP32, INT16, INT32, and .* got 'FP16'",
    ),
    ({"grid": 0.0625}, r"contradicts itself: grid is 0\.0625, but .* gives 0\.03125"),
    ({"datatype": "INT16", "stages": [], "noise_std": 0}, "datatype must be one of"),
    ({"preprocessing": None}, "contradicts itself: preprocessing is None"),
    ({"noise_source": "a seed"}, "contradicts itself: noise_source is 'a seed'"),
    ({"audit": 3}, "is broken"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=lambda v: str(v)[:40])
@pytest.mark.usefixtures("as_users_run")
def test_a_broken_manifest_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit(folder, **changes)
    with pytest.raises(ExportError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "splitveil-export-2"}'])
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
