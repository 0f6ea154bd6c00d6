"""Records of several runs gathered into rows: a row is what was run, over its seeds."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitveil.errors import RunError
from splitveil.report.fields import number, text
from splitveil.report.tables import NOTHING

Json = dict[str, Any]
SEED, ATTACK = re.compile(r"seed\d+"), re.compile(r"attack\d+")


@dataclass(frozen=True)
class Group:
    """One row: its name, and for each training seed the records of its attack seeds."""

    name: str
    seeds: tuple[tuple[Json, ...], ...]

    @property
    def records(self) -> tuple[Json, ...]:
        """Every record of the row."""
        return tuple(record for seed in self.seeds for record in seed)

    def values(self, *keys: str) -> list[float | None]:
        """The number at a path of keys for each training seed, averaged over its attack seeds."""
        return [mean_of([number(record, *keys) for record in seed]) for seed in self.seeds]

    def mean(self, *keys: str) -> float | None:
        """The number at a path of keys, averaged over the training seeds."""
        return mean_of(self.values(*keys))

    def distinct(self, *keys: str) -> list[str]:
        """The different texts at a path of keys, sorted."""
        return sorted({text(record, *keys) or NOTHING for record in self.records})


@dataclass(frozen=True)
class Found:
    """What a search for records gave: rows in the order met, and files that are no records."""

    groups: tuple[Group, ...]
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """What others report under a row's name; accuracies are shares, `aux` is their attacker's."""

    accuracy: float
    mse: float
    source: str
    aux: str = "train"
    reconstruction_accuracy: float | None = None
    ssim_zeropad: float | None = None
    psnr_pooled: float | None = None


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of what was measured; None if nothing was."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def find_records(paths: Sequence[Path]) -> Found:
    """Records below some paths: run folders, record files, or folders of them.

    Folders called seed0, seed1, … are the training seeds of the row they lie in, and attack1, …
    in one of them are further attack seeds of the same run; any other folder with a record is a
    row of its own. Audits with another attacker's knowledge are another row. What cannot be read is
    named, and the rest is still compared.
    """
    rows: dict[tuple[Path, str], dict[Path, list[Json]]] = {}
    broken: list[str] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("record.json"))
        if not files:
            raise RunError(f"no record.json in {path}; audit a run first: splitveil audit RUN")
        for file in files:
            record = _read(file)
            if record is None:
                broken.append(str(file))
                continue
            row, seed = _place(file)
            seeds = rows.setdefault((row, text(record, "audit", "aux") or "train"), {})
            seeds.setdefault(seed, []).append(record)
    if not rows:
        raise RunError(f"none of {', '.join(broken)} is a record; audit the runs again")
    names = _names([row for row, _ in rows])
    groups = (
        Group(names[row], tuple(tuple(seed) for seed in seeds.values()))
        for (row, _), seeds in rows.items()
    )
    return Found(tuple(groups), tuple(broken))


def _place(file: Path) -> tuple[Path, Path]:
    """Folders of the row and of the training seed that a record belongs to."""
    folder = file.resolve().parent
    if ATTACK.fullmatch(folder.name) and SEED.fullmatch(folder.parent.name):
        folder = folder.parent
    return (folder.parent if SEED.fullmatch(folder.name) else folder), folder


def _names(rows: Sequence[Path]) -> dict[Path, str]:
    """A short name for each folder; namesakes are told apart by the folder above."""
    folders = set(rows)
    ends = [row.name for row in folders]
    return {
        row: row.name if ends.count(row.name) == 1 else f"{row.parent.name}/{row.name}"
        for row in folders
    }


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


def reported(group: Group, published: Mapping[str, Published]) -> Published | None:
    """What is published under a row's name; folders say `arl-cem` for the stack `arl+cem`."""
    said = published.get(group.name) or published.get(group.name.replace("-", "+"))
    return said if said is not None and group.distinct("audit", "aux") == [said.aux] else None


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
