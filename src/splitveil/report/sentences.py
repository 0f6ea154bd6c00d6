"""The sentences of a report that depend on its runs: statement, verdict, caveats, passport."""

from collections.abc import Mapping, Sequence

from splitveil.report.checks import brief_profile, flags_of
from splitveil.report.fields import flatten, number, section, text
from splitveil.report.files import RunFiles
from splitveil.report.tables import NOTHING, format_mse, percent
from splitveil.report.words import TABLE, Said, said

PASSPORT = ("config", "seeds", "splits", "versions", "audit", "client", "training", "seconds")
MEASURED_ALIKE: Mapping[str, tuple[str, str]] = {
    "differ.dataset": ("config", "dataset"),
    "differ.profile": ("audit", "profile"),
    "differ.aux": ("audit", "aux"),
    "differ.scored": ("audit", "scored"),
}


def statement(runs: Sequence[RunFiles]) -> Said:
    """One sentence: what is shown."""
    datasets = distinct(runs, "config", "dataset")
    named = tuple(datasets) if datasets else said("statement.unnamed")
    if len(runs) == 1:
        return said("statement.one", datasets=named)
    return said("statement.many", datasets=named, count=str(len(runs)))


def verdict(runs: Sequence[RunFiles]) -> Said:
    """One sentence: what the defence changed, or what is known without an undefended run.

    Runs are only compared with runs on the same images.
    """
    scored = [run for run in runs if number(run.record, "strongest", "mse") is not None]
    if not scored:
        return said("verdict.none")
    if len(scored) == 1:
        return said("verdict.one", **_measured(scored[0]))
    bare = next((run for run in scored if not _defended(run)), None)
    rivals = [r for r in scored if _defended(r) and (bare is None or _same_images(bare, r))]
    if bare is not None and rivals:
        return _change(bare, _most_private(rivals))
    count = str(len(scored))
    if not all(_same_images(scored[0], run) for run in scored):
        return said("verdict.mixed", count=count)
    if not rivals:
        return said("verdict.undefended", count=count, **_measured(_most_private(scored)))
    return said("verdict.best", count=count, **_measured(_most_private(rivals)))


def _change(bare: RunFiles, best: RunFiles) -> Said:
    before, after = (format_mse(number(r.record, "strongest", "mse")) for r in (bare, best))
    start, end = (percent(number(r.record, "accuracy"), 1) for r in (bare, best))
    return said(
        "verdict.change",
        bare=bare.name,
        best=best.name,
        before=before,
        after=after,
        ceiling=format_mse(number(best.record, "ceiling", "mse")),
        start=start,
        end=end,
    )


def _measured(run: RunFiles) -> dict[str, str]:
    return {
        "name": run.name,
        "accuracy": percent(number(run.record, "accuracy"), 1),
        "attack": text(run.record, "strongest", "mse_by") or NOTHING,
        "mse": format_mse(number(run.record, "strongest", "mse")),
        "ceiling": format_mse(number(run.record, "ceiling", "mse")),
        "leakage": percent(number(run.record, "leakage"), 1),
    }


def _most_private(runs: Sequence[RunFiles]) -> RunFiles:
    return max(runs, key=lambda run: number(run.record, "strongest", "mse") or 0.0)


def _defended(run: RunFiles) -> bool:
    return text(run.record, "config", "defence") != "none"


def _same_images(one: RunFiles, other: RunFiles) -> bool:
    """Whether two runs share dataset and test split, as far as their records say."""
    return all(
        text(one.record, *keys) == text(other.record, *keys)
        for keys in (("config", "dataset"), ("splits", "test"))
    )


def caveats(runs: Sequence[RunFiles]) -> list[Said]:
    """What the reader must know before believing the numbers."""
    return [
        *_about_flags(runs),
        *_about_seeds(runs),
        *_about_attacks(runs),
        *_about_comparison(runs),
        said("caveat.last"),
    ]


def _about_flags(runs: Sequence[RunFiles]) -> list[Said]:
    flagged = tuple(run.name for run in runs if flags_of(run))
    brief = tuple(run.name for run in runs if brief_profile(run) is not None)
    pairs = (("caveat.flags", flagged), ("caveat.brief", brief))
    return [said(key, names=names) for key, names in pairs if names]


def _about_seeds(runs: Sequence[RunFiles]) -> list[Said]:
    seeds: dict[str, set[str]] = {}
    for run in runs:
        defence = text(run.record, "config", "defence")
        if defence is not None:
            seeds.setdefault(defence, set()).add(text(run.record, "config", "seed") or NOTHING)
    single = tuple(name for name, found in seeds.items() if len(found) == 1)
    several = tuple(name for name in seeds if name not in single)
    pairs = (("caveat.one-seed", single), ("caveat.seeds", several))
    return [said(key, names=names) for key, names in pairs if names]


def _about_attacks(runs: Sequence[RunFiles]) -> list[Said]:
    names = dict.fromkeys(name for run in runs for name in section(run.record, "attacks"))
    listed = (
        ("caveat.attacks", tuple(names)),
        ("caveat.profile", tuple(distinct(runs, "audit", "profile"))),
        ("caveat.scored", tuple(distinct(runs, "audit", "scored"))),
    )
    knowledge = [
        said("caveat.knowledge", aux=aux, meaning=_knowledge(aux))
        for aux in distinct(runs, "audit", "aux")
    ]
    attacks, profile, scored = ([said(k, names=v)] if v else [] for k, v in listed)
    return [*attacks, *profile, *knowledge, *scored]


def _knowledge(aux: str) -> Said:
    return said(f"aux.{aux}" if f"aux.{aux}" in TABLE else "aux.other")


def _about_comparison(runs: Sequence[RunFiles]) -> list[Said]:
    """Warnings where the runs were not measured alike."""
    made = [
        said("caveat.differ", what=said(words), values=tuple(values))
        for words, keys in MEASURED_ALIKE.items()
        if len(values := distinct(runs, *keys)) > 1
    ]
    if len(distinct(runs, "splits", "test")) > 1:
        made.append(said("caveat.tests"))
    unaudited = tuple(run.name for run in runs if run.record is None)
    return made + ([said("caveat.unaudited", names=unaudited)] if unaudited else [])


def passport(run: RunFiles) -> list[tuple[str, str]]:
    """Where a run's numbers come from: (key, value) in a fixed order."""
    known = {key: section(run.record, key) for key in PASSPORT}
    device = text(run.record, "device")
    return flatten(known) + ([("device", device)] if device is not None else [])


def distinct(runs: Sequence[RunFiles], *keys: str) -> list[str]:
    """The different values of a key, in order of the runs."""
    values = (text(run.record, *keys) for run in runs)
    return list(dict.fromkeys(value for value in values if value is not None))
