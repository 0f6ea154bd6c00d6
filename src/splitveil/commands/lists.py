"""The commands that list what can be asked for by name."""

from typing import Annotated

import typer

from splitveil.cli.console import show_catalogue

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
    from dataclasses import asdict

    from splitveil.console import show_json
    from splitveil.defences.catalogue import DEFENCES

    if json_:
        show_json({name: asdict(d) for name, d in DEFENCES.items()})
    else:
        show_catalogue("Defences", {n: d.summary for n, d in DEFENCES.items()}, json_=False)


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
    from splitveil.console import show_json

    if json_:
        named = NAMED_RECIPES.items()
        show_json({n: {"summary": r.summary, "options": dict(r.options)} for n, r in named})
    else:
        show_catalogue("Recipes", {n: r.summary for n, r in NAMED_RECIPES.items()}, json_=False)
