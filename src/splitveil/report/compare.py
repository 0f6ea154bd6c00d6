"""Records of several runs as one table: rows are what was run, numbers are means over seeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitveil.errors import RunError
from splitveil.report.fields import number, text
from splitveil.report.tables import NOTHING, Column

Json = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """One row: its name and the records of its seeds."""

    name: str
    records: tuple[Json, ...]


@dataclass(frozen=True)
class Found:
    """What a search for records gave: rows in the order met, and files that are no records."""

    groups: tuple[Group, ...]
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """What a paper reports under a row's name."""

    accuracy: float
    mse: float
    source: str


def find_records(paths: Sequence[Path]) -> Found:
    """Records below some paths: run folders, record files, or folders of them.

    Folders called seed0, seed1, … are the seeds of the row they lie in; any other folder with a
    record is a row of its own. What cannot be read is named, and the rest is still compared.
    """
    rows: dict[str, list[Json]] = {}
    broken: list[str] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("record.json"))
        if not files:
            raise RunError(f"no record.json in {path}; audit a run first: splitveil audit RUN")
        for file in files:
            record = _read(file)
            if record is None:
                broken.append(str(file))
            else:
                rows.setdefault(_row_name(file), []).append(record)
    if not rows:
        raise RunError(f"none of {', '.join(broken)} is a record; audit the runs again")
    return Found(tuple(Group(n, tuple(r)) for n, r in rows.items()), tuple(broken))


def _row_name(file: Path) -> str:
    folder = file.resolve().parent
    return folder.parent.name if folder.name.startswith("seed") else folder.name


def _read(file: Path) -> Json | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(record, dict) and isinstance(record.get("strongest"), dict)
    return record if known and isinstance(record.get("config"), dict) else None


def read_published(path: Path) -> dict[str, Published]:
    """Rows of a JSON file {name: {accuracy, mse, source}}; accuracies are shares."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {name: Published(**row) for name, row in data.items()}
    except (OSError, ValueError, TypeError, AttributeError) as err:
        raise RunError(f"{path} is not a file of published rows: {err}") from err


def spread(values: Sequence[float | None], scale: float, digits: int) -> str:
    """Mean ± sd over seeds; a single seed has no sd.

    >>> spread([0.5, 0.7], 100.0, 1), spread([0.5], 1.0, 4), spread([None], 1.0, 2)
    ('60.0 ± 14.1', '0.5000', '–')
    """
    known = [v * scale for v in values if v is not None]
    if not known:
        return NOTHING
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def compare_columns() -> tuple[Column, ...]:
    """Columns in the order of `compare_row`; `brief` ones fit a terminal."""
    return (
        Column(heading="row", numeric=False, brief="row"),
        Column(heading="net", numeric=False),
        Column(heading="seeds", brief="n"),
        Column(heading="accuracy", unit="%", arrow="↑", brief="acc% ↑"),
        Column(heading="strongest attack MSE", arrow="↑", brief="MSE ↑"),
        Column(heading="by", numeric=False, brief="by"),
        Column(heading="SSIM", arrow="↓", brief="SSIM ↓"),
        Column(heading="PSNR", unit="dB", arrow="↓"),
        Column(heading="worst-case MSE", arrow="↑"),
        Column(heading="leakage", unit="%", arrow="↓", brief="leak% ↓"),
        Column(heading="rate", unit="nats", arrow="↓"),
        Column(heading="client MMAC", arrow="↓"),
        Column(heading="wire", arrow="↓"),
        Column(heading="train", unit="s"),
        Column(heading="reported", numeric=False),
    )


def compare_row(group: Group, published: Mapping[str, Published]) -> list[str]:
    """The cells of one row as text."""
    records = group.records

    def mean(*keys: str, scale: float = 1.0, digits: int = 4) -> str:
        return spread([number(r, *keys) for r in records], scale, digits)

    attackers = {text(r, "strongest", "mse_by") or NOTHING for r in records}
    nets = {text(r, "config", "net") or NOTHING for r in records}
    said = published.get(group.name)
    reported = "" if said is None else f"{100 * said.accuracy:.2f} / {said.mse:.4f} ({said.source})"
    return [
        group.name,
        ", ".join(sorted(nets)),
        str(len(records)),
        mean("accuracy", scale=100.0, digits=2),
        mean("strongest", "mse"),
        ", ".join(sorted(attackers)),
        mean("strongest", "ssim", digits=3),
        mean("strongest", "psnr_pooled", digits=2),
        mean("worst_case", "mse"),
        mean("leakage", scale=100.0, digits=1),
        mean("true_rate_nats", digits=1),
        mean("client", "macs", scale=1e-6, digits=1),
        mean("client", "wire_floats", digits=0),
        mean("seconds", "train", digits=0),
        reported,
    ]


def markdown(found: Found, published: Mapping[str, Published]) -> str:
    """The whole comparison as a Markdown table."""
    lines = [
        "| " + " | ".join(c.label for c in compare_columns()) + " |",
        "|---" * len(compare_columns()) + "|",
    ]
    for group in found.groups:
        name, *cells = compare_row(group, published)
        lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def warnings(found: Found) -> list[str]:
    """What makes rows incomparable, and what was left out."""
    said = [f"skipped, not a record: {name}" for name in found.broken]
    every = [r for g in found.groups for r in g.records]
    for words, keys in (
        ("dataset", ("config", "dataset")),
        ("attacker's knowledge", ("audit", "aux")),
        ("audit profile", ("audit", "profile")),
        ("scored images", ("splits", "scored")),
    ):
        values = sorted({text(r, *keys) or NOTHING for r in every})
        if len(values) > 1:
            said.append(f"rows differ in {words}: {', '.join(values)}")
    suites = {tuple(sorted(r.get("attacks") or {})) for r in every}
    if len(suites) > 1:
        said.append("rows were attacked by different suites: audit the older ones again")
    return said
