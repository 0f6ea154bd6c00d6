"""Several records as one table: rows, seeds, and what makes them incomparable."""

import json
from pathlib import Path
from typing import Any

import pytest

from splitveil.errors import RunError
from splitveil.report.compare import (
    Group,
    Published,
    compare_columns,
    compare_row,
    find_records,
    markdown,
    read_published,
    warnings,
)


def record(accuracy: float = 0.9, mse: float = 0.05, **audit: str) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "strongest": {"mse": mse, "mse_by": "decoder", "ssim": 0.25, "psnr_pooled": 13.0},
        "worst_case": {"mse": 0.04},
        "leakage": 0.125,
        "true_rate_nats": None,
        "client": {"macs": 19_873_792, "wire_floats": 512},
        "seconds": {"train": 61.5},
        "config": {"net": "thin-resnet", "dataset": "cifar10"},
        "audit": {"profile": "standard", "aux": "train"} | audit,
        "splits": {"scored": "abc"},
        "attacks": {"decoder": {}},
    }


def put(folder: Path, what: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    file = folder / "record.json"
    file.write_text(json.dumps(what), encoding="utf-8")
    return file


def test_seeds_are_gathered_into_their_row_and_runs_are_rows(tmp_path: Path) -> None:
    put(tmp_path / "results" / "veil" / "seed0", record(0.90))
    put(tmp_path / "results" / "veil" / "seed1", record(0.92))
    alone = put(tmp_path / "runs" / "mine", record(0.80))
    found = find_records([tmp_path / "results", alone])
    assert [(g.name, len(g.records)) for g in found.groups] == [("veil", 2), ("mine", 1)]
    assert found.broken == ()


def test_a_row_is_mean_and_sd_over_seeds() -> None:
    group = Group("veil", (record(0.90, 0.050), record(0.92, 0.052)))
    cells = dict(zip([c.heading for c in compare_columns()], compare_row(group, {}), strict=True))
    assert cells["accuracy"] == "91.00 ± 1.41"
    assert cells["strongest attack MSE"] == "0.0510 ± 0.0014"
    assert cells["seeds"] == "2"
    assert cells["rate"] == "–"
    assert cells["client MMAC"] == "19.9 ± 0.0"
    assert cells["reported"] == ""


def test_reported_stands_beside_measured(tmp_path: Path) -> None:
    file = tmp_path / "published.json"
    row = {"accuracy": 0.8762, "mse": 0.033, "source": "CEM paper"}
    file.write_text(json.dumps({"arl+cem": row}), encoding="utf-8")
    published = read_published(file)
    assert published == {"arl+cem": Published(0.8762, 0.033, "CEM paper")}
    cells = compare_row(Group("arl+cem", (record(),)), published)
    assert cells[-1] == "87.62 / 0.0330 (CEM paper)"
    file.write_text('{"a": {"mse": 1}}', encoding="utf-8")
    with pytest.raises(RunError, match="not a file of published rows"):
        read_published(file)


def test_the_markdown_has_a_line_per_row_and_as_many_cells(tmp_path: Path) -> None:
    put(tmp_path / "a", record())
    put(tmp_path / "b", record())
    lines = markdown(find_records([tmp_path]), {}).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| `a` | thin-resnet | 1 | 90.00 |")


def test_broken_records_are_named_and_the_rest_is_compared(tmp_path: Path) -> None:
    put(tmp_path / "good", record())
    for name, content in (("cut", '{"accuracy": '), ("other", "[1]"), ("empty", "{}")):
        put(tmp_path / name, {}).write_text(content, encoding="utf-8")
    found = find_records([tmp_path])
    assert [g.name for g in found.groups] == ["good"]
    assert [Path(name).parent.name for name in found.broken] == ["cut", "empty", "other"]
    assert sum("not a record" in line for line in warnings(found)) == 3


def test_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no record\.json in .*; audit a run first"):
        find_records([tmp_path])
    put(tmp_path / "a", {})
    with pytest.raises(RunError, match="is a record; audit the runs again"):
        find_records([tmp_path])


def test_what_makes_rows_incomparable_is_said(tmp_path: Path) -> None:
    put(tmp_path / "a", record())
    put(tmp_path / "b", record(aux="test90") | {"attacks": {"decoder": {}, "rmle": {}}})
    said = warnings(find_records([tmp_path]))
    assert said == [
        "rows differ in attacker's knowledge: test90, train",
        "rows were attacked by different suites: audit the older ones again",
    ]
    (tmp_path / "b" / "record.json").unlink()
    assert warnings(find_records([tmp_path])) == []
