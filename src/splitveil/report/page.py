"""The report's page: its content, its HTML from `templates/`, and the pictures beside it."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path

from splitveil.errors import RunError
from splitveil.io import put_all
from splitveil.record.files import RunFiles, folder_names, read_run
from splitveil.record.schema import answers_well, exposure_of, text
from splitveil.record.statistics import undominated
from splitveil.report import columns, figures, first_screen, gains, sentences, words
from splitveil.report.canvas import drawable
from splitveil.report.columns import Published
from splitveil.report.first_screen import FrontRow
from splitveil.report.words import Lang, Sentence, sentence, word

PAGE = "report.html"
TEMPLATES = resources.files("splitveil.report") / "templates"
MANY_ROWS = 8
LARGEST_SHEET = 200_000  # bytes of the sheet of all attacks; a larger one stays beside the page


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """What a report is about, before it takes a form.

    Args:
        runs: The runs, under distinct names.
        skipped: Path and reason of each folder that was left out.
        lang: Language of the report.
        title: Its title; None for the usual one.
        published: Rows of others by name, drawn as hollow marks.

    >>> ReportContent(runs=(), title="Our client").heading
    'Our client'
    """

    runs: Sequence[RunFiles]
    skipped: Sequence[tuple[str, str]] = ()
    lang: Lang = "en"
    title: str | None = None
    published: Mapping[str, Published] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The title, or the usual one."""
        return self.title if self.title is not None else word("title", self.lang)

    @property
    def sources(self) -> Sentence | None:
        """Who published the hollow marks, if there are any."""
        said_by = [
            row.source for row in figures.comparable_rows(self.runs, self.published).values()
        ]
        names = {source.rpartition(", ")[0] or source for source in said_by}  # “paper, row”
        return sentence("caption.published", sources=tuple(sorted(names))) if names else None

    @property
    def notes(self) -> list[str]:
        """Folders and published rows that are not in the report, and why."""
        left_out = [
            sentence("audit.left-out", path=path, reason=words.translated(reason, self.lang)).plain(
                self.lang
            )
            for path, reason in self.skipped
        ]
        datasets = sentences.distinct(self.runs, "config.dataset")
        remark = drawable(self.lang)[1]
        return left_out + columns.elsewhere(self.published, datasets) + [remark] * bool(remark)

    @property
    def reservations(self) -> list[str]:
        """Which runs had less than a standard audit, and in what."""
        return sentences.reservations(self.runs, self.lang)

    @property
    def overview(self) -> tuple[list[str], list[list[str]]]:
        """Headings and cells of the runs' table that fit a terminal."""
        return columns.overview(self.runs, self.lang)

    @property
    def key_runs(self) -> Sequence[RunFiles]:
        """The runs in the first table: all of a few, else a selection of those nobody beats.

        The selection runs evenly along the front of accuracy and exposure, most private first.
        """
        if len(self.runs) <= MANY_ROWS:
            return self.runs
        ordered = sorted(best_runs(self.runs), key=_exposed)
        last, chosen = len(ordered) - 1, min(len(ordered), MANY_ROWS)
        return [ordered[round(at * last / max(chosen - 1, 1))] for at in range(chosen)]

    @cached_property
    def pictures(self) -> figures.Pictures:
        """Every picture for which the runs have data."""
        return figures.draw_pictures(self.runs, self.published, drawable(self.lang)[0])


def _exposed(run: RunFiles) -> float:
    """What orders runs, most private first: exposure, or the error where that is not known."""
    exposed = exposure_of(run.record)
    return -(run.record.strongest.mse or 0.0) if exposed is None else exposed


def best_runs(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Runs that no other run beats in both accuracy and exposure, in the order given.

    Runs at chance, or far below their net without a defence, are no rivals and not among them.
    """
    good = [run for run in runs if answers_well(run.record)]
    measured = [run for run in good if run.record.strongest.mse is not None]
    known = [
        (run, (a, -_exposed(run))) for run in measured if (a := run.record.accuracy) is not None
    ]
    best = undominated([point for _, point in known])
    return [run for (run, _), kept in zip(known, best, strict=True) if kept]


def read_runs(
    paths: Sequence[Path],
    *,
    lang: str = "en",
    title: str | None = None,
    published: Path | None = None,
) -> ReportContent:
    """Read run folders; one that is broken or no run is named and left out.

    A folder that is given twice counts once. A run that was not audited has its curves alone.

    Args:
        paths: The folders.
        lang: Language of the report: en or zh.
        title: Its title; None for the usual one.
        published: JSON file of published rows, drawn as hollow marks.

    Returns:
        What the report will hold, under names that tell the runs apart.

    Raises:
        RunError: No folder is left; it gives every reason.
        ConfigError: There is no such language.

    Example:
        `write_report(read_runs([Path("runs/first"), Path("runs/second")]), Path("report"))`
    """
    chosen = words.language(lang)
    beside = {} if published is None else columns.read_published(published)
    folders: dict[Path, Path] = {}
    for path in paths:
        folders.setdefault(path.resolve(), path)
    runs: list[RunFiles] = []
    skipped: list[tuple[str, str]] = []
    for path in folders.values():
        try:
            run = read_run(path, audited=False)
            if not (run.audited or run.metrics):  # a log alone gives curves
                read_run(path)  # says what is missing
            columns.check_leaks(run)
        except RunError as err:
            skipped.append((str(path), str(err)))
        else:
            runs.append(run)
    if not runs:
        why = "; ".join(f"{path}: {reason}" for path, reason in skipped)
        raise RunError(why or "no runs to report; name at least one run folder")
    names = folder_names([run.path.resolve() for run in runs])
    named = gains.runs_beside([replace(run, name=names[run.path.resolve()]) for run in runs])
    return ReportContent(
        runs=tuple(named), skipped=tuple(skipped), lang=chosen, title=title, published=beside
    )


def render(content: ReportContent) -> str:
    """The page as HTML text: one small script inside, no network, pictures inside.

    Args:
        content: What the report is about.

    Returns:
        A whole HTML document.

    Example:
        `html = render(read_runs([Path("runs/first")]))`
    """
    return fill_page(content, content.pictures)


def write_report(content: ReportContent, target: Path) -> list[Path]:
    """Write the page, and every figure as PNG and SVG.

    Args:
        content: What the report is about.
        target: A folder (made when absent), or the path of the page itself, ending in .html.

    Returns:
        The paths, the page first. Every file is complete or not there.

    Example:
        `page, *figures = write_report(read_runs([Path("runs/first")]), Path("report"))`
    """
    page = target if target.suffix == ".html" else target / PAGE
    files = {page: render(content).encode("utf-8")}
    for picture in content.pictures.listed():
        files |= {page.parent / name: data for name, data in picture.files().items()}
    return put_all(page.parent, files)


def fill_page(content: ReportContent, pictures: figures.Pictures) -> str:
    """The template of the page with everything in its place."""
    runs, lang = content.runs, content.lang
    rows = first_screen.front_rows(runs)
    shown, cut = figures.strips(runs)
    return fill(
        "page.html.j2",
        lang,
        "page.js.j2",
        title=content.heading,
        conclusions=concluded(rows),
        front=first_screen.front_tables(shown_rows(rows, content.key_runs), lang),
        not_shown=len(content.key_runs) < len(runs),
        stamps=first_screen.stamps(runs),
        skipped=[(path, words.translated(reason, lang)) for path, reason in content.skipped],
        all_runs=len(runs),
        pictures=pictures,
        sheet_fits=pictures.grid is None or len(pictures.grid.png) <= LARGEST_SHEET,
        sources=content.sources,
        albums=[(run.name, [s for s in shown if s.run == run.name]) for run in runs],
        strips_left_out=cut,
        left_out=tuple(figures.left_out(runs)),
        without_gallery=tuple(run.name for run in runs if run.gallery is None),
        without_metrics=tuple(run.name for run in runs if not run.metrics),
        **columns.html_tables(runs, lang),
        flags=[
            (run.name, *columns.written_flag(flag, lang))
            for run in runs
            for flag in columns.flags_of(run) or ()
        ],
        refusals=columns.refused_certificates(runs, lang),
        terms=words.TERMS,
        caveats=sentences.caveats(runs),
        passports=[(run.name, sentences.passport(run)) for run in runs],
    )


def concluded(rows: Sequence[FrontRow]) -> list[Sentence]:
    """The sentences at the top, or that rows on different images are not ranked."""
    tests = {
        (text(r, "config.dataset"), r.splits.test)
        for row in rows
        for r in (run.record for run in row.runs if run.audited)
    }
    if len(tests) > 1:
        return [sentence("verdict.mixed", count=str(sum(len(row.runs) for row in rows)))]
    return first_screen.conclusions(rows)


def shown_rows(rows: Sequence[FrontRow], key_runs: Sequence[RunFiles]) -> list[FrontRow]:
    """The rows of the key runs, in their order."""
    kept = {run.path for run in key_runs}
    return [row for row in rows if any(run.path in kept for run in row.runs)]


def policy(script: str) -> str:
    """What a page may do: run this one script, show pictures it carries, and reach nobody."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def fill(name: str, lang: Lang, script: str, **content: object) -> str:
    """The template `name` with everything in its place: every string is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def told(sentence: Sentence) -> Markup:
        return Markup(sentence.html(lang))  # noqa: S704 - values are escaped, patterns are ours

    def passage(sentences: Sequence[Sentence]) -> Markup:
        """Sentences one after another; a number and its % stay on one line."""
        text = words.APART[lang].join(told(said) for said in sentences)
        return Markup(text.replace(" %", "\N{NO-BREAK SPACE}%"))  # noqa: S704 - as above

    def read(name: str) -> str:
        return (TEMPLATES / name).read_text(encoding="utf-8")

    environment = Environment(loader=FunctionLoader(read), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)  # fmt: skip
    environment.globals |= {
        "say": lambda key, **values: told(sentence(key, **values)),
        "told": told,
        "passage": passage,
        "plain": lambda key, **values: sentence(key, **values).plain(lang),
        "row": lambda names: words.joined(names, lang),
        "html_lang": words.LANGS[lang],
    }
    source = read(script)
    content |= {"script": Markup(source), "policy": policy(source)}  # noqa: S704 - our own file
    return environment.get_template(name).render(content)


def write_page(runs: list[Path], folder: Path, lang: Lang = "en") -> Path:
    """Write the report of some runs; returns the page's path."""
    return write_report(ReportContent(runs=[read_run(path) for path in runs], lang=lang), folder)[0]
