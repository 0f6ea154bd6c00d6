"""Reported comparisons against measured ones, in words: what holds and what does not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from splitveil.record.groups import Group
from splitveil.report.columns import Published
from splitveil.table import NOTHING, decimals, percent

SAME_ATTACK = "decoder"  # what the reported figures were measured with
OF_THE_ATTACK = f"under `{SAME_ATTACK}`, the reported attack"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that was reported, where a record has it, and how many decimals it has.

    `scale` 100 is a share shown in per cent.
    """

    name: str
    field: str
    path: str
    digits: int
    scale: float = 1.0

    def said(self, value: float | None) -> str:
        """The number as text."""
        return percent(value, self.digits) if self.scale != 1.0 else decimals(value, self.digits)

    def reported(self, row: Published) -> float | None:
        """What others report."""
        value: float | None = getattr(row, self.field)
        return value


def _attacked(name: str, field: str, key: str, digits: int, scale: float = 1.0) -> Measure:
    path = f"attacks.{SAME_ATTACK}.{key}"
    return Measure(name=name, field=field, path=path, digits=digits, scale=scale)


MEASURES: tuple[Measure, ...] = (
    _attacked("MSE", "mse", "mse", 4),
    _attacked("zero-pad SSIM", "ssim_zeropad", "ssim_zeropad", 4),
    _attacked("pooled PSNR", "psnr_pooled", "psnr_pooled", 2),
    _attacked("accuracy on reconstructions", "reconstruction_accuracy", "accuracy", 2, 100.0),
    Measure(name="task accuracy", field="accuracy", path="accuracy", digits=2, scale=100.0),
)

OVERFITTED = "attack overfitted"  # the flag of an audit
STRONGEST = Measure(name="MSE", field="mse", path="strongest.mse", digits=4)


def direction(first: float, second: float) -> str:
    """How the first number stands to the second.

    >>> direction(2.0, 1.0), direction(1.0, 2.0), direction(1.0, 1.0)
    ('higher', 'lower', 'equal')
    """
    return "equal" if first == second else "higher" if first > second else "lower"


def verdict(
    measure: Measure, mine: tuple[Group, Group], theirs: tuple[Published, Published]
) -> str:
    """Whether the first row stands to the second as reported, with all four numbers.

    Empty where one of them is not known.
    """
    a, b = (group.mean(measure.path) for group in mine)
    c, d = (measure.reported(row) for row in theirs)
    if a is None or b is None or c is None or d is None:
        return ""
    found, told = direction(a, b), direction(c, d)
    word = "holds" if found == told else "does not hold"
    return (
        f"{measure.name} {word}: {found}, {measure.said(a)} against {measure.said(b)} "
        f"(reported {told}, {measure.said(c)} against {measure.said(d)})"
    )


def pair_lines(
    groups: Mapping[str, Group], reported: Mapping[str, Published], base: str, layer: str
) -> list[str]:
    """Every reported row against the reported `base`, and the same with the layer in front.

    The layer is compared with the same reported figures.
    """
    lines = []
    for name, row in reported.items():
        for front in ("", f"{layer}+"):
            ours, other = groups.get(front + name), groups.get(front + base)
            if name == base or ours is None or other is None:
                continue
            rows = (row, reported[base])
            said = [verdict(measure, (ours, other), rows) for measure in MEASURES]
            strongest = verdict(STRONGEST, (ours, other), rows).partition(" (")[0]
            lines.append(
                f"`{front}{name}` against `{front}{base}` {OF_THE_ATTACK} – "
                + "; ".join(part for part in said if part)
                + (f". Under the strongest attack {strongest}." if strongest else ".")
            )
    return lines


def order_line(
    groups: Mapping[str, Group], reported: Mapping[str, Published], layer: str
) -> list[str]:
    """The order of the reported rows by MSE, as reported and as measured, with and without layer.

    Empty where a row is missing.
    """
    told = sorted(reported, key=lambda name: reported[name].mse)
    lines = []
    for front in ("", f"{layer}+"):
        errors = {name: _decoded(groups.get(front + name)) for name in told}
        known = {name: value for name, value in errors.items() if value is not None}
        if len(known) < len(told) or len(told) < 2:  # noqa: PLR2004 - one row has no order
            continue
        found = sorted(known, key=lambda name: known[name])
        word = "agrees with" if found == told else "differs from"
        lines.append(
            f"Order by MSE of `{SAME_ATTACK}`, lowest first: {_listed(found, front)} {word} the "
            f"reported {_listed(told, '')}."
        )
    return lines


def _decoded(group: Group | None) -> float | None:
    return None if group is None else group.mean(MEASURES[0].path)


def _listed(names: Sequence[str], front: str) -> str:
    return ", ".join(f"`{front}{name}`" for name in names)


def layer_lines(groups: Mapping[str, Group], layer: str, kind: str = "") -> list[str]:
    """What the layer changes in each row that was measured with and without it.

    `kind` ends the name of rows with another kind of the layer.
    """
    lines = []
    for name, plain in groups.items():
        layered = groups.get(f"{layer}+{name}{kind}")
        if layered is None:
            continue
        mse, acc = (_change(plain, layered, m) for m in (STRONGEST, MEASURES[-1]))
        lines.append(
            f"`{layer}{kind}` with `{name}`: strongest attack's MSE {mse}; task accuracy {acc}."
        )
    return lines


def span_lines(groups: Mapping[str, Group], layer: str, kind: str = "") -> list[str]:
    """Between what numbers the rows lie without the layer, and with it: whose doing a number is.

    Of rows measured both ways; empty with fewer than two.
    """
    both = [name for name in groups if f"{layer}+{name}{kind}" in groups]
    if len(both) < 2:  # noqa: PLR2004 - one row spans nothing
        return []
    lines = []
    named = [f"{layer}+{name}{kind}" for name in both]
    for words, names in ((f"Without `{layer}`", both), (f"With `{layer}{kind}`", named)):
        rows = [groups[name] for name in names]
        errors = _span([row.mean(STRONGEST.path) for row in rows], decimals, 4)
        shares = _span([_ceiling_share(row) for row in rows], percent, 0)
        accuracies = _span([row.mean("accuracy") for row in rows], percent, 2)
        lines.append(
            f"{words} the strongest attack on {len(rows)} rows leaves MSE {errors} ({shares} % of "
            f"the ceiling) at a task accuracy of {accuracies} %."
        )
    return lines


def own_images_line(groups: Sequence[Group]) -> list[str]:
    """Rows whose audit says that the attack fitted its own images and not new ones, with both MSEs.

    Of the reported attack; empty where no row has the flag.
    """
    said = []
    for group in groups:
        flagged = any(OVERFITTED in record.flag_names for record in group.records)
        own, new = group.mean(f"attacks.{SAME_ATTACK}.aux_mse"), _decoded(group)
        if flagged and own is not None and new is not None:
            said.append(f"`{group.name}` {decimals(own, 4)} and {decimals(new, 4)}")
    if not said:
        return []
    return [
        f"`{SAME_ATTACK}` fits the images it was given better than new ones, MSE: "
        f"{', '.join(said)}. An attacker with more images may rebuild more: no bound from below."
    ]


def _ceiling_share(group: Group) -> float | None:
    error, ceiling = group.mean(STRONGEST.path), group.mean("ceiling.mse")
    return None if error is None or not ceiling else error / ceiling


def _span(values: Sequence[float | None], said: Callable[[float, int], str], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    low, high = said(min(known), digits), said(max(known), digits)
    return low if low == high else f"{low}–{high}"


def _change(before: Group, after: Group, measure: Measure) -> str:
    a, b = before.mean(measure.path), after.mean(measure.path)
    if a is None or b is None:
        return NOTHING
    gap = f"{measure.scale * (b - a):+.{measure.digits}f}"
    return f"{measure.said(a)} → {measure.said(b)} ({gap})"


def claim_lines(
    groups: Sequence[Group],
    reported: Mapping[str, Published],
    base: str,
    layer: str,
    kinds: Sequence[str] = ("",),
) -> list[str]:
    """What holds of the reported rows and what does not, computed from records."""
    known = {group.name: group for group in groups}
    return [
        *pair_lines(known, reported, base, layer),
        *order_line(known, reported, layer),
        *(line for kind in kinds for line in layer_lines(known, layer, kind)),
        *dict.fromkeys(line for kind in kinds for line in span_lines(known, layer, kind)),
        *own_images_line(groups),
    ]
