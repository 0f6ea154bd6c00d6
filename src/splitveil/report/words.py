"""The sentences of a report that depend on its runs: statement, verdict, caveats, passport."""

from collections.abc import Sequence

from splitveil.report.fields import flatten, number, section, text
from splitveil.report.files import RunFiles
from splitveil.report.tables import NOTHING, format_mse, percent

AUX = {
    "train": "the attacker knows the whole training set (the strongest knowledge)",
    "held-out": "the attacker knows images that were never shown to the defender",
    "test90": "the attacker fits on 90 % of the test images and is scored on the other 10 %",
}
PASSPORT = ("config", "seeds", "splits", "versions", "audit", "client", "training", "seconds")


def statement(runs: Sequence[RunFiles]) -> str:
    """One sentence: what is shown."""
    datasets = " and ".join(_distinct(runs, "config", "dataset")) or "an unnamed dataset"
    models = "One model" if len(runs) == 1 else f"{len(runs)} models"
    return (
        f"{models} trained on {datasets}: how well the answers hold, and how much of the picture "
        "an attacker recovers from what the client sends."
    )


def verdict(runs: Sequence[RunFiles]) -> str | None:
    """The change from the undefended run to the most private one, in numbers; None without both.

    Only runs on the same images are compared.
    """
    scored = [run for run in runs if number(run.record, "strongest", "mse") is not None]
    bare = next((r for r in scored if text(r.record, "config", "defence") == "none"), None)
    if bare is None:
        return None
    rivals = [run for run in scored if run is not bare and _same_images(bare, run)]
    if not rivals:
        return None
    best = max(rivals, key=lambda run: number(run.record, "strongest", "mse") or 0.0)
    before, after = (number(run.record, "strongest", "mse") for run in (bare, best))
    start, end = (percent(number(run.record, "accuracy"), 1) for run in (bare, best))
    return (
        f"From “{bare.name}” to “{best.name}” the strongest attack's error goes from "
        f"{format_mse(before)} to {format_mse(after)} "
        f"(ceiling {format_mse(number(best.record, 'ceiling', 'mse'))}), "
        f"accuracy from {start} % to {end} %."
    )


def caveats(runs: Sequence[RunFiles]) -> list[str]:
    """What the reader must know before believing the numbers."""
    return [
        *_about_flags(runs),
        *_about_seeds(runs),
        *_about_attacks(runs),
        *_about_comparison(runs),
        "An attack that was not run is not covered: a better attacker may recover more. "
        "These are measurements, not certificates.",
    ]


def _about_seeds(runs: Sequence[RunFiles]) -> list[str]:
    seeds: dict[str, list[str]] = {}
    for run in runs:
        defence = text(run.record, "config", "defence")
        if defence is not None:
            seeds.setdefault(defence, []).append(text(run.record, "config", "seed") or NOTHING)
    single = [name for name, listed in seeds.items() if len(set(listed)) == 1]
    several = [name for name in seeds if name not in single]
    said = []
    if single:
        said.append(
            f"One training seed only ({', '.join(single)}): there is no confidence interval, and "
            "small differences may be chance."
        )
    if several:
        said.append(
            f"Several training seeds ({', '.join(several)}): each is a row of its own; no interval "
            "is computed here."
        )
    return said


def _about_attacks(runs: Sequence[RunFiles]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs for name in section(run.record, "attacks")))
    said = [f"Attacks that were run: {', '.join(names)}."] if names else []
    profiles = _distinct(runs, "audit", "profile")
    if profiles:
        said.append(f"Audit profile (budget of the attacks): {', '.join(profiles)}.")
    said += [
        f"Knowledge “{aux}”: {AUX.get(aux, 'see the passport')}."
        for aux in _distinct(runs, "audit", "aux")
    ]
    scored = _distinct(runs, "audit", "scored")
    if scored:
        said.append(f"Images scored: {', '.join(scored)}.")
    return said


def _about_flags(runs: Sequence[RunFiles]) -> list[str]:
    """Every flag of every run's audit."""
    return [
        f"Flag on {run.name}: {flag.get('name')}: {flag.get('seen')}; {flag.get('advice')}."
        for run in runs
        for flag in (run.record or {}).get("flags") or []
        if isinstance(flag, dict)
    ]


def _about_comparison(runs: Sequence[RunFiles]) -> list[str]:
    """Warnings where the runs were not measured alike."""
    said = [
        f"The runs differ in {words} ({', '.join(values)}): do not compare them row by row."
        for words, keys in (
            ("dataset", ("config", "dataset")),
            ("audit profile", ("audit", "profile")),
            ("attacker's knowledge", ("audit", "aux")),
            ("number of scored images", ("audit", "scored")),
        )
        if len(values := _distinct(runs, *keys)) > 1
    ]
    tests = _distinct(runs, "splits", "test")
    if len(tests) > 1:
        said.append("The runs were scored on different test images: see their split hashes.")
    unaudited = [run.name for run in runs if run.record is None]
    if unaudited:
        said.append(f"Not audited yet, so without numbers: {', '.join(unaudited)}.")
    return said


def passport(run: RunFiles) -> list[tuple[str, str]]:
    """Where a run's numbers come from: (key, value) in a fixed order."""
    known = {key: section(run.record, key) for key in PASSPORT}
    device = text(run.record, "device")
    return flatten(known) + ([("device", device)] if device is not None else [])


def _distinct(runs: Sequence[RunFiles], *keys: str) -> list[str]:
    """The different values of a key, in order of the runs."""
    values = (text(run.record, *keys) for run in runs)
    return list(dict.fromkeys(value for value in values if value is not None))


def _same_images(one: RunFiles, other: RunFiles) -> bool:
    """Whether two runs share dataset and test split, as far as their records say."""
    return all(
        text(one.record, *keys) == text(other.record, *keys)
        for keys in (("config", "dataset"), ("splits", "test"))
    )
