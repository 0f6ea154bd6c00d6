"""Records below some folders, grouped over seeds, and as a data frame."""

import glob
import json
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from splitveil.errors import RunError
from splitveil.record.files import RunFiles
from splitveil.record.schema import Record, leaves, number, parse_record, per_image_mse, text
from splitveil.table import NOTHING

if TYPE_CHECKING:
    from pandas import DataFrame


UNSAID = {"label_smoothing": "0.0", "teacher": "none"}  # of records that do not name it
SEED, ATTACK = re.compile(r"seed\d+"), re.compile(r"attack\d+")


@dataclass(frozen=True)
class Group:
    """One row: its name, and for each training seed the records of its attack seeds.

    `runs` are the folders they are from, where `kinds` made the row.
    """

    name: str
    seeds: tuple[tuple[Record, ...], ...]
    runs: tuple[RunFiles, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """Every record of the row."""
        return tuple(record for seed in self.seeds for record in seed)

    def values(self, path: str) -> list[float | None]:
        """The number at a dotted path for each training seed, averaged over its attack seeds."""
        return [mean_of([number(record, path) for record in seed]) for seed in self.seeds]

    def mean(self, path: str) -> float | None:
        """The number at a dotted path, averaged over the training seeds."""
        return mean_of(self.values(path))

    def distinct(self, path: str) -> list[str]:
        """The different texts at a dotted path, sorted."""
        return sorted({text(record, path) or NOTHING for record in self.records})


@dataclass(frozen=True)
class Records:
    """What a search for records gave: rows in the order met, and files that are no records.

    `broken` says what is wrong with each of these files.
    """

    groups: tuple[Group, ...]
    broken: Mapping[str, str] = field(default_factory=dict)

    def to_frame(self) -> "DataFrame":
        """One line per record as a pandas data frame, to filter, sort and choose columns from.

        Returns:
            A column `row` with the name of the record's row, then every value of the records under
            its keys with dots between, such as `strongest.mse`; accuracies and leakages are shares.
        """
        try:
            from pandas import DataFrame
        except ImportError as err:
            raise RunError(
                "a data frame needs pandas; install it: pip install 'splitveil[report]'"
            ) from err
        named = [(group.name, record) for group in self.groups for record in group.records]
        return DataFrame([{"row": name, **leaves(record.raw)} for name, record in named])


def records(paths: str | Path | Sequence[str | Path]) -> Records:
    """Records below some paths: run folders, record files, folders of them, or patterns.

    Args:
        paths: One path or several. Of a pattern such as `"runs/*"` the audited runs are taken.

    Returns:
        The records by row; `to_frame()` gives them as a data frame.
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    return find_records([path for one in given for path in _matches(str(one))])


def _matches(path: str) -> list[Path]:
    """The audited runs that match a pattern; a path as it stands."""
    if os.path.exists(path) or not glob.has_magic(path):
        return [Path(path)]
    matches = map(Path, sorted(glob.glob(path)))
    found = [m for m in matches if (_below(m) if m.is_dir() else m.suffix == ".json")]
    if not found:
        raise RunError(f"no audited run matches {path}; audit one: splitveil audit RUN")
    return found


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of what was measured; None if nothing was."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def find_records(paths: Sequence[Path]) -> Records:
    """Records below some paths: run folders, record files, or folders of them.

    Folders called seed0, seed1, … are the training seeds of the row they lie in, and attack1, …
    in one of them are further attack seeds of the same run; any other folder with a record is a
    row of its own. Links are followed. Audits with another attacker's knowledge are another row. A
    file that is met twice counts once. What cannot be read is named, and the rest still compared.
    """
    rows: dict[tuple[Path, str], dict[Path, list[Record]]] = {}
    broken: dict[str, str] = {}
    files: dict[Path, Path] = {}
    for path in paths:
        below = _below(path)
        if not below:
            raise RunError(f"no record.json in {path}; audit a run first: splitveil audit RUN")
        for file in below:
            files.setdefault(file.resolve(), file)
    for file in files.values():
        record = _read(file)
        if isinstance(record, str):
            broken[str(file)] = record
            continue
        row, seed = _place(file)
        seeds = rows.setdefault((row, record.audit.aux or "train"), {})
        seeds.setdefault(seed, []).append(record)
    if not rows:
        why = "; ".join(f"{name}: {reason}" for name, reason in broken.items())
        raise RunError(f"none of {len(broken)} is a record; audit the runs again ({why})")
    names = row_names([row for row, _ in rows])
    groups = (
        Group(names[row], tuple(tuple(seed) for seed in seeds.values()))
        for (row, _), seeds in rows.items()
    )
    return Records(tuple(groups), broken)


def _below(path: Path) -> list[Path]:
    """The record at a path, or all below it; those that only links lead to come last."""
    if not os.path.exists(path):  # Path.exists raises where the system refuses the name
        raise RunError(f"there is no {path}{_meant(path)} check the path")
    if path.is_file():
        return [path]
    linked, seen = [], set[str]()
    for folder, inner, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # links may go in circles
            inner.clear()
            continue
        seen.add(real)
        linked += [Path(folder) / name for name in names if name == "record.json"]
    return [*sorted(path.rglob("record.json")), *sorted(linked)]


def _meant(path: Path) -> str:
    """A name beside a path that is not there, if one is near to it."""
    try:
        there = [file.name for file in path.parent.iterdir()]
    except OSError:
        there = []
    near = get_close_matches(path.name, there, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ";"


def _place(file: Path) -> tuple[Path, Path]:
    """Folders of the row and of the training seed that a record belongs to, as links name them."""
    folder = Path(os.path.abspath(file)).parent
    if ATTACK.fullmatch(folder.name) and SEED.fullmatch(folder.parent.name):
        folder = folder.parent
    return (folder.parent if SEED.fullmatch(folder.name) else folder), folder


def row_names(rows: Sequence[Path]) -> dict[Path, str]:
    """A short name for each folder; namesakes are told apart by as many folders above as it takes.

    >>> list(row_names([Path("/a/x"), Path("/b/y/x"), Path("/c/y/x"), Path("/z")]).values())
    ['a/x', 'b/y/x', 'c/y/x', 'z']
    """
    names = {row: row.name for row in rows}
    for depth in range(2, 1 + max(len(row.parts) for row in rows)):
        taken = list(names.values())
        names = {
            row: name if taken.count(name) == 1 else "/".join(row.parts[-depth:]).lstrip("/")
            for row, name in names.items()
        }
    return names


def _read(file: Path) -> Record | str:
    """The record in a file, or what is wrong with it."""
    try:
        record = parse_record(file.read_text(encoding="utf-8"))
        per_image_mse(record)
    except (OSError, ValueError, RunError) as err:
        return str(err)
    return record


def dataset_of(group: Group) -> str:
    """The dataset of a row."""
    return text(group.records[0], "config.dataset") or NOTHING


def aux_of(group: Group) -> str:
    """What the attacker of a row knew."""
    return group.records[0].audit.aux or "train"


def defences_of(group: Group) -> tuple[str, ...]:
    """The presets that a row's defence is a stack of."""
    return tuple((text(group.records[0], "config.defence") or NOTHING).split("+"))


def setting(key: str) -> Callable[[Record], str]:
    """A reader of a setting; what a record does not name was the default, where that is known.

    >>> record = Record.from_dict({"config": {"lr": 0.2}})
    >>> setting("label_smoothing")(record), setting("lr")(record)
    ('0.0', '0.2')
    """

    def read(record: Record) -> str:
        if key in record.config:
            return text(record.config, key) or "none"
        return UNSAID.get(key, NOTHING)

    return read


FREE = ("seed", "name", "device", "compile")  # settings in which runs of one kind may differ

ALIKE = ("audit.profile", "audit.aux", "audit.only", "splits.scored", "splits.test")


def kinds(runs: Sequence[RunFiles]) -> list[Group]:
    """Runs of the same settings, audited alike, as rows in the order met; one alone gives its name.

    Several runs are called after their defence, or what their names begin with where another kind
    has the same defence.
    """
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        found.setdefault(_settings(run), []).append(run)
    defences = [_defence(same[0]) for same in found.values()]
    return [
        Group(
            _name(same, alone=defences.count(_defence(same[0])) == 1), _by_seed(same), tuple(same)
        )
        for same in found.values()
    ]


def _by_seed(runs: Sequence[RunFiles]) -> tuple[tuple[Record, ...], ...]:
    seeds: dict[int | None, list[Record]] = {}
    for run in runs:
        seeds.setdefault(run.record.seeds.train, []).append(run.record)
    return tuple(map(tuple, seeds.values()))


def _settings(run: RunFiles) -> str:
    """What makes a run of its kind, as text; one that was not audited is a kind of its own."""
    if not run.audited:
        return str(run.path)
    config = {k: v for k, v in run.record.config.items() if k not in FREE}
    told = [text(run.record, path) for path in ALIKE]
    heard = bool(run.record.audit.wire)
    return json.dumps([config, told, heard], sort_keys=True)


def _defence(run: RunFiles) -> str:
    return text(run.record, "config.defence") or NOTHING


def _name(runs: Sequence[RunFiles], *, alone: bool) -> str:
    if len(runs) == 1:
        return runs[0].name
    start = common_start([run.name for run in runs])
    return _defence(runs[0]) if alone or not start else start


def common_start(names: Sequence[str]) -> str:
    """What names begin with, up to the word for a seed.

    >>> common_start(["veil/seed0", "veil/seed1"]), common_start(["fast-s0", "fast-s12"])
    ('veil', 'fast')
    """
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return re.sub(r"(^|[\W_]+)(seed|s)?$", "", "".join(letters[0] for letters in same))
