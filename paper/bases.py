"""Defences alone and with a penalty added: Table 1 of the CEM paper from records, and in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitveil.record.groups import Group
from splitveil.report.columns import EVERYTHING, Compared, Published
from splitveil.report.comparison import Track, track_table
from splitveil.table import Table, format_mse

HOLDS = 0.5  # a defence holds up whose strongest attack is left with this share of the ceiling

SHOWN = ("row", "defence", "noise", "seeds", "accuracy", "reported-accuracy", "mse", "reported-mse",
         "by", "ssim", "worst", "leakage", "rate", "seconds")  # fmt: skip

SIDES: Mapping[tuple[bool, bool], str] = {  # more accurate, more MSE than reported
    (True, True): "more accurate and more MSE",
    (True, False): "more accurate, less MSE",
    (False, True): "less accurate, more MSE",
    (False, False): "less accurate and less MSE",
}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A defence under the paper's name, and its rows: alone first, then what was added to it."""

    title: str
    rows: tuple[str, ...]


def _three(title: str, row: str) -> Base:
    return Base(title=title, rows=(row, f"{row}+cem", f"{row}+veil"))


TABLE1: tuple[Base, ...] = (
    Base(title="Bottleneck", rows=("none", "noise", "cem", "veil-vgg11")),
    _three("DistCorr", "DistCorr"),
    _three("Dropout", "dropout"),
    _three("PATROL", "patrol"),
    _three("ResSFL", "ResSFL"),
    _three("Noise_Nopeek", "nopeek"),
    _three("Noise_ARL", "arl"),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a row is judged by: accuracy as a share, the strongest attack's MSE, the ceiling."""

    name: str
    accuracy: float
    mse: float
    ceiling: float | None


def measured(bases: Sequence[Base], groups: Sequence[Group]) -> list[Group]:
    """The rows that have records, in the order of the bases."""
    known = {group.name: group for group in groups}
    return [known[row] for base in bases for row in base.rows if row in known]


def points(groups: Sequence[Group]) -> dict[str, Point]:
    """Rows by name; one without accuracy or without a strongest attack is left out."""
    made = {}
    for group in groups:
        accuracy, mse = group.mean("accuracy"), group.mean("strongest.mse")
        if accuracy is not None and mse is not None:
            made[group.name] = Point(
                name=group.name, accuracy=accuracy, mse=mse, ceiling=group.mean("ceiling.mse")
            )
    return made


def base_table(
    title: str, bases: Sequence[Base], groups: Sequence[Group], published: Mapping[str, Published]
) -> tuple[Table, Sequence[Compared]]:
    """The rows of each base one below the other, measured beside reported."""
    track = Track(title=title, groups=tuple(measured(bases, groups)))
    table, rows = track_table(track, published, EVERYTHING.only(*SHOWN))
    told = "Reported: Table 1 of the CEM paper, a decoder fitted on the training set, one run."
    return table.titled(title, table.caption, (told,) if table.notes else ()), rows


def base_lines(bases: Sequence[Base], groups: Sequence[Group]) -> list[str]:
    """A sentence per base that has a record: what each addition gains and costs."""
    known = points(groups)
    return [
        line
        for base in bases
        if (line := base_line(base, [known[row] for row in base.rows if row in known]))
    ]


def base_line(base: Base, found: Sequence[Point]) -> str:
    """What was added to a base against the base alone, highest MSE first.

    >>> alone = Point(name="arl", accuracy=0.88, mse=0.03, ceiling=None)
    >>> more = Point(name="arl+cem", accuracy=0.87, mse=0.045, ceiling=None)
    >>> base_line(Base(title="ARL", rows=("arl", "arl+cem")), [alone, more])
    '**ARL**, alone MSE 0.0300 at 88.00 %: highest with `arl+cem`, 0.0450 (1.50×), -1.00 points.'
    """
    if not found:
        return ""
    alone = found[0]
    if alone.name != base.rows[0]:
        return f"**{base.title}**: no record of `{base.rows[0]}` to compare with."
    start = f"**{base.title}**, alone MSE {format_mse(alone.mse)} at {100 * alone.accuracy:.2f} %"
    added = sorted(found[1:], key=lambda point: -point.mse)
    if not added:
        return f"{start}: no record yet of what is added to it."
    gains = [_gain(point, alone) for point in added]
    if added[0].mse > alone.mse:
        return f"{start}: highest with {'; then '.join(gains)}."
    return f"{start}: highest alone; then {'; then '.join(gains)}."


def _gain(point: Point, alone: Point) -> str:
    ratio = f" ({point.mse / alone.mse:.2f}×)" if alone.mse > 0 else ""
    cost = 100 * (point.accuracy - alone.accuracy)
    return f"`{point.name}`, {format_mse(point.mse)}{ratio}, {cost:+.2f} points"


def count_line(bases: Sequence[Base], groups: Sequence[Group]) -> str:
    """On how many bases each addition has a higher MSE than the base alone; empty without any."""
    known = points(groups)
    tally: dict[str, list[bool]] = {}
    for base in bases:
        for row in base.rows[1:]:
            if base.rows[0] in known and row in known:
                tally.setdefault(added(base, row), []).append(
                    known[row].mse > known[base.rows[0]].mse
                )
    parts = [f"`{name}` on {sum(up)} of {len(up)}" for name, up in tally.items()]
    return f"More MSE than the base alone: {', '.join(parts)}." if parts else ""


def added(base: Base, row: str) -> str:
    """What a row adds to its base.

    >>> added(Base(title="ARL", rows=("arl", "arl+cem")), "arl+cem")
    'cem'
    """
    return row.removeprefix(f"{base.rows[0]}+").removesuffix("-vgg11")


def rivals_line(
    bases: Sequence[Base], groups: Sequence[Group], first: str = "veil", second: str = "cem"
) -> str:
    """How often one addition beats another on the same base; empty where no base has both."""
    known = points(groups)
    pairs = []
    for base in bases:
        rows = {added(base, row): known[row] for row in base.rows[1:] if row in known}
        if first in rows and second in rows:
            pairs.append((rows[first], rows[second]))
    if not pairs:
        return ""
    private = [a.mse > b.mse for a, b in pairs]
    accurate = [a.accuracy > b.accuracy for a, b in pairs]
    both = sum(p and q for p, q in zip(private, accurate, strict=True))
    return (
        f"`{first}` in the place of `{second}`: more MSE on {sum(private)} of {len(pairs)} bases, "
        f"more accuracy on {sum(accurate)}, both on {both}."
    )


def reported_line(groups: Sequence[Group], published: Mapping[str, Published]) -> str:
    """On which side of the reported figures each measured row lies; empty without any."""
    known = points(groups)
    sides: dict[tuple[bool, bool], list[str]] = {}
    for name, point in known.items():
        if said := published.get(name):
            side = point.accuracy > said.accuracy, point.mse > said.mse
            sides.setdefault(side, []).append(f"`{name}`")
    parts = [f"{SIDES[side]}: {', '.join(sides[side])}" for side in SIDES if side in sides]
    return f"Measured against reported – {'; '.join(parts)}." if parts else ""


def against_reported_line(
    bases: Sequence[Base],
    groups: Sequence[Group],
    published: Mapping[str, Published],
    first: str = "veil",
    second: str = "cem",
) -> str:
    """One addition as measured against another as reported, on each base; empty without any."""
    known = points(groups)
    lines = []
    for base in bases:
        rows = {added(base, row): row for row in base.rows[1:]}
        ours, said = known.get(rows.get(first, "")), published.get(rows.get(second, ""))
        if ours and said:
            lines.append((ours, ours.accuracy - said.accuracy, ours.mse - said.mse))
    if not lines:
        return ""
    told = [f"`{o.name}` {100 * accuracy:+.2f} points, {mse:+.4f}" for o, accuracy, mse in lines]
    private = [mse > 0 for _, _, mse in lines]
    accurate = [accuracy > 0 for _, accuracy, _ in lines]
    both = sum(p and q for p, q in zip(private, accurate, strict=True))
    return (
        f"`{first}` as measured against `{second}` as reported: more MSE on {sum(private)} of "
        f"{len(lines)} bases, more accuracy on {sum(accurate)}, both on {both} "
        f"({'; '.join(told)})."
    )


def holding_lines(groups: Sequence[Group]) -> list[str]:
    """Which rows hold up under the strongest attack, and which do not, most private first."""
    judged = [
        (point.mse / point.ceiling, point) for point in points(groups).values() if point.ceiling
    ]
    judged.sort(key=lambda pair: -pair[0])
    share = f"{100 * HOLDS:.0f} %"
    return [
        f"{words}: {', '.join(_held(pair) for pair in rows) or 'none'}."
        for words, rows in (
            (
                f"Hold up, the strongest attack on one sending has an MSE of at least {share} of "
                "the ceiling",
                [pair for pair in judged if pair[0] >= HOLDS],
            ),
            (f"Do not, it is under {share}", [pair for pair in judged if not pair[0] >= HOLDS]),
        )
    ]


def _held(pair: tuple[float, Point]) -> str:
    share, point = pair
    return f"`{point.name}` ({100 * share:.0f} %, accuracy {100 * point.accuracy:.2f} %)"


def missing_line(bases: Sequence[Base], groups: Sequence[Group]) -> str:
    """Rows without a record; empty when all are there."""
    known = {group.name for group in groups}
    absent = [f"`{row}`" for base in bases for row in base.rows if row not in known]
    return f"No record yet: {', '.join(absent)}." if absent else ""


def base_section(
    title: str, bases: Sequence[Base], groups: Sequence[Group], published: Mapping[str, Published]
) -> str:
    """Table, a sentence per base, who holds up, what is missing: Markdown."""

    def parts() -> Iterator[str]:
        table, rows = base_table(title, bases, groups, published)
        yield table.render(rows, "markdown", level=3).strip()
        yield "\n".join(f"- {line}" for line in base_lines(bases, groups))
        yield count_line(bases, groups)
        yield rivals_line(bases, groups)
        yield reported_line(measured(bases, groups), published)
        yield against_reported_line(bases, groups, published)
        yield from holding_lines(measured(bases, groups))
        yield missing_line(bases, groups)

    return "\n\n".join(part for part in parts() if part)
