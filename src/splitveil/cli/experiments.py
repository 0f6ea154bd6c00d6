"""The commands that make many runs: `demo`, `clients`, `sweep`, `reproduce`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitveil.cli.console import print_lines, show_runs
from splitveil.cli.lists import in_words, show_cuts

if TYPE_CHECKING:
    from splitveil.config.run_config import RunConfig
    from splitveil.experiments.client_search import Ranking
    from splitveil.io import Json


ANY_IMAGE = "3x32x32"
INTERRUPTED = 130  # exit code
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Dataset = Annotated[str | None, typer.Option(help="See `splitveil datasets`.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[str | None, typer.Option(help="Where datasets lie.")]


def start() -> None:
    """Prepare the process and its messages."""
    from splitveil.cli.console import setup_logging
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()


def demo(
    runs_dir: Annotated[str, typer.Option(help="Where the demo's runs go.")] = "runs/demo",
    epochs: Annotated[int | None, typer.Option(help="Fewer epochs for a hasty look.")] = None,
    profile: Annotated[str, typer.Option(help="Attack budget.")] = "quick",
    json_: JsonFlag = False,
) -> None:
    """Train, attack and compare `none`, `gated-att` and `veil` on digits, in minutes on a CPU.

    Example: `splitveil demo`
    """
    start()
    from splitveil.cli.console import err, out
    from splitveil.experiments.demo import run_demo
    from splitveil.experiments.runner import LiveTable
    from splitveil.report.page import write_page

    with LiveTable().live(err) as table:
        paths = run_demo(runs_dir, profile, epochs, table)
    page = write_page(paths, Path(runs_dir))
    show_runs(paths, json_=json_)
    if not json_:
        out.print(f"\nOpen {page.resolve()} to see what the attacker saw.", soft_wrap=True)


def clients(  # noqa: PLR0917 - every option of the command, as typer wants them
    macs: Annotated[float, typer.Option(help="Multiply-adds it may spend on an image.")],
    wire: Annotated[int, typer.Option(help="Numbers it may send for an image.")],
    params: Annotated[int | None, typer.Option(help="Parameters it may have.")] = None,
    image: Annotated[
        str | None,
        typer.Option(help=f"Channels, height and width (default: {ANY_IMAGE}, or the dataset's)."),
    ] = None,
    family: Annotated[str | None, typer.Option(help="inverted, residual or strided.")] = None,
    smaller: Annotated[
        bool, typer.Option("--smaller", help="Also those that send less than they may.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="How many to show (default: 20).")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="A net by name, as resnet20, or MODULE:FUNCTION of yours, found from here; takes "
            "(image_shape, num_classes) or nothing, returns an nn.Sequential. Its code is run, "
            "and its cuts are listed."
        ),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="For --backbone (default: 10).")
    ] = None,
    rank: Annotated[
        bool, typer.Option("--rank", help="Train and attack the best ones, and rank them.")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="For --rank, which needs one.")] = None,
    defence: Annotated[str | None, typer.Option(help="For --rank (default: veil).")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="For --rank (default: a quarter of a full training).")
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="For --rank: how many beside the named nets (default: 4).")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="For --rank: attack budget, smoke or quick (default).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="For --rank (default: 0).")] = None,
    device: Annotated[str | None, typer.Option(help="For --rank: auto, cpu or cuda.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="For --rank: where datasets lie.")] = None,
    runs_dir: Annotated[
        str | None, typer.Option(help="For --rank: trials go to its folder advisor.")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """List thin clients that fit a budget, those that spend it on depth first.

    With `--rank` the named nets and some of each family are trained briefly and attacked, and
    ranked by accuracy above chance × MSE of the strongest attack over the ceiling, measured on
    validation images. Called again it goes on where it stopped.

    With `--backbone` the cuts of a named net are listed, as `--net NAME@N` makes them, or those
    of your own and, where too much would be sent, the bottleneck that mends it.

    Example: `splitveil clients --macs 21.9e6 --wire 512`

    Example: `splitveil clients --macs 1e6 --wire 64 --rank --dataset digits --top 3`

    Example: `splitveil clients --macs 21.9e6 --wire 512 --backbone mynets:resnet`
    """
    from splitveil.nets.clients import parse_image

    run = {
        "dataset": dataset, "defence": defence, "epochs": epochs, "seed": seed, "device": device,
        "data_dir": data_dir, "runs_dir": runs_dir,
    }  # fmt: skip
    only_ranked = run | {"top": top, "profile": profile}
    only_listed = {"limit": limit, "smaller": smaller or None}
    if rank:
        others = only_listed | {"backbone": backbone, "classes": classes}
        reject_options("--rank", "does not go", others)
    elif backbone is not None:
        others = only_listed | only_ranked | {"params": params, "family": family}
        reject_options("--backbone", "does not go", others)
    else:
        reject_options("--rank", "was not given, but goes", only_ranked)
        reject_options("--backbone", "was not given, but goes", {"classes": classes})
    budget: Json = {"max_macs": macs, "wire_floats": wire, "max_params": params, "family": family}
    shape = parse_image(image or ANY_IMAGE)
    if rank:
        budget |= {"image_shape": image and shape} | ({} if top is None else {"top": top})
        show_ranking(run, budget, profile or "quick", json_=json_)
    elif backbone is not None:
        show_cuts(backbone, shape, 10 if classes is None else classes, macs, wire, json_=json_)
    else:
        show_clients(shape, budget, 20 if limit is None else limit, smaller=smaller, json_=json_)


def reject_options(owner: str, how: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would do nothing."""
    from splitveil.errors import ConfigError

    given = [f"--{name.replace('_', '-')}" for name, v in options.items() if v is not None]
    if given:
        raise ConfigError(f"{owner} {how} with {', '.join(given)}; leave out the one or the other")


def show_clients(
    shape: tuple[int, int, int],
    budget: Mapping[str, Any],
    limit: int,
    *,
    smaller: bool,
    json_: bool,
) -> None:
    """The clients that fit a budget, by their costs alone."""
    from splitveil.cli.console import show_json
    from splitveil.errors import ConfigError
    from splitveil.nets.cost import candidates, nothing_fits

    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    found = candidates(shape, **budget, smaller=smaller)
    if not found:
        raise ConfigError(nothing_fits(shape, **budget))
    shown = found[:limit]
    if json_:
        rows = [vars(c) | {"spec": str(c.spec), "family": c.spec.family} for c in shown]
        show_json({"image_shape": shape, "fitting": len(found), "clients": rows})
        return
    wide = max(len(c.net) for c in shown)
    print_lines(
        f"{len(shown)} of {len(found)} clients that fit, for images {in_words(shape)}",
        f"{'net':<{wide}} {'MMAC':>6} {'params':>6} {'wire':>5} {'depth':>5} {'sees':>4}",
        *(
            f"{c.net:<{wide}} {c.macs / 1e6:6.2f} {c.params:6d} {c.wire_floats:5d} {c.depth:5d} "
            f"{c.receptive_field:4d}"
            for c in shown
        ),
        "wire: numbers sent; depth: convolutions in a row; sees: receptive field in pixels",
        f"next: splitveil train --net {shown[0].net} --dataset NAME",
    )


def show_ranking(
    run: Mapping[str, Any], budget: Mapping[str, Any], profile: str, *, json_: bool
) -> None:
    """Train and attack clients that fit, and rank them."""
    start()
    from splitveil.cli.console import err, progress_bar, show_json, warn
    from splitveil.config.resolve import make_config
    from splitveil.data.catalogue import load
    from splitveil.errors import ConfigError
    from splitveil.experiments.client_search import SCORE, search_clients
    from splitveil.experiments.runner import LiveTable, brief_epochs

    if run["dataset"] is None:
        raise ConfigError("--rank trains clients and needs --dataset; see `splitveil datasets`")
    given = {k: v for k, v in run.items() if v is not None}
    config = make_config({"epochs": brief_epochs(run["dataset"]), **given})
    with progress_bar("data") as bar:
        load(config.dataset, config.data_dir, bar)  # the first time they are fetched
    with LiveTable().live(err) as table:
        ranking = search_clients(config, profile, progress=table, **budget)
    for net, error in ranking.failed.items():
        warn(f"{net} failed: {error}")
    if not json_:
        print_lines(*ranking_lines(ranking, config, profile))
        return
    show_json({
        "dataset": config.dataset, "defence": config.defence, "epochs": config.epochs,
        "seed": config.seed, "profile": profile, "image_shape": ranking.image_shape,
        "score": SCORE, "clients": [vars(c) for c in ranking.clients],
        "failed": [{"net": net, "error": error} for net, error in ranking.failed.items()],
    })  # fmt: skip


def ranking_lines(ranking: "Ranking", config: "RunConfig", profile: str) -> Iterator[str]:
    """The ranking as text, one line for each client."""
    from splitveil.experiments.client_search import SCORE

    best, wide = ranking.clients[0], max(len(c.net) for c in ranking.clients)
    yield (
        f"{len(ranking.clients)} clients on {config.dataset} with {config.defence}, "
        f"{config.epochs} epochs, seed {config.seed}, profile {profile}"
    )
    yield (
        f"  {'net':<{wide}} {'score':>6} {'acc %':>6} {'MSE':>7} {'leakage':>7} {'MMAC':>6} "
        f"{'params':>7} {'wire':>5} attack"
    )
    for c in ranking.clients:
        yield (
            f"{'*' if c.pareto else ' '} {c.net:<{wide}} {c.score:6.3f} {100 * c.accuracy:6.2f} "
            f"{c.mse:7.4f} {c.leakage:7.3f} {c.macs / 1e6:6.2f} {c.params:7d} {c.wire_floats:5d} "
            f"{c.attack}"
        )
    yield f"score: {SCORE}; all on validation images"
    yield "*: no other is as accurate and as private, and better in one; one seed, short training"
    train = f"splitveil train --net {best.net} --dataset {config.dataset}"
    if best.score == 0:
        yield "next: none answers better than chance; give them more --epochs"
    else:
        yield f"next: {train} --defence {config.defence}"


def sweep(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: Dataset = None,
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
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="For --engine ray: its cluster (default: a new one here).")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Trials at a time; several need Ray (default: 1, on Ray one per core)."),
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
    device: Device = None,
    data_dir: DataDir = None,
    runs_dir: Annotated[str, typer.Option(help="Folder that holds the sweep's.")] = "runs",
    name: Annotated[str, typer.Option(help="Name of the sweep's folder.")] = "sweep",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Search settings of several defences under one budget, and show the front they reach.

    Every trial is a run below `runs/NAME/trials`, trained briefly and attacked on validation
    images. Each defence has the same number of trials; one with fewer settings to try spends
    them on other seeds. A sweep that was stopped goes on with `--resume --name NAME`.

    Example: `splitveil sweep --dataset digits --defence none --defence noise --defence veil
    --vary lambd=0.1,0.3,1 --vary noise_std=log:0.01:0.2 --trials 12`
    """
    start()
    from splitveil.cli.console import err, show_json, warn
    from splitveil.config.run_config import RunConfig
    from splitveil.errors import ConfigError, unknown
    from splitveil.experiments.runner import LiveTable
    from splitveil.experiments.search import plan_of, run_sweep

    if engine not in ("local", "ray"):
        raise ConfigError(unknown("engine", engine, ("local", "ray")))
    if address is not None and engine != "ray":
        raise ConfigError("--address is that of a Ray cluster; add --engine ray")
    given: Json = {
        "defences": defence, "vary": vary, "trials": trials, "sampler": sampler,
        "profile": profile, "attacks": attack, "seed": seed,
    }  # fmt: skip
    options = {
        "dataset": dataset, "epochs": epochs, "net": net, "device": device,
        "data_dir": None if data_dir is None else str(Path(data_dir).resolve()),
    }  # fmt: skip
    # From the root: a worker on Ray may start elsewhere.
    folder = RunConfig(runs_dir=str(Path(runs_dir).resolve()), name=name).folder
    plan = plan_of(given, options, settings or [], folder if resume else None)
    on_ray = {"jobs": jobs, "address": address or "local"}
    where = on_ray if engine == "ray" else {"jobs": 1 if jobs is None else jobs}
    with LiveTable().live(err) as table:
        result = run_sweep(plan, folder, resume=resume, progress=table, **where)
    failed = [row for row in result["trials"] if "error" in row]
    for row in failed:
        warn(f"{row['trial']} failed: {row['error']}")
    if failed:
        warn("what failed is tried again with --resume")
    if json_:
        show_json(result)
    else:
        print_lines(*sweep_lines(result))


def sweep_lines(result: "Json") -> Iterator[str]:
    """The result of a sweep as text."""
    plan, base, at = (result[k] for k in ("plan", "reference_accuracy", "reference_point"))
    yield (
        f"{len(result['trials'])} trials on {plan['options'].get('dataset', 'digits')}: "
        f"{plan['trials']} of each defence, sampler {plan['sampler']}, seed {plan['seed']}, "
        f"profile {plan['profile']}; all numbers on validation images"
    )
    yield "front: no other trial is as accurate and as private, and better in one"
    yield f"{'acc %':>6} {'leakage':>7} {'MSE':>7} {'attack':<13} trial"
    yield from map(_trial_line, result["front"])
    yield (
        f"hypervolume {result['hypervolume']['value']:.3f}: share covered from accuracy "
        f"{at['accuracy']:g}, leakage {at['leakage']:g}"
    )
    for name, one in result["defences"].items():
        volume = "–" if one["hypervolume"] is None else f"{one['hypervolume']['value']:.3f}"
        yield f"  {name}: {volume}, {one['failed']} of {one['trials']} failed"
    yield (
        f"best privacy at ≤ {100 * result['allowed_loss']:g} point below "
        f"{100 * base['accuracy']:.2f} %, the most accurate trial of "
        f"{base['defence'] if base['defence'] == 'none' else 'all'}"
    )
    best = {name: one["best"] for name, one in result["defences"].items()}
    for name, row in best.items():
        yield f"  {name}: no trial" if row is None else _trial_line(row)
    if kept := [row for row in best.values() if row is not None]:
        run = Path(min(kept, key=lambda row: max(row["leakage"], 0.0))["run"])
        here = Path.cwd()
        yield f"next: splitveil audit {run.relative_to(here) if run.is_relative_to(here) else run}"


def _trial_line(row: "Json") -> str:
    from splitveil.experiments.runner import trial_words

    return (
        f"{100 * row['accuracy']:6.2f} {max(row['leakage'], 0.0):7.3f} {row['mse']:7.4f} "
        f"{row['attack']:<13} {row['defence']} {trial_words(row['settings'], row['seed'])}"
    )


def reproduce(  # noqa: PLR0917 - every option of the command, as typer wants them
    experiment: Annotated[str, typer.Argument(help="Which experiment: seed-003.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A row of it; give it again for others.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the runs.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Fewer epochs for a rehearsal.")] = None,
    profile: Annotated[str, typer.Option(help="Attack budget.")] = "standard",
    dataset: Annotated[str | None, typer.Option(help="Another dataset, for a rehearsal.")] = None,
    device: Device = None,
    data_dir: DataDir = None,
    runs_dir: Annotated[
        str | None, typer.Option(help="Where its runs go (default: runs/EXPERIMENT-sSEED).")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Run a published experiment, row by row, and print its table beside what was reported.

    Hours on one GPU. The same command again repeats nothing that was finished and continues an
    interrupted row. The table is of all rows finished in that folder with the same options.

    Example: `splitveil reproduce seed-003 --only cem --only gated-att`
    """
    start()
    from splitveil.cli.console import err, out, show_error, show_json, show_table
    from splitveil.experiments import reproduction
    from splitveil.experiments.runner import LiveTable

    try:
        with LiveTable().live(err) as table:
            made, rows, page = reproduction.reproduce(
                experiment, only=only or [], profile=profile, runs_dir=runs_dir, progress=table,
                seed=seed, epochs=epochs, dataset=dataset, device=device, data_dir=data_dir,
            )  # fmt: skip
    except KeyboardInterrupt:
        show_error("interrupted; what was complete is saved. The same command again continues")
        raise typer.Exit(INTERRUPTED) from None
    if json_:
        show_json(reproduction.shown_json(made, rows))
        return
    show_table(made.title, *made.brief(rows))
    out.print(f"table: {page}", highlight=False, soft_wrap=True)
