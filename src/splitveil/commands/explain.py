"""`splitveil doctor` and `splitveil explain`: what to turn, and why a defence does what it does."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(help="Folder of the run.")]


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def doctor(
    run: RunFolder,
    plain: Annotated[
        Path | None,
        typer.Option(help="Undefended run to compare with (default: one beside the run)."),
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Read a run's log and say what to turn, and how far.

    Example: `splitveil doctor runs/first`
    """
    from splitveil.console import out, show_json
    from splitveil.doctor import RULES, diagnose
    from splitveil.doctor.reading import read_case

    findings = diagnose(read_case(run, plain))
    if json_:
        show_json(
            {"run": str(run), "rules": list(RULES), "findings": [asdict(f) for f in findings]}
        )
        return
    lines = [f"{run}: nothing to mend" if not findings else f"{run}: {len(findings)} to mend"]
    for at, finding in enumerate(findings, start=1):
        lines += [f"{at}. {finding.name}", f"   seen: {finding.seen}", f"   do: {finding.advice}"]
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def explain(
    run: RunFolder,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for the page (default: the run's).")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Draw what a run's defence looks at and what it does: `explain.html` and its pictures.

    Example: `splitveil explain runs/first --out page`
    """
    from splitveil.console import out, setup_logging, show_json
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()
    from splitveil.insight.explanation import explain_run

    paths, numbers = explain_run(run, out_dir)
    if json_:
        show_json({"run": str(run), "files": [str(path) for path in paths], "numbers": numbers})
    else:
        out.print(f"page: {paths[0]}", highlight=False, markup=False, soft_wrap=True)
