"""The commands that make many runs: `demo`, `clients`, `sweep`, `reproduce`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from splitveil.cli import console
from splitveil.cli.lists import COSTS, MEASURED, Shape, in_words, show_cuts, show_listing
from splitveil.errors import ConfigError, unknown

if TYPE_CHECKING:
    from splitveil.io import Json

ANY_IMAGE = "3x32x32"
INTERRUPTED = 130  # exit code
Seed = Annotated[int | None, Option(help="Seed of the runs.")]


def demo(
    runs_dir: Annotated[str, Option(help="Where the demo's runs go.")] = "runs/demo",
    epochs: Annotated[int | None, Option(help="Fewer epochs for a hasty look.")] = None,
    profile: Annotated[str, Option(help="Attack budget.")] = "quick",
    json_: console.JsonFlag = False,
) -> None:
    """Train, attack and compare `none`, `gated-att` and `veil` on digits, in minutes on a CPU.

    Example: `splitveil demo`
    """
    console.start()
    from splitveil.experiments.demo import run_demo
    from splitveil.experiments.runner import LiveTable
    from splitveil.record.files import read_run
    from splitveil.report.page import write_page

    with LiveTable(console.err) as table:
        paths = run_demo(runs_dir, profile, epochs, table)
    page = write_page(paths, Path(runs_dir))
    console.show_runs([read_run(path) for path in paths], json_=json_)
    if not json_:
        console.print_lines(f"\nOpen {page.resolve()} to see what the attacker saw.")


def clients(  # noqa: PLR0917 - every option of the command, as typer wants them
    macs: Annotated[float, Option(help="Multiply-adds it may spend on an image.")],
    wire: Annotated[int, Option(help="Numbers it may send for an image.")],
    params: Annotated[int | None, Option(help="Parameters it may have.")] = None,
    image: Annotated[str | None, Option(help=f"Its size (default: {ANY_IMAGE}).")] = None,
    family: Annotated[str | None, Option(help="inverted, residual or strided.")] = None,
    smaller: Annotated[bool, Option("--smaller", help="Also those that send less.")] = False,
    limit: Annotated[int | None, Option(help="How many to show (default: 20).")] = None,
    backbone: Annotated[str | None, Option(help="A net to cut, or your MODULE:FUNCTION.")] = None,
    classes: Annotated[int | None, Option(min=2, help="For --backbone.")] = None,
    rank: Annotated[bool, Option("--rank", help="Train, attack and rank the best.")] = False,
    dataset: console.Dataset = None,
    defence: Annotated[str | None, Option(help="For --rank (default: veil).")] = None,
    epochs: Annotated[int | None, Option(help="For --rank (default: a quarter).")] = None,
    top: Annotated[int | None, Option(help="Beside the named nets (default: 4).")] = None,
    profile: Annotated[str | None, Option(help="Attack budget (default: quick).")] = None,
    seed: Seed = None,
    device: console.Device = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    json_: console.JsonFlag = False,
) -> None:
    """List thin clients that fit a budget, those that spend it on depth first.

    With `--rank` the named nets and some of each family are trained briefly on `--dataset` (a
    quarter of a full training) and attacked, and ranked by accuracy above chance × MSE of the
    strongest attack over the ceiling, measured on validation images. Trials go to the folder
    advisor of `--runs-dir`. Called again it goes on where it stopped.

    With `--backbone` the cuts of a named net are listed, as `--net NAME@N` makes them, or those
    of your own and, where too much would be sent, the bottleneck that mends it. Your function,
    found from here, takes (image_shape, num_classes) or nothing, and returns an nn.Sequential; its
    code is run.

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
    budget: Json = {"max_macs": macs, "wire_floats": wire, "max_params": params, "family": family}
    shape = parse_image(image or ANY_IMAGE)
    if rank:
        others = only_listed | {"backbone": backbone, "classes": classes}
        reject_options("--rank", "does not go", others)
        if top is not None:
            budget["top"] = top
        show_ranking(run, budget, profile or "quick", image, json_=json_)
    elif backbone is not None:
        others = only_listed | only_ranked | {"params": params, "family": family}
        reject_options("--backbone", "does not go", others)
        show_cuts(backbone, shape, 10 if classes is None else classes, macs, wire, json_=json_)
    else:
        reject_options("--rank", "was not given, but goes", only_ranked)
        reject_options("--backbone", "was not given, but goes", {"classes": classes})
        show_clients(shape, budget, 20 if limit is None else limit, smaller=smaller, json_=json_)


def reject_options(owner: str, how: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would do nothing."""
    given = [f"--{name.replace('_', '-')}" for name, v in options.items() if v is not None]
    if given:
        raise ConfigError(f"{owner} {how} with {', '.join(given)}; leave out the one or the other")


def show_clients(
    shape: Shape, budget: Mapping[str, Any], limit: int, *, smaller: bool, json_: bool
) -> None:
    """The clients that fit a budget, by their costs alone."""
    from splitveil.nets.cost import candidates, nothing_fits

    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    found = candidates(shape, **budget, smaller=smaller)
    if not found:
        raise ConfigError(nothing_fits(shape, **budget))
    rows = [vars(c) | {"spec": str(c.spec), "family": c.spec.family} for c in found[:limit]]
    if json_:
        console.show_json({"image_shape": shape, "fitting": len(found), "clients": rows})
        return
    show_listing(
        ("net", *COSTS, "depth", "receptive_field"), rows,
        f"{len(rows)} of {len(found)} clients that fit, for images {in_words(shape)}",
        "wire: numbers sent; depth: convolutions in a row; sees: receptive field in pixels",
        f"next: splitveil train --net {rows[0]['net']} --dataset NAME",
    )  # fmt: skip


def show_ranking(
    run: Mapping[str, Any], budget: "Json", profile: str, image: str | None, *, json_: bool
) -> None:
    """Train and attack clients that fit, and rank them."""
    console.start()
    from splitveil.config.resolve import make_config
    from splitveil.data.catalogue import load
    from splitveil.experiments.client_search import SCORE, contenders, rank_clients
    from splitveil.experiments.runner import LiveTable, brief_epochs
    from splitveil.nets.clients import parse_image

    if run["dataset"] is None:
        raise ConfigError("--rank trains clients and needs --dataset; see `splitveil datasets`")
    given = {k: v for k, v in run.items() if v is not None}
    config = make_config({"epochs": brief_epochs(run["dataset"]), **given})
    with console.progress_bar("data") as bar:  # the first time they are fetched
        images = load(config.dataset, config.data_dir, bar).image_shape
    if image is not None and parse_image(image) != images:
        raise ConfigError(f"the images of '{config.dataset}' are {images}; leave out --image")
    with LiveTable(console.err) as table:
        rows, failed = rank_clients(contenders(images, **budget), config, profile, table)
    for net, error in failed.items():
        console.warn(f"{net} failed: {error}")
    if json_:
        said = {key: getattr(config, key) for key in ("dataset", "defence", "epochs", "seed")}
        said |= {"profile": profile, "image_shape": images, "score": SCORE, "clients": rows}
        said["failed"] = [{"net": net, "error": error} for net, error in failed.items()]
        console.show_json(said)
        return
    end = "none answers better than chance; give them more --epochs"
    if rows[0]["score"] > 0:
        end = f"splitveil train --net {rows[0]['net']} --dataset {config.dataset}"
        end += f" --defence {config.defence}"
    show_listing(
        ("mark", "net", "score", *MEASURED, *COSTS),
        [row | {"mark": "*" if row["pareto"] else " "} for row in rows],
        f"{len(rows)} clients on {config.dataset} with {config.defence}, {config.epochs} epochs, "
        f"seed {config.seed}, profile {profile}",
        f"score: {SCORE}; all on validation images",
        "*: no other is as accurate and as private, and better in one; one seed, short training",
        f"next: {end}",
    )


def sweep(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: console.Dataset = None,
    defence: Annotated[
        list[str] | None, Option(help="Again for others (default: none, noise and veil).")
    ] = None,
    vary: Annotated[
        list[str] | None, Option(help="key=a,b or key=lin:low:high or key=log:low:high[:count].")
    ] = None,
    trials: Annotated[int | None, Option(help="Of each defence (default: a grid).")] = None,
    sampler: Annotated[str | None, Option(help="grid, random or optuna.")] = None,
    engine: Annotated[str, Option(help="local, or ray.")] = "local",
    address: Annotated[str | None, Option(help="Of a Ray cluster (default: new).")] = None,
    jobs: Annotated[int | None, Option(help="Trials at a time; several need Ray.")] = None,
    epochs: Annotated[int | None, Option(help="Of a trial (default: a quarter).")] = None,
    profile: Annotated[str | None, Option(help="Attack budget (default: quick).")] = None,
    attack: Annotated[list[str] | None, Option(help="Only these of the profile.")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="key=value, in all trials.")] = None,
    net: Annotated[str | None, Option(help="See `splitveil clients`.")] = None,
    seed: Seed = None,
    device: console.Device = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    name: Annotated[str, Option(help="Name of the sweep's folder.")] = "sweep",
    resume: Annotated[bool, Option("--resume", help="Go on where it stopped.")] = False,
    json_: console.JsonFlag = False,
) -> None:
    """Search settings of several defences under one budget, and show the front they reach.

    Every trial is a run below `runs/NAME/trials`, trained briefly (a quarter of a full training)
    and attacked on validation images. Each defence has the same number of trials; one with fewer
    settings to try spends them on other seeds. Any setting of the run or of a defence can be
    varied; where every value is listed the sampler is a grid, which takes `:count` values of a
    range. A sweep that was stopped goes on with `--resume --name NAME`.

    Example: `splitveil sweep --dataset digits --defence none --defence noise --defence veil
    --vary lambd=0.1,0.3,1 --vary noise_std=log:0.01:0.2 --trials 12`
    """
    console.start()
    from splitveil.config.run_config import RunConfig
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
    folder = RunConfig(runs_dir=str(Path(runs_dir or "runs").resolve()), name=name).folder
    plan = plan_of(given, options, settings or [], folder if resume else None)
    if engine == "ray":
        address = address or "local"
    elif jobs is None:
        jobs = 1
    with LiveTable(console.err) as table:
        result = run_sweep(plan, folder, resume=resume, jobs=jobs, address=address, progress=table)
    failed = [row for row in result["trials"] if "error" in row]
    for row in failed:
        console.warn(f"{row['trial']} failed: {row['error']}")
    if failed:
        console.warn("what failed is tried again with --resume")
    if json_:
        console.show_json(result)
    else:
        show_sweep(result)


def show_sweep(result: "Json") -> None:
    """The result of a sweep as text."""
    plan, base, at = (result[k] for k in ("plan", "reference_accuracy", "reference_point"))
    console.print_lines(
        f"{len(result['trials'])} trials on {plan['options'].get('dataset', 'digits')}: "
        f"{plan['trials']} of each defence, sampler {plan['sampler']}, seed {plan['seed']}, "
        f"profile {plan['profile']}; all numbers on validation images"
    )
    show_listing(
        (*MEASURED, "defence", "settings"),
        [_shown(row) for row in result["front"]],
        "front: no other trial is as accurate and as private, and better in one",
        f"hypervolume {result['hypervolume']['value']:.3f}: share covered from accuracy "
        f"{at['accuracy']:g}, leakage {at['leakage']:g}",
    )
    rows: list[Json] = []
    for name, one in result["defences"].items():
        volume, best = one["hypervolume"], one["best"]
        row = {"settings": "no trial"} if best is None else _shown(best)
        row |= {"defence": name, "failed": f"{one['failed']}/{one['trials']}"}
        rows.append(row | {"volume": volume and volume["value"]})
    show_listing(
        ("defence", "failed", "volume", *MEASURED, "settings"),
        rows,
        f"best privacy at ≤ {100 * result['allowed_loss']:g} point below "
        f"{100 * base['accuracy']:.2f} %, the most accurate trial of "
        f"{base['defence'] if base['defence'] == 'none' else 'all'}",
    )
    if kept := [row for row in rows if "run" in row]:
        run, here = Path(min(kept, key=lambda row: row["leakage"])["run"]), Path.cwd()
        shown = run.relative_to(here) if run.is_relative_to(here) else run
        console.print_lines(f"next: splitveil audit {shown}")


def _shown(row: "Json") -> "Json":
    """A trial's row with its settings in words; below no leakage there is nothing left to win."""
    from splitveil.experiments.runner import trial_words

    words = trial_words(row["settings"], row["seed"])
    return row | {"settings": words, "leakage": max(row["leakage"], 0.0)}


def reproduce(  # noqa: PLR0917 - every option of the command, as typer wants them
    experiment: Annotated[str, Argument(help="Which experiment: seed-003.")],
    only: Annotated[list[str] | None, Option(help="A row of it; again for others.")] = None,
    seed: Seed = 0,
    epochs: Annotated[int | None, Option(help="Fewer epochs for a rehearsal.")] = None,
    profile: Annotated[str, Option(help="Attack budget.")] = "standard",
    dataset: console.Dataset = None,
    device: console.Device = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    json_: console.JsonFlag = False,
) -> None:
    """Run a published experiment, row by row, and print its table beside what was reported.

    Hours on one GPU; for a rehearsal take other data or fewer epochs. The same command again
    repeats nothing that was finished and continues an interrupted row. The table is of all rows
    finished with the same options in that folder, `runs/EXPERIMENT-sSEED` without `--runs-dir`.

    Example: `splitveil reproduce seed-003 --only cem --only gated-att`
    """
    console.start()
    from splitveil.experiments import reproduction
    from splitveil.experiments.runner import LiveTable

    try:
        with LiveTable(console.err) as table:
            made, rows, page = reproduction.reproduce(
                experiment, only=only or [], profile=profile, runs_dir=runs_dir, progress=table,
                seed=seed, epochs=epochs, dataset=dataset, device=device, data_dir=data_dir,
            )  # fmt: skip
    except KeyboardInterrupt:
        console.show_error(
            "interrupted; what was complete is saved. The same command again continues"
        )
        raise Exit(INTERRUPTED) from None
    if json_:
        console.show_json(reproduction.shown_json(made, rows))
    else:
        console.show_table(made.title, *made.brief(rows))
        console.print_lines(f"table: {page}")
