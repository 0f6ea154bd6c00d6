"""Every column of every table: runs, attacks, checks, leaks, rows to compare, published rows.

The rows of `SUMMARY` and `CERTIFICATES` are runs, those of `ATTACKS` a run and an attack's name,
those of `LEAKS` groups of records, those of `COMPARE` a group and what is published of it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from splitveil import table
from splitveil.errors import RunError
from splitveil.io import finite, parse_json, read_text
from splitveil.record import schema
from splitveil.record.files import RunFiles
from splitveil.record.groups import Group, aux_of, mean_of
from splitveil.record.schema import (
    Certificate,
    Record,
    Share,
    exposure_of,
    get,
    number,
    sends_part,
    text,
)
from splitveil.report.gains import Gain, Gains, exposure_over
from splitveil.report.words import (
    LANGS,
    LOCALE,
    Lang,
    Value,
    joined,
    sentence,
    translated,
    word,
    written,
)
from splitveil.table import (
    CODE,
    MSE,
    NOTHING,
    TEXT,
    TEXTS,
    Column,
    Format,
    Table,
    duration,
    fixed,
    gap,
    mean_sd,
)

KINDS = ("capacity", "gallery", "population")  # of certificates
VACUOUS = "vacuous"  # how a record begins the reason why a bound that excludes nothing is refused
WIRE = "leaks.re-id.wire"
MOST_NAMED = 16  # flags of a run in a cell; they are all explained below the table
DOUBLING = "certificates.gallery.doubles.repeats"


def both(key: str) -> dict[str, str]:
    """A word in every language."""
    return {lang: word(key, lang) for lang in LANGS}


def column(
    words: str,
    get: Callable[[Any], Any],
    fmt: Format = TEXT,
    *more: Any,  # noqa: ANN401 - unit, better and brief
    **named: Any,  # noqa: ANN401
) -> Column:
    """A column headed by the entry `words` of the locale files; its key is the entry's name."""
    return Column(words.partition(".")[2], both(words), get, fmt, *more, **named)


def _number(path: str) -> Callable[[RunFiles], float | None]:
    return lambda run: number(run.record, path)


def _text(path: str) -> Callable[[RunFiles], str | None]:
    return lambda run: text(run.record, path)


NATS, POINTS = both("unit.nats"), both("unit.points")
TIME = Format(text=lambda value, _: duration(value), nothing="")
SHARE, LEAK = fixed(2, 100.0), fixed(1, 100.0)  # in per cent
SHARES, LEAKAGES = mean_sd(2, 100.0), mean_sd(1, 100.0)  # of several seeds
WORDS = Format(text=written, exact=lambda value: (written(value, "en"),), numeric=False)
BOUND = replace(WORDS, numeric=True)  # a number, or a word why there is none


def _whole_leakage(run: RunFiles) -> float | None:
    """The leakage where every image is sent; that of the sent alone has a column of its own."""
    return None if sends_part(run.record) else run.record.leakage


def _limits(record: Record, name: str) -> tuple[float, float] | None:
    found = record.intervals.get(name)
    return None if found is None else (found[0], found[1])


def _exposure(run: RunFiles) -> tuple[float, tuple[float, float] | None] | None:
    exposed = exposure_of(run.record)
    return None if exposed is None else (exposed, _limits(run.record, "exposure"))


def _gained(name: str) -> Callable[[RunFiles], tuple[float, tuple[float, float] | None] | None]:
    """A gain of the record in points, with its limits."""

    def read(run: RunFiles) -> tuple[float, tuple[float, float] | None] | None:
        points = number(run.record, name)
        return None if points is None else (points, _limits(run.record, name))

    return read


SUMMARY = Table(
    column("column.run", lambda run: run.name, brief="run"),
    column("column.defence", _text("config.defence")),
    column("column.seed", _text("config.seed"), table.DIGITS),
    column("column.accuracy", _number("accuracy"), SHARE, "%", "up", "acc%"),
    column("column.strongest", _number("strongest.mse"), MSE, "", "up", "MSE"),
    column("column.by", _text("strongest.mse_by"), brief="by"),
    column("column.psnr", _number("strongest.psnr_pooled"), fixed(2), "dB", "down"),
    column("column.ssim", _number("strongest.ssim"), fixed(3), "", "down", "SSIM"),
    column("column.worst-case", _number("worst_case.mse"), MSE, "", "up"),
    column("column.ceiling", _number("ceiling.mse"), MSE),
    column("column.leakage", _whole_leakage, LEAK, "%", "down", "leak%"),
    column("column.rate", _number("true_rate_nats"), fixed(2), NATS, "down", "nats"),
    column("column.macs", _number("client.macs"), table.COUNT, "", "down"),
    column("column.wire", _number("client.wire_floats"), table.COUNT, "", "down"),
)


SENT_AND_GAINED = (  # of the summary, after the leakage, where they say something
    column("column.sent", _number("sent"), LEAK, "%", "down", "sent%"),
    column("column.leakage-sent", _number("leakage_sent"), LEAK, "%", "down"),
    column("column.exposure", _exposure, gap(1, 100.0, sign=""), "%", "down", "exp%"),
    column("column.identified", _number("identified"), LEAK, "%", "down"),
    column("column.gain", _gained("server_gain"), gap(1), POINTS, "up", "gain"),
    column("column.gain-same", _gained("gain_over_same_client"), gap(1), POINTS, "up"),
)


def summary_of(runs: Sequence[RunFiles]) -> Table:
    """The summary, with what is sent and gained where the runs have something to tell."""
    at = [shown.key for shown in SUMMARY.columns].index("leakage") + 1
    whole = Table(*SUMMARY.columns[:at], *SENT_AND_GAINED, *SUMMARY.columns[at:])
    return telling(whole, runs, [run.record for run in runs])


def overview(runs: Sequence[RunFiles], lang: Lang) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the summary that fit a terminal."""
    return summary_of(runs).brief(runs, lang)


PARTLY = ("sent", "exposure", "identified", "leakage-sent")  # where not every image is sent
WHERE_KNOWN = ("gain", "gain-same", "server-gain", "server-macs", "stored", "bits")


def telling(table: Table, rows: Sequence[Any], records: Sequence[Record]) -> Table:
    """A table without the columns that say nothing of its rows.

    What is sent, and what that exposes, is told where a row does not send every image; gains and
    costs where a row has them.

    Args:
        table: The table.
        rows: Its rows.
        records: The records of these rows.
    """
    left_out = set() if any(r.sent not in (None, 1) for r in records) else set(PARTLY)
    if not any(map(sends_part, records)):
        left_out.add("leakage-sent")
    for shown in table.columns:
        values = [shown.value(row) for row in rows] if shown.key in WHERE_KNOWN else [0.0]
        if all(v is None or (isinstance(v, list) and set(v) == {None}) for v in values):
            left_out.add(shown.key)
    return table.only(*(c.key for c in table.columns if c.key not in left_out))


class Attacked(NamedTuple):
    """An attack on a run."""

    run: RunFiles
    attack: str
    scores: schema.AttackScores


def attack_rows(runs: Sequence[RunFiles]) -> list[Attacked]:
    """One row per attack, run by run, in the order of their records."""
    return [Attacked(run, *named) for run in runs for named in run.record.attacks.items()]


def _best_for(row: Attacked) -> Value:
    """The metrics in which an attack is the strongest, or why it is not ranked with the others.

    An attack is not ranked if it saw only a subset of the images, or several sendings of each.
    """
    strongest, scores = row.run.record.strongest, row.scores
    by = {"MSE": strongest.mse_by, "SSIM": strongest.ssim_by}
    best = [metric for metric, attack in by.items() if attack == row.attack]
    if best:
        return f"★ {', '.join(best)}"
    if scores.repeats is not None:
        return sentence("remark.draws", count=str(scores.repeats))
    if scores.subset is None:
        return ""
    images, rival = table.count(scores.images), scores.beside
    if not rival.attack:
        return sentence("remark.images", count=images)
    mse = table.format_mse(rival.mse)
    return sentence("remark.beside", count=images, attack=rival.attack, mse=mse)


ACCESS = Format(
    text=lambda name, lang: LOCALE[lang].get(f"access.{name}", name), numeric=False
)  # the word for it; the name itself where a record has another

ATTACKS = Table(
    column("column.run", lambda row: row.run.name),
    column("column.attack", lambda row: row.attack, brief="Attack"),
    column("column.access", lambda row: row.scores.access, ACCESS, brief="Access"),
    column("column.mse", lambda row: row.scores.mse, MSE, "", "up", "MSE"),
    column("column.psnr", lambda row: row.scores.psnr_pooled, fixed(2), "dB", "down", "PSNR (dB)"),
    column("column.ssim", lambda row: row.scores.ssim, fixed(3), "", "down", "SSIM"),
    column("column.time", lambda row: row.scores.seconds, TIME, brief="Time"),
    column("column.best", _best_for, WORDS, brief="Strongest in"),
    together=lambda row: row.run.name,
)


def flags_of(run: RunFiles) -> list[tuple[Value, str, Value]] | None:
    """Name, what was seen and what to do, for each flag; None where the audit looked for none."""
    return None if run.record.flags is None else [_flag(flag) for flag in run.record.flags]


def _flag(flag: schema.Flag) -> tuple[Value, str, Value]:
    known, title, remedy = LOCALE["en"], f"flag.{flag.name}", f"advice.{flag.name}"
    usual = known.get(remedy) == flag.advice  # advice of another version stands as it is
    return (
        sentence(title) if title in known else flag.name,
        flag.seen or NOTHING,
        sentence(remedy) if usual else flag.advice or NOTHING,
    )


def written_flag(flag: tuple[Value, str, Value], lang: Lang) -> tuple[str, str, str]:
    """A flag in a language; what was seen stands in the record in English."""
    name, seen, advice = flag
    return written(name, lang), translated(seen, lang), written(advice, lang)


def _flags(run: RunFiles) -> list[Value] | None:
    """Names of a run's flags, and the profile of an audit with less than the standard budget."""
    flags, profile = flags_of(run), run.record.audit.profile
    if flags is None:
        return None
    names = [title for title, _, _ in flags[:MOST_NAMED]] or [sentence("flags.none")]
    if len(flags) > MOST_NAMED:
        names.append(sentence("flags.more", count=str(len(flags) - MOST_NAMED)))
    return [*names, sentence("flags.brief", profile=profile)] if profile in schema.BRIEF else names


def _certified(kind: str) -> Callable[[RunFiles], Value | None]:
    """A certificate in nats, the word for a refusal, or None if it was not asked for."""

    def read(run: RunFiles) -> Value | None:
        certificate = _certificate(run.record, kind)
        if certificate.refused is not None:
            return sentence("certificate.refused")
        if certificate.nats is None:
            return None
        value = table.decimals(certificate.nats, 1)
        return sentence("certificate.vacuous", value=value) if vacuous(certificate) else value

    return read


def _certificate(record: Record, kind: str) -> Certificate:
    return record.certificates.get(kind) or schema.read_part(Certificate, None)


def vacuous(certificate: Certificate) -> bool:
    """Whether a certificate excludes nothing, by its own field or by Fano's bound."""
    if certificate.vacuous is not None:
        return certificate.vacuous
    return (certificate.identification_error.refused or "").startswith(VACUOUS)


def _identification(run: RunFiles) -> Value | None:
    """Fano's error over the gallery in per cent, the word why there is none, or None."""
    gallery = _certificate(run.record, "gallery")
    reason = gallery.refused or gallery.identification_error.refused
    if reason is None:
        return table.percent(gallery.identification_error.at_least, 1)
    return sentence("certificate.empty" if reason.startswith(VACUOUS) else "certificate.refused")


def _listed(values: Sequence[Value], lang: Lang) -> str:
    return joined([written(value, lang) for value in values], lang)


CERTIFICATES = Table(
    column("column.run", lambda run: run.name),
    column("column.flags", _flags, Format(text=_listed, numeric=False)),
    *(column(f"column.{kind}", _certified(kind), BOUND, NATS, "down") for kind in KINDS),
    column("column.identification", _identification, BOUND, "%", "up"),
    style="prose",
)


def refused_certificates(runs: Sequence[RunFiles], lang: Lang = "en") -> list[tuple[str, str, str]]:
    """Why certificates were refused: runs, certificates, reason; equal reasons together."""
    reasons: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for run in runs:
        for kind in KINDS:
            reason = _certificate(run.record, kind).refused
            if reason is not None:
                names, kinds = reasons.setdefault(reason, ({}, {}))
                names[run.name] = kinds[word(f"certificate.{kind}", lang)] = None
    return [(joined([*names], lang), joined([*kinds], lang), translated(reason, lang))
            for reason, (names, kinds) in reasons.items()]  # fmt: skip


def audited(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """The runs whose records have flags or certificates."""
    return [r for r in runs if r.record.flags is not None or r.record.certificates]


DOUBLES = ("between", "never", "cannot", "nothing")  # what a record may say of the doubling


def sendings(runs: Sequence[RunFiles]) -> tuple[Table, list[RunFiles]]:
    """The table of leakage by number of sendings, and its rows: the runs that measured it."""
    repeats = "leaks.repeats"
    rows = [run for run in runs if run.record.leaks.get("repeats")]
    counts = sorted({k for run in rows for k in _sendings(run.record)}, key=int)
    made = Table(
        column("leaks.row", lambda run: run.name),
        *(
            Column(f"k-{k}", f"k = {k}", _number(f"{repeats}.leakage.{k}"), LEAK, "%", "down")
            for k in counts
        ),
        column("repeats.doubles", lambda run: doubles(run.record), WORDS),
        column("repeats.attack", _text(f"{repeats}.attack")),
        column("repeats.images", _text(f"{repeats}.n"), table.DIGITS),
    )
    return made, rows


def doubles(record: Record) -> Value | None:
    """Where a record's leakage doubles; what is of no kind known here as it stands."""
    place = "leaks.repeats.doubles"
    kind, after, by = (text(record, f"{place}.{key}") for key in ("kind", "after", "by"))
    if kind not in DOUBLES:
        return text(record, f"{place}.says")
    if kind == "nothing" and by is not None:
        kind = "later"
    if kind == "between" and (after, by) == ("1", "2"):
        kind = "at"
    most = max(_sendings(record), key=int, default=NOTHING)
    return sentence(f"repeats.{kind}", after=after or NOTHING, by=by or NOTHING, most=most)


def _sendings(record: Record) -> list[str]:
    return [k for k in get(record, "leaks.repeats.leakage") or () if k.isdecimal()]


def _each(read: Callable[[Record], float | None]) -> Callable[[Group], list[float | None]]:
    """A number that is computed from each record, for each training seed."""
    return lambda group: [mean_of([read(record) for record in seed]) for seed in group.seeds]


def sent_before(record: Record) -> int:
    """How often re-identification had sent each known image; 0 where a record does not say."""
    return int(number(record, f"{WIRE}.sendings") or 0)


def found_by_wire(group: Group) -> list[float | None]:
    """Share re-identified by z̃ for each training seed, of the records with the most sendings."""
    # With fewer sendings the attacker is weaker: a mean over both would describe neither.
    most = max(map(sent_before, group.records))
    return [
        mean_of([number(r, f"{WIRE}.rank_1") for r in seed if sent_before(r) == most])
        for seed in group.seeds
    ]


def _found_by_encoder(group: Group) -> list[float | None]:
    errors = group.values("certificates.gallery.matcher_error")
    return [None if error is None else 1 - error for error in errors]


def _largest(leak: str, key: str, part: str = "") -> Callable[[Record], float | None]:
    """The largest number under `key` of a leak's entries whose names have `part` in them."""

    def read(record: Record) -> float | None:
        names = [name for name in record.leaks.get(leak, ()) if part in name]
        shares = [number(record.leaks[leak], f"{name}.{key}") for name in names]
        return max((s for s in shares if s is not None), default=None)

    return read


def _member(source: str) -> Callable[[Record], float | None]:
    """The area under the curve of the strongest membership score."""

    def read(record: Record) -> float | None:
        name = text(record, f"leaks.membership.strongest.{source}")
        return number(record, f"leaks.membership.{source}.{name}.auc") if name else None

    return read


def _given_class(kind: str) -> Callable[[Group], Value | None]:
    """A certificate given the class, called vacuous where records say so, or the refusal's word."""

    def read(group: Group) -> Value | None:
        rates = group.values(f"certificates.{kind}.nats_given_class")
        measured = len(rates) - rates.count(None)
        if not measured:
            refused = group.distinct(f"certificates.{kind}.refused") != [NOTHING]
            return sentence("certificate.refused") if refused else None
        value = table.spread(rates, 1.0, 1)
        empty = sum(any(vacuous(_certificate(r, kind)) for r in seed) for seed in group.seeds)
        if empty in (0, measured):
            return sentence("certificate.vacuous", value=value) if empty else value
        part = {"some": str(empty), "all": str(measured)}
        return sentence("certificate.vacuous-in-part", value=value, **part)

    return read


LEAKS = Table(
    column("leaks.row", lambda group: group.name, CODE),
    column("leaks.re-id-wire", found_by_wire, LEAKAGES, "%", "down"),
    column("leaks.re-id-encoder", _found_by_encoder, LEAKAGES, "%", "down"),
    column("leaks.re-id-picture", _each(_largest("re-id", "rank_1", "/")), LEAKAGES, "%", "down"),
    column("leaks.member-outputs", _each(_member("outputs")), mean_sd(3), "", "down"),
    column("leaks.member-wire", _each(_member("wire")), mean_sd(3), "", "down"),
    column("leaks.attribute", _each(_largest("attribute", "beyond_answer")), LEAKAGES, "%", "down"),
    column("leaks.gallery", _given_class("gallery"), BOUND, NATS, "down"),
    column("leaks.certified", _given_class("population"), BOUND, NATS, "down"),
    column("leaks.doubles", lambda group: group.values(DOUBLING), mean_sd(0), better="up"),
)


def leaking(groups: Sequence[Group]) -> list[Group]:
    """The rows whose records have leaks beyond pixels."""
    return [group for group in groups if any(r.leaks for r in group.records)]


def check_leaks(run: RunFiles) -> None:
    """Raise RunError for odd leaks, which are not checked when a record is read."""
    LEAKS.cells(_with_leaks([run]))


def _with_leaks(runs: Sequence[RunFiles]) -> list[Group]:
    """The runs with leaks beyond pixels, each a row of its own."""
    return leaking([Group(run.name, ((run.record,),)) for run in runs])


def html_tables(runs: Sequence[RunFiles], lang: Lang) -> dict[str, str]:
    """The tables about some runs as HTML, by name; "" where the runs have nothing for one."""
    leaks, (repeats, repeated) = _with_leaks(runs), sendings(runs)
    return {
        "summary": summary_of(runs).render(runs, "html", lang),
        "attacks": ATTACKS.render(attack_rows(runs), "html", lang),
        "audit": CERTIFICATES.render(runs, "html", lang) if audited(runs) else "",
        "leaks": LEAKS.render(leaks, "html", lang) if leaks else "",
        "repeats": repeats.render(repeated, "html", lang) if repeated else "",
    }


@dataclass(frozen=True)
class Published:
    """What others report under a row's name.

    Args:
        accuracy: Accuracy of the task, in [0, 1].
        mse: MSE of their attack, pixels in [0, 1].
        source: Where it is printed.
        dataset: Dataset; None stands beside records of any dataset.
        aux: What their attacker knew.
        reconstruction_accuracy: Accuracy on the reconstructions, in [0, 1].
        ssim_zeropad: SSIM with zero padding at the borders.
        psnr_pooled: PSNR of the mean MSE, dB.
    """

    accuracy: Share
    mse: Share
    source: str
    dataset: str | None = None
    aux: str = "train"
    reconstruction_accuracy: Share | None = None
    ssim_zeropad: float | None = None
    psnr_pooled: float | None = None

    def is_of(self, datasets: Collection[str | None]) -> bool:
        """Whether the row can stand beside records of these datasets."""
        return self.dataset is None or self.dataset in datasets


def read_published(path: Path) -> dict[str, Published]:
    """Rows of a JSON file {name: {accuracy, mse, source, dataset, …}}; accuracies are shares.

    Raises:
        RunError: The file is no such object; the message names the row and the key.
    """
    try:
        data = parse_json(read_text(path), lenient=True)
        if not isinstance(data, dict):
            raise ValueError(f"it must hold an object of rows, got {type(data).__name__}")
        return {name: _published(name, row) for name, row in data.items()}
    except (OSError, ValueError) as err:
        raise RunError(
            f"{path} is not a file of published rows: {err}; a row is, for example, "
            '"cem": {"accuracy": 0.9, "mse": 0.01, "source": "where it is printed", '
            '"dataset": "cifar10"}'
        ) from err


def _published(name: str, given: object) -> Published:
    """A checked row of a file; raises ValueError naming the row and the key."""
    row = finite(given)
    if not isinstance(row, dict):
        raise ValueError(f"row '{name}' must be an object, got {type(row).__name__}")
    known = [field.name for field in fields(Published)]
    strange = [f"unknown {key}" for key in row if key not in known]
    missing = [f"no {key}" for key in known[:3] if row.get(key) is None]
    if strange or missing:
        raise ValueError(f"row '{name}': {', '.join(missing + strange)}")
    try:
        return schema.read_part(Published, {"aux": Published.aux} | row)
    except RunError as err:
        raise ValueError(f"row '{name}': {err}") from err


def reported(group: Group, published: Mapping[str, Published]) -> Published | None:
    """What is published under a row's name, for the same dataset and attacker's knowledge.

    A folder may be called `arl-cem` for the stack `arl+cem`.
    """
    said = published.get(group.name) or published.get(group.name.replace("-", "+"))
    if said is None or not said.is_of(group.distinct("config.dataset")):
        return None
    return said if group.distinct("audit.aux") == [said.aux] else None


def elsewhere(published: Mapping[str, Published], datasets: Collection[str]) -> list[str]:
    """A line that counts the published rows of other datasets than these, which are not shown."""
    counts = Counter(said.dataset for said in published.values() if not said.is_of(datasets))
    named = ", ".join(f"{dataset} ({n})" for dataset, n in sorted(counts.items()))
    met = ", ".join(sorted(datasets)) or NOTHING
    return [f"published rows of another dataset left out: {named}; records: {met}"] if named else []


class Compared(NamedTuple):
    """A row to compare: its records, what is published of it, what it gains over clients alone."""

    group: Group
    reported: Published | None = None
    gains: Gains = Gains()


def _over(path: str) -> Callable[[Compared], list[float | None]]:
    """A number of the record at a dotted path, for each training seed."""
    return lambda row: row.group.values(path)


def _distinct(path: str) -> Callable[[Compared], list[str]]:
    return lambda row: row.group.distinct(path)


def _reported(key: str) -> Callable[[Compared], float | None]:
    return lambda row: None if row.reported is None else getattr(row.reported, key)


def _seeds_text(attacks: Sequence[int], lang: str) -> str:
    """How many training seeds a row has, and times how many attack seeds where there are several.

    >>> _seeds_text([2, 2, 2], "en"), _seeds_text([1], "en"), _seeds_text([2, 1], "en")
    ('3×2', '1', '2×1–2')
    """
    del lang
    low, high = min(attacks), max(attacks)
    times = f"×{high}" if low == high else f"×{low}–{high}"
    return str(len(attacks)) + ("" if high == 1 else times)


SEEDS = Format(text=_seeds_text, exact=lambda attacks: (float(len(attacks)),))


def _flag_count(group: Group) -> float | None:
    """How many different flags the row's audits raised; None where none was asked for."""
    asked = [record.flag_names for record in group.records if record.flags is not None]
    return float(len(set().union(*asked))) if asked else None


def remarks(group: Group) -> list[str]:
    """What makes audits of a row less than standard ones."""
    found = (words for record in group.records for words in schema.shortfalls(record))
    return list(dict.fromkeys(found))


def _rebuilt(row: Compared) -> list[float | None]:
    """The server's accuracy on what `decoder` rebuilt, the attack of the reference documents.

    Where `decoder` did not run, on what the strongest attack rebuilt.
    """

    def read(record: Record) -> float | None:
        ran = number(record, "attacks.decoder.accuracy")
        return number(record, f"attacks.{record.strongest.mse_by}.accuracy") if ran is None else ran

    return _each(read)(row.group)


def _whole_leakages(row: Compared) -> list[float | None]:
    return _each(lambda record: None if sends_part(record) else record.leakage)(row.group)


def _compared_gain(
    which: str, stored: str
) -> Callable[[Compared], tuple[float, tuple[float, float] | None] | None]:
    """A gain over the clients alone at hand; else what the row's records say."""

    def read(row: Compared) -> tuple[float, tuple[float, float] | None] | None:
        made: Gain | None = getattr(row.gains, which)
        if made is not None:
            return made.points, made.limits
        points, records = row.group.mean(stored), row.group.records
        limits = _limits(records[0], stored) if len(records) == 1 else None
        return None if points is None else (points, limits)

    return read


def notes_on(table: Table, rows: Sequence[Compared]) -> list[str]:
    """What a reader must know of rows that send only some images, and of the gains."""
    keys = {column.key for column in table.columns}
    part = [f"`{row.group.name}`" for row in rows if any(map(sends_part, row.group.records))]
    against: dict[str, list[str]] = {}
    for row in rows:
        if (made := row.gains.over_best) is not None:
            track = f" ({row.gains.track})" * (row.gains.track is not None)
            against.setdefault(f"`{made.against}`{track}", []).append(f"`{row.group.name}`")
    notes = []
    if part and keys & {"mse", "ssim", "psnr", "worst"}:
        notes.append(
            f"Of {', '.join(part)} only some images are sent: MSE, SSIM, PSNR and worst case are "
            "of these alone, and compare with no other row. Exposure compares."
        )
    if "server-gain" in keys and against:
        every = (f"{rival} for {', '.join(theirs)}" for rival, theirs in sorted(against.items()))
        told = next(iter(against)) if len(against) == 1 else "; ".join(every)
        notes.append(
            "Server gain: accuracy less that of the best client alone of the track, with its 95 % "
            f"limits; that is {told}."
        )
    return notes


REPORTED, THOUSANDS = fixed(2, 100.0, nothing=""), table.shared(0, 1e-3)
COMPARE = Table(
    Column("row", "row", lambda row: row.group.name, CODE, brief="row"),
    Column("net", "net", _distinct("config.net"), TEXTS),
    Column("seeds", "seeds", lambda row: list(map(len, row.group.seeds)), SEEDS, brief="n"),
    Column("accuracy", "accuracy", _over("accuracy"), SHARES, "%", "up", "acc%"),
    Column("reported-accuracy", "reported accuracy", _reported("accuracy"), REPORTED, "%"),
    Column("mse", "strongest attack MSE", _over("strongest.mse"), mean_sd(4), "", "up", "MSE"),
    Column("reported-mse", "reported MSE", _reported("mse"), fixed(4, nothing="")),
    Column("by", "by", _distinct("strongest.mse_by"), TEXTS, brief="by"),
    Column("ssim", "SSIM", _over("strongest.ssim"), mean_sd(3), "", "down", "SSIM"),
    Column("psnr", "pooled PSNR", _over("strongest.psnr_pooled"), mean_sd(2), "dB", "down"),
    Column("worst", "worst-case MSE", _over("worst_case.mse"), mean_sd(4), "", "up"),
    Column("leakage", "leakage", _whole_leakages, LEAKAGES, "%", "down", "leak%"),
    Column("sent", "sent", _over("sent"), LEAKAGES, "%", "down", "sent%"),
    Column("leakage-sent", "leakage of the sent", _over("leakage_sent"), LEAKAGES, "%", "down"),
    Column(
        "exposure",
        "exposure",
        lambda row: exposure_over(row.group),
        gap(1, 100.0, sign=""),
        "%",
        "down",
        "exp%",
    ),
    Column("identified", "identified of 1,000", _over("identified"), LEAKAGES, "%", "down"),
    Column(
        "server-gain",
        "server gain",
        _compared_gain("over_best", "server_gain"),
        gap(1),
        "points",
        "up",
        "gain",
    ),
    Column(
        "gain-same",
        "gain over the same client",
        _compared_gain("over_same", "gain_over_same_client"),
        gap(1),
        "points",
        "up",
    ),
    Column("rate", "rate", _over("true_rate_nats"), mean_sd(1), "nats", "down"),
    Column("macs", "client MMAC", _over("client.macs"), table.shared(1, 1e-6), "", "down"),
    Column("params", "client parameters", _over("client.params"), THOUSANDS, "k", "down"),
    Column("wire", "wire", _over("client.wire_floats"), table.shared(0), "", "down"),
    Column("stored", "stored", _over("client.stored"), THOUSANDS, "k", "down"),
    Column("server-macs", "server MMAC", _over("server.macs_per_image"), mean_sd(1, 1e-6)),
    Column("bits", "bits per image", _over("client.bits_per_image"), mean_sd(0), "", "down"),
    Column("seconds", "train", _over("seconds.train"), mean_sd(0), "s"),
    Column("flags", "flags", lambda row: _flag_count(row.group), fixed(0), "", "down"),
    Column("remark", "remark", lambda row: remarks(row.group), TEXTS, brief="remark"),
)

EVERYTHING = Table(  # what CSV and JSON hold of a row
    *COMPARE.columns,
    Column("rec-accuracy", "accuracy on reconstructions", _rebuilt, SHARES, "%", "down", "rec%"),
    Column(
        "ssim-zeropad",
        "zero-pad SSIM",
        _over("strongest.ssim_zeropad"),
        mean_sd(4),
        better="down",
        brief="SSIM₀",
    ),
    Column("defence", "defence", _distinct("config.defence"), TEXTS),
    Column("dataset", "dataset", _distinct("config.dataset"), TEXTS),
    Column("aux", "aux", lambda row: [aux_of(row.group)], TEXTS),
    Column("profile", "profile", _distinct("audit.profile"), TEXTS),
    Column("epochs", "epochs", _over("config.epochs"), table.shared(0)),
    Column("lambd", "lambd", _over("config.lambd"), table.shared(3)),
    Column("noise", "noise", _over("config.noise_std"), table.shared(3)),
    Column("ceiling", "ceiling MSE", _over("ceiling.mse"), mean_sd(4)),
)

REFERENCE = Table(  # rows attacked as in the reference documents; reported ones are mappings
    *EVERYTHING.only("row", "net", "seeds").columns,
    Column("accuracy", "task accuracy", _over("accuracy"), SHARES, "%", "up", "acc%"),
    *EVERYTHING.only("rec-accuracy", "mse", "by", "ssim-zeropad").columns,
    Column("psnr", "pooled PSNR", _over("strongest.psnr_pooled"), mean_sd(2), "dB", "down", "PSNR"),
    Column("source", "source", lambda row: ", ".join(["measured", *remarks(row.group)])),
)

ReferenceRow = dict[str, Any]


def reported_reference(name: str, row: Published) -> ReferenceRow:
    """A published row of `REFERENCE`: one run against one attack."""
    return {
        "row": f"*{name.removesuffix('-test90')}*", "net": ["vgg11"], "seeds": [1],
        "accuracy": [row.accuracy], "rec-accuracy": [row.reconstruction_accuracy],
        "mse": [row.mse], "by": ["decoder"], "ssim-zeropad": [row.ssim_zeropad],
        "psnr": [row.psnr_pooled], "source": row.source,
    }  # fmt: skip
