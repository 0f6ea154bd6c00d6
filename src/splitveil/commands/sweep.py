"""`splitveil sweep`: many trials of many defences, equal budgets, and the front they reach."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from splitveil.sweep.engines import Engine
    from splitveil.sweep.trial import Plan

DEFENCES = ("none", "noise", "veil")
NAIVE = ("none", "noise")
OWN = ("defence", "seed", "name", "runs_dir")  # of every trial's; the sweep's are options


def sweep(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: Annotated[str | None, typer.Option(help="See `splitveil datasets`.")] = None,
    defence: Annotated[
        list[str] | None,
        typer.Option(help="Once for each defence (default: none, noise and veil)."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="key=a,b,c or key=lin:low:high or key=log:low:high, with :count for a grid; "
            "any setting of the run or of a defence."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="For each defence (default: the largest grid).")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help="grid, random or optuna (default: grid if every value is listed)."),
    ] = None,
    engine: Annotated[str, typer.Option(help="local processes, or ray.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="For --engine ray: its cluster (default: a new one here).")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Trials at a time (default: one per core or GPU).")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Of a trial (default: a quarter of a full training).")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Attack budget (default: quick).")] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Only these of the profile, once for each.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, the same in every trial.")
    ] = None,
    net: Annotated[str | None, typer.Option(help="See `splitveil clients`.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of proposals and trainings.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where datasets lie.")] = None,
    runs_dir: Annotated[str, typer.Option(help="Folder that holds the sweep's.")] = "runs",
    name: Annotated[str, typer.Option(help="Name of the sweep's folder.")] = "sweep",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Search settings of several defences under one budget, and show the front they reach.

    Every trial is a run below `runs/NAME/trials`, trained briefly and attacked on validation
    images. Each defence has the same number of trials; one with fewer settings to try spends
    them on other seeds. A sweep that was stopped goes on with `--resume --name NAME`.

    Example: `splitveil sweep --dataset digits --defence none --defence noise --defence veil
    --vary lambd=0.1,0.3,1 --vary noise_std=log:0.01:0.2 --trials 12`
    """
    from splitveil.console import setup_logging
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()
    given: dict[str, Any] = {
        "defences": None if defence is None else tuple(defence),
        "vary": None if vary is None else tuple(vary),
        "trials": trials, "sampler": sampler, "profile": profile, "seed": seed,
        "attacks": None if attack is None else tuple(attack),
    }  # fmt: skip
    options = {
        "dataset": dataset, "epochs": epochs, "net": net, "device": device,
        "data_dir": None if data_dir is None else str(Path(data_dir).resolve()),
    }  # fmt: skip
    folder = folder_of(runs_dir, name)
    plan = plan_of(given, options, settings or [], folder if resume else None)
    run(plan, folder, engine, address, jobs, resume=resume, json_=json_)


def folder_of(runs_dir: str, name: str) -> Path:
    """The sweep's folder, from the root: workers may start elsewhere."""
    from splitveil.config import RunConfig

    return RunConfig(runs_dir=str(Path(runs_dir).resolve()), name=name).folder


def plan_of(
    given: dict[str, Any], options: dict[str, Any], pairs: list[str], saved: Path | None
) -> "Plan":
    """The plan of the command line, over that of the sweep to go on with."""
    from splitveil.advisor import brief_epochs
    from splitveil.config import one_noise_name
    from splitveil.config.settings import parse_pairs
    from splitveil.errors import ConfigError
    from splitveil.runs import load_teacher, place_of
    from splitveil.sweep.driver import make_plan, read_plan

    said = {k: v for k, v in given.items() if v is not None}
    common = one_noise_name(parse_pairs(pairs))
    for key in OWN:
        if key in common:
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(f"--set {key} would change nothing in a sweep; use {option}")
    common |= {k: v for k, v in options.items() if v is not None}
    if saved is not None:
        before = read_plan(saved)
        said = vars(before) | said
        common = dict(before.options) | common
    else:
        common = {"dataset": "digits"} | common
        common.setdefault("epochs", brief_epochs(str(common["dataset"])))
        said = {"defences": DEFENCES, "vary": (), "trials": None, "sampler": None} | said
    teacher = None
    if (named := common.get("teacher")) not in (None, "none"):
        place = place_of(str(named)).resolve()
        common["teacher"], teacher = str(place), load_teacher(place).noted["model"]
    return make_plan(**said | {"options": common, "teacher": teacher})


def run(
    plan: "Plan",
    folder: Path,
    engine: str,
    address: str | None,
    jobs: int | None,
    *,
    resume: bool,
    json_: bool,
) -> None:
    """Check the plan, run what is left of it, and show what all of it found."""
    import json

    from splitveil.commands import print_lines
    from splitveil.console import err, show_json, warn
    from splitveil.sweep.board import Board, result_lines
    from splitveil.sweep.driver import check, check_folder, open_sweep, run_sweep
    from splitveil.sweep.outcome import FILE, summarise
    from splitveil.train.files import write_text

    make = engine_of(engine, address, jobs, plan, folder)
    check_folder(folder, plan, resume=resume)  # before any data is fetched
    check(plan)
    if not set(NAIVE) & set(plan.defences):
        warn("no naive baseline takes part; add --defence none or --defence noise")
    workers = None if resume else make()  # a cluster out of reach leaves no folder behind
    try:
        with open_sweep(folder, plan, resume=resume) as journal:
            if journal.failed:
                names = ", ".join(entry.task.key for entry in journal.failed)
                warn(f"tried again, because they failed: {names}")
            if journal.failed or len(journal.entries) < len(plan.defences) * plan.trials:
                workers = workers or make()
                board = Board(plan, [entry for entry in journal.entries if entry.error is None])
                with board.live(err):
                    run_sweep(plan, folder, journal, workers, board)
            result = summarise(plan, journal.entries, folder)
    finally:
        if workers is not None:
            workers.close()
    write_text(folder / FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    failed = [one for one in result["trials"] if "error" in one]
    for one in failed:
        warn(f"{one['trial']} failed: {one['error']}")
    if failed:
        warn("what failed is tried again with --resume")
    if json_:
        show_json(result)
    else:
        print_lines(*result_lines(result))


def engine_of(name: str, address: str | None, jobs: int | None, plan: "Plan", folder: Path) -> Any:  # noqa: ANN401 - a function that starts the Engine
    """What starts the engine; refused here if it cannot."""
    from splitveil.config import find_device
    from splitveil.errors import ConfigError, unknown
    from splitveil.sweep.engines import LocalEngine, RayEngine, need_ray
    from splitveil.sweep.trial import perform

    if name not in ("local", "ray"):
        raise ConfigError(unknown("engine", name, ("local", "ray")))
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    if address is not None and name != "ray":
        raise ConfigError("--address is that of a Ray cluster; add --engine ray")
    device = find_device(str(plan.options.get("device", "auto")))
    gpus = visible_gpus() if device == "cuda" else ()
    most = plan.trials * len(plan.defences)
    number = min(jobs or len(gpus) or os.cpu_count() or 1, most)
    if name == "ray":
        need_ray()

    def start() -> "Engine":
        if name == "ray":
            return RayEngine(perform, jobs=jobs, address=address, gpus=min(len(gpus), 1))
        return LocalEngine(perform, number, folder / "workers.log", gpus)

    return start


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return tuple(named.split(","))
    return tuple(str(i) for i in range(torch.cuda.device_count()))
