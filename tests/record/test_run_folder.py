"""Run folders: what is read, what is forgiven, what is refused and how."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import MakeRun, make_gallery, make_metrics, make_record, write_run

from splitveil.errors import RunError
from splitveil.record.files import read_run


def test_a_folder_comes_back_as_it_was_written(make_run: MakeRun) -> None:
    run = make_run("veil", "veil")
    assert run.name == "veil"
    assert run.record.to_dict() == make_record("veil")
    assert [entry["epoch"] for entry in run.metrics] == list(range(1, 21))
    assert run.gallery is not None
    assert run.gallery.original.shape == (8, 1, 8, 8)
    assert run.gallery.original.dtype == np.uint8
    assert set(run.gallery.reconstructions) == {"linear", "decoder"}
    assert run.gallery.mse["decoder"] == tuple(make_gallery("veil")["mse"]["decoder"])


def test_a_missing_folder_names_the_next_command(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run folder at .*ghost; train one with .*--name ghost"):
        read_run(tmp_path / "ghost")


def test_an_unaudited_run_names_the_next_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", None, make_metrics("veil"), None)
    with pytest.raises(RunError, match=r"has no record.json; run `splitveil audit .*x` first"):
        read_run(folder)
    (folder / "config.toml").write_text("seed = 0\n")
    with pytest.raises(RunError, match=rf"holds runs; name them, such as {folder}$"):
        read_run(tmp_path)
    run = read_run(folder, audited=False)
    assert not run.audited
    assert len(run.metrics) == 20


@pytest.mark.parametrize("name", ["record.json", "gallery.json"])
@pytest.mark.parametrize("content", ["{", "[]", "", '{"a": 1}}'])
def test_corrupt_json_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    folder = write_run(tmp_path / "x", make_record("veil"), None, make_gallery("veil"))
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=name):
        read_run(folder)


def test_bytes_that_are_not_text_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", make_record("veil"), None, None)
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(RunError, match=r"cannot read .*metrics\.jsonl"):
        read_run(folder)


def test_half_a_last_line_is_dropped(make_run: MakeRun) -> None:
    run = make_run("x", metrics=make_metrics("veil", 3) + '{"kind": "epoch", "epoch": 4, "tas')
    assert [entry["epoch"] for entry in run.metrics] == [1, 2, 3]


def test_a_broken_line_is_refused_with_its_number(tmp_path: Path) -> None:
    log = '{"kind": "epoch", "epoch": 1}\nnonsense\n{"kind": "epoch", "epoch": 2}\n'
    folder = write_run(tmp_path / "x", make_record("veil"), log, None)
    with pytest.raises(RunError, match=r"metrics\.jsonl line 2 is not valid JSON"):
        read_run(folder)


def test_of_an_epoch_logged_twice_the_later_line_counts(make_run: MakeRun) -> None:
    lines = [
        {"kind": "epoch", "epoch": e, "rob_loss": loss} for e, loss in ((1, 5), (2, 4), (2, 3))
    ]
    run = make_run("x", metrics="\n".join(map(json.dumps, lines)))
    assert [(e["epoch"], e["rob_loss"]) for e in run.metrics] == [(1, 5), (2, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_shape": [2, 8, 8]}, "image_shape"),
        ({"image_shape": [1, 8]}, "image_shape` must be a list of 3 entries, got list"),
        ({"labels": [1]}, "labels` must be a list of 8 entries, got list"),
        ({"answers": ["7"] * 8}, r"answers\[0\]` must be a number, got str '7'"),
        ({"indices": []}, "indices` must be a list of at least 1 entries"),
        ({"original": "AAAA"}, "original` must be 512 bytes"),
        ({"original": "no base64!"}, "original` must be base64 of uint8"),
        ({"original": None}, "original` must be a text, got nothing"),
        ({"reconstructions": {"decoder": "AAAA"}}, "reconstructions.decoder` must be 512 bytes"),
        ({"reconstructions": {"decoder": 3}}, "reconstructions.decoder` must be a text, got int 3"),
        ({"mse": {"decoder": [0.1]}}, "mse.decoder` must be a list of 8 entries"),
    ],
)
def test_a_broken_gallery_names_the_key_and_what_it_must_be(
    make_run: MakeRun, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=rf"gallery\.json is not a gallery: .*{message}"):
        make_run("x", gallery=make_gallery("veil") | change)


@pytest.mark.parametrize("epoch", ["one", True, None, [1], {}])
def test_an_epoch_of_the_log_that_is_no_number_is_named(epoch: object, tmp_path: Path) -> None:
    lines = make_metrics("veil") + json.dumps({"kind": "epoch", "epoch": epoch}) + "\n"
    folder = write_run(tmp_path / "x", make_record("veil"), lines, None)
    with pytest.raises(
        RunError, match=r"metrics.jsonl line \d+: `epoch` must be a number, got"
    ) as e:
        read_run(folder)
    assert f"got {epoch!r}; remove the line or train again" in str(e.value)
