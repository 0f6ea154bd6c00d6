"""Records found in folders, grouped over seeds, and as a data frame.

A `Group` is one row of a comparison: the same experiment, repeated with other seeds.
"""

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
from splitveil.io import read_text
from splitveil.record.files import RunFiles, folder_names
from splitveil.record.schema import (
    Record,
    leaves,
    number,
    on_gpu,
    parse_record,
    per_image_mse,
    text,
)
from splitveil.table import NOTHING

if TYPE_CHECKING:
    from pandas import DataFrame


UNSAID = {  # defaults that old records do not name
    "label_smoothing": "0.0", "teacher": "none", "nesterov": "false", "flips": "random",
}  # fmt: skip
SEED, ATTACK = re.compile(r"seed\d+"), re.compile(r"attack\d+")


@dataclass(frozen=True)
class Group:
    """One row: its name, and for each training seed the records of its attack seeds.

    `runs` are the run folders, if `kinds` made the group; otherwise it is empty.
    """

    name: str
    seeds: tuple[tuple[Record, ...], ...]
    runs: tuple[RunFiles, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """All records of the row."""
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
    """What a search for records found: rows in the order met, and why each other file is broken."""

    groups: tuple[Group, ...]
    broken: Mapping[str, str] = field(default_factory=dict)

    def to_frame(self) -> "DataFrame":
        """A pandas data frame with one line per record.

        Returns:
            A column `row` with the name of the group, then one for every value under its dotted
            keys, such as `strongest.mse`. Accuracies and leakages are fractions of 1.

        Raises:
            RunError: If pandas is not installed.
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
    """All records in run folders, folders of runs, record files, or patterns.

    Args:
        paths: One path or several. Of a pattern such as `"runs/*"` the audited runs are taken.

    Returns:
        The records, grouped by experiment; `to_frame()` gives them as a data frame.

    >>> frame = records("runs/*").to_frame()  # doctest: +SKIP
    >>> frame[frame["accuracy"] > 0.9].sort_values("strongest.mse")  # doctest: +SKIP
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    return find_records([path for one in given for path in _matches(str(one))])


def _matches(path: str) -> list[Path]:
    """The audited runs that match a pattern; a path without one is returned unchanged."""
    if os.path.exists(path) or not glob.has_magic(path):
        return [Path(path)]
    matches = map(Path, sorted(glob.glob(path)))
    found = [m for m in matches if (_below(m) if m.is_dir() else m.suffix == ".json")]
    if not found:
        raise RunError(f"no audited run matches {path}; audit one: `splitveil audit RUN`")
    return found


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the numbers; None if all are None."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def find_records(paths: Sequence[Path]) -> Records:
    """All records in run folders, record files, or folders of them.

    Folders named seed0, seed1, … are the training seeds of the row they lie in; inside of them,
    attack1, … are further attack seeds of the same run. Any other folder with a record is a row of
    its own. Audits with another `aux` are separate rows. Links are followed, and a file met twice
    counts once. Broken files are listed, and the rest is still compared.
    """
    rows: dict[tuple[Path, str], dict[Path, list[Record]]] = {}
    broken: dict[str, str] = {}
    files: dict[Path, Path] = {}
    for path in paths:
        below = _below(path)
        if not below:
            raise RunError(f"no record.json in {path}; audit a run first: `splitveil audit RUN`")
        for file in below:
            files.setdefault(file.resolve(), file)
    for file in files.values():
        try:
            record = parse_record(read_text(file))
            per_image_mse(record)
        except (OSError, ValueError, RunError) as err:
            broken[str(file)] = str(err)
            continue
        row, seed = _place(file)
        seeds = rows.setdefault((row, record.audit.aux or "train"), {})
        seeds.setdefault(seed, []).append(record)
    if not rows:
        why = "; ".join(f"{name}: {reason}" for name, reason in broken.items())
        raise RunError(f"none of {len(broken)} files is a record; audit the runs again ({why})")
    names = folder_names([row for row, _ in rows])
    groups = (
        Group(names[row], tuple(tuple(seed) for seed in seeds.values()))
        for (row, _), seeds in rows.items()
    )
    return Records(tuple(groups), broken)


def _below(path: Path) -> list[Path]:
    """The record file at a path, or all in a folder; files behind links come last."""
    if not os.path.exists(path):  # Path.exists raises for names that the system rejects
        raise RunError(f"there is no {path}{_meant(path)} check the path")
    if path.is_file():
        return [path]
    linked, seen = [], set[str]()
    # rglob does not follow links, os.walk does.
    for folder, inner, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # links may form a cycle
            inner.clear()
            continue
        seen.add(real)
        linked += [Path(folder) / name for name in names if name == "record.json"]
    return [*sorted(path.rglob("record.json")), *sorted(linked)]


def _meant(path: Path) -> str:
    """A hint at a similar name next to a missing path."""
    try:
        there = [file.name for file in path.parent.iterdir()]
    except OSError:
        there = []
    near = get_close_matches(path.name, there, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ";"


def _place(file: Path) -> tuple[Path, Path]:
    """Folders of the row and of the training seed that a record file belongs to."""
    folder = Path(os.path.abspath(file)).parent  # not resolved: a link may rename a row
    if ATTACK.fullmatch(folder.name) and SEED.fullmatch(folder.parent.name):
        folder = folder.parent
    return (folder.parent if SEED.fullmatch(folder.name) else folder), folder


def dataset_of(group: Group) -> str:
    """The dataset of a row."""
    return text(group.records[0], "config.dataset") or NOTHING


def aux_of(group: Group) -> str:
    """The images that the attacker of a row knew: `train`, `held-out`, `test90` or `val`."""
    return group.records[0].audit.aux or "train"


def defences_of(group: Group) -> tuple[str, ...]:
    """The defences that a row stacks; of runs without an audit, as `config.toml` says."""
    named = text(group.records[0], "config.defence")
    if named is None and group.runs:
        named = text(group.runs[0].settings, "defence")
    return tuple((named or NOTHING).split("+"))


def setting(key: str) -> Callable[[Record], str]:
    """A function that reads a setting; an old record without it used the default, if it is known.

    >>> record = Record.from_dict({"config": {"lr": 0.2}})
    >>> setting("label_smoothing")(record), setting("lr")(record)
    ('0.0', '0.2')
    """

    def read(record: Record) -> str:
        if key in record.config:
            return text(record.config, key) or "none"
        if key == "precision":  # without a choice, it was the usual one of the device
            device = text(record.config, "device")
            return NOTHING if device is None else "bf16" if on_gpu(device) else "float32"
        return UNSAID.get(key, NOTHING)

    return read


# Runs of one kind may differ in the settings FREE, and must agree in ALIKE.
FREE = ("seed", "name", "device", "compile", "threads")
ALIKE = ("audit.profile", "audit.aux", "audit.only", "splits.scored", "splits.test")


def kinds(runs: Sequence[RunFiles]) -> list[Group]:
    """Group runs that differ in nothing but their seeds, in the order met.

    A group of one run has the run's name. A larger one has the name of its defence, or the common
    start of the runs' names if another group has the same defence.
    """
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        found.setdefault(_settings(run), []).append(run)
    defences = [_defence(same[0]) for same in found.values()]
    groups = []
    for defence, same in zip(defences, found.values(), strict=True):
        name = common_start([run.name for run in same])
        if len(same) == 1:
            name = same[0].name
        elif not name or defences.count(defence) == 1:
            name = defence
        groups.append(Group(name, _by_seed(same), tuple(same)))
    return groups


def _by_seed(runs: Sequence[RunFiles]) -> tuple[tuple[Record, ...], ...]:
    seeds: dict[int | None, list[Record]] = {}
    for run in runs:
        seeds.setdefault(run.record.seeds.train, []).append(run.record)
    return tuple(map(tuple, seeds.values()))


def _settings(run: RunFiles) -> str:
    """What runs of one kind share, as text; a run without an audit is a kind of its own."""
    if not run.audited:
        return str(run.path)
    config = {k: v for k, v in run.record.config.items() if k not in FREE}
    config["precision"] = setting("precision")(run.record)
    alike = [text(run.record, path) for path in ALIKE]
    return json.dumps([config, alike, bool(run.record.audit.wire)], sort_keys=True)


def _defence(run: RunFiles) -> str:
    return text(run.record, "config.defence") or NOTHING


def common_start(names: Sequence[str]) -> str:
    """The common start of names, without a word for the seed at its end.

    >>> common_start(["veil/seed0", "veil/seed1"]), common_start(["fast-s0", "fast-s12"])
    ('veil', 'fast')
    """
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return re.sub(r"(^|[\W_]+)(seed|s)?$", "", "".join(letters[0] for letters in same))
