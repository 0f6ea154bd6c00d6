"""Datasets, defences, attacks, nets, recipes."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from splitveil.cli.console import JsonFlag, print_lines, show_catalogue, show_json

if TYPE_CHECKING:
    from splitveil.nets.cost import CutCost


def show_cuts(
    name: str, shape: tuple[int, int, int], num_classes: int, macs: float, wire: int, *, json_: bool
) -> None:
    """Where a named net or a user's own can be cut, what that costs, and what would make it fit."""
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


def in_words(shape: tuple[int, ...]) -> str:
    """A shape as `--image` takes it."""
    return "x".join(map(str, shape))


def datasets(json_: JsonFlag = False) -> None:
    """List the datasets that can be trained on.

    Example: `splitveil datasets --json`
    """
    from splitveil.data.catalogue import DATASETS

    names = {k + (":PATH" if v.needs_path else ""): v.summary for k, v in DATASETS.items()}
    show_catalogue("Datasets", names, json_=json_)


def defences(json_: JsonFlag = False) -> None:
    """List the defences and, with `--json`, every setting of each.

    Different ones can be stacked, at most one with a penalty: `--defence noise+dropout`.

    Example: `splitveil defences`
    """
    from splitveil.defences.catalogue import DEFENCES

    summaries = {n: d.summary for n, d in DEFENCES.items()}
    show_catalogue("Defences", summaries, {n: asdict(d) for n, d in DEFENCES.items()}, json_=json_)


def attacks(json_: JsonFlag = False) -> None:
    """List the attacks and what each may touch.

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
    """List the recipes of `splitveil train --recipe` and, with `--json`, the settings of each.

    Example: `splitveil recipes`
    """
    from splitveil.config.recipes import NAMED_RECIPES

    summaries = {n: r.summary for n, r in NAMED_RECIPES.items()}
    show_catalogue(
        "Recipes", summaries, {n: asdict(r) for n, r in NAMED_RECIPES.items()}, json_=json_
    )
