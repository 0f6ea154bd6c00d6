"""The report as a deck of slides in one HTML file: arrow keys turn it, it prints one per page."""

from collections.abc import Sequence

from splitveil.report import checks, sentences, tables, tiles
from splitveil.report.files import RunFiles
from splitveil.report.pictures import Pictures
from splitveil.report.subject import Subject
from splitveil.report.templates import fill

ROWS = 9  # of a table on a slide
PER_SLIDE = 4  # runs whose reconstructions share a slide
PICTURE_SLIDES = 3
CAVEATS = 8
SHOWN = (0, 1, 3, 4, 5, 9, 10)  # columns of the summary that fit a slide
ORIGIN = ("config.dataset", "config.net", "audit.profile", "audit.aux", "audit.scored",
          "versions.splitveil", "versions.commit", "versions.torch", "device")  # fmt: skip


def render_slides(subject: Subject, pictures: Pictures) -> str:
    """The deck as HTML text."""
    runs, lang = subject.runs, subject.lang
    columns = tables.columns(lang)
    rows = [tables.format_row(row) for row in _shown(subject)]
    strongest = [strip for strip in tiles.strips(_with_pictures(runs))[0] if strip.strongest]
    albums = [strongest[at : at + PER_SLIDE] for at in range(0, len(strongest), PER_SLIDE)]
    return fill(
        "slides.html.j2",
        lang,
        "slides.js.j2",
        title=subject.heading,
        verdict=sentences.verdict(runs),
        statement=sentences.statement(runs),
        columns=[columns[at] for at in SHOWN],
        rows=[[row[at] for at in SHOWN] for row in rows],
        more_rows=len(runs) - len(rows),
        pictures=pictures,
        sources=subject.sources,
        albums=albums,
        audit_columns=checks.audit_columns(lang),
        audit_rows=[checks.audit_row(run, lang) for run in _audited(runs)[:ROWS]],
        caveats=sentences.caveats(runs)[-CAVEATS:],
        origin=_origin(runs),
    )


def _shown(subject: Subject) -> list[tables.Row]:
    """All rows of a few runs, else those that have cards."""
    return subject.rows if len(subject.rows) <= ROWS else subject.key_rows


def _with_pictures(runs: Sequence[RunFiles]) -> list[RunFiles]:
    return [run for run in runs if run.gallery is not None][: PER_SLIDE * PICTURE_SLIDES]


def _audited(runs: Sequence[RunFiles]) -> list[RunFiles]:
    return [run for run in runs if checks.audited([run])]


def _origin(runs: Sequence[RunFiles]) -> list[tuple[str, str]]:
    """What the runs' passports say about the main questions, different values side by side."""
    found = []
    for key in ORIGIN:
        values = sentences.distinct(runs, *key.split("."))
        if values:
            found.append((key, ", ".join(values)))
    return found
