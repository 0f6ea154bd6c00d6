"""One self-contained HTML page about some runs; its pictures and other forms beside it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from splitveil.errors import RunError
from splitveil.report import checks, grid, sentences, tables, tiles
from splitveil.report.files import RunFiles
from splitveil.report.pictures import Pictures, draw
from splitveil.report.prose import latex, markdown
from splitveil.report.published import Published
from splitveil.report.slides import render_slides
from splitveil.report.subject import Subject
from splitveil.report.templates import fill
from splitveil.report.words import Lang, listed, word
from splitveil.report.words.reading import TERMS
from splitveil.train.files import replacing

PAGE, SLIDES, MARKDOWN, LATEX = "report.html", "slides.html", "report.md", "report.tex"


def render(
    runs: Sequence[RunFiles],
    title: str | None = None,
    *,
    lang: Lang = "en",
    published: Mapping[str, Published] | None = None,
    skipped: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as HTML text: one small script inside, no network, pictures inside."""
    subject = Subject(runs=runs, title=title, lang=lang, published=published or {}, skipped=skipped)
    return fill_page(subject, draw(runs, subject.published))


def write_report(
    runs: Sequence[RunFiles],
    target: Path,
    *,
    title: str | None = None,
    lang: Lang = "en",
    published: Mapping[str, Published] | None = None,
    skipped: Sequence[tuple[str, str]] = (),
    slides: bool = False,
) -> list[Path]:
    """Write the page, the same as Markdown, a LaTeX table, every figure as PNG and SVG.

    `target` is a folder (made when absent) or the path of the page itself, ending in .html.
    `slides` adds a deck. Returns the paths, the page first. Every file is complete or not there.
    """
    page = target if target.suffix == ".html" else target / PAGE
    folder = page.parent
    subject = Subject(runs=runs, title=title, lang=lang, published=published or {}, skipped=skipped)
    pictures = draw(runs, subject.published)
    contents = {page: fill_page(subject, pictures)}
    if slides:
        contents[folder / SLIDES] = render_slides(subject, pictures)
    contents[folder / MARKDOWN] = markdown(subject, pictures)
    contents[folder / LATEX] = latex(subject)
    files = {path: text.encode("utf-8") for path, text in contents.items()}
    for picture in pictures.listed():
        files |= {folder / name: content for name, content in picture.files().items()}
    return put_all(folder, files)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise RunError(
            f"cannot write {path}: {err}; choose a folder you may write to, or free some space"
        ) from err


def put_all(folder: Path, files: Mapping[Path, bytes]) -> list[Path]:
    """Make a folder and put files in place; returns their paths, in order."""
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        put(path, content)
    return list(files)


def put(path: Path, content: bytes) -> None:
    """Put a file in place in one step; its folder must be there."""
    with _explained(path), replacing(path) as file:
        file.write(content)


def fill_page(subject: Subject, pictures: Pictures) -> str:
    """The template of the page with everything in its place."""
    runs, lang = subject.runs, subject.lang
    strips, cut = tiles.strips(runs)
    audited = checks.audited(runs)
    sheet, repeats = subject.leaks, subject.repeats
    return fill(
        "page.html.j2",
        lang,
        "page.js.j2",
        title=subject.heading,
        statement=sentences.statement(runs),
        verdict=sentences.verdict(runs),
        skipped=subject.skipped,
        cards=[card(row) for row in subject.key_rows],
        all_runs=len(runs),
        pictures=pictures,
        sources=subject.sources,
        albums=[(run.name, [s for s in strips if s.run == run.name]) for run in runs],
        strips_left_out=cut,
        left_out=tuple(grid.left_out(runs)),
        without_gallery=tuple(run.name for run in runs if run.gallery is None),
        without_metrics=tuple(run.name for run in runs if not run.metrics),
        columns=tables.columns(lang),
        rows=[tables.format_row(row) for row in subject.rows],
        attack_columns=tables.attack_columns(lang),
        attack_groups=attack_groups(subject),
        audit_columns=checks.audit_columns(lang) if audited else (),
        audit_rows=[checks.audit_row(run, lang) for run in runs] if audited else [],
        flags=flag_rows(subject),
        refusals=[refusal_row(subject, *found) for found in checks.refusals(runs)],
        leaks=sheet,
        leak_rows=[[row[0][1:-1], *row[1:]] for row in sheet.rows] if sheet else [],
        repeats=repeats,
        repeat_rows=[[row[0][1:-1], *row[1:]] for row in repeats.rows] if repeats else [],
        terms=TERMS,
        caveats=sentences.caveats(runs),
        passports=[(run.name, sentences.passport(run)) for run in runs],
    )


def attack_groups(subject: Subject) -> list[list[list[str]]]:
    """Cells of the attacks, run by run; runs without an attack are left out."""
    groups = [tables.attack_rows(run, subject.lang) for run in subject.runs]
    return [[tables.format_attack_row(r, subject.lang) for r in rows] for rows in groups if rows]


def flag_rows(subject: Subject) -> list[list[str]]:
    """Cells of the flags: run, name, what was seen, what to do."""
    return [
        [run.name, *(checks.written(v, subject.lang) for v in (f.title, f.seen, f.remedy))]
        for run in subject.runs
        for f in checks.flags_of(run) or ()
    ]


def refusal_row(
    subject: Subject, names: tuple[str, ...], kinds: tuple[str, ...], reason: str
) -> list[str]:
    """Cells of a refusal: runs, certificates, reason."""
    lang = subject.lang
    return [
        listed(names, lang),
        listed([word(f"certificate.{k}", lang) for k in kinds], lang),
        reason,
    ]


def card(row: tables.Row) -> dict[str, str | float | None]:
    """The key numbers of a run, and the length of its leakage bar in per cent."""
    leak = row.leakage
    return {
        "name": row.name,
        "defence": row.defence or tables.NOTHING,
        "accuracy": tables.percent(row.accuracy, 2),
        "mse": tables.format_mse(row.strongest_mse),
        "by": row.strongest_by,
        "ceiling": tables.format_mse(row.ceiling_mse),
        "leakage": tables.percent(leak, 1),
        "bar": None if leak is None else round(100 * min(max(leak, 0.0), 1.0), 1),
    }
