"""Cuts of a named net or of a user's own: loading it, and showing what each cut costs."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from splitveil.commands import print_lines
from splitveil.imports import current_folder_first, find_object

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]


def show_cuts(net: "nn.Sequential", shape: Shape, macs: float, wire: int, *, json_: bool) -> None:
    """Where a backbone can be cut, what that costs, and what would make it fit."""
    from dataclasses import asdict

    from splitveil.console import show_json
    from splitveil.nets import suggest_cuts

    found = suggest_cuts(net, shape, macs, wire)
    if json_:
        show_json({"image_shape": shape, "cuts": [asdict(c) for c in found]})
        return
    lines = [
        f"{len(found)} cuts of the backbone, for images {in_words(shape)}",
        f"{'at':>3} {'after':<17} {'MMAC':>8} {'params':>9} {'wire':>7} fits",
    ]
    for c in found:
        narrow = c.bottleneck
        fits = "yes" if c.fits else "no"
        if narrow is not None:
            fits = (
                f"with 3×3 convolution to {narrow.channels} channels and sigmoid: "
                f"{(c.macs + narrow.macs) / 1e6:.2f} MMAC, {c.params + narrow.params} params, "
                f"wire {narrow.wire_floats}"
            )
        lines.append(
            f"{c.at:3d} {c.layer:<17} {c.macs / 1e6:8.2f} {c.params:9d} {c.wire_floats:7d} {fits}"
        )
    print_lines(*lines, "wire: numbers sent; splitveil.nets.cut(backbone, at) makes the split")


def load_backbone(name: str, shape: Shape, num_classes: int) -> "nn.Sequential":
    """A named net, or what the user's MODULE:FUNCTION returns, which may lie in this folder."""
    from torch import nn

    from splitveil.config import find_net
    from splitveil.errors import ConfigError, unknown
    from splitveil.nets import NETS

    if name.partition("@")[0] in NETS:
        return find_net(name).build(shape, num_classes)
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
        except Exception as err:
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


def in_words(shape: Shape) -> str:
    """An image's shape as `--image` takes it."""
    return "x".join(map(str, shape))
