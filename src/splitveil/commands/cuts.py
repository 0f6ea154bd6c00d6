"""Cuts of a named net or of a user's own: loading it, and showing what each cut costs."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from splitveil.commands import print_lines
from splitveil.console import show_json
from splitveil.errors import ConfigError, unknown
from splitveil.imports import current_folder_first, find_object
from splitveil.table import DIGITS, Table, fixed, plain_column

if TYPE_CHECKING:
    from torch import nn

    from splitveil.types import Json

Shape = tuple[int, int, int]

LISTING = Table(  # every column of a listing of clients, cuts or trials
    plain_column("mark", "*"), plain_column("net", "net"), plain_column("at", "at", DIGITS),
    plain_column("layer", "after"), plain_column("sends", "sends"),
    plain_column("macs", "MMAC", fixed(2, 1e-6)), plain_column("params", "params", DIGITS),
    plain_column("wire_floats", "wire", DIGITS), plain_column("depth", "depth", DIGITS),
    plain_column("receptive_field", "sees", DIGITS), plain_column("fitting", "fits"),
    plain_column("score", "score", fixed(3)), plain_column("accuracy", "acc %", fixed(2, 100.0)),
    plain_column("mse", "MSE", fixed(4)), plain_column("leakage", "leakage", fixed(3)),
    plain_column("attack", "attack"), plain_column("defence", "defence"),
    plain_column("failed", "failed", DIGITS), plain_column("volume", "volume", fixed(3)),
    plain_column("settings", "trial"),
)  # fmt: skip
COSTS = ("macs", "params", "wire_floats")
MEASURED = ("accuracy", "leakage", "mse", "attack")


def show_listing(keys: Sequence[str], rows: Sequence["Json"], head: str, *notes: str) -> None:
    """Print the columns of these keys, a line above and some below."""
    print_lines(head, LISTING.only(*keys).render(rows, "terminal").rstrip(), *notes)


def show_cuts(
    name: str, shape: Shape, num_classes: int, macs: float, wire: int, *, json_: bool
) -> None:
    """Where a named net or a user's own can be cut, what that costs, and what would make it fit."""
    from splitveil.config import find_net
    from splitveil.nets import NETS
    from splitveil.nets.catalogue import every_cut
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


def _shown(row: "Json") -> "Json":
    """A cut's row with the shape it sends, and in words what would make it fit."""
    fits, narrow = "yes" if row["fits"] else "no", row["bottleneck"]
    if narrow is not None:
        fits = (
            f"with 3×3 convolution to {narrow['channels']} channel{'s' * (narrow['channels'] > 1)} "
            f"and sigmoid: {(row['macs'] + narrow['macs']) / 1e6:.2f} MMAC, "
            f"{row['params'] + narrow['params']} params, wire {narrow['wire_floats']}"
        )
    return row | {"sends": in_words(row["wire_shape"]), "fitting": fits}


def load_backbone(name: str, shape: Shape, num_classes: int) -> "nn.Sequential":
    """What the user's MODULE:FUNCTION returns, which may lie in this folder."""
    from torch import nn

    from splitveil.nets import NETS

    if ":" not in name:
        raise ConfigError(
            f"{unknown('backbone', name, NETS)}; or give your own as MODULE:FUNCTION, as "
            "mynets:resnet"
        )
    with current_folder_first():
        make = find_object(name, "--backbone", "mynets:resnet")
        if not callable(make) or isinstance(make, nn.Module):
            raise ConfigError(f"'{name}' must be a function, got a {type(make).__name__}")
        try:
            net = make(*arguments(make, name, shape, num_classes))
        except ConfigError:
            raise
        except (Exception, SystemExit) as err:
            raise ConfigError(f"'{name}' failed: {type(err).__name__}: {err}") from err
    if not isinstance(net, nn.Sequential):
        raise ConfigError(
            f"'{name}' must return an nn.Sequential, got a {type(net).__name__}; wrap the stages: "
            "nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    return net


def arguments(make: Callable[..., Any], name: str, shape: Shape, classes: int) -> tuple[Any, ...]:
    """(image_shape, num_classes) or nothing, whichever the function takes."""
    signature = inspect.signature(make)
    for given in ((shape, classes), ()):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return given
    raise ConfigError(f"'{name}' must take (image_shape, num_classes) or nothing, not {signature}")


def in_words(shape: tuple[int, ...]) -> str:
    """A shape as `--image` takes it."""
    return "x".join(map(str, shape))
