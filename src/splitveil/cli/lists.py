"""The commands that list datasets, defences, attacks and recipes; the cuts of a net."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from typer import Option

from splitveil.cli.console import JsonFlag, print_lines, show_catalogue, show_json
from splitveil.errors import ConfigError
from splitveil.io import Json
from splitveil.table import DIGITS, Table, fixed, plain_column

Shape = tuple[int, int, int]

LISTING = Table(  # every column of a listing of clients, cuts or trials
    plain_column("mark", "*"), plain_column("net", "net"), plain_column("at", "at", DIGITS),
    plain_column("layer", "after"), plain_column("sends", "sends"),
    plain_column("macs", "MMAC", fixed(2, 1e-6)), plain_column("params", "params", DIGITS),
    plain_column("stored", "stored", DIGITS),
    plain_column("wire_floats", "wire", DIGITS), plain_column("depth", "depth", DIGITS),
    plain_column("receptive_field", "sees", DIGITS), plain_column("fitting", "fits"),
    plain_column("score", "score", fixed(3)), plain_column("accuracy", "acc %", fixed(2, 100.0)),
    plain_column("mse", "MSE", fixed(4)), plain_column("leakage", "leakage", fixed(3)),
    plain_column("exposure", "exposure", fixed(3)),
    plain_column("attack", "attack"), plain_column("defence", "defence"),
    plain_column("failed", "failed", DIGITS), plain_column("volume", "volume", fixed(3)),
    plain_column("settings", "trial"), plain_column("track", "track"),
    plain_column("server_macs", "server MMAC", fixed(2, 1e-6)),
    plain_column("server_params", "server params", DIGITS),
    plain_column("epochs", "epochs", DIGITS), plain_column("pooling", "pooling"),
    plain_column("client", "client"),
)  # fmt: skip
ANY_IMAGE = "3x32x32"
COSTS = ("macs", "params", "wire_floats")
MEASURED = ("accuracy", "leakage", "mse", "attack")


def show_listing(keys: Sequence[str], rows: Sequence[Json], head: str, *notes: str) -> None:
    """Print these columns of the rows, with a line above and notes below."""
    print_lines(head, LISTING.only(*keys).render(rows, "terminal").rstrip(), *notes)


def show_cuts(
    name: str, shape: Shape, num_classes: int, macs: float, wire: int, *, json_: bool
) -> None:
    """Print where a net can be cut, what each cut costs, and what would make it fit."""
    from splitveil.config.resolve import load_backbone
    from splitveil.nets.budget import cuts_of_nets, suggest_cuts
    from splitveil.nets.catalogue import NETS, every_cut, find_net

    base, at, _ = name.partition("@")
    named = base in NETS
    if named:
        nets = [find_net(name)] if at else every_cut(name)
        found = cuts_of_nets(nets, shape, num_classes, macs, wire)
    else:
        found = suggest_cuts(load_backbone(name, shape, num_classes), shape, macs, wire)
    rows = [{"at": c.at, "layer": c.layer} | asdict(c) for c in found]
    if json_:
        show_json({"image_shape": shape, "cuts": rows})
        return
    end = "splitveil.nets.cut(backbone, at) makes the split"
    if named:
        net = name if at or len(found) == 1 else f"{base}@N"
        end = f"next: splitveil train --net {net} --dataset NAME"
        if not any(c.fits for c in found):
            end = f"no cut fits; next: splitveil clients --macs {macs:.10g} --wire {wire}"
    head = f"{len(rows)} cut{'s'[: len(rows) > 1]} of {base if named else 'the backbone'}"
    show_listing(
        ("at", "layer", "sends", *COSTS, "fitting"), [_shown(row) for row in rows],
        f"{head}, for images {in_words(shape)}", "wire: numbers sent", end,
    )  # fmt: skip


def _shown(row: Json) -> Json:
    """A cut's row with its shape and, in words, what would make it fit."""
    fits, narrow = "yes" if row["fits"] else "no", row["bottleneck"]
    if narrow is not None:
        fits = (
            f"with 3×3 convolution to {narrow['channels']} channel{'s' * (narrow['channels'] > 1)} "
            f"and sigmoid: {(row['macs'] + narrow['macs']) / 1e6:.2f} MMAC, "
            f"{row['params'] + narrow['params']} params, wire {narrow['wire_floats']}"
        )
    return row | {"sends": in_words(row["wire_shape"]), "fitting": fits}


def in_words(shape: tuple[int, ...]) -> str:
    """A shape as `--image` takes it."""
    return "x".join(map(str, shape))


def nets(
    image: Annotated[str, Option(help="Size of the images.")] = ANY_IMAGE,
    classes: Annotated[int, Option(help="Number of classes.", min=2)] = 10,
    json_: JsonFlag = False,
) -> None:
    """List the nets and servers by name, and what both halves cost for one image.

    `stored` counts the parameters after BatchNorm is folded, with tables and noise scales. A track
    is the smallest of B1 (1 MMAC, 16,000 stored), B5 (5 MMAC, 64,000) and B21 (21.9 MMAC, 500,000)
    that holds the client, with at most 512 numbers on the wire.

    Example: `splitveil nets --image 1x28x28`
    """
    import torch

    from splitveil.nets.catalogue import NETS
    from splitveil.nets.clients import parse_image
    from splitveil.nets.servers import SERVERS
    from splitveil.nets.split import TRACKS, cut, deployed_cost

    shape, rows = parse_image(image), []
    for name, net in NETS.items():
        # On meta, tensors have no values: nothing is allocated or drawn.
        with suppress(ConfigError), torch.device("meta"):  # a net that is not for such images
            cost = deployed_cost(cut(net.build(shape, classes), net.cut_at), shape).to_json()
            server = {f"server_{k}": cost["server"][k] for k in ("macs", "params")}
            rows.append({"net": name, "summary": net.summary} | cost["client"] | server)
    if not rows:
        raise ConfigError(f"no net is made for {image} images; give at least 4×4, as 1x8x8")
    servers = {name: server.summary for name, server in SERVERS.items()}
    if json_:
        tracks = {name: asdict(caps) for name, caps in TRACKS.items()}
        show_json({"image_shape": shape, "nets": rows, "servers": servers, "tracks": tracks})
        return
    show_listing(
        ("net", "macs", "stored", "wire_floats", "track", "server_macs", "server_params"), rows,
        f"{len(rows)} nets for images {in_words(shape)} of {classes} classes; costs without a "
        "defence",
        *(f"--server {name}: {summary}" for name, summary in servers.items()),
        "clients for --client: small, thin-deep, thin-mobilenet, thin-resnet, thin-strided, or a "
        "SPEC that `splitveil clients` lists",
    )  # fmt: skip


def datasets(json_: JsonFlag = False) -> None:
    """List the datasets.

    Example: `splitveil datasets --json`
    """
    from splitveil.data.catalogue import DATASETS

    names = {k + (":PATH" if v.needs_path else ""): v.summary for k, v in DATASETS.items()}
    show_catalogue("Datasets", names, json_=json_)


def defences(json_: JsonFlag = False) -> None:
    """List the defences; with `--json` also their settings.

    Several can be joined, as in `--defence noise+dropout`, but only one of them with a penalty.

    Example: `splitveil defences`
    """
    from splitveil.defences.catalogue import DEFENCES

    summaries = {n: d.summary for n, d in DEFENCES.items()}
    show_catalogue("Defences", summaries, {n: asdict(d) for n, d in DEFENCES.items()}, json_=json_)


def attacks(json_: JsonFlag = False) -> None:
    """List the attacks, and what each needs.

    `label` needs the image's label, `black-box` a client to send images of its own through,
    `repeats` the same image sent several times, `white-box` the client's network.

    Example: `splitveil attacks`
    """
    from splitveil.attacks.profiles import PROFILES
    from splitveil.threat import Attack

    def words(attack: Attack) -> str:
        lines = (getattr(attack, "summary", "") or attack.__doc__ or "").strip().splitlines()
        return f"{attack.access}: {next(iter(lines), '')}"

    # An attack of several profiles has the budget of the last one, `paper`.
    entries = {n: words(attack) for profile in PROFILES.values() for n, attack in profile.items()}
    show_catalogue("Attacks", entries, json_=json_)


def recipes(json_: JsonFlag = False) -> None:
    """List the recipes of `splitveil train --recipe`; with `--json` also their settings.

    Example: `splitveil recipes`
    """
    from splitveil.config.recipes import RECIPES

    summaries = {n: r.summary for n, r in RECIPES.items()}
    show_catalogue("Recipes", summaries, {n: asdict(r) for n, r in RECIPES.items()}, json_=json_)
