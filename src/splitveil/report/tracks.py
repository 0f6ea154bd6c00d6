"""Which rows may stand in one table: tracks, and what their records have in common, in words."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from splitveil.report.fields import number, section, text
from splitveil.report.rows import Group, Json
from splitveil.report.tables import NOTHING, count

ARCHITECTURE = "Same architecture: VGG11, cut 4, 8 channels"
BUDGET = "Same budget: at most 21.9 MMAC and 512 numbers"
REST = "Other clients"
TEST90 = "Under the seeds' protocol test90"
BUDGET_MACS, BUDGET_FLOATS = 21.9e6, 512  # the CEM paper's client, 21.2e6, and a little more
SEVERAL = 3  # training seeds of a result
TRAINING = (
    "epochs", "batch_size", "lr", "schedule", "momentum", "weight_decay", "label_smoothing",
    "teacher", "held_out",
)  # fmt: skip
UNSAID = {"label_smoothing": "0.0", "teacher": "none"}  # of records that do not name it


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
            made.append(Track(title=prefix + title, groups=least_private_first(chosen), aux=aux))
    return made


def least_private_first(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Rows by the strongest attack's error."""
    return tuple(sorted(groups, key=lambda g: (g.mean("strongest", "mse") or 0.0, g.name)))


def _tracks_of(dataset: str, aux: str, rows: list[Group]) -> list[tuple[str, list[Group]]]:
    if aux == "test90":
        return [(TEST90, rows)]
    if dataset != "cifar10":
        return [(f"Rows on {dataset}" + ("" if aux == "train" else f", aux = {aux}"), rows)]
    suffix = "" if aux == "train" else f"; aux = {aux}"
    same = [g for g in rows if g.distinct("config", "net") == ["vgg11"]]
    within = [g for g in rows if _fits(g)]
    rest = [g for g in rows if g not in same and g not in within]
    named = ((ARCHITECTURE, same), (BUDGET, within), (REST, rest))
    return [(title + suffix, chosen) for title, chosen in named if chosen]


def _fits(group: Group) -> bool:
    macs, floats = group.values("client", "macs"), group.values("client", "wire_floats")
    return all(m is not None and m <= BUDGET_MACS for m in macs) and all(
        f is not None and f <= BUDGET_FLOATS for f in floats
    )


def dataset_of(group: Group) -> str:
    """The dataset of a row."""
    return text(group.records[0], "config", "dataset") or NOTHING


def aux_of(group: Group) -> str:
    """What the attacker of a row knew."""
    return text(group.records[0], "audit", "aux") or "train"


def defences_of(group: Group) -> tuple[str, ...]:
    """The presets that a row's defence is a stack of."""
    return tuple((text(group.records[0], "config", "defence") or NOTHING).split("+"))


def seeds_text(group: Group) -> str:
    """How many training seeds a row has, and times how many attack seeds where there are several.

    >>> seeds_text(Group("a", (({}, {}), ({}, {}), ({}, {})))), seeds_text(Group("b", (({},),)))
    ('3×2', '1')
    """
    attacks = [len(seed) for seed in group.seeds]
    low, high = min(attacks), max(attacks)
    times = f"×{high}" if low == high else f"×{low}–{high}"
    return str(len(attacks)) + ("" if high == 1 else times)


def caption(groups: Sequence[Group]) -> str:
    """What the records of some rows have in common, with the rows that differ."""
    facts = (
        _fact(groups, _wire, "{} numbers on the wire"),
        _fact(groups, setting("epochs"), "{} epochs"),
        *_trained_otherwise(groups),
        _fact(groups, _final, "trained on {}"),
        _fact(groups, lambda r: text(r, "audit", "profile"), "`{}` audit"),
        _fact(groups, lambda r: str(len(r.get("attacks") or {})), "{} attacks"),
        _fact(groups, _aux, "aux = {}"),
        _fact(groups, lambda r: count(number(r, "audit", "scored")), "{} scored images"),
        _fact(groups, _ceiling, "ceiling {}"),
        _fact(groups, lambda r: text(r, "device"), "{}"),
    )
    return f"{'; '.join(fact for fact in facts if fact)}. {_seeds(groups)}"


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


def _trained_otherwise(groups: Sequence[Group]) -> list[str]:
    """The settings of a training, the defence's own apart, in which rows differ."""
    said = []
    for key in TRAINING[1:]:  # the epochs are always told
        read = setting(key)
        if len({read(record) for group in groups for record in group.records} - {NOTHING}) > 1:
            said.append(_fact(groups, read, f"`{key}` {{}}"))
    return said


def _wire(record: Json) -> str:
    return count(number(record, "client", "wire_floats"))


def _final(record: Json) -> str:
    return "train+val" if text(record, "audit", "final") == "true" else "the training split"


def _aux(record: Json) -> str:
    images = number(record, "audit", "aux_images")
    known = text(record, "audit", "aux") or NOTHING
    return known if images is None else f"{known} ({count(images)} images)"


def _ceiling(record: Json) -> str:
    value = number(record, "ceiling", "mse")
    return NOTHING if value is None else f"{value:.4f}"


def _fact(groups: Sequence[Group], read: Callable[[Json], str | None], words: str) -> str:
    """The most frequent value in words, and in brackets the others with their rows."""
    rows: dict[str, list[str]] = {}
    for group in groups:
        for value in sorted({read(record) or NOTHING for record in group.records} - {NOTHING}):
            rows.setdefault(value, []).append(f"`{group.name}`")
    if not rows:
        return ""
    first, *others = sorted(rows, key=lambda value: -len(rows[value]))
    listed = "; ".join(f"{value}: {', '.join(rows[value])}" for value in others)
    return words.format(first) + (f" ({listed})" if others else "")


def _seeds(groups: Sequence[Group]) -> str:
    numbers = sorted({len(group.seeds) for group in groups})
    few, enough = (
        [f"`{g.name}`" for g in groups if (len(g.seeds) < SEVERAL) is small]
        for small in (True, False)
    )
    if numbers == [1]:
        return "**One training seed each: directions, not results.**"
    said = "Mean ± sd over training seeds; attack seeds of one training seed are averaged first."
    which = f"all but {', '.join(enough)}" if 0 < len(enough) < len(few) else ", ".join(few)
    return said + (f" Fewer than three training seeds: {which}." if few else "")
