"""Parts of the built pages that are not tables of rows: a sentence, flags, diagnostics, times."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitveil.record.groups import Group, mean_of
from splitveil.report.columns import Published
from splitveil.report.comparison import seed_test
from splitveil.table import NOTHING, spread

DIAGNOSTICS = {
    "surrogate_to_true": "surrogate to true rate",
    "true_rate": "true rate (nats per number)",
    "effective_sample_size": "effective sample size",
    "soft_gate": "soft gate",
    "hard_gate": "hard gate",
}

BEFORE_UNITS = ("13f3d08", "aea73c8", "c444be2")  # commits of records without attacks/units.py


def in_a_sentence(groups: Sequence[Group], published: Mapping[str, Published]) -> str:
    """The flagship on CIFAR-10 beside the undefended client and the most private published row."""
    rows = {group.name: group for group in groups}
    ours, bare, rebuilt = (_point(rows[name]) for name in ("veil", "none", "arl+cem"))
    best = max((row for row in published.values() if row.aux == "train"), key=lambda r: r.mse)
    tried = rows["veil"].records[0].attacks
    blind = ("mean", "class-mean")  # they look at nothing that was sent
    once = [name for name, a in tried.items() if not a.repeats and name not in blind]
    whole = [name for name in once if not tried[name].subset]
    again = rows["veil"].mean("attacks.k-query.mse")
    ceiling = rows["veil"].mean("ceiling.mse")
    seeds = len(rows["veil"].seeds)
    sizes = [(rows[name].mean("client.params") or 0.0) / 1000 for name in ("veil", "none")]
    return (
        f"- **`veil`**: the server answers {ours[0]} of the test images rightly, and the strongest "
        f"of {len(whole)} attacks on one sending ({len(once) - len(whole)} more are scored on some "
        f"of the images) rebuilds them with MSE {ours[1]} "
        f"({again:.4f} by `k-query`, which sees {tried['k-query'].repeats} sendings), mean of "
        f"{seeds} training seeds; the label alone gives {ceiling:.4f}.\n"
        f"- **The undefended client of the CEM paper**, which takes about as many multiply-adds "
        f"({sizes[1]:.0f} k parameters, ours {sizes[0]:.0f} k), answers {bare[0]} and is rebuilt "
        f"with {bare[1]}.\n"
        f"- **The most private published defence of it** ({best.source}) stands at "
        f"{100 * best.accuracy:.1f} % and {best.mse:.4f} as reported, and at {rebuilt[0]} and "
        f"{rebuilt[1]} as rebuilt and attacked here.\n{_in_its_place(rows, published, best)}"
    )


def _in_its_place(
    rows: Mapping[str, Group], published: Mapping[str, Published], best: Published
) -> str:
    """Our penalty where the most private published row has CEM's, as trained here and longer."""
    swap, long, control = (rows[name] for name in ("arl+veil", "arl+veil-long", "arl+cem-long"))
    epochs = long.records[0].config["epochs"]
    accuracy = spread(long.values("accuracy"), 100.0, 2)
    mse = spread(long.values("strongest.mse"), 1.0, 4)
    ahead = [_ahead(group, published) for group in (swap, long)]
    return (
        f"- **Our penalty in the place of CEM's there** (`arl+veil`, {_seeds(swap)}, its weight "
        f"chosen on validation images) stands at {_both(swap)}, {ahead[0]}; trained for {epochs} "
        f"epochs with smoothed labels (`arl+veil-long`, {_seeds(long)}) at {_both(long)}, "
        f"{ahead[1]}. "
        f"That is {accuracy} % against the {100 * best.accuracy:.2f} % reported for "
        f"{best.source}, and {mse} against {best.mse:.4f}{told_apart(long, best)}. CEM's penalty "
        f"trained as long "
        f"(`arl+cem-long`, {_seeds(control)}, the weight of its preset) stands at {_both(control)}."
    )


def told_apart(group: Group, said: Published) -> str:
    """Whether a row's seeds tell it from one reported run, which has no spread of its own."""
    pairs = (group.values("accuracy"), said.accuracy), (group.values("strongest.mse"), said.mse)
    made = [seed_test(values, [one] * len(values), paired=True) for values, one in pairs]
    apart = [difference is not None and difference.excludes_zero for difference in made]
    if all(apart):
        return ""
    which = "the errors are not" if apart[0] else "the accuracies are not"
    return f" ({which if any(apart) else 'neither is'} told apart over the seeds)"


def _both(group: Group) -> str:
    accuracy, mse = _point(group)
    return f"{accuracy} and {mse} ({group.mean('attacks.k-query.mse'):.4f} by `k-query`)"


def _ahead(group: Group, published: Mapping[str, Published]) -> str:
    """Which published rows report more of both than a row has."""
    above = sorted(row.source for row in published.values() if _above(row, group))
    if not above:
        return "and no published row reports more of both"
    return f"in both below what is reported for {' and '.join(above)}"


def _above(said: Published, group: Group) -> bool:
    """Whether a published row has more accuracy and more MSE than a measured one."""
    accuracy, mse = group.mean("accuracy"), group.mean("strongest.mse")
    return said.aux == "train" and said.accuracy > (accuracy or 0) and said.mse > (mse or 0)


def client_alone(groups: Sequence[Group]) -> str:
    """What the flagship's client does without a penalty, with CEM's and with ours."""
    rows = {group.name: group for group in groups}
    bare, theirs, ours, other = (
        rows[name] for name in ("noise-thin-deep", "cem-thin-deep", "veil", "noise")
    )

    def told(group: Group) -> str:
        accuracy, mse = _point(group)
        return f"{accuracy} and {mse}, leakage {100 * (group.mean('leakage') or 0.0):.0f} %"

    return (
        f"Much of it is the client: with noise alone, trained as long (`noise-thin-deep`, "
        f"{_seeds(bare)}), it stands at {told(bare)}; with CEM's penalty (`cem-thin-deep`, "
        f"{_seeds(theirs)}, the weight of its preset) at {told(theirs)}; with ours, "
        f"chosen together with this client, at {told(ours)}. "
        f"VGG11 with noise alone stands at {told(other)}."
    )


def _seeds(group: Group) -> str:
    n = len(group.seeds)
    return f"{n} training seed{'s' * (n > 1)}"


def _point(group: Group) -> tuple[str, str]:
    """Accuracy and the strongest attack's MSE of a row, as text."""
    accuracy, mse = group.mean("accuracy"), group.mean("strongest.mse")
    assert accuracy is not None and mse is not None  # noqa: S101, PT018 - every record has them
    return f"{100 * accuracy:.1f} %", f"{mse:.4f}"


def flagged(group: Group) -> list[str]:
    """The flags of a row's audits, each with the attacks it was raised for."""
    names: dict[str, set[str]] = {}
    for record in group.records:
        for flag in record.flags or ():
            words = re.findall(r"[a-z][a-z-]*", flag.seen or "")
            attacks = [f"`{w}`" for w in words if w in record.attacks and w != "mean"]
            names.setdefault(flag.name, set()).update(attacks[:1])
    return [
        f"“{name}”" + (f" ({', '.join(sorted(attacks))})" if attacks else "")
        for name, attacks in sorted(names.items())
    ]


def before_units(group: Group) -> str:
    """Which seeds of a row were audited before attacks read z̃ in units of its own spread."""
    seeds = {
        str(record.seeds.train)
        for record in group.records
        if str(record.versions.get("commit")) in BEFORE_UNITS
    }
    if not seeds:
        return ""
    whole = len(seeds) == len(group.seeds)
    return (
        f"`{group.name}`" if whole else f"`{group.name}` (training seed {', '.join(sorted(seeds))})"
    )


def estimators(groups: Sequence[Group], folder: Path) -> str:
    """What each surrogate said of itself in the last epoch, mean over the training seeds."""
    lines = [f"| row | seeds | {' | '.join(DIAGNOSTICS.values())} |", "| --- |" + " --: |" * 6]
    for group in groups:
        paths = sorted((folder / group.name).glob("seed*/last_epoch.json"))
        logs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        logs = [log for log in logs if "rob_loss" in log]
        if logs:
            means = (mean_of([log.get(key) for log in logs]) for key in DIAGNOSTICS)
            told = (NOTHING if value is None else f"{value:.3f}" for value in means)
            lines.append(f"| `{group.name}` | {len(logs)} | {' | '.join(told)} |")
    return "\n".join(lines)


def epoch_times(results: Path) -> str:
    """How long recipes took alone, and an epoch with each preset, wherever it was measured."""
    parts = []
    for path in sorted(results.glob("*/recipe--*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        parts += [
            f"`{told['command']}`, {row['epochs']} epochs, alone on {told['device']}: "
            f"{row['best_ms'] / 1000:.1f} s, {row['images_per_second']:,} images/s "
            f"(commit {told['versions']['commit']})."
            for row in told["rows"]
        ]  # fmt: skip
    tables: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/epoch--*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        kind = ", compiled" if told["compiled"] else ""
        head = f"**{told['net']}, batches of {told['batch']}{kind}; {told['device']}**"
        tables.setdefault(head, []).append(told)
    for head, files in tables.items():
        commits = ", ".join(dict.fromkeys(told["versions"]["commit"] for told in files))
        lines = [
            "| preset | seconds per epoch | beside `none` | images/s |",
            "| --- | --: | --: | --: |",
        ]
        lines += [
            f"| `{row['preset']}` | {row['best_ms'] / 1000:.2f} | ×{row['ratio']:.2f} | "
            f"{row['images_per_second']:,} |"
            for row in sorted(
                (row for told in files for row in told["rows"]), key=lambda r: r["preset"] != "none"
            )
        ]  # fmt: skip
        parts += [f"{head} (commit {commits}).", "\n".join(lines)]
    return "\n\n".join(parts) or "Not measured yet."
