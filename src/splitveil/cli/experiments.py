"""The commands that make many runs: `demo`, `clients`, `sweep`, `reproduce`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Exit, Option

from splitveil.cli import console
from splitveil.cli.console import OptInt, OptNumber, OptText, OptTexts
from splitveil.cli.lists import ANY_IMAGE, COSTS, MEASURED, Shape, in_words, show_cuts, show_listing
from splitveil.errors import ConfigError
from splitveil.io import Json

if TYPE_CHECKING:
    from splitveil.config.run_config import RunConfig

EXIT_SOME_FAILED = 3  # the command ended, but trials failed
MINUTES = {False: "two", True: "six"}  # that the demo takes, brief and with all attacks
SAME_COMMAND = "the same command"
TRAINS = "--rank or --alone"
EPOCHS = "Passes over the data (default: a quarter of a full training)."
BUDGET = "Budget of the attacks: smoke, demo, quick, laptop, standard or paper (default: quick)."


def demo(  # noqa: PLR0917 - every option of the command, as typer wants them
    runs_dir: Annotated[str, Option(help="Folder for the six runs.")] = "runs/demo",
    full: Annotated[bool, Option("--full", help="All attacks, with the profile quick.")] = False,
    dataset: Annotated[
        OptText, Option(help="Other images than the small Fashion-MNIST of the package.")
    ] = None,
    epochs: Annotated[OptInt, Option(help="Passes over the data (default: 12).")] = None,
    profile: Annotated[
        OptText, Option(help="Budget of the attacks (default: demo; quick with --full).")
    ] = None,
    json_: console.JsonFlag = False,
) -> None:
    """What does a split leak, does a defence help, is the server needed? In two minutes on a CPU.

    Six rows on 7,000 pictures of clothes: a tiny client alone; the same client with a server,
    undefended, with `gated-att` and with `veil`; asking the server only when unsure; and a larger
    client alone. The last line names a page to open in a browser.

    Example: `splitveil demo`
    """
    console.start()
    from splitveil.experiments.demo import DATASET, EPOCHS, run_demo
    from splitveil.experiments.runner import LiveTable
    from splitveil.record.files import read_run
    from splitveil.report.first_screen import FRONT, conclusions, front_rows
    from splitveil.report.page import write_page

    shown = "pictures of clothes" if dataset is None else dataset
    # Known for the demo as it stands only.
    takes = (
        "" if dataset or epochs or profile else f": about {MINUTES[full]} minutes on two CPU cores"
    )
    console.announce(f"Six small models, trained and attacked on {shown}{takes}.")
    with LiveTable(console.err) as table:
        paths = run_demo(
            runs_dir, profile or ("quick" if full else "demo"), dataset=dataset or DATASET,
            epochs=EPOCHS if epochs is None else epochs, progress=table,
        )  # fmt: skip
    page, runs = write_page(paths, Path(runs_dir)), [read_run(path) for path in paths]
    if json_:
        console.show_records(runs)
        return
    rows = front_rows(runs)
    console.show_table("what leaves the device, and what it is worth", *FRONT.brief(rows, "en"))
    console.print_lines(" ".join(said.plain() for said in conclusions(rows)))
    console.print_lines(f"\nOpen {page.resolve()} to see what a stranger rebuilds.")


def _for(option: str, text: str, *, param: str = "", **more: Any) -> Any:  # noqa: ANN401 - typer's option
    """An option that works only together with another one, below a heading of its own."""
    names = [param] if param else []
    return Option(*names, help=text, rich_help_panel=f"With {option}", **more)


def clients(  # noqa: PLR0917 - every option of the command, as typer wants them
    macs: Annotated[
        OptNumber, Option(help="Multiply-adds that the client may spend on an image.")
    ] = None,
    wire: Annotated[OptInt, Option(help="Numbers that the client may send for an image.")] = None,
    params: Annotated[OptInt, Option(help="Parameters that the client may have.")] = None,
    track: Annotated[
        OptText, Option(help="Instead of these three: the caps of B1, B5 or B21.")
    ] = None,
    image: Annotated[OptText, Option(help=f"Size of the images (default: {ANY_IMAGE}).")] = None,
    family: Annotated[
        OptText, Option(help="Only this family: inverted, residual or strided.")
    ] = None,
    smaller: Annotated[
        bool,
        Option("--smaller", help="Also show clients that send fewer numbers."),
    ] = False,
    limit: Annotated[OptInt, Option(help="How many to show (default: 20).")] = None,
    backbone: Annotated[
        OptText, Option(help="Show the cuts of this net instead; see above.")
    ] = None,
    classes: Annotated[OptInt, _for("--backbone", "Its classes (default: 10).", min=2)] = None,
    alone: Annotated[
        bool,
        Option(
            "--alone",
            help="Train some without a server, and find the best.",
            rich_help_panel="What to show",
        ),
    ] = False,
    rank: Annotated[bool, Option("--rank", help="Train and attack some, and rank them.")] = False,
    dataset: Annotated[OptText, _for(TRAINS, "Dataset to train on; required.")] = None,
    defence: Annotated[
        OptText, _for("--rank", "Defence that they train with (default: veil).")
    ] = None,
    epochs: Annotated[OptInt, _for(TRAINS, EPOCHS)] = None,
    top: Annotated[
        OptInt,
        _for(TRAINS, "How many to train; with --rank besides the named nets (default: 4, or 16)."),
    ] = None,
    profile: Annotated[OptText, _for("--rank", BUDGET)] = None,
    settings: Annotated[
        OptTexts, _for(TRAINS, "key=value of the runs; repeatable.", param="--set")
    ] = None,
    seed: Annotated[OptInt, _for(TRAINS, "Random seed of the training (default: 0).")] = None,
    device: Annotated[OptText, _for(TRAINS, "Where to compute: auto, cpu or cuda.")] = None,
    data_dir: Annotated[OptText, _for(TRAINS, "Folder of the datasets.")] = None,
    runs_dir: Annotated[OptText, _for(TRAINS, "Folder of the runs (default: runs).")] = None,
    json_: console.JsonFlag = False,
) -> None:
    """List clients that fit the compute and the bandwidth of a device.

    Deep ones stand first: at equal cost, depth protects better than width.

    With `--rank` the named nets and a few others that fit are trained briefly, attacked on
    validation images and ranked by a score: accuracy above chance × error of the strongest attack,
    as a share of the error that remains if the attacker knows the label alone. The runs go to the
    folder `advisor` of `--runs-dir`; the same command again continues. If some fail, the others
    are ranked, and the exit code is 3.

    With `--alone` 16 clients that answer by themselves, the deepest among them, are trained in
    rounds: the better half goes on with twice as many epochs. Nothing is sent and nothing is
    attacked; the best on validation images is what a server must beat.

    With `--backbone NET` the places where a net can be cut are listed, with a bottleneck where a
    cut sends too much. NET is a name, which `splitveil train --net NAME@N` then takes, or a
    function of yours, MODULE:FUNCTION. It takes (image_shape, num_classes) or nothing, and returns
    an nn.Sequential; its code is run.

    Example: `splitveil clients --macs 21.9e6 --wire 512`

    Example: `splitveil clients --macs 1e6 --wire 64 --rank --dataset digits --top 3`

    Example: `splitveil clients --alone --track B5 --dataset cifar10`

    Example: `splitveil clients --macs 21.9e6 --wire 512 --backbone mynets:resnet`
    """
    from splitveil.nets.clients import parse_image

    run: Json = {
        "dataset": dataset, "defence": defence, "epochs": epochs, "seed": seed, "device": device,
        "data_dir": data_dir, "runs_dir": runs_dir,
    }  # fmt: skip
    only_ranked = run | {"top": top, "profile": profile, "set": settings}
    only_listed: Json = {"limit": limit, "smaller": smaller or None}
    budget = _budget(macs, wire, params, track, alone=alone) | {"family": family}
    macs, wire = budget["max_macs"], budget["wire_floats"]
    shape = parse_image(image or ANY_IMAGE)
    if alone:
        others = {
            "rank": rank or None,
            "backbone": backbone,
            "classes": classes,
            "profile": profile,
        }
        others |= {"family": family, "image": image, "defence": defence}
        _refuse(only_listed | others, without="--alone")
        show_alone(run, settings or [], budget, top, track, json_=json_)
    elif rank:
        _refuse(only_listed | {"backbone": backbone, "classes": classes}, without="--rank")
        budget |= {} if top is None else {"top": top}
        show_ranking(run, settings or [], budget, profile or "quick", image, json_=json_)
    elif backbone is not None:
        others = only_listed | only_ranked | {"params": params, "family": family, "track": track}
        _refuse(others, without="--backbone")
        show_cuts(backbone, shape, 10 if classes is None else classes, macs, wire, json_=json_)
    else:
        _refuse(only_ranked, needs="--rank")
        _refuse({"classes": classes}, needs="--backbone")
        show_clients(shape, budget, 20 if limit is None else limit, smaller=smaller, json_=json_)


def _budget(
    macs: float | None, wire: int | None, params: int | None, track: str | None, *, alone: bool
) -> Json:
    """What a client may cost, as given or by a track."""
    from splitveil.nets.split import find_track

    if track is not None:
        caps = find_track(track)
        _refuse({"macs": macs, "wire": wire, "params": params}, without="--track")
        stored = {"max_stored": caps.stored}
        return {"max_macs": caps.macs, "wire_floats": caps.wire_floats} | stored
    if macs is None or (wire is None and not alone):
        raise ConfigError(
            "clients need a budget; give --macs and --wire, for example --macs 5e6 --wire 512, or "
            "--track B1, B5 or B21"
        )
    limit = {"max_stored" if alone else "max_params": params}
    return {"max_macs": macs, "wire_floats": 512 if wire is None else wire} | limit


def _refuse(options: Mapping[str, Any], *, needs: str = "", without: str = "") -> None:
    """Refuse options that would have no effect."""
    given = ", ".join(f"--{k.replace('_', '-')}" for k, v in options.items() if v is not None)
    if given and needs:
        raise ConfigError(f"{given}: only with {needs}; add {needs}, or leave the option out")
    if given:
        raise ConfigError(f"{given}: not together with {without}; leave one of them out")


def show_clients(
    shape: Shape, budget: Mapping[str, Any], limit: int, *, smaller: bool, json_: bool
) -> None:
    """The clients that fit a budget, by their costs alone."""
    from splitveil.nets.budget import candidates, nothing_fits

    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    found = candidates(shape, **budget, smaller=smaller)
    if not found:
        raise ConfigError(nothing_fits(shape, **budget))
    rows = [
        vars(c) | {"spec": str(c.spec), "family": c.spec.family, "track": c.track}
        for c in found[:limit]
    ]
    if json_:
        console.show_json({"image_shape": shape, "fitting": len(found), "clients": rows})
        return
    show_listing(
        ("net", *COSTS, "stored", "track", "depth", "receptive_field"), rows,
        f"{len(rows)} of {len(found)} clients that fit, for images {in_words(shape)}",
        "wire: numbers sent; stored: parameters after folding BatchNorm; depth: convolutions in a "
        "row; sees: receptive field in pixels",
        f"next: splitveil train --net {rows[0]['net']} --dataset NAME",
    )  # fmt: skip


def show_alone(
    run: Mapping[str, Any], pairs: list[str], budget: Json, top: int | None, track: str | None,
    *, json_: bool,
) -> None:  # fmt: skip
    """Find the client that answers best without a server."""
    console.start()
    from splitveil.data.catalogue import load
    from splitveil.experiments.client_search import ALONE, search_alone
    from splitveil.experiments.runner import LiveTable
    from splitveil.nets.budget import answering_clients

    config = _config_of({**run, "defence": "alone"}, pairs, "--alone")
    with console.progress_bar("data") as bar:  # the first time they are downloaded
        dataset = load(config.dataset, config.data_dir, bar)
    most, room = budget["max_macs"], budget.get("max_stored")
    found = answering_clients(
        dataset.image_shape, dataset.num_classes, max_macs=most, max_stored=room,
        wire_floats=budget["wire_floats"], most=ALONE if top is None else top,
    )  # fmt: skip

    def fits(macs: int, stored: int) -> bool:
        return macs <= most and (room is None or stored <= room)

    with LiveTable(console.err) as table:
        rows, failed = search_alone(found, config, fits, table)
    warn_failed(failed, SAME_COMMAND)
    best, caps = rows[0], {"macs": most, "stored": room}
    if json_:
        content: Json = {key: getattr(config, key) for key in ("dataset", "epochs", "seed")}
        content |= {"track": track, "caps": caps, "architectures": len(found), "best": best}
        content |= {"clients": rows}
        content["failed"] = [{"trial": name, "error": error} for name, error in failed.items()]
        console.show_json(content)
    else:
        words = " ".join(f"--set {pair}" for pair in pairs)
        show_listing(
            ("client", "pooling", "epochs", "accuracy", "macs", "stored", "depth"), rows,
            f"{len(found)} clients alone on {config.dataset}, track {track or 'none'}, up to "
            f"{config.epochs} epochs, seed {config.seed}; accuracy on validation images",
            "each round keeps the better half and doubles the epochs; one seed, short training",
            f"next: splitveil train --dataset {config.dataset} --defence alone "
            f"--client {best['client']} --set pooling={best['pooling']} {words}".rstrip(),
        )  # fmt: skip
    end_after(failed)


def _config_of(run: Mapping[str, Any], pairs: list[str], option: str) -> "RunConfig":
    """Settings of runs for a choice: a quarter of the usual epochs, unless given."""
    from splitveil.config.resolve import make_config
    from splitveil.config.run_config import parse_pairs
    from splitveil.experiments.runner import brief_epochs

    if run["dataset"] is None:
        raise ConfigError(f"{option} trains clients and needs --dataset; see `splitveil datasets`")
    given = {k: v for k, v in run.items() if v is not None}
    return make_config({"epochs": brief_epochs(run["dataset"]), **parse_pairs(pairs), **given})


def show_ranking(
    run: Mapping[str, Any], pairs: list[str], budget: Json, profile: str, image: str | None,
    *, json_: bool,
) -> None:  # fmt: skip
    """Train and attack clients that fit, and rank them."""
    console.start()
    from splitveil.data.catalogue import load
    from splitveil.experiments.client_search import SCORE, contenders, rank_clients
    from splitveil.experiments.runner import LiveTable
    from splitveil.nets.clients import parse_image

    config = _config_of(run, pairs, "--rank")
    with console.progress_bar("data") as bar:  # the first time they are downloaded
        images = load(config.dataset, config.data_dir, bar).image_shape
    if image is not None and parse_image(image) != images:
        raise ConfigError(f"the images of '{config.dataset}' are {images}; leave out --image")
    with LiveTable(console.err) as table:
        rows, failed = rank_clients(contenders(images, **budget), config, profile, table)
    warn_failed(failed, SAME_COMMAND)
    if json_:
        content = {key: getattr(config, key) for key in ("dataset", "defence", "epochs", "seed")}
        content |= {"profile": profile, "image_shape": images, "score": SCORE, "clients": rows}
        content["failed"] = [{"net": net, "error": error} for net, error in failed.items()]
        console.show_json(content)
        end_after(failed)
        return
    end = "no client answers better than chance; try more --epochs"
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
    end_after(failed)


def warn_failed(failed: Mapping[str, str], again: str) -> None:
    """Say which trials failed, why, and how to try them again."""
    for label, error in failed.items():
        console.warn(f"{label} failed: {error}")
    if failed:
        console.warn(f"{again} tries again what failed")


def end_after(failed: Mapping[str, str]) -> None:
    """End with the exit code of a command whose other trials are shown, if some failed."""
    if failed:
        raise Exit(EXIT_SOME_FAILED)


def advise(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: Annotated[str, Option(help="A name that `splitveil datasets` lists.")],
    macs: Annotated[
        OptNumber, Option(help="Multiply-adds that the device may spend on an image.")
    ] = None,
    wire: Annotated[OptInt, Option(help="Numbers that it may send for an image.")] = None,
    params: Annotated[OptInt, Option(help="Numbers that it may store (default: any).")] = None,
    track: Annotated[OptText, Option(help="Instead of these three: B1, B5 or B21.")] = None,
    exposure: Annotated[float, Option(help="Largest exposure, in [0, 1].")] = 0.25,
    minutes: Annotated[
        OptNumber,
        Option(help="About how long it may take on two cores (default: 4, or 6 for many images)."),
    ] = None,
    server: Annotated[
        OptText, Option(help="What follows the client; see `splitveil nets`.")
    ] = None,
    seed: Annotated[int, Option(help="Random seed of the trainings.")] = 0,
    device: console.Device = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    json_: console.JsonFlag = False,
) -> None:
    """Try a client alone, split and with early exit, and say what to ship.

    Short trainings within the device's budget, judged on validation images. The answer is a
    sentence, a table, a picture (`frontier.png` in `advice/DATASET` of the folder of runs), and
    what was not tried. A server is recommended only if it surely answers better than the best
    client alone, with an exposure that is surely within the limit. The same command again
    continues.

    Example: `splitveil advise --macs 5e6 --wire 512 --exposure 0.25 --dataset fashion-mnist`
    """
    console.start()
    from splitveil.config.resolve import make_config
    from splitveil.data.catalogue import load
    from splitveil.experiments.advise import run_advise
    from splitveil.experiments.choice import ADVICE, DeviceLimits
    from splitveil.experiments.runner import LiveTable

    budget = _budget(macs, wire, params, track, alone=True)
    limits = DeviceLimits(
        macs=budget["max_macs"], wire_floats=budget["wire_floats"], exposure=exposure,
        stored=budget["max_stored"],
    )  # fmt: skip
    run = {
        "dataset": dataset, "seed": seed, "device": device, "data_dir": data_dir,
        "runs_dir": runs_dir,
    }  # fmt: skip
    config = make_config({k: v for k, v in run.items() if v is not None})
    with console.progress_bar("data") as bar:  # the first time they are downloaded
        load(config.dataset, config.data_dir, bar)
    with LiveTable(console.err) as table:
        found = run_advise(config, limits, minutes=minutes, server=server, progress=table)
    warn_failed(found.failed, SAME_COMMAND)
    said = found.to_json()
    if json_:
        console.show_json(said)
    else:
        console.print_lines(
            said["sentence"], "", ADVICE.render(said["rows"], "terminal").rstrip(),
            "gain: points over the best client alone, with 95 % limits; at most: upper limit of "
            "the exposure; found: among 1,000",
            f"picture: {said['picture']}", "not tried:",
            *(f"- {words}" for words in said["not_tried"]),
        )  # fmt: skip
    end_after(found.failed)


def sweep(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: console.DatasetOption = None,
    defence: Annotated[
        OptTexts, Option(help="Defence to try; repeatable (default: none, noise, veil).")
    ] = None,
    vary: Annotated[
        OptTexts, Option(help="A setting and its values, see above; repeatable.")
    ] = None,
    trials: Annotated[
        OptInt, Option(help="Trials of each defence (default: the largest grid).")
    ] = None,
    sampler: Annotated[
        OptText, Option(help="Who proposes settings: grid, random or optuna.")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], Option(help="Where the trials run: in this process, or on Ray.")
    ] = "local",
    address: Annotated[
        OptText, Option(help="Address of a Ray cluster (default: start one here).")
    ] = None,
    jobs: Annotated[OptInt, Option(help="Trials at a time; several need Ray.")] = None,
    epochs: Annotated[OptInt, Option(help=EPOCHS)] = None,
    profile: Annotated[OptText, Option(help=BUDGET)] = None,
    attacks: Annotated[
        OptText, Option(help="Only these attacks of the profile, such as linear,decoder.")
    ] = None,
    attack: Annotated[OptTexts, Option(hidden=True)] = None,
    settings: console.SettingsOption = None,
    net: console.NetOption = None,
    seed: Annotated[OptInt, Option(help="Random seed of proposals and runs (default: 0).")] = None,
    device: console.Device = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    name: Annotated[str, Option(help="Name of the sweep's folder.")] = "sweep",
    resume: Annotated[bool, Option("--resume", help="Continue the sweep of this name.")] = False,
    lang: console.Language = "en",
    json_: console.JsonFlag = False,
) -> None:
    """Try settings of several defences, and show the best trade-offs of accuracy and leakage.

    Every trial is a short training and an attack on validation images, in a run of its own below
    `runs/NAME/trials`. All defences have the same number of trials; one with fewer settings to try
    repeats them with other random seeds. A stopped sweep continues with `--resume --name NAME`.
    At the end, a page (`sweep.html`), its plot and every trial as CSV stand in `runs/NAME`. If some
    trials fail, the others are shown, and the exit code is 3.

    `--vary` takes any setting of a run or of a defence: `key=a,b,c` lists its values,
    `key=lin:low:high` and `key=log:low:high` are ranges, and `:count` after a range says how many
    of its values a grid takes. If all are countable the sampler is a grid, otherwise Optuna.

    Example: `splitveil sweep --dataset digits --defence none --defence noise --defence veil
    --vary lambd=0.1,0.3,1 --vary noise_std=log:0.01:0.2 --trials 12`
    """
    console.start()
    from splitveil.config.run_config import RunConfig
    from splitveil.experiments.runner import LiveTable
    from splitveil.experiments.search import make_plan, run_sweep
    from splitveil.experiments.sweep_page import write_sweep
    from splitveil.report.words import language

    chosen = language(lang)
    if address is not None and engine != "ray":
        raise ConfigError("--address names a Ray cluster; add --engine ray")
    given: Json = {
        "defences": defence, "vary": vary, "trials": trials, "sampler": sampler,
        "profile": profile, "attacks": console.names_of(attacks, attack), "seed": seed,
    }  # fmt: skip
    options = {
        "dataset": dataset, "epochs": epochs, "net": net, "device": device,
        "data_dir": None if data_dir is None else str(Path(data_dir).resolve()),
    }  # fmt: skip
    # Absolute paths: a worker of Ray may start in another folder.
    folder = RunConfig(runs_dir=str(Path(runs_dir or "runs").resolve()), name=name).folder
    plan = make_plan(given, options, settings or [], folder if resume else None)
    if engine == "ray":
        address = address or "local"
    elif jobs is None:
        jobs = 1
    with LiveTable(console.err) as table:
        result = run_sweep(plan, folder, resume=resume, jobs=jobs, address=address, progress=table)
    failed = {row["trial"]: row["error"] for row in result["trials"] if "error" in row}
    warn_failed(failed, "--resume")
    files = [shown_path(path) for path in write_sweep(result, folder, chosen)]
    if json_:
        console.show_json(result | {"files": files})
    else:
        page, plot, _, table_ = files
        show_sweep(result, f"page: {page}", f"plot: {plot}", f"every trial: {table_}")
    end_after(failed)


def shown_path(path: Path) -> str:
    """A path from the current folder, where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def show_sweep(result: Json, *files: str) -> None:
    """The result of a sweep as text, and where its files are."""
    plan, base, at = (result[k] for k in ("plan", "reference_accuracy", "reference_point"))
    console.print_lines(
        f"{len(result['trials'])} trials on {plan['options'].get('dataset', 'digits')}: "
        f"{plan['trials']} of each defence, sampler {plan['sampler']}, seed {plan['seed']}, "
        f"profile {plan['profile']}; all numbers on validation images"
    )
    measured: tuple[str, ...] = MEASURED
    if any("exposure" in row for row in result["trials"]):  # not every image is sent
        measured = tuple("exposure" if key == "leakage" else key for key in MEASURED)
    show_listing(
        (*measured, "defence", "settings"),
        [_shown(row) for row in result["front"]],
        "front: no other trial is as accurate and as private, and better in one",
        f"hypervolume {result['hypervolume']['value']:.3f}: share covered from accuracy "
        f"{at['accuracy']:g}, leakage {at['leakage']:g}",
        *_left_out(result["at_chance"]),
    )
    rows: list[Json] = []
    for name, one in result["defences"].items():
        volume, best = one["hypervolume"], one["best"]
        row = {"settings": "no trial"} if best is None else _shown(best)
        row |= {"defence": name, "failed": f"{one['failed']}/{one['trials']}"}
        rows.append(row | {"volume": volume and volume["value"]})
    show_listing(
        ("defence", "failed", "volume", *measured, "settings"),
        rows,
        f"best privacy at ≤ {100 * result['allowed_loss']:g} point below "
        f"{100 * base['accuracy']:.2f} %, the most accurate trial of "
        f"{base['defence'] if base['defence'] == 'none' else 'all'}",
    )
    console.print_lines(*files)
    if kept := [row for row in rows if "run" in row]:
        run = Path(min(kept, key=lambda row: row["exposure"])["run"])
        console.print_lines(f"next: splitveil audit {shlex.quote(shown_path(run))}")


def _left_out(at_chance: Sequence[str]) -> list[str]:
    names = ", ".join(at_chance)
    return [f"not on the front, because hardly better than guessing: {names}"] if names else []


def _shown(row: Json) -> Json:
    """A trial's row with its settings in words, and its leakage and exposure as at least 0."""
    from splitveil.experiments.runner import trial_words

    words = trial_words(row["settings"], row["seed"])
    leaks = max(row["leakage"], 0.0)
    exposed = max(row.get("exposure", leaks), 0.0)
    return row | {"settings": words, "leakage": leaks, "exposure": exposed}


def reproduce(  # noqa: PLR0917 - every option of the command, as typer wants them
    experiment: Annotated[str, Argument(help="Which experiment: gated-att-report.")],
    only: Annotated[OptTexts, Option(help="Only this row; repeatable.")] = None,
    seeds: Annotated[OptText, Option(help="Random seeds, such as 0,1,2 (default: 0).")] = None,
    seed: Annotated[OptInt, Option(help="One random seed.")] = None,
    epochs: Annotated[OptInt, Option(help="Passes over the data (default: as published).")] = None,
    profile: console.Profile = "standard",
    aux: Annotated[OptText, Option(help="What the attacker knows (default: as published).")] = None,
    dataset: Annotated[
        OptText, Option(help="Train on this dataset instead of the experiment's.")
    ] = None,
    device: console.Device = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    json_: console.JsonFlag = False,
) -> None:
    """Run a published experiment, and print its table next to the reported numbers.

    This takes hours on one GPU; rehearse it with fewer epochs or other data. The same command
    again keeps finished rows and continues an interrupted one. The table shows all rows of the
    folder that were made with the same options; the folder is `runs/EXPERIMENT-sSEED` by default.
    Several seeds give one table with mean ± sd. If some rows fail, the others are shown, and the
    exit code is 3.

    Example: `splitveil reproduce gated-att-report --only cem --only gated-att --seeds 0,1,2`
    """
    console.start()
    if seeds is not None and seed is not None:
        raise ConfigError("--seed and --seeds say the same; give one of them")
    from splitveil.experiments import reproduction
    from splitveil.experiments.runner import LiveTable

    with LiveTable(console.err) as table:
        made, rows, page, failed = reproduction.reproduce(
            experiment, seeds=console.seeds_of(seeds or str(seed or 0)), only=only or [],
            profile=profile, aux=aux, runs_dir=runs_dir, progress=table, epochs=epochs,
            dataset=dataset, device=device, data_dir=data_dir,
        )  # fmt: skip
    warn_failed(failed, SAME_COMMAND)
    if json_:
        console.show_json(reproduction.shown_json(made, rows))
    else:
        console.show_table(made.title, *made.brief(rows))
        console.print_lines(f"table: {page}")
    end_after(failed)
