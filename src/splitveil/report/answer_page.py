"""A page whose first screen is one answer: sentences, pictures, a few figures, all else folded.

`insight` writes such a page about one run, `experiments` about a sweep; both look like the report.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitveil.io import put_all
from splitveil.report.canvas import png_uri
from splitveil.report.first_screen import FrontTable
from splitveil.report.page import fill
from splitveil.report.words import Lang, Sentence


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure that carries the answer, and what it is."""

    value: str
    label: Sentence


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of a page: a picture with its words, a table, or a text alone.

    Args:
        title: Its heading.
        text: What the picture shows; without one, why there is none.
        file: Name of the picture's file beside the page.
        png: The picture.
        table: An HTML table.
    """

    title: str
    text: str = ""
    file: str = ""
    png: bytes | None = None
    table: str = ""

    @property
    def uri(self) -> str:
        """The picture as a data: address."""
        return png_uri(self.png or b"")


@dataclass(frozen=True, kw_only=True)
class AnswerPage:
    """What such a page holds.

    Args:
        title: Its title.
        verdict: The answer.
        front: Rows with pictures below it.
        facts: The figures that carry it.
        chart: The picture or the table that stands beside them.
        panels: Everything else, folded.
        stamps: What to write on numbers of a weak audit.
        legend: What the figures mean.
        footer: The last line.
    """

    title: str
    verdict: Sequence[Sentence]
    front: Sequence[FrontTable] = ()
    facts: Sequence[Fact] = ()
    chart: Panel | None = None
    panels: Sequence[Panel] = ()
    stamps: Sequence[Sentence] = ()
    legend: str = ""
    footer: str = ""


def write_answer(target: Path, page: AnswerPage, lang: Lang = "en") -> list[Path]:
    """Write the page, and its pictures beside it; every string is escaped.

    Args:
        target: Path of the page; its folder is made when absent.
        page: What it holds.
        lang: Its language.

    Returns:
        The paths, the page first. Every file is complete or not there.
    """
    html = fill("answer.html.j2", lang, "page.js.j2", **vars(page))
    pictures = [page.chart] if page.chart is not None else []
    files = {target: html.encode("utf-8")}
    files |= {target.parent / p.file: p.png for p in (*pictures, *page.panels) if p.png and p.file}
    return put_all(target.parent, files)
