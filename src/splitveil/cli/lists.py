"""Cuts of a named net or of a user's own: loading it, and showing what each cut costs."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from splitveil.cli.console import print_lines
from splitveil.imports import current_folder_first, find_object

if TYPE_CHECKING:
    from torch import nn

    from splitveil.nets.cost import CutCost


Shape = tuple[int, int, int]


def show_cuts(
    name: str, shape: Shape, num_classes: int, macs: float, wire: int, *, json_: bool
) -> None:
    """Where a named net or a user's own can be cut, what that costs, and what would make it fit."""
    from dataclasses import asdict

    from splitveil.config.resolve import find_net
    from splitveil.console import show_json
    from splitveil.nets.catalogue import NETS, every_cut
    from splitveil.nets.cost import cuts_of_nets, suggest_cuts

    base, at, _ = name.partition("@")
    named = base in NETS
    if named:
        nets = [find_net(name)] if at else every_cut(name)
        found = cuts_of_nets(nets, shape, num_classes, macs, wire)
    else:
        found = suggest_cuts(load_backbone(name, shape, num_classes), shape, macs, wire)
    if json_:
        show_json({"image_shape": shape, "cuts": [asdict(c) for c in found]})
        return
    which = base if named else "the backbone"
    head = f"{len(found)} cut{'s'[: len(found) > 1]} of {which}, for images {in_words(shape)}"
    columns = f"{'MMAC':>8} {'params':>9} {'wire':>7} fits"
    if named:
        net = name if at or len(found) == 1 else f"{base}@N"
        lines = [f"{c.at:3d} {in_words(c.wire_shape):<9} {cut_costs(c)}" for c in found]
        end = f"next: splitveil train --net {net} --dataset NAME"
        if not any(c.fits for c in found):
            end = f"no cut fits; next: splitveil clients --macs {macs:.10g} --wire {wire}"
        print_lines(head, f"{'at':>3} {'sends':<9} {columns}", *lines, "wire: numbers sent", end)
        return
    width = max(len("after"), *(len(c.layer) for c in found))
    lines = [f"{c.at:3d} {c.layer:<{width}} {cut_costs(c)}" for c in found]
    end = "wire: numbers sent; splitveil.nets.cut(backbone, at) makes the split"
    print_lines(head, f"{'at':>3} {'after':<{width}} {columns}", *lines, end)


def cut_costs(c: "CutCost") -> str:
    """What a cut costs, as the end of its line."""
    narrow = c.bottleneck
    fits = "yes" if c.fits else "no"
    if narrow is not None:
        fits = (
            f"with 3×3 convolution to {narrow.channels} channel{'s' * (narrow.channels > 1)} "
            f"and sigmoid: {(c.macs + narrow.macs) / 1e6:.2f} MMAC, "
            f"{c.params + narrow.params} params, wire {narrow.wire_floats}"
        )
    return f"{c.macs / 1e6:8.2f} {c.params:9d} {c.wire_floats:7d} {fits}"


def load_backbone(name: str, shape: Shape, num_classes: int) -> "nn.Sequential":
    """What the user's MODULE:FUNCTION returns, which may lie in this folder."""
    from torch import nn

    from splitveil.errors import ConfigError, unknown
    from splitveil.nets.catalogue import NETS

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
    from splitveil.errors import ConfigError

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
