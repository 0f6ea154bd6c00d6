"""`splitveil clients`: which clients fit a budget, which of them is best, where to cut a net."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitveil.commands import print_lines
from splitveil.commands.cuts import in_words, show_cuts

if TYPE_CHECKING:
    from splitveil.advisor import Advice
    from splitveil.config import RunConfig

Shape = tuple[int, int, int]

ANY_IMAGE = "3x32x32"


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
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
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
        refuse("--rank", "does not go", only_listed | {"backbone": backbone, "classes": classes})
    elif backbone is not None:
        foreign = {"params": params, "family": family}
        refuse("--backbone", "does not go", only_listed | only_ranked | foreign)
    else:
        refuse("--rank", "was not given, but goes", only_ranked)
        refuse("--backbone", "was not given, but goes", {"classes": classes})
    budget: dict[str, Any] = {
        "max_macs": macs, "wire_floats": wire, "max_params": params, "family": family
    }  # fmt: skip
    shape = parse_image(image or ANY_IMAGE)
    if rank:
        options = {k: v for k, v in run.items() if v is not None}
        show_advice(
            options,
            budget if top is None else budget | {"top": top},
            profile or "quick",
            image=None if image is None else shape,
            json_=json_,
        )
    elif backbone is not None:
        show_cuts(backbone, shape, 10 if classes is None else classes, macs, wire, json_=json_)
    else:
        show_clients(shape, budget, 20 if limit is None else limit, smaller=smaller, json_=json_)


def refuse(owner: str, how: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would do nothing."""
    from splitveil.errors import ConfigError

    given = [f"--{name.replace('_', '-')}" for name, v in options.items() if v is not None]
    if given:
        raise ConfigError(f"{owner} {how} with {', '.join(given)}; leave out the one or the other")


def show_clients(
    shape: Shape, budget: Mapping[str, Any], limit: int, *, smaller: bool, json_: bool
) -> None:
    """The clients that fit a budget, by their costs alone."""
    from splitveil.console import show_json
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
    head = f"{'net':<{wide}} {'MMAC':>6} {'params':>6} {'wire':>5} {'depth':>5} {'sees':>4}"
    print_lines(
        f"{len(shown)} of {len(found)} clients that fit, for images {in_words(shape)}",
        head,
        *(
            f"{c.net:<{wide}} {c.macs / 1e6:6.2f} {c.params:6d} {c.wire_floats:5d} {c.depth:5d} "
            f"{c.receptive_field:4d}"
            for c in shown
        ),
        "wire: numbers sent; depth: convolutions in a row; sees: receptive field in pixels",
        f"next: splitveil train --net {shown[0].net} --dataset NAME",
    )


def show_advice(
    options: Mapping[str, Any],
    budget: Mapping[str, Any],
    profile: str,
    *,
    image: Shape | None,
    json_: bool,
) -> None:
    """Train and attack clients that fit, and rank them."""
    from splitveil import advisor
    from splitveil.config import make_config
    from splitveil.console import progress_bar, setup_logging, show_json, warn
    from splitveil.data import load
    from splitveil.errors import ConfigError
    from splitveil.nets.cost import nothing_fits
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()
    if "dataset" not in options:
        raise ConfigError("--rank trains clients and needs --dataset; see `splitveil datasets`")
    config = make_config({"epochs": advisor.brief_epochs(options["dataset"]), **options})
    with progress_bar("rank") as bar:
        shape = load(config.dataset, config.data_dir, bar).image_shape
        if image not in (None, shape):
            raise ConfigError(f"the images of '{config.dataset}' are {shape}; leave out --image")
        found = advisor.entrants(shape, **budget)
        if not found:
            raise ConfigError(
                nothing_fits(shape, **{k: v for k, v in budget.items() if k != "top"})
            )
        advice = advisor.advise(found, config, profile, bar)
    for failure in advice.failures:
        warn(f"{failure.net} failed: {failure.error}")
    if json_:
        settings = {"dataset": config.dataset, "defence": config.defence, "epochs": config.epochs}
        show_json(
            settings
            | {"seed": config.seed, "profile": profile, "image_shape": shape}
            | {"score": advisor.SCORE, "clients": [vars(f) for f in advice.findings]}
            | {"failed": [vars(f) for f in advice.failures]}
        )
    else:
        print_lines(*advice_lines(advice, config, profile))


def advice_lines(advice: "Advice", config: "RunConfig", profile: str) -> Iterator[str]:
    """The ranking as text, one line for each client."""
    from splitveil.advisor import SCORE

    findings = advice.findings
    wide = max(len(f.net) for f in findings)
    yield (
        f"{len(findings)} clients on {config.dataset} with {config.defence}, "
        f"{config.epochs} epochs, seed {config.seed}, profile {profile}"
    )
    yield (
        f"  {'net':<{wide}} {'score':>6} {'acc %':>6} {'MSE':>7} {'leakage':>7} {'MMAC':>6} "
        f"{'params':>7} {'wire':>5} attack"
    )
    for f in findings:
        yield (
            f"{'*' if f.pareto else ' '} {f.net:<{wide}} {f.score:6.3f} {100 * f.accuracy:6.2f} "
            f"{f.mse:7.4f} {f.leakage:7.3f} {f.macs / 1e6:6.2f} {f.params:7d} {f.wire_floats:5d} "
            f"{f.attack}"
        )
    yield f"score: {SCORE}; all on validation images"
    yield "*: no other is as accurate and as private, and better in one; one seed, short training"
    best = findings[0]
    if best.score == 0:
        yield "next: none answers better than chance; give them more --epochs"
    else:
        yield (
            f"next: splitveil train --net {best.net} --dataset {config.dataset} "
            f"--defence {config.defence}"
        )
