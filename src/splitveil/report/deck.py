"""The report as a deck of slides in one HTML file: arrow keys turn it, it prints one per page."""

from pathlib import Path

from splitveil.io import put_all
from splitveil.report import sentences
from splitveil.report.columns import CERTIFICATES, SUMMARY, audited
from splitveil.report.figures import Pictures, strips
from splitveil.report.page import ReportContent, fill

SLIDES = "slides.html"
ROWS = 9  # of a table on a slide
PER_SLIDE = 4  # runs whose reconstructions share a slide
PICTURE_SLIDES = 3
CAVEATS = 8
SHOWN = SUMMARY.only("run", "defence", "accuracy", "strongest", "by", "ceiling", "leakage")

ORIGIN = ("config.dataset", "config.net", "audit.profile", "audit.aux", "audit.scored",
          "versions.splitveil", "versions.commit", "versions.torch", "device")  # fmt: skip


def write_deck(content: ReportContent, folder: Path) -> Path:
    """Write the deck into a folder.

    Args:
        content: What the report is about.
        folder: Where it goes; made when absent.

    Returns:
        The path of the deck.

    Example:
        `write_deck(read_runs([Path("runs/first")]), Path("report"))`
    """
    deck = render_slides(content, content.pictures)
    return put_all(folder, {folder / SLIDES: deck.encode("utf-8")})[0]


def render_slides(content: ReportContent, pictures: Pictures) -> str:
    """The deck as HTML text."""
    runs, lang = content.runs, content.lang
    shown = runs if len(runs) <= ROWS else content.key_runs
    checked = audited(runs)[:ROWS]
    pictured = [run for run in runs if run.gallery is not None][: PER_SLIDE * PICTURE_SLIDES]
    strongest = [strip for strip in strips(pictured)[0] if strip.strongest]
    # Different values of the main questions of the passports stand side by side.
    origin = [(key, sentences.distinct(runs, key)) for key in ORIGIN]
    return fill(
        "slides.html.j2",
        lang,
        "slides.js.j2",
        title=content.heading,
        verdict=sentences.verdict(runs),
        statement=sentences.statement(runs),
        summary=SHOWN.render(shown, "html", lang),
        more_rows=len(runs) - len(shown),
        pictures=pictures,
        sources=content.sources,
        albums=[strongest[at : at + PER_SLIDE] for at in range(0, len(strongest), PER_SLIDE)],
        audit=CERTIFICATES.render(checked, "html", lang) if checked else "",
        caveats=sentences.caveats(runs)[-CAVEATS:],
        origin=[(key, ", ".join(values)) for key, values in origin if values],
    )
