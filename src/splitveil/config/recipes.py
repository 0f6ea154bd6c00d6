"""Trainings by name (`recipes.toml`), and how recipe, settings file, `--set` and options merge."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from splitveil.config.resolve import make_config
from splitveil.config.run_config import RUN_KEYS, RunConfig, one_noise_name
from splitveil.config.settings import parse_pairs, read_toml
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError, unknown

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Named:
    """A recipe: what it is for, and flat settings, the run's and the defence's mixed."""

    summary: str
    options: Mapping[str, Setting]


def _read_recipes() -> Mapping[str, Named]:
    text = resources.files("splitveil.config").joinpath("recipes.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    return {k: Named(summary=table.pop("summary"), options=table) for k, table in tables.items()}


NAMED_RECIPES: Mapping[str, Named] = _read_recipes()


def find_recipe(name: str) -> Named:
    """The recipe of this name.

    >>> find_recipe("digits-veil").options["defence"]
    'veil'
    """
    if name not in NAMED_RECIPES:
        raise ConfigError(unknown("recipe", name, NAMED_RECIPES))
    return NAMED_RECIPES[name]


def merge(
    recipe: str | None,
    file: Path | None,
    pairs: Sequence[str],
    options: Mapping[str, Any],
    *,
    saved: Mapping[str, Any] | None = None,
) -> RunConfig:
    """One configuration of several sources; each overrides those before it.

    Args:
        recipe: A recipe's name. Its run is called after it, unless it is given a name.
        file: A TOML file of settings.
        pairs: `key=value`, as `--set` takes them.
        options: Options of the command line that were given.
        saved: The flat settings of a run that is resumed; they come before all others.

    Returns:
        The configuration, not resolved.
    """
    given = {} if file is None else one_noise_name(read_toml(file))
    given |= one_noise_name(parse_pairs(pairs)) | dict(options)
    merged = dict(given)
    if recipe is not None:
        check_recipe(recipe, given)
        merged = one_noise_name(find_recipe(recipe).options) | given
        if merged.get("name") is None:
            merged["name"] = f"{recipe}-s{make_config(merged).seed}"
    if saved is not None:
        merged = {"defence": saved["defence"]} | merged
        # Settings of the saved defence alone would be unknown to another; `fit` refuses that one.
        known = _known(str(merged["defence"]))
        merged = {key: value for key, value in saved.items() if key in known} | merged
    return make_config(merged)


def check_recipe(recipe: str, given: Mapping[str, Any]) -> None:
    """Refuse another defence than the recipe's if it lacks settings that the recipe makes."""
    told = find_recipe(recipe).options
    defence = str(given.get("defence", told["defence"]))
    foreign = [key for key in told if key not in _known(defence) and key not in given]
    if not foreign:
        return
    dataset = given.get("dataset", told["dataset"])
    fitting = [
        name
        for name, other in NAMED_RECIPES.items()
        if (other.options["dataset"], other.options["defence"]) == (dataset, defence)
    ]
    instead = f"use the recipe {' or '.join(fitting)}" if fitting else "leave the recipe out"
    raise ConfigError(
        f"recipe '{recipe}' sets {', '.join(foreign)} of its defence '{told['defence']}', but "
        f"defence '{defence}' has no such setting; leave that defence out, or {instead}"
    )


def _known(defence: str) -> set[str]:
    """The settings of a run with this defence."""
    return {*RUN_KEYS, *find_defence(defence).setting_types()}
