"""Beyond the headline: what each attack got from each row, and leaks that are no pictures."""

from collections.abc import Sequence

from splitveil.report.compare import Sheet
from splitveil.report.fields import number, section, text
from splitveil.report.rows import Group, mean_of, spread
from splitveil.report.tables import NOTHING, Column
from splitveil.report.words import Lang, word


def attack_sheet(groups: Sequence[Group], *, least: int = 5) -> Sheet | None:
    """MSE of every attack on every row with at least `least` attacks; a row's lowest is bold.

    None without such a row. Attacks on a subset of the images, or on several sendings, stand in
    the table and are never bold: they are not ranked with the others.
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
        "* scored on a fixed subset; † the same image sent several times, to a decoder with a "
        "shorter fit than `decoder` has: not ranked, and no bound from below.",
        columns=(Column(heading="attack", numeric=False), *(Column(heading=g.name) for g in wide)),
        rows=tuple(rows),
    )


def _attack_mse(group: Group, name: str) -> str:
    return spread(group.values("attacks", name, "mse"), 1.0, 4)


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
        caption=word("leaks.caption", lang),
        columns=(
            Column(heading=word("leaks.row", lang), numeric=False),
            column("re-id-wire", "%"),
            column("re-id-picture", "%"),
            column("member-outputs"),
            column("member-wire"),
            column("attribute", "%"),
            column("gallery", nats),
            column("certified", nats),
            column("doubles", arrow="↑"),
        ),
        rows=tuple(_leak_row(g) for g in told),
    )


def _leak_row(group: Group) -> tuple[str, ...]:
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

    return (
        f"`{group.name}`",
        over_seeds("leaks", "re-id", "wire", "rank_1", scale=100.0, digits=1),
        spread([mean_of([_by_picture(r) for r in s]) for s in group.seeds], 100.0, 1),
        strongest("outputs"),
        strongest("wire"),
        spread([mean_of([_beyond(r) for r in s]) for s in group.seeds], 100.0, 1),
        over_seeds("certificates", "gallery", "nats_given_class", digits=1),
        over_seeds("certificates", "population", "nats_given_class", digits=1),
        over_seeds("certificates", "gallery", "doubles", "repeats", digits=0),
    )


def _by_picture(record: dict[str, object]) -> float | None:
    """The largest rank-1 share of an attack's reconstructions."""
    found = section(record, "leaks", "re-id")
    shares = [number(found, name, "rank_1") for name in found if "/" in name]
    return max((s for s in shares if s is not None), default=None)


def _beyond(record: dict[str, object]) -> float | None:
    found = section(record, "leaks", "attribute")
    shares = [number(found, name, "beyond_answer") for name in found]
    return max((s for s in shares if s is not None), default=None)


def breadth(groups: Sequence[Group], level: int = 3) -> str:
    """Both tables as Markdown; a dash where no record has them yet."""
    made = [sheet.markdown(level) for sheet in (attack_sheet(groups), leak_sheet(groups)) if sheet]
    return "\n".join(made).strip() or NOTHING
