"""The pages about one run: why it does or does not protect, what to change, everything else folded.

`explain` adds its pictures to the page that `doctor` writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from splitveil.insight.diagnosis import Diagnosis, RunHistory, diagnose
from splitveil.insight.verdict import Judgement, judge, undefended_beside
from splitveil.record.files import RunFiles, folder_names
from splitveil.report.answer_page import AnswerPage, Panel, write_answer
from splitveil.report.canvas import drawable
from splitveil.report.columns import WORDS, column
from splitveil.report.curves import training_curves
from splitveil.report.first_screen import FrontTable, front_rows, front_tables, stamps
from splitveil.report.gains import beside
from splitveil.report.words import Lang, sentence, word
from splitveil.table import Table

DOCTOR_PAGE = "doctor.html"


def found_table(lang: Lang) -> Table:
    """What the doctor found, and what to change."""
    return Table(
        column("column.finding", lambda found: word(f"rule.{found.name}", lang), WORDS),
        column("column.seen", lambda found: found.seen, WORDS),
        column("column.advice", lambda found: found.advice, WORDS),
        style="prose",
    )


def findings_panel(found: Sequence[Diagnosis], lang: Lang) -> Panel:
    """The doctor's findings as a part of a page."""
    title = word("cause.found", lang)
    if not found:
        return Panel(title=title, text=word("cause.nothing-found", lang))
    return Panel(title=title, table=found_table(lang).render(found, "html", lang))


def curves_panel(files: RunFiles, lang: Lang) -> Panel:
    """The training curves of a run with at least one epoch."""
    return Panel(
        title=sentence("explain.curves-title").plain(lang),
        text=sentence("explain.curves").plain(lang),
        file="curves.png",
        png=training_curves([files], lang=drawable(lang)[0]).png,
    )


def rows_of(case: RunHistory, lang: Lang, *, poor: bool) -> list[FrontTable]:
    """The run, and the undefended one beside it, with what is rebuilt of the same images."""
    if case.files is None or not case.files.audited:
        return []
    runs = [replace(case.files, record=case.beside)]
    bare = case.plain.files if case.plain is not None else undefended_beside(case)
    if bare is not None and bare.audited:
        runs.append(replace(bare, record=beside(bare.record, case.rows)))
    names = folder_names([run.path.resolve() for run in runs])
    first, *rest = front_rows([replace(run, name=names[run.path.resolve()]) for run in runs])
    return front_tables([replace(first, poor=poor or first.poor), *rest], lang)[:1]


def run_page(
    case: RunHistory, verdict: Judgement, title: str, lang: Lang, *, panels: Sequence[Panel],
    chart: Panel | None,
) -> AnswerPage:  # fmt: skip
    """The page about a run.

    Args:
        case: The run.
        verdict: Why it does or does not protect.
        title: Entry of the locale files with name, defence, dataset and seed of the run.
        lang: Language of the page.
        panels: Everything that is folded.
        chart: The picture that shows the cause, or what stands in its place.
    """
    audited = case.files is not None and case.files.audited
    kind, _, path = str(case.config["dataset"]).partition(":")
    facts = {key: str(case.config[key]) for key in ("defence", "seed")}
    facts["dataset"] = f"{kind}:{Path(path).name}" if path else kind
    return AnswerPage(
        title=sentence(title, name=case.name, **facts).plain(lang),
        verdict=verdict.said,
        front=rows_of(case, lang, poor=verdict.poor),
        facts=verdict.facts,
        chart=chart,
        panels=panels,
        stamps=stamps([case.files]) if case.files is not None else (),
        legend=word("cause.legend", lang) if audited else "",
        footer=word("explain.footer", lang),
    )


def write_doctor(folder: Path, case: RunHistory, lang: Lang = "en") -> list[Path]:
    """Write `doctor.html` and its picture into a folder.

    Args:
        folder: Made when absent.
        case: The run, with at least one epoch in its log.
        lang: Language of the page.

    Returns:
        The paths, the page first.
    """
    verdict = judge(case)
    findings = findings_panel(diagnose(case, lang), lang)
    panels = [] if case.files is None else [curves_panel(case.files, lang)]
    page = run_page(case, verdict, "cause.doctor-title", lang, panels=panels, chart=findings)
    return write_answer(folder / DOCTOR_PAGE, page, lang)
