"""Compare rows of records: tracks, differences with intervals, and what cannot be compared.

Accuracies are compared over training seeds only, by Welch's t; only the gain over a client alone
pairs images (`gains`). MSEs are compared over seeds and images where both rows hold the strongest
attack's MSE per image. With `--against`, rows with the same training seeds are compared seed by
seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ConfigError, unknown
from splitveil.io import Json
from splitveil.record.groups import FREE, Group, Records, aux_of, dataset_of, defences_of, setting
from splitveil.record.schema import Record, number, per_image_mse, sends_part
from splitveil.record.statistics import (
    LEAST_SEEDS,
    Difference,
    Sample,
    difference,
    holm,
    seed_test,
)
from splitveil.report import columns, gains
from splitveil.report.columns import (
    COMPARE,
    EVERYTHING,
    REFERENCE,
    Compared,
    Published,
    ReferenceRow,
)
from splitveil.table import CODE, NOTHING, P_VALUE, Cell, Column, Table, count, decimals, gap

ARCHITECTURE = "Same architecture: VGG11, cut 4, 8 channels"
BUDGET = "Same budget: at most 21.9 MMAC and 512 numbers"
REST = "Other clients"
TEST90 = "Under the reference documents' protocol test90"
MOST = {"client.macs": 21.9e6, "client.wire_floats": 512}  # the CEM paper's client and a little
SEVERAL = 3  # training seeds of a result

TRAINING = (
    "epochs", "batch_size", "lr", "schedule", "momentum", "nesterov", "weight_decay",
    "label_smoothing", "flips", "teacher", "held_out", "precision",
)  # fmt: skip

TRAINED_ON = {True: "train+val", False: "the training split"}  # by whether a run is final

MEASURED = {"accuracy": "accuracy", "MSE": "strongest.mse", "leakage": "leakage"}


def _attacks(record: Record) -> list[str]:
    """The attacks of a record; that on an early exit's unsure images is one of the others again."""
    return sorted(name for name in record.attacks if not name.endswith("-unsure"))


ATTACKED_ALIKE: Mapping[str, Callable[[Record], str]] = {
    "differ in audit profile": lambda r: r.audit.profile or NOTHING,
    "differ in the version of their attacks": lambda r: str(r.audit.attacks_version or 1),
    "differ in the precision of their attacks": lambda r: r.audit_precision,
    "differ in scored images": lambda r: r.splits.scored or NOTHING,
    "were not attacked by the same attacks": lambda r: ", ".join(_attacks(r)) or "none",
}

OURS = "veil"
ALPHA = 0.05

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

    CIFAR-10 has two tracks, same architecture and same budget, and a row may be in both. Rows on
    another dataset, or against an attacker with other knowledge, form a separate track.
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
    """What the records of some rows have in common; exceptions are named with their rows."""
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
    """The training settings in which rows differ, without those of the defence."""
    # The caption always names the epochs, which come first.
    read = {key: setting(key) for key in TRAINING[1:]}
    differ = [key for key in read if len(_rows_by(groups, read[key]).keys() - {NOTHING}) > 1]
    return [_fact(groups, read[key], f"`{key}` {{}}") for key in differ]


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
    few = [f"`{g.name}`" for g in groups if len(g.seeds) < SEVERAL]
    enough = [f"`{g.name}`" for g in groups if len(g.seeds) >= SEVERAL]
    if all(len(group.seeds) == 1 for group in groups):
        return "**One training seed each: directions, not results.**"
    said = "Mean ± sd over training seeds; attack seeds of one training seed are averaged first."
    which = f"all but {', '.join(enough)}" if 0 < len(enough) < len(few) else ", ".join(few)
    return said + (f" Fewer than three training seeds: {which}." if few else "")


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """Row `ours` less row `other`; accuracies are shares.

    Args:
        ours: Name of the first row.
        other: Name of the second row.
        accuracy_gap: Difference of the mean accuracies.
        mse_gap: Difference of the mean MSEs.
        accuracy: The difference with its interval; None with a single training seed on either
            side, or where the seeds have no spread.
        mse: The same for the MSE, where values per image can stand in for a second seed.
        over: What the interval of the MSE covers.
        several: Whether both rows have more than one training seed.
        part: Whether a row sends only some images; its MSE is of these, and compares with no other.
        p_accuracy: p-value for another training; None with one seed.
        p_mse: The same for the MSE.
    """

    ours: str
    other: str
    accuracy_gap: float | None
    mse_gap: float | None
    accuracy: Difference | None
    mse: Difference | None
    over: str
    several: bool
    part: bool = False
    p_accuracy: float | None = None
    p_mse: float | None = None

    @property
    def verdict(self) -> str:
        """What the intervals allow to say; what Holm's correction does not confirm is set apart."""
        accuracy, mse = _sign(self.accuracy), _sign(self.mse)
        if self.part:
            sure = self.p_accuracy is not None and self.p_accuracy < ALPHA
            return f"{VERDICTS[(accuracy or 0) * sure, 0]}; compare exposures"
        if mse is None and not accuracy:
            return "no spread over seeds: no verdict" if self.several else "one seed: no verdict"
        a, m, nothing = accuracy or 0, mse or 0, VERDICTS[0, 0]
        sure_a, sure_m = (p is not None and p < ALPHA for p in (self.p_accuracy, self.p_mse))
        said = VERDICTS[a * sure_a, m * sure_m]
        unsure = VERDICTS[a * (not sure_a), m * (not sure_m)]
        if unsure == nothing:
            return said
        if said == nothing:
            return f"{unsure}, before correction"
        return f"{said} and, before correction, {unsure}"


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


def matched(ours: Group, other: Group) -> tuple[Group, Group] | None:
    """Both rows with their training seeds in the same order; None if the seeds differ."""
    sides = [{seed[0].seeds.train: seed for seed in g.seeds} for g in (ours, other)]
    names = sorted(name for name in sides[0] if name is not None)
    complete = all(len(side) == len(g.seeds) for side, g in zip(sides, (ours, other), strict=True))
    if not complete or sides[0].keys() != sides[1].keys() or len(names) != len(sides[0]):
        return None
    left, right = (tuple(side[name] for name in names) for side in sides)
    return Group(ours.name, left), Group(other.name, right)


def contrast(ours: Group, other: Group, *, paired: bool = False) -> RowDifference:
    """Compare two rows; the p-values are not corrected yet.

    Args:
        ours: The first row.
        other: The second row, which is subtracted.
        paired: Compare seed by seed where both rows have the same training seeds.
    """
    pair = matched(ours, other) if paired else None
    ours, other = pair or (ours, other)
    together = pair is not None and len(ours.seeds) >= LEAST_SEEDS
    accuracy = seed_test(ours.values("accuracy"), other.values("accuracy"), paired=together)
    mse = seed_test(ours.values("strongest.mse"), other.values("strongest.mse"), paired=together)
    part = any(sends_part(record) for g in (ours, other) for record in g.records)
    a, b, over = image_table(ours), image_table(other), "seeds"
    same = ours.distinct("splits.scored") == other.distinct("splits.scored")
    if part:
        mse = None
    elif a is not None and b is not None and same and a.shape[1] == b.shape[1]:
        mse = difference(Sample.of(a), Sample.of(b), paired=together)
        over = mse.interval.scope
    return RowDifference(
        ours=ours.name,
        other=other.name,
        accuracy_gap=_gap(ours, other, "accuracy"),
        mse_gap=None if part else _gap(ours, other, "strongest.mse"),
        accuracy=accuracy,
        mse=mse,
        over=NOTHING if mse is None else f"paired {over}" if together else over,
        several=min(len(ours.seeds), len(other.seeds)) >= LEAST_SEEDS,
        part=part,
        p_accuracy=None if accuracy is None else accuracy.p_value,
        p_mse=None if mse is None or over == "images" else mse.p_value,
    )


def _gap(ours: Group, other: Group, path: str) -> float | None:
    a, b = ours.mean(path), other.mean(path)
    return None if a is None or b is None else a - b


def corrected(made: Sequence[RowDifference]) -> list[RowDifference]:
    """The differences with Holm's correction over all their p-values together."""
    values = [p for c in made for p in (c.p_accuracy, c.p_mse)]
    adjusted = iter(holm([p for p in values if p is not None]))
    pairs = iter([None if p is None else next(adjusted) for p in values])
    return [replace(c, p_accuracy=next(pairs), p_mse=next(pairs)) for c in made]


def row_differences(
    track: Track, done: Sequence[str] = (), against: str | None = None
) -> list[RowDifference]:
    """The differences that a track claims, corrected together.

    Args:
        track: The rows.
        done: Names of rows with our defence that another track has compared already.
        against: Compare every other row with the row of this name, seed by seed where both have
            the same training seeds. None compares rows with our defence with all rows without it.
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
    """The rows of a track with what is published about them, and the differences between them.

    `rows` are all rows at hand, among which clients alone are looked for; empty for the track's.
    """

    track: Track
    published: Mapping[str, Published]
    contrasts: Sequence[RowDifference] = ()
    against: str | None = None
    rows: Sequence[Group] = ()

    def tables(self) -> list[tuple[Table, Sequence[Any]]]:
        """What readers see: the track's table with its rows, then the differences, if any."""
        made = [track_table(self.track, self.published, rows=self.rows)]
        if self.contrasts:
            paired = any(c.over.startswith("paired") for c in self.contrasts)
            title, words = f"Differences – {self.track.title}", _GAP_CAPTION + _PAIRED * paired
            made.append((DIFFERENCES.titled(title, words), self.contrasts))
        return made

    def exact(self) -> list[dict[str, Cell]]:
        """Every row without rounding, shares as shares.

        With a row to compare `against`, the differences to it follow.
        """
        known = EVERYTHING.exact(_beside(self.track, self.published, self.rows))
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
        for table, contrasts in self.tables()[1:]:
            rows = [{"track": title, **row} for row in table.exact(contrasts)]
            made.append({"title": table.title, "caption": table.caption, "rows": rows})
        return made


def compare_records(
    found: Records, published: Mapping[str, Published], against: str | None = None
) -> list[Comparison]:
    """The tracks of some records, each with its differences.

    Args:
        found: The records by row.
        published: Published rows by name.
        against: Row to compare all others with; None compares our defence with all others. A row
            of ours that is in two tracks is compared in the first.

    Raises:
        ConfigError: There is no row `against`.
    """
    names = {group.name for group in found.groups}
    if against is not None and against not in names:
        raise ConfigError(unknown("row to compare against", against, names))
    made, done = [], set[str]()
    rows = gains.rows_beside(found.groups)
    for track in tracks(rows):
        without = track.aux == "test90" and against is None
        pairs = [] if without else row_differences(track, sorted(done), against)
        done |= {pair.ours for pair in pairs}
        made.append(
            Comparison(
                track=track, published=published, contrasts=pairs, against=against, rows=rows
            )
        )
    return made


def _beside(
    track: Track, published: Mapping[str, Published], rows: Sequence[Group]
) -> list[Compared]:
    """The rows of a track with what is published of them, and what they gain among all `rows`."""
    return [
        Compared(
            group, columns.reported(group, published), gains.gains(group, rows or track.groups)
        )
        for group in track.groups
    ]


def track_table(
    track: Track,
    published: Mapping[str, Published],
    table: Table = COMPARE,
    rows: Sequence[Group] = (),
) -> tuple[Table, Sequence[Any]]:
    """The table of a track with its rows; attacks as in the reference documents have their own.

    Args:
        track: The track.
        published: Published rows by name.
        table: Its columns; of the usual ones, those that say nothing of these rows are left out.
        rows: All rows at hand, among which clients alone are looked for; empty for the track's.
    """
    title, words = track.title, caption(track.groups)
    if track.aux == "test90" and table is COMPARE:
        return REFERENCE.titled(title, words), reference_rows(track, published)
    compared = _beside(track, published, rows)
    if table is COMPARE:
        records = [record for row in compared for record in row.group.records]
        table = columns.telling(table, compared, records)
    sources = sorted({row.reported.source for row in compared if row.reported is not None})
    named = sources and any(column.key.startswith("reported") for column in table.columns)
    notes = [f"Reported: {'; '.join(sources)}."] if named else []
    notes += columns.notes_on(table, compared)
    return table.titled(title, words, notes), compared


def reference_rows(
    track: Track, published: Mapping[str, Published]
) -> list[Compared | ReferenceRow]:
    """Rows attacked as in the reference documents: first the measured ones, then the reported."""
    datasets = [dataset_of(group) for group in track.groups]
    beside = {n: p for n, p in published.items() if p.aux == track.aux and p.is_of(datasets)}
    reported_rows = [columns.reported_reference(name, row) for name, row in beside.items()]
    return [*map(Compared, track.groups), *reported_rows]


def warnings(found: Records) -> list[str]:
    """Why rows on one dataset and against one attacker cannot be compared, and what was skipped."""
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
        attacked = [g for g in groups if not gains.answers_alone(g)]  # the others send something
        for words, read in ATTACKED_ALIKE.items():
            said += _outliers(attacked, read, f"{where} {words}")
    return said


def _outliers(groups: Sequence[Group], read: Callable[[Record], str], words: str) -> list[str]:
    """A line if the records of the rows differ in what `read` reads: each value with its rows."""
    rows = _rows_by(groups, read)
    listed = "; ".join(f"{value} ({', '.join(names)})" for value, names in rows.items())
    return [f"{words}: {listed}"] if len(rows) > 1 else []


def _inner_faults(group: Group) -> list[str]:
    """In what the seeds of one row differ although they must not."""
    said = []
    named = {key for record in group.records for key in record.config} - {*FREE}
    for key in sorted(named):
        values = sorted({setting(key)(record) for record in group.records} - {NOTHING})
        if len(values) > 1:
            said.append(f"row {group.name}: its seeds differ in {key}: {', '.join(values)}")
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
            f"row {group.name}: {trained.count(seed)} folders have training seed {seed} and count "
            "as separate trainings; put the audits of one training into one folder"
        )
    pairs = [(r.seeds.train, r.seeds.attack) for r in group.records]
    twice = sorted({pair for pair in pairs if pairs.count(pair) > 1 and None not in pair})
    return said + [
        f"row {group.name}: training seed {train} with attack seed {attack} appears twice"
        for train, attack in twice
    ]
