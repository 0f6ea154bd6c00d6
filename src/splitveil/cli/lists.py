"""The commands that list datasets, defences, attacks and recipes; the cuts of a net."""

from collections.abc import Sequence
from dataclasses import asdict

from splitveil.cli.console import JsonFlag, print_lines, show_catalogue, show_json
from splitveil.io import Json
from splitveil.table import DIGITS, Table, fixed, plain_column

Shape = tuple[int, int, int]

LISTING = Table(  # every column of a listing of clients, cuts or trials
    plain_column("mark", "*"), plain_column("net", "net"), plain_column("at", "at", DIGITS),
    plain_column("layer", "after"), plain_column("sends", "sends"),
    plain_column("macs", "MMAC", fixed(2, 1e-6)), plain_column("params", "params", DIGITS),
    plain_column("wire_floats", "wire", DIGITS), plain_column("depth", "depth", DIGITS),
    plain_column("receptive_field", "sees", DIGITS), plain_column("fitting", "fits"),
    plain_column("score", "score", fixed(3)), plain_column("accuracy", "acc %", fixed(2, 100.0)),
    plain_column("mse", "MSE", fixed(4)), plain_column("leakage", "leakage", fixed(3)),
    plain_column("exposure", "exposure", fixed(3)),
    plain_column("attack", "attack"), plain_column("defence", "defence"),
    plain_column("failed", "failed", DIGITS), plain_column("volume", "volume", fixed(3)),
    plain_column("settings", "trial"),
)  # fmt: skip
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
    from splitveil.nets.catalogue import NETS, every_cut, find_net
    from splitveil.nets.cost import cuts_of_nets, suggest_cuts

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
