"""Records of several runs gathered into rows: a row is what was run, over its seeds."""

import base64
import binascii
import glob
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError
from splitveil.record.schema import leaves, number, parse, section, text
from splitveil.table import NOTHING

if TYPE_CHECKING:
    from pandas import DataFrame


Json = dict[str, Any]


ROUNDING = 0.01  # half-precision errors per image average to far less than this share of the mean


LEAST = 2.0**-25  # but those of images rebuilt all but perfectly: half a step of half precision


BRIEF = ("smoke", "quick")  # profiles whose numbers say little about a stronger attacker


UNSAID = {"label_smoothing": "0.0", "teacher": "none"}  # of records that do not name it


SEED, ATTACK = re.compile(r"seed\d+"), re.compile(r"attack\d+")


NUMBERS = (
    "accuracy", "strongest.mse", "strongest.ssim", "strongest.ssim_zeropad",
    "strongest.psnr_pooled", "worst_case.mse", "ceiling.mse", "leakage", "true_rate_nats",
    "client.macs", "client.params", "client.wire_floats", "seconds.train",
    "audit.scored", "audit.aux_images",
    "config.epochs", "config.lambd", "config.noise_std",
)  # fmt: skip


SHARE, COUNT = (0.0, 1.0), (0.0, math.inf)  # images and their reconstructions lie in [0, 1]


LIMITS = {
    "accuracy": SHARE, "strongest.mse": SHARE, "worst_case.mse": SHARE, "ceiling.mse": SHARE,
    "floor.mse": SHARE, "leakage": (-math.inf, 1.0), "strongest.ssim": (-1.0, 1.0),
    "client.macs": COUNT, "client.params": COUNT, "client.wire_floats": COUNT,
}  # fmt: skip


TEXTS = (
    "strongest.mse_by", "config.net", "config.dataset", "config.defence", "audit.aux",
    "audit.profile", "audit.final", "splits.scored", "seeds.train", "seeds.attack", "device",
)  # fmt: skip


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
        return DataFrame([{"row": name, **leaves(record)} for name, record in named])


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


def flag_names(record: Json) -> set[str]:
    """The flags that an audit raised."""
    return {flag["name"] for flag in record.get("flags") or ()}


def shortfalls(record: Json | None) -> list[str]:
    """What makes an audit less than a standard one of test images; empty where nothing does.

    >>> shortfalls({"audit": {"profile": "quick", "aux": "val"}})
    ['quick audit', 'validation images']
    """
    told = section(record, "audit")
    profile = text(told, "profile")
    return [
        *([f"{profile} audit"] if profile in BRIEF else []),
        *(["some attacks"] if told.get("only") else []),
        *(["validation images"] if text(told, "aux") == "val" else []),
    ]


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
    rows: dict[tuple[Path, str], dict[Path, list[Json]]] = {}
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
        seeds = rows.setdefault((row, text(record, "audit", "aux") or "train"), {})
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


def _read(file: Path) -> Json | str:
    """The record in a file, or what is wrong with it."""
    try:
        record = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        return f"no JSON: {err}"
    if not isinstance(record, dict):
        return f"a record is an object, got {type(record).__name__}"
    missing = [key for key in ("strongest", "config") if not isinstance(record.get(key), dict)]
    if missing:
        return f"no {' and no '.join(missing)} in it"
    try:
        _check(record)
    except RunError as err:
        return str(err)
    return record


def _check(record: Json) -> None:
    """Refuse a record whose values are not of the kind that an audit writes."""
    for path in NUMBERS:
        number(record, *path.split("."))
    refuse_impossible(record, LIMITS)
    for path in TEXTS:
        text(record, *path.split("."))
    best = text(record, "strongest", "mse_by")
    if best is not None:
        number(section(record, "attacks"), best, "accuracy")
    flags = record.get("flags")
    named = isinstance(flags, list) and all(
        isinstance(flag, dict) and isinstance(flag.get("name"), str) for flag in flags
    )
    if flags is not None and not named:
        raise RunError("`flags` must be a list of objects with a name; audit the run again")
    per_image_mse(record)


def per_image_mse(record: Json) -> NDArray[np.float64] | None:
    """The strongest attack's MSE of every scored image (n,), or None where none is kept."""
    packed = text(record, "per_image", "mse")
    if not packed:
        return None
    try:
        values = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<f2")
    except (binascii.Error, ValueError) as err:
        raise RunError(
            f"per_image.mse is not base64 of float16: {err}; audit the run again"
        ) from err
    made = values.astype(np.float64)
    mean, stated = float(made.mean()) if len(made) else 0.0, number(record, "strongest", "mse")
    if stated is None or not abs(mean - stated) <= ROUNDING * stated + LEAST:
        raise RunError(
            f"per_image.mse has mean {mean:.6g}, but strongest.mse is {stated}; audit the run again"
        )
    return made


def refuse_impossible(record: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a number, known by its path of keys, that lies outside its limits."""
    for path, (least, most) in limits.items():
        value = number(record, *path.split("."))
        if value is not None and not least <= value <= most:
            rule = f"lie between {least:g} and {most:g}"
            if math.isinf(least) or math.isinf(most):
                rule = f"be at least {least:g}" if math.isinf(most) else f"be at most {most:g}"
            raise RunError(f"`{path}` must {rule}, got {value:g}")


def dataset_of(group: Group) -> str:
    """The dataset of a row."""
    return text(group.records[0], "config", "dataset") or NOTHING


def aux_of(group: Group) -> str:
    """What the attacker of a row knew."""
    return text(group.records[0], "audit", "aux") or "train"


def defences_of(group: Group) -> tuple[str, ...]:
    """The presets that a row's defence is a stack of."""
    return tuple((text(group.records[0], "config", "defence") or NOTHING).split("+"))


def setting(key: str) -> Callable[[Json], str]:
    """A reader of a setting; what a record does not name was the default, where that is known.

    >>> setting("label_smoothing")({"config": {"lr": 0.2}}), setting("lr")({"config": {"lr": 0.2}})
    ('0.0', '0.2')
    """

    def read(record: Json) -> str:
        if key in section(record, "config"):
            return text(record, "config", key) or "none"
        return UNSAID.get(key, NOTHING)

    return read
