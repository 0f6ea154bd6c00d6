"""What the commands share: merging settings, writing pages, showing tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def merge(
    recipe: str | None,
    file: Path | None,
    settings: list[str],
    options: dict[str, Any],
    *,
    resume: bool,
) -> Any:  # noqa: ANN401 - RunConfig, which must not be imported at module level
    """Saved settings of a resumed run, then the recipe, the file, `--set`, and the options."""
    from splitveil.config import RUN_KEYS, find_defence, make_config, one_noise_name
    from splitveil.recipes import find_recipe
    from splitveil.runs import flat_config, read_folder
    from splitveil.settings import parse_pairs, read_toml

    given = {} if file is None else one_noise_name(read_toml(file))
    given |= one_noise_name(parse_pairs(settings))
    given |= options
    if recipe is not None:
        check_recipe(recipe, given)
    merged = ({} if recipe is None else one_noise_name(find_recipe(recipe).options)) | given
    if recipe is not None and merged.get("name") is None:
        merged["name"] = f"{recipe}-s{make_config(merged).seed}"
    if resume:
        folder = make_config(merged).folder
        saved = flat_config(read_folder(folder)[0])
        merged = {"defence": saved["defence"]} | merged
        # Another defence has not the saved one's settings; that it is another, `fit` says.
        own = {*RUN_KEYS, *find_defence(str(merged["defence"])).setting_types()}
        merged = {key: value for key, value in saved.items() if key in own} | merged
    return make_config(merged)


def check_recipe(recipe: str, given: Mapping[str, Any]) -> None:
    """Refuse another defence than the recipe's where that has not the settings of the recipe."""
    from splitveil.config import RUN_KEYS, find_defence
    from splitveil.errors import ConfigError
    from splitveil.recipes import NAMED_RECIPES, find_recipe

    told = find_recipe(recipe).options
    defence = str(given.get("defence", told["defence"]))
    own = {*RUN_KEYS, *find_defence(defence).setting_types()}
    foreign = [key for key in told if key not in own and key not in given]
    if not foreign:
        return
    dataset = given.get("dataset", told["dataset"])
    fitting = [
        name
        for name, other in NAMED_RECIPES.items()
        if (other.options["dataset"], other.options["defence"]) == (dataset, defence)
    ]
    instead = f"use the recipe {' or '.join(fitting)}" if fitting else "leave the recipe out"
    raise ConfigError(
        f"recipe '{recipe}' sets {', '.join(foreign)} of its defence '{told['defence']}', which "
        f"defence '{defence}' has not; leave that defence out, or {instead}"
    )


def last_epoch(folder: Path) -> dict[str, Any]:
    """The last epoch's line of a run's log; empty before the first."""
    from splitveil.report import read_run

    lines = [m for m in read_run(folder, audited=False).metrics if m.get("kind") == "epoch"]
    return dict(lines[-1]) if lines else {}


def write_page(runs: list[Path], folder: Path) -> Path:
    """Write the report of some runs; returns the page's path."""
    from splitveil.report import read_run, write_report

    return write_report([read_run(path) for path in runs], folder)[0]


def show_runs(paths: list[Path], *, json_: bool) -> None:
    """Print one row per audited run, or their records."""
    from splitveil.console import show_json, show_table
    from splitveil.report import read_run, summary_rows
    from splitveil.report.tables import brief_table

    runs = [read_run(path) for path in paths]
    if json_:
        show_json({str(run.path): run.record for run in runs})
    else:
        show_table("Accuracy, and what the attacker got", *brief_table(summary_rows(runs)))


def show_audit(folder: Path, flags: list[dict[str, Any]], page: Path) -> None:
    """Print what the attacks got, the summary, and every flag."""
    from splitveil.console import out, show_table, warn
    from splitveil.report import read_run
    from splitveil.report.tables import attack_columns, attack_rows, format_attack_row

    rows = [format_attack_row(r)[1:] for r in attack_rows(read_run(folder))]  # the title names it
    show_table(f"Attacks on {folder}", [c.label for c in attack_columns()][1:], rows)
    show_runs([folder], json_=False)
    for flag in flags:
        warn(f"flag: {flag['name']}: {flag['seen']}; {flag['advice']}")
    out.print(f"page: {page}", highlight=False, soft_wrap=True)


def show_catalogue(title: str, entries: dict[str, str], *, json_: bool) -> None:
    """Print names and what they stand for."""
    from splitveil.console import show_json, show_table

    if json_:
        show_json(entries)
    else:
        show_table(title, ["name", "what it is"], [list(item) for item in entries.items()])


def print_lines(*lines: str) -> None:
    """Print on stdout without a box, which would fold long names: a client stays on its line."""
    from splitveil.console import out

    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def bench(
    suite: str,
    *,
    batch: int,
    dim: int,
    repeats: int,
    device: str,
    target: Path | None,
    json_: bool,
) -> None:
    """Run a suite, write it where asked, show it."""
    import json

    import torch

    from splitveil.bench import bench_surrogates
    from splitveil.config import find_device
    from splitveil.console import progress_bar, show_json, show_table
    from splitveil.errors import ConfigError, unknown
    from splitveil.train.files import check_file, write_text

    if suite != "surrogates":
        raise ConfigError(unknown("suite", suite, ["surrogates"]))
    if min(batch, dim, repeats) < 1:
        raise ConfigError(
            f"batch, dim and repeats must be at least 1, got {batch}, {dim} and {repeats}"
        )
    if target is not None:
        check_file(target)
    with progress_bar("bench") as bar:
        found = bench_surrogates(
            batch=batch,
            dim=dim,
            repeats=repeats,
            device=torch.device(find_device(device)),
            progress=bar,
        )
    if target is not None:
        write_text(target, json.dumps(found, indent=2) + "\n")
    if json_:
        show_json(found)
        return
    rows = [
        [r["surrogate"], str(r["classes"]), f"{r['best_ms']:.2f}", f"{r['median_ms']:.2f}"]
        for r in found["rows"]
    ]
    show_table("Forward and backward", ["surrogate", "classes", "best ms", "median ms"], rows)
