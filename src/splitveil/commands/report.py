"""`splitveil report`: one page about some runs, in English or Chinese, and slides if asked."""

from pathlib import Path
from typing import Annotated

import typer


def report(  # noqa: PLR0917 - every option of the command, as typer wants them
    runs: Annotated[list[Path], typer.Argument(help="Folders of audited runs.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for the page (default: the first run's).")
    ] = None,
    lang: Annotated[str, typer.Option(help="Language of the page: en or zh.")] = "en",
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    slides: Annotated[
        bool, typer.Option("--slides", help="Write slides.html too: arrow keys, one per page.")
    ] = False,
    published: Annotated[
        Path | None, typer.Option(help="JSON of published rows, drawn as hollow marks.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Build one page with tables and pictures from audited runs.

    A folder that is broken or is no run is named and left out. Beside the page: every figure as
    PNG and SVG. `splitveil compare` writes tables as Markdown and LaTeX.

    Example: `splitveil report runs/demo/none runs/demo/veil --out page`

    Example: `splitveil report runs/demo/* --out page --lang zh --slides`
    """
    from dataclasses import replace

    from splitveil.console import out, show_json, show_table, warn
    from splitveil.record.groups import shortfalls
    from splitveil.record.schema import finite
    from splitveil.report.columns import SUMMARY
    from splitveil.report.comparison import elsewhere, read_published
    from splitveil.report.deck import write_deck
    from splitveil.report.page import read_runs, write_report
    from splitveil.report.sentences import distinct
    from splitveil.report.words import language

    chosen = language(lang)
    beside = {} if published is None else read_published(published)
    content = replace(read_runs(runs), lang=chosen, title=title, published=beside)
    for path, reason in content.skipped:
        warn(f"left out: {path}: {reason}")
    for line in elsewhere(beside, distinct(content.runs, "config", "dataset")):
        warn(line)
    target = out_dir or content.runs[0].path
    pages = write_report(content, target)[:1]
    if slides:
        pages.append(write_deck(content, pages[0].parent))
    if json_:
        show_json(finite({str(run.path): run.record for run in content.runs}))
        return
    show_table("Accuracy, and what the attacker got", *SUMMARY.brief(content.runs))
    less: dict[str, list[str]] = {}
    for run in content.runs:
        less.setdefault(", ".join(shortfalls(run.record)), []).append(run.name)
    for words, names in less.items():
        if words:
            warn(f"less than a standard audit of test images ({words}): {', '.join(names)}")
    for page in pages:
        out.print(f"page: {page}", highlight=False, markup=False, soft_wrap=True)
