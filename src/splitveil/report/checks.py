"""What an audit says beside its numbers: flags, certificates, and why a certificate was refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitveil.errors import RunError
from splitveil.report.fields import number, section, text
from splitveil.report.files import RunFiles
from splitveil.report.rows import BRIEF
from splitveil.report.tables import NOTHING, Column, decimals, percent
from splitveil.report.words import TABLE, Lang, Said, Value, listed, said, word

CERTIFICATES = ("capacity", "gallery", "population")
VACUOUS = "vacuous"  # how a record begins the reason why a bound that excludes nothing is refused


@dataclass(frozen=True, kw_only=True)
class FlagSeen:
    """A flag of a record: its name, what was seen, and what to do."""

    name: str
    seen: str
    advice: str

    @property
    def title(self) -> Value:
        """The name, in the reader's language where it is known."""
        return _known(f"flag.{self.name}", self.name)

    @property
    def remedy(self) -> Value:
        """The advice, in the reader's language where it is the usual one."""
        key = f"advice.{self.name}"
        return said(key) if TABLE.get(key, ("", ""))[0] == self.advice else self.advice


def _known(key: str, otherwise: str) -> Value:
    return said(key) if key in TABLE else otherwise


def flags_of(run: RunFiles) -> tuple[FlagSeen, ...] | None:
    """The flags an audit raised; None where none was asked for."""
    found = (run.record or {}).get("flags")
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(flag, dict) for flag in found):
        raise RunError(f"`flags` must be a list of objects, got {found!r:.60}; audit the run again")
    return tuple(
        FlagSeen(
            name=text(flag, "name") or NOTHING,
            seen=text(flag, "seen") or NOTHING,
            advice=text(flag, "advice") or NOTHING,
        )
        for flag in found
    )


def brief_profile(run: RunFiles) -> str | None:
    """The profile of an audit with less than the standard budget; None where it had that."""
    profile = text(run.record, "audit", "profile")
    return profile if profile in BRIEF else None


def audit_columns(lang: Lang = "en") -> tuple[Column, ...]:
    """Columns of the audit table, in the order of `audit_row`."""
    nats = word("unit.nats", lang)
    return (
        Column(heading=word("column.run", lang), numeric=False),
        Column(heading=word("column.flags", lang), numeric=False),
        Column(heading=word("column.capacity", lang), unit=nats, arrow="↓"),
        Column(heading=word("column.gallery", lang), unit=nats, arrow="↓"),
        Column(heading=word("column.population", lang), unit=nats, arrow="↓"),
        Column(heading=word("column.identification", lang), unit="%", arrow="↑"),
    )


def audit_row(run: RunFiles, lang: Lang = "en") -> list[str]:
    """The cells of a run: names of its flags, its certificates in nats, Fano's error.

    An audit with less than the standard budget is named beside the flags.
    """
    flags = flags_of(run)
    names = [written(flag.title, lang) for flag in flags or ()] or [word("flags.none", lang)]
    brief = brief_profile(run)
    names += [] if brief is None else [said("flags.brief", profile=brief).plain(lang)]
    return [
        run.name,
        NOTHING if flags is None else listed(names, lang),
        *(_certified(run, kind, lang) for kind in CERTIFICATES),
        _identification(run, lang),
    ]


def written(value: Value, lang: Lang) -> str:
    """A value of a sentence as plain text."""
    return value.plain(lang) if isinstance(value, Said) else str(value)


def _certified(run: RunFiles, kind: str, lang: Lang) -> str:
    """A certificate in nats, the word for a refusal, or a dash for what was not asked for."""
    if text(run.record, "certificates", kind, "refused") is not None:
        return word("certificate.refused", lang)
    value = decimals(number(run.record, "certificates", kind, "nats"), 1)
    if value != NOTHING and vacuous(section(run.record, "certificates", kind)):
        return said("certificate.vacuous", value=value).plain(lang)
    return value


def vacuous(certificate: Mapping[str, object]) -> bool:
    """Whether a certificate says of itself, or through Fano's bound, that it excludes nothing.

    >>> vacuous({"vacuous": False}), vacuous({"identification_error": {"refused": "vacuous: 9 …"}})
    (False, True)
    """
    marked = certificate.get("vacuous")
    if isinstance(marked, bool):
        return marked
    return (text(certificate, "identification_error", "refused") or "").startswith(VACUOUS)


def _identification(run: RunFiles, lang: Lang) -> str:
    """Fano's error over the gallery in per cent, the word why there is none, or a dash."""
    gallery = section(run.record, "certificates", "gallery")
    reason = text(gallery, "refused") or text(gallery, "identification_error", "refused")
    if reason is None:
        return percent(number(gallery, "identification_error", "at_least"), 1)
    empty = reason.startswith(VACUOUS)
    return word("certificate.empty" if empty else "certificate.refused", lang)


def refusals(runs: Sequence[RunFiles]) -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Why certificates were refused: (runs, kinds, reason), equal reasons together."""
    reasons: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for run in runs:
        for kind in CERTIFICATES:
            reason = text(run.record, "certificates", kind, "refused")
            if reason is not None:
                names, kinds = reasons.setdefault(reason, ({}, {}))
                names[run.name] = kinds[kind] = None
    return [(tuple(names), tuple(kinds), reason) for reason, (names, kinds) in reasons.items()]


def audited(runs: Sequence[RunFiles]) -> bool:
    """Whether any record has flags or certificates."""
    return any(flags_of(r) is not None or section(r.record, "certificates") for r in runs)
