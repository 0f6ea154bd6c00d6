"""Rebuild what is read from record files: the README's tables, docs/project/results.md, figure.

python -m paper.readme                  all of it, from results/<dataset>/<row>/seed<N>/
python -m paper.readme picture RUN...   docs/images/digits.png, from audited runs
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from paper.bases import TABLE1, base_section
from paper.breadth import breadth
from paper.readme_commands import audit_command, train_command
from paper.readme_laws import CLIENTS, STATISTICS, few, seen_in
from paper.readme_parts import (
    before_units,
    client_alone,
    epoch_times,
    estimators,
    flagged,
    in_a_sentence,
)
from paper.reference import section
from paper.tradeoff import marks, tradeoff
from splitveil.experiments.reproduction import EXPERIMENTS
from splitveil.record.files import read_run
from splitveil.record.groups import Group, Records, find_records
from splitveil.report.columns import Published
from splitveil.report.comparison import (
    Track,
    compare_records,
    read_published,
    row_differences,
    track_table,
    tracks,
    warnings,
)
from splitveil.report.gallery import reconstruction_grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FIGURE = ROOT / "docs" / "images" / "cifar10.png"
PAGES = (ROOT / "README.md", ROOT / "docs" / "project" / "results.md")
BLOCK = re.compile(r"(<!-- built: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHORT = ("row", "net", "seeds", "accuracy", "reported-accuracy", "mse", "reported-mse", "by",
         "ssim", "worst", "leakage", "rate")  # fmt: skip


@cache
def found(dataset: str) -> Records:
    """The records of a dataset."""
    return find_records([RESULTS / dataset])


@cache
def published() -> Mapping[str, Published]:
    """What others report on CIFAR-10."""
    return {
        **read_published(RESULTS / "published.json"),
        **EXPERIMENTS["gated-att-report"].reported,
    }


def main_tracks(dataset: str) -> list[Track]:
    """The tracks against the attacker who knows the training set."""
    return [track for track in tracks(found(dataset).groups) if track.aux == "train"]


def short(dataset: str) -> str:
    """A table per track, but those within another, with the columns that matter most."""
    parts = []
    made = main_tracks(dataset)
    for track in made:
        if any(_within(track, other) for other in made):
            continue
        table, rows = track_table(track, published())
        several = len({group.distinct("config.net")[0] for group in track.groups}) > 1
        wanted = [key for key in SHORT if several or key != "net"]
        inner = "".join(_told(t) for t in made if _within(t, track))
        shown = few(table, rows, wanted)
        parts += [f"**{table.title}.** {inner}{table.caption}", shown, *table.notes]
    return "\n\n".join(parts)


def _within(track: Track, other: Track) -> bool:
    """Whether every row of a track stands in the larger other one too."""
    mine, theirs = ({group.name for group in t.groups} for t in (track, other))
    return mine < theirs


def _told(track: Track) -> str:
    """A track by its nets, for a table that holds its rows among others."""
    nets = sorted({net for group in track.groups for net in group.distinct("config.net")})
    return f"The rows of {' and '.join(f'`{net}`' for net in nets)} are also *{track.title}*. "


def verdicts(dataset: str) -> str:
    """What the intervals allow to say of our rows, wins and losses."""
    said: dict[str, dict[str, list[str]]] = {}
    done: list[str] = []
    for track in main_tracks(dataset):
        for pair in row_differences(track, done):
            rows = said.setdefault(pair.ours, {}).setdefault(pair.verdict, [])
            rows.append(f"`{pair.other}`")
        done += [name for name in said if name not in done]
    lines = []
    for ours, kinds in said.items():
        ordered = sorted(kinds.items(), key=lambda kind: "no verdict" in kind[0])  # those last
        listed = "; ".join(f"{verdict}: {', '.join(rows)}" for verdict, rows in ordered)
        lines.append(f"- `{ours}` against the others – {listed}.")
    return "\n".join(lines) or "No row to compare."


def full(dataset: str) -> str:
    """Every table of a dataset, with the differences."""
    made = compare_records(found(dataset), published())
    tables = [pair for comparison in made for pair in comparison.tables()]
    return "\n".join(t.render(rows, "markdown", level=3) for t, rows in tables).strip()


def remarks() -> str:
    """What a reader must know of single rows: flags, unequal audits, penalties that were off."""
    lines = []
    for dataset in datasets():
        lines += [f"- {line}." for line in warnings(found(dataset))]
        if older := [words for group in found(dataset).groups if (words := before_units(group))]:
            lines.append(
                f"- {dataset}: audited before the attacks read z̃ in units of its own spread, which "
                f"scale and offset cannot hide: {', '.join(older)}."
            )
        for group in found(dataset).groups:
            if flags := flagged(group):
                lines.append(f"- {dataset}, `{group.name}`: flagged {', '.join(flags)}.")
        for path in sorted((RESULTS / dataset).glob("*/seed*/last_epoch.json")):
            line = json.loads(path.read_text(encoding="utf-8"))
            if line.get("shut"):
                lines.append(
                    f"- {dataset}, `{path.parent.parent.name}`, {path.parent.name}: in the last "
                    f"epoch its own rule shut the penalty off (hard gate mean "
                    f"{line['hard_gate']:.2f})."
                )
    return "\n".join(lines) or "None."


def datasets() -> list[str]:
    """Datasets with records."""
    return sorted({p.relative_to(RESULTS).parts[0] for p in RESULTS.rglob("record.json")})


def rebuild() -> str:
    """The commands of each row: training and audit of its first seed."""
    parts = []
    for dataset in datasets():
        lines = []
        for group in found(dataset).groups:
            first = min(group.records, key=lambda r: (r.seeds.train or 0, r.seeds.attack or 0))
            name = f"{dataset}-{group.name}-s{first.config['seed']}"
            lines += [
                f"# {group.name}: {_made(group)}",
                train_command(first, name),
                audit_command(first, name),
            ]
        parts.append(f"**{dataset}**\n\n```sh\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts)


def _made(group: Group) -> str:
    """Seeds and commit of a row."""
    seeds = ", ".join(group.distinct("seeds.train"))
    attacks = ", ".join(group.distinct("seeds.attack"))
    commits = sorted({str(r.versions.get("commit")) for r in group.records} - {"None"})
    words = f"training seeds {seeds}; attack seeds {attacks}"
    return words + (f"; commit {', '.join(commits)}" if commits else "")


def beyond(dataset: str) -> str:
    """What each attack got, and leaks that are no pictures."""
    return breadth([g for t in main_tracks(dataset)[-1:] for g in t.groups])


def table1() -> str:
    """Table 1 of the CEM paper, rebuilt."""
    folder = "cifar10-table1"
    if folder not in datasets():
        return absent("table1")
    return base_section(
        "VGG11, cut 4, 8 channels: each defence alone and with a penalty",
        TABLE1, found(folder).groups, published(),
    )  # fmt: skip


def seed_003() -> str:
    """The seeds' own experiment."""
    folder = "cifar10-seed-003"
    if folder not in datasets():
        return absent("seed-003")
    experiment = EXPERIMENTS["gated-att-report"]
    own = [g for g in found(folder).groups if g.distinct("audit.aux") == [experiment.aux]]
    ours = found("cifar10").groups if "cifar10" in datasets() else ()
    beside = [g for g in ours if g.name == f"veil-{experiment.aux}"]
    parts = [section(experiment, [*own, *beside])]
    if every := [group for group in found(folder).groups if group not in own]:
        table, rows = track_table(Track(title="Under every attack", groups=tuple(every)), {})
        shown = few(table, rows, SHORT)
        parts += [f"### {table.title}", table.caption, shown, breadth(every, 4)]
    return "\n\n".join(parts)


def law_2() -> str:
    """One penalty, and what weighs the samples varied; with what the estimators say."""
    groups = found("digits-laws").groups
    return f"{seen_in(groups)}\n\n{estimators(groups, RESULTS / 'digits-laws')}"


def absent(table: str) -> str:
    """What stands where a table has no records."""
    return f"No records yet: paper/headline.py --table {table} makes them."


BLOCKS: Mapping[str, Callable[[], str]] = {
    "digits": lambda: short("digits"),
    "cifar10": lambda: short("cifar10"),
    "sentence": lambda: in_a_sentence(found("cifar10").groups, published()),
    "client-alone": lambda: client_alone(found("cifar10").groups),
    "verdicts": lambda: verdicts("cifar10"),
    "digits-full": lambda: full("digits"),
    "cifar10-full": lambda: full("cifar10"),
    "cifar10-breadth": lambda: beyond("cifar10"),
    "cifar10-estimators": lambda: estimators(found("cifar10").groups, RESULTS / "cifar10"),
    "digits-breadth": lambda: beyond("digits"),
    "digits-threads": lambda: seen_in(found("digits-threads").groups),
    "law-1": lambda: seen_in(found("cifar10").groups, STATISTICS),
    "law-2": law_2,
    "law-3": lambda: seen_in(found("cifar10").groups, CLIENTS),
    "table1": table1,
    "seed-003": seed_003,
    "epoch-times": lambda: epoch_times(ROOT / "benchmarks" / "results"),
    "remarks": remarks,
    "rebuild": rebuild,
}


def with_blocks(text: str) -> str:
    """A page with every marked block rebuilt."""
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


def figure() -> bytes:
    """PNG of the trade-off on CIFAR-10."""
    groups = [g for g in found("cifar10").groups if g.distinct("audit.aux") == ["train"]]
    ceilings = [value for g in groups if (value := g.mean("ceiling.mse")) is not None]
    return tradeoff(marks(groups, published()), max(ceilings))


def picture(paths: Sequence[str]) -> bytes:
    """PNG of the originals and of each run's strongest attack."""
    runs = []
    for path in paths:
        run = read_run(Path(path))
        best = run.record.strongest.mse_by
        if run.gallery is None or best is None:
            sys.exit(f"{path} has no gallery.json; audit it again")
        shown = {best: run.gallery.reconstructions[best]}
        runs.append(replace(run, gallery=replace(run.gallery, reconstructions=shown)))
    return reconstruction_grid(runs)


def main() -> None:
    """Write what was asked for."""
    if sys.argv[1:2] == ["picture"]:
        (ROOT / "docs" / "images" / "digits.png").write_bytes(picture(sys.argv[2:]))
        return
    for page in PAGES:
        page.write_text(with_blocks(page.read_text(encoding="utf-8")), encoding="utf-8")
    FIGURE.write_bytes(figure())


if __name__ == "__main__":
    main()
