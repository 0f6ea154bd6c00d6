"""Rebuild what is read from record files: the tables of the results and the figure.

python -m paper.tables                  the tables in README.md and docs/project/results/*.md
python -m paper.tables figure           the figures in docs/images that are drawn from records

Only tables and commands are written, between the marks of a block; sentences are written by hand.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from paper.commands import audit_command, train_command
from paper.headline_rows import REPORT, TABLES
from paper.tradeoff import marks, tradeoff
from splitveil.experiments.reproduction import group_table
from splitveil.record.groups import Group, Records, aux_of, find_records, mean_of
from splitveil.record.schema import Record
from splitveil.record.statistics import share_difference
from splitveil.report.columns import (
    EVERYTHING,
    LEAKS,
    Compared,
    Published,
    leaking,
    read_published,
    sent_before,
)
from splitveil.report.comparison import Track, compare_records, track_table
from splitveil.report.figures import draw_frontier
from splitveil.report.gains import best_alone, clients_alone, frontier, kind_of, rows_beside
from splitveil.table import CODE, COUNT, DIGITS, Column, Table, fixed, gap, mean_sd, spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TIMES = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "project" / "results").glob("*.md")))
BLOCK = re.compile(r"(<!-- built: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# The README's rows: the CEM paper's client, then ours with and without each penalty.
SUMMARY = {
    "none": "no defence",
    "cem": "CEM's penalty",
    "veil-vgg11": "our penalty",
    "veil": "our penalty, 160 epochs",
    "alone-thin-deep": "no server, 160 epochs",
}
# Tracks of small clients: the folders of their rows, and of those that `standard` audited, too.
SMALL = {"B1": "cifar10-b1", "B5": "cifar10-b5"}
STANDARD = {track: f"{folder}-standard" for track, folder in SMALL.items()}
WORTH = ("accuracy", "sent", "leakage-sent", "exposure", "identified", "server-gain")
BRIEFLY = ("noise", "early-exit")  # of each track in the README
BRIEF_FLAGSHIP = "cifar10-short"  # the flagship's client trained for twelve epochs
OTHER_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
STATISTICS = ("noise", "gated-att", "slot-cross", "cem", "veil-vgg11")
CLIENTS = ("noise", "noise-thin-deep", "cem", "cem-thin-deep", "veil-vgg11", "veil-fast")
FEW = ("row", "net", "seeds", "accuracy", "mse", "by", "leakage", "rate")
BASES = ("row", "defence", "noise", "seeds", "accuracy", "reported-accuracy", "mse", "reported-mse",
         "by", "ssim", "worst", "leakage", "rate", "seconds")  # fmt: skip
DIAGNOSTICS = {
    "surrogate_to_true": "surrogate to true rate",
    "true_rate": "true rate (nats per number)",
    "effective_sample_size": "effective sample size",
    "soft_gate": "soft gate",
    "hard_gate": "hard gate",
}
# Commits of audits whose attacks read z̃ as it is; later ones divide it by its own spread.
BEFORE_UNITS = ("13f3d08", "aea73c8", "c444be2")
LEAST_ATTACKS = 5  # of a row in the table of attacks


@cache
def found(folder: str) -> Records:
    """The records of a folder below results/."""
    return find_records([RESULTS / folder])


def folders() -> list[str]:
    """The folders of results/ with records."""
    return sorted({p.relative_to(RESULTS).parts[0] for p in RESULTS.rglob("record.json")})


@cache
def published() -> Mapping[str, Published]:
    """What others report on CIFAR-10."""
    return {**read_published(RESULTS / "published.json"), **REPORT.reported}


def rows_of(folder: str, names: Sequence[str] = ()) -> list[Group]:
    """The rows of a folder against the attacker who knows the training set, least private first.

    With `names` these rows, in this order.
    """
    groups = [group for group in found(folder).groups if aux_of(group) == "train"]
    groups.sort(key=lambda group: (group.mean("strongest.mse") or 0.0, group.name))
    known = {group.name: group for group in groups}
    return [known[name] for name in names] if names else groups


def written(table: Table, rows: Sequence[Any], title: str = "") -> str:
    """A table in Markdown, under its own title or another one."""
    titled = table.titled(title or table.title, table.caption, table.notes)
    return titled.render(rows, "markdown").strip()


def measured(title: str, groups: Sequence[Group], keys: Sequence[str]) -> str:
    """Some columns of some rows."""
    track = Track(title=title, groups=tuple(groups))
    table, rows = track_table(track, published(), EVERYTHING.only(*keys))
    return written(table, rows)


def summary() -> str:
    """The README's table."""
    name, net, *others = EVERYTHING.only("row", "net", "accuracy", "leakage").columns
    what = Column("what", "defence", lambda row: SUMMARY[row.group.name])
    seeds = Column("seeds", "seeds", lambda row: len(row.group.seeds), DIGITS)
    rows = [Compared(group) for group in rows_of("cifar10", tuple(SUMMARY))]
    return written(Table(name, replace(net, heading="client"), what, seeds, *others), rows)


def compared(folder: str) -> str:
    """Every track of a folder with the differences between its rows."""
    made = compare_records(found(folder), published())
    return "\n\n".join(written(*pair) for comparison in made for pair in comparison.tables())


def worth() -> str:
    """The README's second table: rows of the small clients and what their servers add."""
    rows = []
    for track, folder in SMALL.items():
        known = {row.group.name: row for row in comparable(folder)}
        best = best_alone(clients_alone([row.group for row in known.values()]))
        assert best is not None  # noqa: S101 - every track has one
        known.setdefault(best.name, Compared(best))
        rows += [(track, known[name]) for name in (best.name, *BRIEFLY)]
    kept = EVERYTHING.only("row", "accuracy", "exposure", "server-gain").columns
    own = (replace(column, get=partial(_of_pair, column.value)) for column in kept)
    return written(Table(Column("track", "track", lambda pair: pair[0]), *own), rows)


def _of_pair(read: Callable[[Any], Any], pair: tuple[str, Compared]) -> Any:  # noqa: ANN401
    return read(pair[1])


def comparable(folder: str) -> Sequence[Compared]:
    """The rows of a folder beside each other, least private first."""
    groups = tuple(rows_of(folder))
    return track_table(Track(title="", groups=groups), published(), EVERYTHING)[1]


def frontiers() -> str:
    """Rows of the small clients, track by track, and what their exit rules do at other shares."""
    parts = []
    for track, folder in SMALL.items():
        groups = rows_of(folder)
        parts += [
            measured(f"Track {track}", groups, ("row", "seeds", *WORTH, "remark")),
            written(shares_table(clients_alone(groups)), at_shares(groups),
                    f"Track {track} at other shares"),
        ]  # fmt: skip
    keys = ("row", "seeds", "accuracy", "sent", "mse", "by", "leakage-sent", "exposure")
    parts += [
        measured(f"Track {track}, the audit `standard`", rows_of(folder), keys)
        for track, folder in STANDARD.items()
    ]
    brief = rows_of(BRIEF_FLAGSHIP)
    parts.append(measured("The flagship's client, twelve epochs", brief, ("row", "seeds", *WORTH)))
    return "\n\n".join(parts)


@dataclass(frozen=True)
class AtShare:
    """A row with an exit rule whose threshold sends another share of the images."""

    group: Group
    sent: float

    def values(self, field: str) -> list[float]:
        """What its training seeds have there."""
        shares = [
            share for r in self.group.records for share in r.shares if share.sent == self.sent
        ]
        return [value for share in shares if (value := getattr(share, field)) is not None]

    def gain(self, alone: Group) -> tuple[float, tuple[float, float]]:
        """Accuracy less that of a client alone; its limits take the images of both as unpaired."""
        theirs = [value for value in alone.values("accuracy") if value is not None]
        images = min(r.audit.scored or 0 for r in self.group.records)
        made = share_difference(self.values("accuracy"), theirs, images)
        return made.mean, (made.low, made.high)


def at_shares(groups: Sequence[Group]) -> list[AtShare]:
    """The rows with an exit rule at other shares."""
    asking = [group for group in groups if kind_of(group) == "exit"]
    return [AtShare(group, share) for group in asking for share in OTHER_SHARES]


def shares_table(alone: Sequence[Group]) -> Table:
    """Accuracy and exposure at each share, and the gain over the best of the clients alone."""
    best = best_alone(alone)
    assert best is not None  # noqa: S101 - every track has one
    return Table(
        Column("row", "row", lambda row: row.group.name, CODE),
        Column("sent", "sent", lambda row: row.sent, fixed(0, 100.0), "%"),
        Column("accuracy", "accuracy", lambda row: row.values("accuracy"), mean_sd(2, 100.0), "%",
               "up"),
        Column("exposure", "exposure", lambda row: row.values("exposure"), mean_sd(1, 100.0), "%",
               "down"),
        Column("gain", f"over {best.name}", lambda row: row.gain(best), gap(1, 100.0), "points",
               "up"),
    )  # fmt: skip


def table1() -> str:
    """Table 1 of the CEM paper, rebuilt: each defence alone, with CEM's penalty, with ours."""
    rows = rows_of("cifar10-table1", [row.name for row in TABLES["table1"].rows])
    return measured("VGG11, cut 4, 8 channels", rows, BASES)


def documents() -> str:
    """The experiment of the reference documents, and its rows under every attack."""
    own = [g for g in found(TABLES["documents"].folder).groups if aux_of(g) == REPORT.aux]
    beside = [g for g in found("cifar10").groups if aux_of(g) == REPORT.aux]
    made = group_table(REPORT, [*own, *beside])
    every = rows_of(TABLES["documents"].folder)
    return f"{written(*made)}\n\n{measured('Under every attack', every, FEW)}"


def attack_table(groups: Sequence[Group]) -> Table:
    """The MSE of every attack on every row; a row's strongest is bold.

    An attack on a subset of the images (*) or with several sendings (†) is not ranked. One on a
    subset has in brackets its error over that of the best black-box attack on the same images.
    """
    names = list(dict.fromkeys(n for g in groups for r in g.records for n in r.attacks))

    def heading(name: str) -> str:
        tried = [r.attacks[name] for g in groups for r in g.records if name in r.attacks]
        subset, repeated = any(a.subset for a in tried), any(a.repeats for a in tried)
        return f"`{name}`{'*' * subset}{'†' * repeated}"

    return Table(
        Column("row", "row", lambda group: group.name, CODE),
        *(Column(name, heading(name), partial(_attack_mse, name=name), DIGITS) for name in names),
    )


def _attack_mse(group: Group, name: str) -> str:
    shown, ratio = spread(group.values(f"attacks.{name}.mse"), 1.0, 4), _ratio(group, name)
    best = ", ".join(group.distinct("strongest.mse_by")).split(", ")
    shown = f"**{shown}**" if name in best else shown
    return shown if ratio is None else f"{shown} ({_times(ratio)})"


def _ratio(group: Group, name: str) -> float | None:
    """An attack's MSE over its rival's on the same images; None unless every seed has both."""

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


def attacks() -> str:
    """What each attack got, folder by folder."""
    parts = []
    for folder in folders():
        wide = [g for g in rows_of(folder) if len(g.records[0].attacks) >= LEAST_ATTACKS]
        if wide:
            parts.append(written(attack_table(wide), wide, folder))
    return "\n\n".join(parts)


def leaks() -> str:
    """Leaks that are no pictures, and certificates, folder by folder."""
    first, wire, *others = LEAKS.columns
    sent = Column("sendings", "sent before", _sendings, DIGITS)
    table = Table(first, wire, sent, *others)
    rows = {folder: leaking(rows_of(folder)) for folder in folders()}
    return "\n\n".join(written(table, groups, name) for name, groups in rows.items() if groups)


def _sendings(group: Group) -> str:
    """How often each known image was sent before, and in how many seeds of a row as often."""
    most = [max(map(sent_before, seed)) for seed in group.seeds]
    share = f" ({most.count(max(most))} of {len(most)} seeds)"
    return f"{max(most)}{share * (len(set(most)) > 1)}"


def digits() -> str:
    """Rows on digits, then one of them with another number of threads."""
    threads = measured("Two threads", rows_of("digits-threads"), FEW)
    return f"{compared('digits')}\n\n{threads}"


def laws() -> str:
    """The rows that each law of the maths page is seen in, and what their surrogates say."""
    return "\n\n".join(
        (
            measured("1. What is measured", rows_of("cifar10", STATISTICS), FEW),
            measured("2. What weighs the samples", rows_of("digits-laws"), FEW),
            estimators("digits-laws"),
            measured("3. Which client", rows_of("cifar10", CLIENTS), FEW),
            estimators("cifar10"),
        )
    )


def estimators(folder: str) -> str:
    """What each surrogate says of itself in the last epoch, mean over the training seeds."""
    rows = []
    for group in found(folder).groups:
        logs = [log for log in last_epochs(folder, group.name).values() if "rob_loss" in log]
        means = {key: mean_of([log.get(key) for log in logs]) for key in DIAGNOSTICS}
        if logs:
            rows.append({"row": group.name, "seeds": str(len(logs))} | means)
    columns = (Column(key, heading, fmt=fixed(3)) for key, heading in DIAGNOSTICS.items())
    table = Table(Column("row", "row", fmt=CODE), Column("seeds", "seeds", fmt=DIGITS), *columns)
    return written(table, rows, f"Surrogates of {folder} in the last epoch")


def last_epochs(folder: str, row: str) -> dict[str, Any]:
    """The last line of the log of each training seed's run."""
    paths = sorted((RESULTS / folder / row).glob("seed*/last_epoch.json"))
    return {p.parent.name: json.loads(p.read_text(encoding="utf-8")) for p in paths}


def times() -> str:
    """How long a recipe took alone, and an epoch with each preset."""
    recipes = Table(
        Column("command", "command", fmt=CODE), Column("device", "device"),
        Column("epochs", "epochs", fmt=DIGITS), *_speed("seconds"),
    )  # fmt: skip
    presets = Table(
        Column("preset", "preset", fmt=CODE),
        Column("ratio", "over `none`", lambda row: row["ratio"], fixed(2)),
        *_speed("seconds per epoch"),
    )
    parts = [written(recipes, _timed("recipe"), "Whole recipes")]
    told: dict[str, list[dict[str, Any]]] = {}
    for row in _timed("epoch"):
        told.setdefault(f"{row['net']}, batches of {row['batch']}, {row['device']}", []).append(row)
    parts += [written(presets, rows, title) for title, rows in told.items()]
    return "\n\n".join(parts)


def _timed(kind: str) -> list[dict[str, Any]]:
    """The rows of a kind of benchmark, each with what its file says of all."""
    paths = sorted(TIMES.glob(f"*/{kind}--*.json"))
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [
        {**told, **row, "seconds": row["best_ms"] / 1000, "commit": told["versions"]["commit"]}
        for told in files
        for row in told["rows"]
    ]


def _speed(seconds: str) -> tuple[Column, ...]:
    return (
        Column("seconds", seconds, fmt=fixed(2)),
        Column("images_per_second", "images/s", fmt=COUNT),
        Column("commit", "commit"),
    )


def flags() -> str:
    """What an audit or a training says against a row, folder by folder."""
    table = Table(
        Column("row", "row", fmt=CODE),
        Column("flags", "flags (the attacks they were raised for)"),
        Column("shut", "penalty shut off in the last epoch"),
        Column("units", "audited before attacks scaled z̃"),
    )
    parts = []
    for folder in folders():
        rows = []
        for group in found(folder).groups:
            logs = last_epochs(folder, group.name)
            old = {f"seed{r.seeds.train}" for r in group.records
                   if str(r.versions.get("commit")) in BEFORE_UNITS}  # fmt: skip
            shut = ", ".join(seed for seed, log in logs.items() if log.get("shut"))
            told = {"flags": flagged(group), "shut": shut, "units": ", ".join(sorted(old))}
            rows.append({"row": group.name} | told)
        parts.append(written(table, rows, folder))
    return "\n\n".join(parts)


def flagged(group: Group) -> str:
    """The flags of a row's audits, each with the attacks it was raised for."""
    names: dict[str, set[str]] = {}
    for record in group.records:
        for flag in record.flags or ():
            words = re.findall(r"[a-z][a-z-]*", flag.seen or "")
            # The first attack that is named is the one; "mean" is also an ordinary word.
            named = [f"`{w}`" for w in words if w in record.attacks and w != "mean"]
            names.setdefault(flag.name, set()).update(named[:1])
    return "; ".join(
        name + (f" ({', '.join(sorted(tried))})" if tried else "")
        for name, tried in sorted(names.items())
    )


def commands() -> str:
    """The commands that make each row again: training and audit of its first seed."""
    parts = []
    for folder in folders():
        lines = []
        for group in found(folder).groups:
            first = min(group.records, key=lambda r: (r.seeds.train or 0, r.seeds.attack or 0))
            name = f"{folder}-{group.name}-s{first.config['seed']}"
            commits = ", ".join(sorted({str(r.versions.get("commit")) for r in group.records}))
            seeds = ", ".join(group.distinct("seeds.train"))
            repeats = ", ".join(group.distinct("seeds.attack"))
            lines += [
                f"# {group.name}: training seeds {seeds}; attack seeds {repeats}; commit {commits}",
                train_command(first, name),
                audit_command(first, name),
            ]
        parts.append(f"## {folder}\n\n```sh\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "summary": summary,
    "worth": worth,
    "frontier": frontiers,
    "cifar10": lambda: compared("cifar10"),
    "table1": table1,
    "documents": documents,
    "attacks": attacks,
    "leaks": leaks,
    "digits": digits,
    "laws": laws,
    "times": times,
    "flags": flags,
    "commands": commands,
}


def with_blocks(text: str) -> str:
    """A page with every marked block rebuilt."""
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


def figures() -> dict[str, bytes]:
    """PNG of each figure by its file's name: the trade-off, and the frontiers of small clients."""
    groups = rows_of("cifar10")
    ceilings = [value for g in groups if (value := g.mean("ceiling.mse")) is not None]
    drawn = {"cifar10": tradeoff(marks(groups, published()), max(ceilings))}
    for folder in SMALL.values():
        found_here = frontier(rows_beside(rows_of(folder)))
        assert found_here is not None  # noqa: S101 - both have rows that answer alone
        drawn[f"frontier-{folder.rpartition('-')[2]}"] = draw_frontier(found_here).png
    return drawn


def main() -> None:
    """Write what was asked for."""
    match sys.argv[1:]:
        case []:
            for page in PAGES:
                page.write_text(with_blocks(page.read_text(encoding="utf-8")), encoding="utf-8")
        case ["figure"]:
            for name, png in figures().items():
                (IMAGES / f"{name}.png").write_bytes(png)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
