"""The sentences of a report that depend on its runs: statement, verdict, caveats, passport."""

from collections.abc import Mapping, Sequence

from splitveil.record.files import RunFiles
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import BRIEF, answers_well, get, leaves, sends_part, shortfalls, text
from splitveil.report.gains import answers_alone, exposure_over, gains
from splitveil.report.words import LOCALE, Lang, Sentence, Value, joined, sentence, translated
from splitveil.table import NOTHING, SMALL_MSE, format_mse, gap, spread

PASSPORT = (
    "config", "seeds", "splits", "versions", "audit", "client", "training", "seconds", "device",
)  # fmt: skip

MEASURED_ALIKE: Mapping[str, str] = {
    "differ.dataset": "config.dataset",
    "differ.profile": "audit.profile",
    "differ.aux": "audit.aux",
    "differ.scored": "audit.scored",
}


def statement(runs: Sequence[RunFiles]) -> Sentence:
    """One sentence: what is shown."""
    datasets = tuple(distinct(runs, "config.dataset")) or sentence("statement.unnamed")
    if len(runs) == 1:
        return sentence("statement.one", datasets=datasets)
    return sentence("statement.many", datasets=datasets, count=str(len(runs)))


def verdict(runs: Sequence[RunFiles]) -> Sentence:
    """One sentence: what the defence changed, or what is known without an undefended run.

    Runs that differ in their seeds alone count as one, with their mean and sd, so that the luck of
    a seed decides nothing. Runs are only compared with runs on the same images. A run at chance, or
    far below its net without a defence, is never praised. Where clients alone are at hand, the gain
    over them is said.
    """
    scored = [run for run in runs if run.record.strongest.mse is not None]
    good = [run for run in scored if answers_well(run.record)]
    poor = tuple(run.name for run in scored if run not in good)
    if not scored:
        return sentence("verdict.none")
    if not good:
        return sentence("verdict.unusable", names=poor)
    said, best = _ranked(good)
    if best is not None:
        said = _with_gain(said, best, kinds(good))
    return sentence("verdict.left-out", verdict=said, names=poor) if poor else said


def _ranked(scored: Sequence[RunFiles]) -> tuple[Sentence, Group | None]:
    """The verdict without a word on clients alone, and the kind of runs that it praises."""
    found = kinds(scored)
    if len(found) == 1:
        return _one(found[0]), None
    found = [kind for kind in found if not answers_alone(kind)] or found
    bare = next((kind for kind in found if not _defended(kind)), None)
    rivals = [k for k in found if _defended(k) and (bare is None or _same_images(bare, k))]
    count = str(len(scored))
    if bare is not None and rivals:
        best = _most_private(rivals)
        before, after = _measured(bare), _measured(best)
        part = any(sends_part(record) for record in best.records)
        key, size = ("verdict.change-exposure", "exposure") if part else ("verdict.change", "mse")
        return sentence(
            key, bare=before["name"], best=after["name"], before=before[size], after=after[size],
            ceiling=after["ceiling"], start=before["accuracy"], end=after["accuracy"],
        ), best  # fmt: skip
    if not all(_same_images(found[0], kind) for kind in found):
        return sentence("verdict.mixed", count=count), None
    if len(found) == 1:
        return _one(found[0]), found[0]
    if not rivals:
        best = _most_private(found)
        return sentence("verdict.undefended", count=count, **_measured(best)), best
    best = _most_private(rivals)
    return sentence("verdict.best", count=count, **_measured(best)), best


def _one(kind: Group) -> Sentence:
    if answers_alone(kind):
        return sentence("verdict.one-alone", **_measured(kind))
    part = any(sends_part(record) for record in kind.records)
    return sentence("verdict.one-part" if part else "verdict.one", **_measured(kind))


def _with_gain(said: Sentence, best: Group, found: Sequence[Group]) -> Sentence:
    """The verdict with what the praised kind gains over the best client alone, if one is there."""
    beside = gains(best, found)
    made = beside.over_best
    if made is None or made.limits is None or beside.best is None:
        return said
    low, high = (f"{limit:+.1f}" for limit in made.limits)
    measured = _measured(best)
    return sentence(
        "verdict.gain" if made.sure else "verdict.no-gain", verdict=said,
        alone=_called(beside.best), accuracy=spread(beside.best.values("accuracy"), 100.0, 1),
        best=measured["name"], points=f"{made.points:+.1f}", low=low, high=high,
        exposure=measured["exposure"],
    )  # fmt: skip


def _measured(kind: Group) -> dict[str, Value]:
    return {
        "name": _called(kind),
        "accuracy": spread(kind.values("accuracy"), 100.0, 1),
        "attack": tuple(kind.distinct("strongest.mse_by")),
        "mse": _error(kind),
        "ceiling": format_mse(kind.mean("ceiling.mse")),
        "leakage": spread(kind.values("leakage"), 100.0, 1),
        "leakage-sent": spread(kind.values("leakage_sent"), 100.0, 1),
        "sent": spread(kind.values("sent"), 100.0, 1),
        "exposure": _exposed(kind),
    }


def _called(kind: Group) -> Value:
    """The name of a kind, and over how many seeds or audits its numbers are means."""
    seeds = len(kind.seeds)
    if len(kind.runs) == 1:
        return f"“{kind.name}”"
    key, count = ("verdict.seeds", seeds) if seeds > 1 else ("verdict.audits", len(kind.runs))
    return sentence(key, name=kind.name, count=str(count))


def _error(group: Group) -> str:
    """The strongest attack's error, mean ± sd over training seeds where there are several."""
    mean, values = group.mean("strongest.mse"), group.values("strongest.mse")
    small = mean is not None and 0 < mean < SMALL_MSE
    return format_mse(mean) if len(values) == 1 else spread(values, 1.0, 5 if small else 4)


def _exposed(kind: Group) -> str:
    """Mean exposure in per cent, with its limits where its records have them."""
    exposed = exposure_over(kind)
    return NOTHING if exposed is None else gap(1, 100.0, sign="").text(exposed, "en")


def _most_private(found: Sequence[Group]) -> Group:
    """The kind that exposes least; where all send everything, that with the largest error."""
    if not any(sends_part(record) for kind in found for record in kind.records):
        return max(found, key=lambda kind: kind.mean("strongest.mse") or 0.0)
    exposed = [exposure_over(kind) for kind in found]
    at = min(range(len(found)), key=lambda i: (exposed[i] or (1.0, None))[0])
    return found[at]


def _defended(kind: Group) -> bool:
    return text(kind.runs[0].record, "config.defence") != "none"


def _same_images(one: Group, other: Group) -> bool:
    """Whether two kinds share dataset and test split, as far as their records say."""
    first, second = one.runs[0].record, other.runs[0].record
    same_data = text(first, "config.dataset") == text(second, "config.dataset")
    return same_data and first.splits.test == second.splits.test


def caveats(runs: Sequence[RunFiles]) -> list[Sentence]:
    """What the reader must know before believing the numbers."""
    seeds: dict[str, set[str]] = {}
    for run in runs:
        defence = text(run.record, "config.defence")
        if defence is not None:
            seeds.setdefault(defence, set()).add(text(run.record, "config.seed") or NOTHING)
    named = {
        "caveat.flags": [run.name for run in runs if run.record.flags],
        "caveat.brief": [run.name for run in runs if run.record.audit.profile in BRIEF],
        "caveat.one-seed": [name for name, found in seeds.items() if len(found) == 1],
        "caveat.seeds": [name for name, found in seeds.items() if len(found) > 1],
        "caveat.attacks": list(dict.fromkeys(name for r in runs for name in r.record.attacks)),
        "caveat.profile": distinct(runs, "audit.profile"),
        "caveat.scored": distinct(runs, "audit.scored"),
        "caveat.part": [run.name for run in runs if sends_part(run.record)],
        "caveat.unaudited": [run.name for run in runs if not run.audited],
    }
    made = [sentence(key, names=tuple(names)) for key, names in named.items() if names]
    for aux in distinct(runs, "audit.aux"):
        known = f"aux.{aux}" if f"aux.{aux}" in LOCALE["en"] else "aux.other"
        made.append(sentence("caveat.knowledge", aux=aux, meaning=sentence(known)))
    for words, path in MEASURED_ALIKE.items():
        if len(values := distinct(runs, path)) > 1:
            made.append(sentence("caveat.differ", what=sentence(words), values=tuple(values)))
    if len(distinct(runs, "splits.test")) > 1:
        made.append(sentence("caveat.tests"))
    return [*made, sentence("caveat.last")]


def reservations(runs: Sequence[RunFiles], lang: Lang = "en") -> list[str]:
    """Which runs had less than a standard audit, and in what; equal shortfalls together."""
    less: dict[str, list[str]] = {}
    for run in runs:
        short = [translated(reason, lang) for reason in shortfalls(run.record)]
        less.setdefault(joined(short, lang), []).append(run.name)
    return [
        sentence("audit.less", reason=reason, names=tuple(names)).plain(lang)
        for reason, names in less.items()
        if reason
    ]


def passport(run: RunFiles) -> list[tuple[str, str]]:
    """Where a run's numbers come from: (key, value) in a fixed order."""
    found = {key: get(run.record, key) for key in PASSPORT}
    told = leaves({key: value for key, value in found.items() if value is not None})
    words = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in told.items()}
    return [(key, NOTHING if value is None else str(value)) for key, value in words.items()]


def distinct(runs: Sequence[RunFiles], path: str) -> list[str]:
    """The different values at a dotted path, in order of the runs."""
    values = (text(run.record, path) for run in runs)
    return list(dict.fromkeys(value for value in values if value is not None))
