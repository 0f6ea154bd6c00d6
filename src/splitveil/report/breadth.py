"""Beyond the headline: what each attack got from each row, and leaks that are no pictures."""

from collections.abc import Sequence

from splitveil.report.checks import vacuous
from splitveil.report.compare import Sheet
from splitveil.report.fields import number, section, text
from splitveil.report.rows import Group, mean_of, spread
from splitveil.report.tables import NOTHING, Column, count
from splitveil.report.words import Lang, said, word

Json = dict[str, object]
WIRE = ("leaks", "re-id", "wire")


def attack_sheet(groups: Sequence[Group], *, least: int = 5) -> Sheet | None:
    """MSE of every attack on every row with at least `least` attacks; a row's lowest is bold.

    None without such a row. Attacks on a subset of the images, or on several sendings, stand in
    the table and are never bold: they are not ranked with the others. Those on a subset have beside
    them how they compare with the best black-box attack on the same images.
    """
    wide = [g for g in groups if all(len(r.get("attacks") or {}) >= least for r in g.records)]
    if not wide:
        return None
    names = list(dict.fromkeys(n for g in wide for r in g.records for n in r["attacks"]))
    cells = {g.name: {n: _attack_mse(g, n) for n in names} for g in wide}
    best = {g.name: ", ".join(g.distinct("strongest", "mse_by")).split(", ") for g in wide}
    rows = []
    for name in names:
        line = []
        for group in wide:
            shown = cells[group.name][name]
            line.append(f"**{shown}**" if name in best[group.name] else shown)
        rows.append((_mark(name, wide), *line))
    return Sheet(
        title="Which attack wins where",
        caption="Mean MSE of each attack, lower is stronger; the strongest of a row is bold. "
        "`mean` and `class-mean` are floors that see nothing of z̃ but, at most, the answer. "
        "* scored on a fixed subset, so not to be read against the others: in brackets its MSE "
        "over that of the best black-box attack (as a rule a decoder) on the same images; above 1 "
        "it is weaker. † the same image sent several times, to a decoder with a shorter fit than "
        "`decoder` has. Neither is ranked, and † is no bound from below.",
        columns=(Column(heading="attack", numeric=False), *(Column(heading=g.name) for g in wide)),
        rows=tuple(rows),
        notes=tuple(note for name in names if (note := _against_rival(name, wide))),
    )


def _attack_mse(group: Group, name: str) -> str:
    shown, ratio = spread(group.values("attacks", name, "mse"), 1.0, 4), _ratio(group, name)
    return shown if ratio is None else f"{shown} ({_times(ratio)})"


def _ratio(group: Group, name: str) -> float | None:
    """An attack's MSE over its rival's on the same images; None unless every record has both."""

    def one(record: Json) -> float | None:
        mse, rival = (number(record, "attacks", name, *k) for k in (("mse",), ("beside", "mse")))
        return mse / rival if mse is not None and rival else None

    ratios = [[one(r) for r in seed if section(r, "attacks", name)] for seed in group.seeds]
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
    found = {text(r, "attacks", name, "beside", "attack") for g in groups for r in g.records}
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
    records = [r["attacks"][name] for g in groups for r in g.records if name in r["attacks"]]
    subset = "*" if any("subset" in r for r in records) else ""
    return f"`{name}`" + subset + ("†" if any("repeats" in r for r in records) else "")


def leak_sheet(groups: Sequence[Group], lang: Lang = "en") -> Sheet | None:
    """Leaks beyond pixels and certificates of the rows that have them; None without one."""
    told = [g for g in groups if any(section(r, "leaks") for r in g.records)]
    if not told:
        return None

    def column(key: str, unit: str = "", arrow: str = "↓") -> Column:
        return Column(heading=word(f"leaks.{key}", lang), unit=unit, arrow=arrow)

    nats = word("unit.nats", lang)
    return Sheet(
        title=word("heading.leaks", lang),
        caption=" ".join(filter(None, (word("leaks.caption", lang), _chance(told, lang)))),
        columns=(
            Column(heading=word("leaks.row", lang), numeric=False),
            column("re-id-wire", "%"),
            column("re-id-encoder", "%"),
            column("re-id-picture", "%"),
            column("member-outputs"),
            column("member-wire"),
            column("attribute", "%"),
            column("gallery", nats),
            column("certified", nats),
            column("doubles", arrow="↑"),
        ),
        rows=tuple(_leak_row(g, lang) for g in told),
        notes=tuple(filter(None, (_fewer_sendings(told, lang),))),
    )


def _sendings(record: Json) -> int:
    """How often re-identification had sent each known image; 0 where a record does not say."""
    return int(number(record, *WIRE, "sendings") or 0)


def _by_wire(group: Group) -> list[float | None]:
    """Share found by z̃ for each training seed, of the records with the most sendings.

    With fewer the gallery is noisier and the attacker weaker: a mean over both is of neither.
    """
    most = max(map(_sendings, group.records))
    return [
        mean_of([number(r, *WIRE, "rank_1") for r in seed if _sendings(r) == most])
        for seed in group.seeds
    ]


def _fewer_sendings(groups: Sequence[Group], lang: Lang) -> str:
    """Whose attacker had fewer sendings of the known images than others'; may be empty."""
    known = [g for g in groups if any(number(r, *WIRE, "rank_1") is not None for r in g.records)]
    counts = {g.name: sorted({n for n in map(_sendings, g.records) if n}) for g in known}
    every = sorted({n for ns in counts.values() for n in ns})
    if len(every) <= 1:
        return ""
    parts = [
        said("leaks.sendings", n=str(n), rows=tuple(f"`{name}`" for name in names)).plain(lang)
        for n in reversed(every)
        if (names := [name for name, ns in counts.items() if ns and ns[-1] == n])
    ]
    for group in known:
        few, values = counts[group.name][:-1], _by_wire(group)
        if few:
            parts.append(
                said(
                    "leaks.sendings-left-out",
                    row=f"`{group.name}`",
                    some=str(len(values) - values.count(None)),
                    all=str(len(values)),
                    n=tuple(map(str, few)),
                ).plain(lang)
            )
    return said("leaks.sendings-note", told="; ".join(parts)).plain(lang)


def _chance(groups: Sequence[Group], lang: Lang) -> str:
    """How many images each re-identification picks from, and what a blind guess finds."""
    sources = (("leaks", "re-id", "wire", "gallery"), ("certificates", "gallery", "images"))
    found = {number(r, *keys) for g in groups for r in g.records for keys in sources}
    sizes = sorted(n for n in found if n)
    if not sizes:
        return ""
    shares = tuple(f"{100 / n:.2g}" for n in sizes)
    return said("leaks.chance", n=tuple(count(n) for n in sizes), share=shares).plain(lang)


def _leak_row(group: Group, lang: Lang) -> tuple[str, ...]:
    def over_seeds(*keys: str, scale: float = 1.0, digits: int = 3) -> str:
        return spread(group.values(*keys), scale, digits)

    def strongest(source: str) -> str:
        found = []
        for seed in group.seeds:
            best = [text(r, "leaks", "membership", "strongest", source) for r in seed]
            aucs = [
                number(r, "leaks", "membership", source, name, "auc") if name else None
                for r, name in zip(seed, best, strict=True)
            ]
            found.append(mean_of(aucs))
        return spread(found, 1.0, 3)

    errors = group.values("certificates", "gallery", "matcher_error")
    return (
        f"`{group.name}`",
        spread(_by_wire(group), 100.0, 1),
        spread([None if e is None else 1 - e for e in errors], 100.0, 1),
        spread([mean_of([_by_picture(r) for r in s]) for s in group.seeds], 100.0, 1),
        strongest("outputs"),
        strongest("wire"),
        spread([mean_of([_beyond(r) for r in s]) for s in group.seeds], 100.0, 1),
        _given_class(group, "gallery", lang),
        _given_class(group, "population", lang),
        over_seeds("certificates", "gallery", "doubles", "repeats", digits=0),
    )


def _given_class(group: Group, kind: str, lang: Lang) -> str:
    """A certificate given the class, called vacuous where records say so, or the refusal's word."""
    rates = group.values("certificates", kind, "nats_given_class")
    value = spread(rates, 1.0, 1)
    if value == NOTHING:
        refused = group.distinct("certificates", kind, "refused") != [NOTHING]
        return word("certificate.refused", lang) if refused else NOTHING
    empty = [any(vacuous(section(r, "certificates", kind)) for r in seed) for seed in group.seeds]
    known = len(rates) - rates.count(None)
    if sum(empty) in (0, known):
        return said("certificate.vacuous", value=value).plain(lang) if any(empty) else value
    part = {"some": str(sum(empty)), "all": str(known)}
    return said("certificate.vacuous-in-part", value=value, **part).plain(lang)


def _by_picture(record: Json) -> float | None:
    """The largest rank-1 share of an attack's reconstructions."""
    found = section(record, "leaks", "re-id")
    shares = [number(found, name, "rank_1") for name in found if "/" in name]
    return max((s for s in shares if s is not None), default=None)


def _beyond(record: Json) -> float | None:
    found = section(record, "leaks", "attribute")
    shares = [number(found, name, "beyond_answer") for name in found]
    return max((s for s in shares if s is not None), default=None)


def breadth(groups: Sequence[Group], level: int = 3) -> str:
    """Both tables as Markdown; a dash where no record has them yet."""
    made = [sheet.markdown(level) for sheet in (attack_sheet(groups), leak_sheet(groups)) if sheet]
    return "\n".join(made).strip() or NOTHING
