"""Rows of records against each other: tracks, published rows, differences, what is incomparable.

Accuracies are compared over training seeds alone, by Welch's t: records hold no answer per image.
MSEs are compared over seeds and images where both rows hold the strongest attack's MSE per image.
Against a row of one's choice, rows with the same training seeds are compared seed by seed.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ConfigError, RunError, unknown
from splitveil.io import Json, finite, parse
from splitveil.record.groups import FREE, Group, Records, aux_of, dataset_of, defences_of, setting
from splitveil.record.schema import Record, number, per_image_mse, read_part
from splitveil.record.statistics import Difference, Sample, difference, holm
from splitveil.report.columns import (
    COMPARE,
    EVERYTHING,
    REFERENCE,
    Compared,
    Published,
    Reference,
    reported_reference,
)
from splitveil.table import CODE, NOTHING, P_VALUE, Cell, Column, Table, count, decimals, gap

ARCHITECTURE = "Same architecture: VGG11, cut 4, 8 channels"
BUDGET = "Same budget: at most 21.9 MMAC and 512 numbers"
REST = "Other clients"
TEST90 = "Under the reference documents' protocol test90"
MOST = {"client.macs": 21.9e6, "client.wire_floats": 512}  # the CEM paper's client and a little
SEVERAL = 3  # training seeds of a result

TRAINING = (
    "epochs", "batch_size", "lr", "schedule", "momentum", "weight_decay", "label_smoothing",
    "teacher", "held_out",
)  # fmt: skip

TRAINED_ON = {True: "train+val", False: "the training split"}  # by whether a run is final

MEASURED = {"accuracy": "accuracy", "MSE": "strongest.mse", "leakage": "leakage"}

ATTACKED_ALIKE: Mapping[str, Callable[[Record], str]] = {
    "differ in audit profile": lambda r: r.audit.profile or NOTHING,
    "differ in scored images": lambda r: r.splits.scored or NOTHING,
    "were attacked by different suites": lambda r: ", ".join(sorted(r.attacks)) or "none",
}

OURS = "veil"
ALPHA = 0.05
LEAST_SEEDS = 2  # a single training has no spread

VERDICTS = {  # sign of the difference in accuracy, in MSE; 0: not told apart, or not known
    (1, 1): "dominates",
    (0, 1): "more private",
    (-1, 1): "more private, less accurate",
    (1, 0): "more accurate",
    (0, 0): "not told apart",
    (-1, 0): "less accurate",
    (1, -1): "more accurate, less private",
    (0, -1): "less private",
    (-1, -1): "is dominated",
}


@dataclass(frozen=True, kw_only=True)
class Track:
    """Rows that compete on equal terms, least private first, and what the attacker knew."""

    title: str
    groups: tuple[Group, ...]
    aux: str = "train"


def tracks(groups: Sequence[Group]) -> list[Track]:
    """The tracks of some rows; every row is in at least one.

    CIFAR-10 has two, same architecture and same budget, and a row may be in both. Rows of another
    dataset or against another attacker are a track of their own.
    """
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        kinds.setdefault((dataset_of(group), aux_of(group)), []).append(group)
    several = len({dataset for dataset, _ in kinds}) > 1
    made = []
    for (dataset, aux), rows in sorted(kinds.items(), key=lambda kind: kind[0][1] == "test90"):
        prefix = f"{dataset}: " if several else ""
        for title, chosen in _tracks_of(dataset, aux, rows):
            in_order = sorted(chosen, key=lambda g: (g.mean("strongest.mse") or 0.0, g.name))
            made.append(Track(title=prefix + title, groups=tuple(in_order), aux=aux))
    return made


def _tracks_of(dataset: str, aux: str, rows: list[Group]) -> list[tuple[str, list[Group]]]:
    if aux == "test90":
        return [(TEST90, rows)]
    if dataset != "cifar10":
        return [(f"Rows on {dataset}" + ("" if aux == "train" else f", aux = {aux}"), rows)]
    suffix = "" if aux == "train" else f"; aux = {aux}"
    same = [g for g in rows if g.distinct("config.net") == ["vgg11"]]
    within = [g for g in rows if _fits(g)]
    rest = [g for g in rows if g not in same and g not in within]
    named = ((ARCHITECTURE, same), (BUDGET, within), (REST, rest))
    return [(title + suffix, chosen) for title, chosen in named if chosen]


def _fits(group: Group) -> bool:
    costs = [(cost, most) for path, most in MOST.items() for cost in group.values(path)]
    return all(cost is not None and cost <= most for cost, most in costs)


def caption(groups: Sequence[Group]) -> str:
    """What the records of some rows have in common, with the rows that differ."""
    facts = (
        _fact(groups, lambda r: count(r.client.wire_floats), "{} numbers on the wire"),
        _fact(groups, setting("epochs"), "{} epochs"),
        *_trained_otherwise(groups),
        _fact(groups, lambda r: TRAINED_ON[bool(r.audit.final)], "trained on {}"),
        _fact(groups, lambda r: r.audit.profile, "`{}` audit"),
        _fact(groups, lambda r: str(len(r.attacks)), "{} attacks"),
        _fact(groups, _aux, "aux = {}"),
        _fact(groups, lambda r: count(r.audit.scored), "{} scored images"),
        _fact(groups, lambda r: decimals(r.ceiling.mse, 4), "ceiling {}"),
        _fact(groups, lambda r: r.device, "{}"),
    )
    return f"{'; '.join(fact for fact in facts if fact)}. {_seeds(groups)}"


def _trained_otherwise(groups: Sequence[Group]) -> list[str]:
    """The settings of a training, the defence's own apart, in which rows differ."""
    said = []
    for key in TRAINING[1:]:  # the epochs are always told
        read = setting(key)
        if len({read(record) for group in groups for record in group.records} - {NOTHING}) > 1:
            said.append(_fact(groups, read, f"`{key}` {{}}"))
    return said


def _aux(record: Record) -> str:
    known, images = record.audit.aux or NOTHING, record.audit.aux_images
    return known if images is None else f"{known} ({count(images)} images)"


def _fact(groups: Sequence[Group], read: Callable[[Record], str | None], words: str) -> str:
    """The most frequent value in words, and in brackets the others with their rows."""
    rows = _rows_by(groups, lambda record: read(record) or NOTHING)
    rows.pop(NOTHING, None)
    if not rows:
        return ""
    first, *others = sorted(rows, key=lambda value: -len(rows[value]))
    listed = "; ".join(f"{v}: {', '.join(f'`{name}`' for name in rows[v])}" for v in others)
    return words.format(first) + (f" ({listed})" if others else "")


def _rows_by(groups: Sequence[Group], read: Callable[[Record], str]) -> dict[str, list[str]]:
    """The rows that have each value of what `read` reads."""
    rows: dict[str, list[str]] = {}
    for group in groups:
        for value in sorted({read(record) for record in group.records}):
            rows.setdefault(value, []).append(group.name)
    return rows


def _seeds(groups: Sequence[Group]) -> str:
    numbers = sorted({len(group.seeds) for group in groups})
    few = [f"`{g.name}`" for g in groups if len(g.seeds) < SEVERAL]
    enough = [f"`{g.name}`" for g in groups if len(g.seeds) >= SEVERAL]
    if numbers == [1]:
        return "**One training seed each: directions, not results.**"
    said = "Mean ± sd over training seeds; attack seeds of one training seed are averaged first."
    which = f"all but {', '.join(enough)}" if 0 < len(enough) < len(few) else ", ".join(few)
    return said + (f" Fewer than three training seeds: {which}." if few else "")


def read_published(path: Path) -> dict[str, Published]:
    """Rows of a JSON file {name: {accuracy, mse, source, dataset}}; accuracies are shares."""
    try:
        data = parse(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it must hold an object of rows, got {type(data).__name__}")
        return {name: _published(name, row) for name, row in data.items()}
    except (OSError, ValueError) as err:
        raise RunError(
            f"{path} is not a file of published rows: {err}; a row is, for example, "
            '"cem": {"accuracy": 0.9, "mse": 0.01, "source": "where it is printed", '
            '"dataset": "cifar10"}'
        ) from err


def _published(name: str, given: object) -> Published:
    """A row of a file, each value of its kind; raises ValueError naming the row and the key."""
    row = finite(given)
    if not isinstance(row, dict):
        raise ValueError(f"row '{name}' must be an object, got {type(row).__name__}")
    known = [field.name for field in fields(Published)]
    strange = [f"unknown {key}" for key in row if key not in known]
    missing = [f"no {key}" for key in known[:3] if row.get(key) is None]
    if strange or missing:
        raise ValueError(f"row '{name}': {', '.join(missing + strange)}")
    try:
        return read_part(Published, {"aux": Published.aux} | row)
    except RunError as err:
        raise ValueError(f"row '{name}': {err}") from err


def reported(group: Group, published: Mapping[str, Published]) -> Published | None:
    """What is published under a row's name, of the same dataset and attacker's knowledge.

    Folders say `arl-cem` for the stack `arl+cem`.
    """
    said = published.get(group.name) or published.get(group.name.replace("-", "+"))
    if said is None or not said.is_of(group.distinct("config.dataset")):
        return None
    return said if group.distinct("audit.aux") == [said.aux] else None


def elsewhere(published: Mapping[str, Published], datasets: Collection[str]) -> list[str]:
    """A line that counts the published rows of other datasets than these, which are not shown."""
    counts = Counter(said.dataset for said in published.values() if not said.is_of(datasets))
    named = ", ".join(f"{dataset} ({count})" for dataset, count in sorted(counts.items()))
    met = ", ".join(sorted(datasets)) or NOTHING
    return [f"published rows of another dataset left out: {named}; records: {met}"] if named else []


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """Row `ours` less row `other`, accuracies as shares.

    A difference without an interval is None: of accuracies with one training seed on either side,
    or where none of the seeds differ; of MSEs the same without values per image. `over` says what
    the interval of the MSE covers. `p_accuracy` and `p_mse` are for another training, so one seed
    has none; `corrected` adjusts them for all claims of a table. `several`: both rows have more
    than one seed.
    """

    ours: str
    other: str
    accuracy_gap: float | None
    mse_gap: float | None
    accuracy: Difference | None
    mse: Difference | None
    over: str
    several: bool
    p_accuracy: float | None = None
    p_mse: float | None = None

    @property
    def verdict(self) -> str:
        """What the intervals allow to say; what Holm's correction does not bear out apart."""
        signs = _sign(self.accuracy), _sign(self.mse)
        if signs[1] is None and not signs[0]:
            return "no spread over seeds: no verdict" if self.several else "one seed: no verdict"
        told, doubtful = [0, 0], [0, 0]
        for at, p in enumerate((self.p_accuracy, self.p_mse)):
            (told if p is not None and p < ALPHA else doubtful)[at] = signs[at] or 0
        said, unsure = VERDICTS[told[0], told[1]], VERDICTS[doubtful[0], doubtful[1]]
        if any(told) and any(doubtful):
            return f"{said} and, before correction, {unsure}"
        return f"{unsure}, before correction" if any(doubtful) else said


def _sign(made: Difference | None) -> int | None:
    """Sign of a difference; 0 where its interval holds 0, None where it has none over seeds."""
    if made is None or made.interval.scope == "images":
        return None
    return (1 if made.interval.mean > 0 else -1) if made.excludes_zero else 0


def image_table(group: Group) -> NDArray[np.float64] | None:
    """MSE per training seed and image (seeds, images), attack seeds averaged; None if not kept."""
    seeds = [[per_image_mse(record) for record in seed] for seed in group.seeds]
    lengths = {None if values is None else len(values) for seed in seeds for values in seed}
    if None in lengths or len(lengths) != 1:
        return None
    return np.stack([np.mean(cast(list[Any], seed), axis=0) for seed in seeds])


def seed_test(
    a: Sequence[float | None], b: Sequence[float | None], *, paired: bool = False
) -> Difference | None:
    """Mean of a less mean of b by Welch's t, or `paired` by Student's t of the differences.

    None with fewer than two values on either side, and where these have no spread: seeds that agree
    to the last image do so by chance, and would make any difference certain.

    >>> made = seed_test([1.0, 2.0, 3.0], [0.0, 0.0])
    >>> round(made.interval.low, 4), round(made.interval.high, 4)  # 2 ± 4.3027/√3
    (-0.4841, 4.4841)
    """
    if paired:
        pairs = [(v, w) for v, w in zip(a, b, strict=True) if v is not None and w is not None]
        left, right = [v for v, _ in pairs], [w for _, w in pairs]
    else:
        left, right = ([v for v in values if v is not None] for values in (a, b))
    if min(len(left), len(right)) < LEAST_SEEDS:
        return None
    samples = [Sample.of([[v, v] for v in values]) for values in (left, right)]
    made = difference(*samples, paired=paired)  # equal columns: the images add no variance
    low, high = made.interval.low, made.interval.high
    return None if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12) else made


def matched(ours: Group, other: Group) -> tuple[Group, Group] | None:
    """Both rows with their training seeds in one order; None if these are not the same ones."""
    sides = [{seed[0].seeds.train: seed for seed in g.seeds} for g in (ours, other)]
    names = sorted(name for name in sides[0] if name is not None)
    complete = all(len(side) == len(g.seeds) for side, g in zip(sides, (ours, other), strict=True))
    if not complete or sides[0].keys() != sides[1].keys() or len(names) != len(sides[0]):
        return None
    left, right = (tuple(side[name] for name in names) for side in sides)
    return Group(ours.name, left), Group(other.name, right)


def contrast(ours: Group, other: Group, *, paired: bool = False) -> RowDifference:
    """Two rows against each other, p-values not yet corrected; `paired` where seeds allow it."""
    pair = matched(ours, other) if paired else None
    ours, other = pair or (ours, other)
    together = pair is not None and len(ours.seeds) >= LEAST_SEEDS
    accuracy = seed_test(ours.values("accuracy"), other.values("accuracy"), paired=together)
    mse = seed_test(ours.values("strongest.mse"), other.values("strongest.mse"), paired=together)
    a, b, over = image_table(ours), image_table(other), "seeds"
    same = ours.distinct("splits.scored") == other.distinct("splits.scored")
    if a is not None and b is not None and same and a.shape[1] == b.shape[1]:
        mse = difference(Sample.of(a), Sample.of(b), paired=together)
        over = mse.interval.scope
    return RowDifference(
        ours=ours.name,
        other=other.name,
        accuracy_gap=_gap(ours, other, "accuracy"),
        mse_gap=_gap(ours, other, "strongest.mse"),
        accuracy=accuracy,
        mse=mse,
        over=NOTHING if mse is None else f"paired {over}" if together else over,
        several=min(len(ours.seeds), len(other.seeds)) >= LEAST_SEEDS,
        p_accuracy=None if accuracy is None else accuracy.p_value,
        p_mse=None if mse is None or over == "images" else mse.p_value,
    )


def _gap(ours: Group, other: Group, path: str) -> float | None:
    a, b = ours.mean(path), other.mean(path)
    return None if a is None or b is None else a - b


def corrected(made: Sequence[RowDifference]) -> list[RowDifference]:
    """The contrasts with Holm's correction over all their p-values together."""
    values = [p for c in made for p in (c.p_accuracy, c.p_mse)]
    adjusted = iter(holm([p for p in values if p is not None]))

    def taken(p: float | None) -> float | None:
        return None if p is None else next(adjusted)

    return [replace(c, p_accuracy=taken(c.p_accuracy), p_mse=taken(c.p_mse)) for c in made]


def row_differences(
    track: Track, done: Sequence[str] = (), against: str | None = None
) -> list[RowDifference]:
    """Every row of a track with our defence, but those `done`, against every row without.

    With `against`, every other row against the one of this name, in pairs of seeds where both have
    the same; none if the track does not hold it.
    """
    if against is not None:
        base = [g for g in track.groups if g.name == against]
        rest = [g for g in track.groups if g.name != against]
        return corrected([contrast(a, b, paired=True) for b in base for a in rest])
    ours = [g for g in track.groups if OURS in defences_of(g)]
    others = [g for g in track.groups if g not in ours]
    return corrected([contrast(a, b) for a in ours if a.name not in done for b in others])


def _gained(name: str) -> Callable[[RowDifference], object]:
    """A difference and the ends of its interval, where it has one."""

    def get(contrast: RowDifference) -> object:
        mean, made = getattr(contrast, f"{name}_gap"), getattr(contrast, name)
        ends = None if made is None else (made.interval.low, made.interval.high)
        return None if mean is None else (mean, ends)

    return get


POINTS = gap(2, 100.0)
DIFFERENCES = Table(
    Column("row", "row", lambda c: c.ours, CODE, brief="row"),
    Column("against", "against", lambda c: c.other, CODE, brief="against"),
    Column("accuracy_gap", "accuracy gained", _gained("accuracy"), POINTS, "points", "up", "Δacc"),
    Column("accuracy_gap_p", "p of accuracy", lambda c: c.p_accuracy, P_VALUE),
    Column("mse_gap", "MSE gained", _gained("mse"), gap(4), "", "up", "ΔMSE"),
    Column("mse_gap_p", "p of MSE", lambda c: c.p_mse, P_VALUE),
    Column("interval_over", "interval over", lambda c: c.over),
    Column("verdict", "verdict", lambda c: c.verdict, brief="verdict"),
)

_GAP_CAPTION = (
    "First row less second, with its 95 % interval; p-values are corrected after Holm over this "
    "table. “Dominates”: both intervals exclude 0 in favour of the first row; “before correction”: "
    "a corrected p is 0.05 or more."
)

_PAIRED = " “Paired”: seed by seed, where both rows have the same training seeds."


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of a track beside what is published of them, and the differences between them."""

    track: Track
    published: Mapping[str, Published]
    contrasts: Sequence[RowDifference] = ()
    against: str | None = None

    def tables(self) -> list[tuple[Table, Sequence[Any]]]:
        """What readers see: the track's table with its rows, and that of the differences."""
        made = [track_table(self.track, self.published)]
        return [*made, (self.differences(), self.contrasts)] if self.contrasts else made

    def differences(self) -> Table:
        """The table of the differences, with its title and caption."""
        paired = any(c.over.startswith("paired") for c in self.contrasts)
        words = _GAP_CAPTION + _PAIRED * paired
        return DIFFERENCES.titled(f"Differences – {self.track.title}", words)

    def exact(self) -> list[dict[str, Cell]]:
        """Every row without rounding, shares as shares.

        With a row to compare `against`, the differences to it follow.
        """
        known = EVERYTHING.exact(_beside(self.track, self.published))
        rows: list[dict[str, Cell]] = [{"track": self.track.title, **row} for row in known]
        if self.against is None:
            return rows
        nothing = dict.fromkeys(key for column in DIFFERENCES.columns[1:] for key in column.keys)
        gaps = {row["row"]: row for row in DIFFERENCES.exact(self.contrasts)}
        return [row | nothing | gaps.get(row["row"], {}) for row in rows]

    def to_dicts(self) -> list[Json]:
        """Both tables without rounding, for JSON."""
        title, words = self.track.title, caption(self.track.groups)
        made: list[Json] = [{"title": title, "caption": words, "rows": self.exact()}]
        if self.contrasts:
            table = self.differences()
            rows = [{"track": title, **row} for row in table.exact(self.contrasts)]
            made.append({"title": table.title, "caption": table.caption, "rows": rows})
        return made


def compare_records(
    found: Records, published: Mapping[str, Published], against: str | None = None
) -> list[Comparison]:
    """The tracks of some records, each with its differences.

    Those of our defence to all others, or with `against` those of all rows to the one of this name.
    A row of ours that stands in two tracks is compared in the first.
    """
    names = {group.name for group in found.groups}
    if against is not None and against not in names:
        raise ConfigError(unknown("row to compare against", against, names))
    made, done = [], set[str]()
    for track in tracks(found.groups):
        without = track.aux == "test90" and against is None
        pairs = [] if without else row_differences(track, sorted(done), against)
        done |= {pair.ours for pair in pairs}
        made.append(Comparison(track=track, published=published, contrasts=pairs, against=against))
    return made


def _beside(track: Track, published: Mapping[str, Published]) -> list[Compared]:
    return [Compared(group, reported(group, published)) for group in track.groups]


def track_table(
    track: Track, published: Mapping[str, Published], table: Table = COMPARE
) -> tuple[Table, Sequence[Any]]:
    """The table of a track with its rows, under the attack of the reference documents their own."""
    title, words = track.title, caption(track.groups)
    if track.aux == "test90" and table is COMPARE:
        return REFERENCE.titled(title, words), reference_rows(track, published)
    rows = _beside(track, published)
    sources = sorted({row.reported.source for row in rows if row.reported is not None})
    named = sources and any(column.key.startswith("reported") for column in table.columns)
    notes = (f"Reported: {'; '.join(sources)}.",) if named else ()
    return table.titled(title, words, notes), rows


def reference_rows(track: Track, published: Mapping[str, Published]) -> list[Compared | Reference]:
    """Rows attacked as in the reference documents: what was measured, then what they report."""
    datasets = [dataset_of(group) for group in track.groups]
    beside = {n: p for n, p in published.items() if p.aux == track.aux and p.is_of(datasets)}
    reported_rows = [reported_reference(name, row) for name, row in beside.items()]
    return [*map(Compared, track.groups), *reported_rows]


def warnings(found: Records) -> list[str]:
    """What makes rows of one dataset and one kind of attacker incomparable; what was left out."""
    said = [f"skipped, not a record: {name} ({why})" for name, why in found.broken.items()]
    for group in found.groups:
        said += _inner_faults(group)
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in found.groups:
        aux = group.records[0].audit.aux or NOTHING
        kinds.setdefault((dataset_of(group), aux), []).append(group)
    for (dataset, aux), groups in kinds.items():
        where = f"{dataset}, attacker knows {aux}: rows"
        for key in TRAINING:
            told = [g for g in groups if NOTHING not in map(setting(key), g.records)]
            said += _outliers(told, setting(key), f"{where} differ in {key}")
        for words, read in ATTACKED_ALIKE.items():
            said += _outliers(groups, read, f"{where} {words}")
    return said


def _outliers(groups: Sequence[Group], read: Callable[[Record], str], words: str) -> list[str]:
    """A line if the rows' records differ in what `read` reads: each value with its rows."""
    rows = _rows_by(groups, read)
    listed = "; ".join(f"{value} ({', '.join(names)})" for value, names in rows.items())
    return [f"{words}: {listed}"] if len(rows) > 1 else []


def _inner_faults(group: Group) -> list[str]:
    """What the seeds of one row must share and do not."""
    said = []
    named = {key for record in group.records for key in record.config} - {*FREE}
    for key in sorted(named):
        values = {setting(key)(record) for record in group.records} - {NOTHING}
        if len(values) > 1:
            listed = ", ".join(sorted(values))
            said.append(f"row {group.name}: its seeds differ in {key}: {listed}")
    for name, path in MEASURED.items():
        without = sum(number(record, path) is None for record in group.records)
        if 0 < without < len(group.records):
            said.append(
                f"row {group.name}: {without} of its {len(group.records)} records "
                f"{'has' if without == 1 else 'have'} no {name}; the mean is of the others"
            )
    trained = [seed[0].seeds.train for seed in group.seeds]
    for seed in sorted({s for s in trained if s is not None and trained.count(s) > 1}):
        said.append(
            f"row {group.name}: {trained.count(seed)} folders are of training seed {seed}, and "
            "count as so many seeds; put attack seeds of one training into its folder"
        )
    pairs = [(r.seeds.train, r.seeds.attack) for r in group.records]
    for pair in sorted({p for p in pairs if pairs.count(p) > 1 and None not in p}):
        said.append(
            f"row {group.name}: training seed {pair[0]}, attack seed {pair[1]} is met twice"
        )
    return said
