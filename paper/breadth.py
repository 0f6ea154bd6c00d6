"""Beyond the headline: what each attack got from each row, and leaks that are no pictures."""

from collections.abc import Sequence

from splitveil.record.groups import Group, mean_of
from splitveil.record.schema import Record, number
from splitveil.report.columns import LEAKS, WIRE, found_by_wire, leaking, sent_before
from splitveil.report.words import Lang, sentence, word
from splitveil.table import DIGITS, NOTHING, Column, Table, count, spread


def attack_table(groups: Sequence[Group], *, least: int = 5) -> tuple[Table, list[dict[str, str]]]:
    """MSE of every attack on every row with at least `least` attacks; a row's lowest is bold.

    Attacks on a subset of the images, or on several sendings, stand in the table and are never
    bold: they are not ranked with the others. Those on a subset have beside them how they compare
    with the best black-box attack on the same images.
    """
    wide = [g for g in groups if all(len(r.attacks) >= least for r in g.records)]
    names = list(dict.fromkeys(n for g in wide for r in g.records for n in r.attacks))
    best = {g.name: ", ".join(g.distinct("strongest.mse_by")).split(", ") for g in wide}
    rows = []
    for name in names:
        row = {"attack": _mark(name, wide)}
        for group in wide:
            shown = _attack_mse(group, name)
            row[group.name] = f"**{shown}**" if name in best[group.name] else shown
        rows.append(row)
    table = Table(
        Column("attack", "attack"),
        *(Column(group.name, group.name, fmt=DIGITS) for group in wide),
        title="Which attack wins where",
        caption="Mean MSE of each attack, lower is stronger; the strongest of a row is bold. "
        "`mean` and `class-mean` are floors that see nothing of z̃ but, at most, the answer. "
        "* scored on a fixed subset, so not to be read against the others: in brackets its MSE "
        "over that of the best black-box attack (as a rule a decoder) on the same images; above 1 "
        "it is weaker. † the same image sent several times, to a decoder with a shorter fit than "
        "`decoder` has. Neither is ranked, and † is no bound from below.",
        notes=tuple(note for name in names if (note := _against_rival(name, wide))),
    )
    return table, rows


def _attack_mse(group: Group, name: str) -> str:
    shown, ratio = spread(group.values(f"attacks.{name}.mse"), 1.0, 4), _ratio(group, name)
    return shown if ratio is None else f"{shown} ({_times(ratio)})"


def _ratio(group: Group, name: str) -> float | None:
    """An attack's MSE over its rival's on the same images; None unless every record has both."""

    def one(record: Record) -> float | None:
        mse, rival = record.attacks[name].mse, record.attacks[name].beside.mse
        return mse / rival if mse is not None and rival else None

    ratios = [[one(r) for r in seed if name in r.attacks] for seed in group.seeds]
    return None if any(None in seed for seed in ratios) else mean_of([mean_of(s) for s in ratios])


def _times(ratio: float) -> str:
    """A ratio; a third decimal where two would hide which side of 1 it is on.

    >>> _times(0.628), _times(0.9982), _times(1.0)
    ('×0.63', '×0.998', '×1.00')
    """
    short = f"×{ratio:.2f}"
    return f"×{ratio:.3f}" if short == "×1.00" and ratio != 1 else short


def _against_rival(name: str, groups: Sequence[Group]) -> str:
    """The sentence where an attack on a subset beats the best of the others there; may be empty."""
    ratios = {g.name: r for g in groups if (r := _ratio(g, name)) is not None}
    if not ratios:
        return ""
    every = [r.attacks[name] for g in groups for r in g.records if name in r.attacks]
    found = {attack.beside.attack for attack in every}
    rivals = ", ".join(f"`{rival}`" for rival in sorted(r for r in found if r))
    wins, losses = (
        ", ".join(f"`{row}` ({_times(r)})" for row, r in ratios.items() if (r < 1) is wanted)
        for wanted in (True, False)
    )
    rival = f"the best black-box attack on the same images ({rivals})"
    if not wins:
        least, most = (_times(pick(ratios.values())) for pick in (min, max))
        return f"`{name}` nowhere beats {rival}: " + " to ".join(dict.fromkeys((least, most))) + "."
    return f"`{name}` beats {rival} on {wins}" + (f"; it does not on {losses}." if losses else ".")


def _mark(name: str, groups: Sequence[Group]) -> str:
    found = [r.attacks[name] for g in groups for r in g.records if name in r.attacks]
    subset = "*" if any(attack.subset for attack in found) else ""
    return f"`{name}`" + subset + ("†" if any(attack.repeats for attack in found) else "")


def leak_table(groups: Sequence[Group], lang: Lang = "en") -> tuple[Table, list[Group]]:
    """Leaks beyond pixels and certificates, with the rows that have them."""
    told = leaking(groups)
    caption = " ".join(filter(None, (word("leaks.caption", lang), _chance(told, lang))))
    notes = tuple(filter(None, (_fewer_sendings(told, lang),)))
    return LEAKS.titled(word("heading.leaks", lang), caption, notes), told


def _fewer_sendings(groups: Sequence[Group], lang: Lang) -> str:
    """Whose attacker had fewer sendings of the known images than others'; may be empty."""
    known = [g for g in groups if any(number(r, f"{WIRE}.rank_1") is not None for r in g.records)]
    counts = {g.name: sorted({n for n in map(sent_before, g.records) if n}) for g in known}
    every = sorted({n for ns in counts.values() for n in ns})
    if len(every) <= 1:
        return ""
    parts = [
        sentence("leaks.sendings", n=str(n), rows=tuple(f"`{name}`" for name in names)).plain(lang)
        for n in reversed(every)
        if (names := [name for name, ns in counts.items() if ns and ns[-1] == n])
    ]
    for group in known:
        few, values = counts[group.name][:-1], found_by_wire(group)
        if few:
            parts.append(
                sentence(
                    "leaks.sendings-left-out",
                    row=f"`{group.name}`",
                    some=str(len(values) - values.count(None)),
                    all=str(len(values)),
                    n=tuple(map(str, few)),
                ).plain(lang)
            )
    return sentence("leaks.sendings-note", told="; ".join(parts)).plain(lang)


def _chance(groups: Sequence[Group], lang: Lang) -> str:
    """How many images each re-identification picks from, and what a blind guess finds."""
    sources = (f"{WIRE}.gallery", "certificates.gallery.images")
    found = {number(r, path) for g in groups for r in g.records for path in sources}
    sizes = sorted(n for n in found if n)
    if not sizes:
        return ""
    shares = tuple(f"{100 / n:.2g}" for n in sizes)
    return sentence("leaks.chance", n=tuple(count(n) for n in sizes), share=shares).plain(lang)


def breadth(groups: Sequence[Group], level: int = 3) -> str:
    """Both tables as Markdown; a dash where no record has them yet."""
    both = (attack_table(groups), leak_table(groups))
    made = [table.render(rows, "markdown", level=level) for table, rows in both if rows]
    return "\n".join(made).strip() or NOTHING
