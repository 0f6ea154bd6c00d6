"""What repeated sendings of one image add, run by run."""

from collections.abc import Sequence
from typing import Any

from splitveil.report.compare import Sheet
from splitveil.report.fields import number, section, text
from splitveil.report.files import RunFiles
from splitveil.report.tables import NOTHING, Column, percent
from splitveil.report.words import Lang, said, word

Json = dict[str, Any]

KINDS = {
    "between": "repeats.between",
    "never": "repeats.never",
    "cannot": "repeats.cannot",
    "nothing": "repeats.nothing",
}


def repeat_sheet(runs: Sequence[RunFiles], lang: Lang = "en") -> Sheet | None:
    """Leakage by the number of sendings, and where it doubles; None where no record has it."""
    known = [(run.name, run.record) for run in runs if section(run.record, "leaks", "repeats")]
    if not known:
        return None
    sendings = sorted({k for _, r in known for k in _sendings(r)}, key=int)
    return Sheet(
        title=word("heading.repeats", lang),
        caption=word("repeats.caption", lang),
        columns=(
            Column(heading=word("leaks.row", lang), numeric=False),
            *(Column(heading=f"k = {k}", unit="%", arrow="↓") for k in sendings),
            Column(heading=word("repeats.doubles", lang), numeric=False),
            Column(heading=word("repeats.attack", lang), numeric=False),
            Column(heading=word("repeats.images", lang)),
        ),
        rows=tuple(
            (
                f"`{name}`",
                *(percent(number(r, "leaks", "repeats", "leakage", k), 1) for k in sendings),
                doubles(r, lang),
                text(r, "leaks", "repeats", "attack") or NOTHING,
                text(r, "leaks", "repeats", "n") or NOTHING,
            )
            for name, r in known
        ),
    )


def doubles(record: Json | None, lang: Lang = "en") -> str:
    """Where a record's leakage doubles, in words; what is of no kind known here as it stands."""
    place = ("leaks", "repeats", "doubles")
    kind, after, by = (text(record, *place, key) for key in ("kind", "after", "by"))
    key = KINDS.get(kind or "")
    if key is None:
        return text(record, *place, "says") or NOTHING
    if kind == "nothing" and by is not None:
        key = "repeats.later"
    if kind == "between" and (after, by) == ("1", "2"):
        key = "repeats.at"
    most = max(_sendings(record), key=int, default=NOTHING)
    return said(key, after=after or NOTHING, by=by or NOTHING, most=most).plain(lang)


def _sendings(record: Json | None) -> list[str]:
    return [k for k in section(record, "leaks", "repeats", "leakage") if k.isdecimal()]
