"""The commands that read runs: `compare`, `report`, `explain`, `doctor`."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from splitveil.cli import console
from splitveil.cli.console import OptPath, OptText, OptTexts
from splitveil.errors import ConfigError
from splitveil.io import Json


def given_path(text: str) -> Path:
    """A path of the command line; an unset shell variable gives an empty one, which is refused."""
    if not text.strip():
        raise BadParameter("got an empty path; give a run folder, a record, or . for this folder")
    return Path(text)


def refuse_shared(files: Mapping[str, Path | None]) -> None:
    """Refuse a file that two options name: the second would replace the first."""
    places = {name: os.path.realpath(path) for name, path in files.items() if path is not None}
    for place in places.values():
        same = [name for name in places if places[name] == place]
        if len(same) > 1:
            raise ConfigError(
                f"{' and '.join(same)} name the same file, {place}; give each its own"
            )


def refuse_former(options: Mapping[str, object], paths: list[Path]) -> None:
    """Say what to use instead of options that are gone."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        named = ", ".join(f'"{path}"' for path in paths)
        raise ConfigError(
            f"compare no longer has {' and '.join(given)}; filter, sort and choose columns with "
            f"pandas: `import splitveil as sv; sv.records([{named}]).to_frame()`"
        )


def compare(  # noqa: PLR0917 - every option of the command, as typer wants them
    paths: Annotated[
        list[Path],
        Argument(parser=given_path, help="Run folders, records, or folders of them."),
    ],
    published: console.PublishedOption = None,
    against: Annotated[OptText, Option(help="Row to compare all others with.")] = None,
    markdown: Annotated[OptPath, Option("--md", help="Markdown file for the tables.")] = None,
    csv: Annotated[OptPath, Option(help="CSV file for every number, not rounded.")] = None,
    latex: Annotated[OptPath, Option(help="LaTeX file for the tables (booktabs).")] = None,
    json_: console.JsonFlag = False,
    where: Annotated[OptTexts, Option(hidden=True)] = None,
    sort: Annotated[OptText, Option(hidden=True)] = None,
    columns: Annotated[OptText, Option(hidden=True)] = None,
) -> None:
    """Compare audited runs: one row per defence, as mean ± sd over the seeds.

    `--against ROW` adds a table of differences, paired by seed where the seeds agree. A remark
    says if a row is less than a standard audit of test images.

    --csv and --json hold these columns: row, defence, dataset, net, aux, profile, by, seeds,
    accuracy, mse, ssim, psnr, worst, leakage, sent, leakage-sent, exposure, identified,
    server-gain, gain-same, rate, macs, params, wire, stored, server-macs, bits, seconds, flags,
    remark, epochs, lambd, noise, ceiling, rec-accuracy, ssim-zeropad, reported-accuracy,
    reported-mse. Accuracies are shares, gains are points. For pandas, use
    `sv.records(paths).to_frame()` in Python.

    Example: `splitveil compare results/cifar10 --published results/published.json`

    Example: `splitveil compare results/digits --against none --csv digits.csv`
    """
    from splitveil.io import finite, put
    from splitveil.record.groups import dataset_of, find_records
    from splitveil.report.columns import elsewhere, read_published
    from splitveil.report.comparison import compare_records, warnings
    from splitveil.table import csv_text

    refuse_former({"--where": where, "--sort": sort, "--columns": columns}, paths)
    refuse_shared({"--published": published, "--md": markdown, "--csv": csv, "--latex": latex})
    reported = {} if published is None else read_published(published)
    found = find_records(paths)
    made = compare_records(found, reported, against)
    tables = [pair for comparison in made for pair in comparison.tables()]
    if markdown is not None:
        put(markdown, "\n".join(t.render(rows, "markdown") for t, rows in tables).encode())
    if csv is not None:
        put(csv, csv_text([row for comparison in made for row in comparison.exact()]).encode())
    if latex is not None:
        put(latex, "\n".join(t.render(rows, "latex") for t, rows in tables).encode())
    if json_:
        console.show_json(finite([table for comparison in made for table in comparison.to_dicts()]))
    else:
        for table, rows in tables:
            console.show_table(table.title, *table.brief(rows))
    for comparison in made:
        if against is not None and against not in {g.name for g in comparison.track.groups}:
            console.warn(f"{comparison.track.title}: no differences, since it has no row {against}")
    datasets = {dataset_of(group) for group in found.groups}
    for line in (*elsewhere(reported, datasets), *warnings(found)):
        console.warn(line)


def doctor(
    run: console.RunFolder,
    plain: Annotated[OptPath, Option(help="Undefended run (default: one next to it).")] = None,
    out_dir: Annotated[OptPath, Option("--out", help="Also write a page into this folder.")] = None,
    lang: console.Language = "en",
    json_: console.JsonFlag = False,
) -> None:
    """Find problems in a run's training log, and say which setting to change and how far.

    `--out` also writes `doctor.html`: why the run does or does not protect, with pictures, and what
    to change.

    Example: `splitveil doctor runs/first`

    Example: `splitveil doctor runs/first --out page`

    Example: `splitveil doctor runs/first --lang zh`
    """
    from splitveil.insight.diagnosis import RULES, diagnose, read_case
    from splitveil.insight.run_page import write_doctor
    from splitveil.report.words import language, sentence, word

    chosen = language(lang)
    case = read_case(run, plain)
    findings = diagnose(case, chosen)
    counted = {0: "doctor.none", 1: "doctor.one"}.get(len(findings), "doctor.many")
    lines = [sentence(counted, run=str(run), count=str(len(findings))).plain(chosen)]
    for at, finding in enumerate(findings, start=1):
        seen = sentence("doctor.seen", what=finding.seen).plain(chosen)
        advice = sentence("doctor.do", what=finding.advice).plain(chosen)
        lines += [f"{at}. {word(f'rule.{finding.name}', chosen)}", f"   {seen}", f"   {advice}"]
    found: Json = {"run": str(run), "rules": list(RULES), "findings": list(map(asdict, findings))}
    if out_dir is not None:
        files = write_doctor(out_dir, case, chosen)
        found["files"] = [str(path) for path in files]
        lines.append(sentence("audit.page", page=str(files[0])).plain(chosen))
    console.show_result(found, *lines, json_=json_)


def explain(
    run: Annotated[OptPath, Argument(help="Folder of a trained run, such as runs/first.")] = None,
    out_dir: console.OutFolder = None,
    flow: Annotated[
        OptText,
        Option(help="Flow chart of a method, without a run: gated-att, slot-cross, cem, veil …"),
    ] = None,
    lang: console.Language = "en",
    json_: console.JsonFlag = False,
) -> None:
    """Say why a run does or does not protect, with pictures; or show how a method works.

    With a run, the page `explain.html` and its pictures go to the run's folder, or to that of
    `--out`. With `--flow NAME`, the method's flow chart is written as SVG and PDF to this folder,
    or to that of `--out`; with a run as well, the present values of its gates and learned scalars
    are printed. Names: split, attention, gated-att, gated-att-simple, gated-att-trace, slot-cross,
    cem, veil.

    Example: `splitveil explain runs/first --out page`

    Example: `splitveil explain --flow slot-cross --lang zh --out page`

    Example: `splitveil explain runs/first --flow slot-cross`
    """
    if flow is not None:
        _flow_chart(flow, lang, out_dir or Path(), run, json_=json_)
        return
    if run is None:
        raise ConfigError("explain needs a run folder, or --flow NAME for a method's chart")
    console.start()
    from splitveil.insight.explanation import explain_run
    from splitveil.report.canvas import drawable
    from splitveil.report.words import language, sentence

    chosen = language(lang)
    paths, numbers = explain_run(run, out_dir, chosen)
    if remark := drawable(chosen)[1]:
        console.warn(remark)
    why = numbers.pop("why")
    found = {"run": str(run), "why": why, "files": list(map(str, paths)), "numbers": numbers}
    told = sentence("audit.page", page=str(paths[0])).plain(chosen)
    console.show_result(found, why, told, json_=json_)


def _flow_chart(name: str, lang: str, folder: Path, run: Path | None, *, json_: bool) -> None:
    """Write a method's chart; of a run, also say where its gates and learned scalars stand."""
    from splitveil.record.files import read_run
    from splitveil.report.curves import gate_values
    from splitveil.report.method_charts import write_charts
    from splitveil.report.words import language, sentence

    chosen = language(lang)
    values = {} if run is None else gate_values(read_run(run, audited=False))
    paths, remark = write_charts(name, folder, chosen)
    if remark:
        console.warn(remark)
    found: Json = {"flow": name, "files": [str(path) for path in paths]}
    lines = [sentence("explain.chart", path=str(path)).plain(chosen) for path in paths]
    if run is not None:
        found["values"] = values
        said = "explain.values" if values else "explain.no-values"
        told = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        lines.append(sentence(said, run=str(run), values=told).plain(chosen))
    console.show_result(found, *lines, json_=json_)


def report(  # noqa: PLR0917 - every option of the command, as typer wants them
    runs: Annotated[list[Path], Argument(help="Folders of audited runs.")],
    out_dir: console.OutFolder = None,
    lang: console.Language = "en",
    title: Annotated[OptText, Option(help="Title of the page.")] = None,
    pptx: Annotated[bool, Option("--pptx", help="Also a PowerPoint deck, deck.pptx.")] = False,
    published: console.PublishedOption = None,
    json_: console.JsonFlag = False,
    slides: Annotated[bool, Option("--slides", hidden=True)] = False,
) -> None:
    """Build one page with tables and pictures from audited runs.

    The page and its figures, as PNG and SVG, go to the first run's folder, or to that of `--out`. A
    folder that is not a run, or a broken one, is named and left out. `--pptx` adds a deck whose
    texts, tables and charts can be edited. For tables in Markdown or LaTeX use `splitveil compare`.

    Example: `splitveil report runs/demo/undefended runs/demo/veil --out page`

    Example: `splitveil report runs/demo/* --out page --lang zh --pptx`
    """
    from splitveil.report.deck import write_deck
    from splitveil.report.page import read_runs, write_report
    from splitveil.report.words import sentence, word

    if slides:
        raise ConfigError(
            "report no longer writes HTML slides (--slides); use --pptx for a PowerPoint deck"
        )
    content = read_runs(runs, lang=lang, title=title, published=published)
    for line in content.notes:
        console.warn(line)
    target = out_dir or content.runs[0].path
    folder = target.parent if target.suffix == ".html" else target
    decks = [write_deck(content, folder)] if pptx else []  # first: python-pptx may be missing
    pages = write_report(content, target)[:1]
    if json_:
        console.show_records(content.runs)
        return
    console.show_table(word("audit.runs", content.lang), *content.overview)
    for line in content.reservations:
        console.warn(line)
    told = [("audit.page", pages[0]), *(("audit.deck", deck) for deck in decks)]
    console.print_lines(*(sentence(key, page=str(path)).plain(content.lang) for key, path in told))
