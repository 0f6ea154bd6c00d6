"""Recipes: named sets of settings, read from `recipes.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from splitveil.config.run_config import RUN_KEYS
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError, unknown

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named set of settings.

    Args:
        summary: One line for `splitveil recipes`.
        options: Settings of the run and of its defence, in one flat table.
    """

    summary: str
    options: Mapping[str, Setting]


def _read_recipes() -> Mapping[str, Recipe]:
    text = resources.files("splitveil.config").joinpath("recipes.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    return {k: Recipe(summary=table.pop("summary"), options=table) for k, table in tables.items()}


RECIPES: Mapping[str, Recipe] = _read_recipes()


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; an unknown one raises a ConfigError with the nearest name.

    >>> find_recipe("digits-veil").options["defence"]
    'veil'
    """
    if name not in RECIPES:
        raise ConfigError(unknown("recipe", name, RECIPES))
    return RECIPES[name]


def check_recipe(recipe: str, given: Mapping[str, Any]) -> None:
    """Validate that the recipe's settings exist for the defence that the user chose.

    Args:
        recipe: Its name.
        given: What the user set, which overrides the recipe.

    Raises:
        ConfigError: The chosen defence lacks a setting that the recipe makes.
    """
    options = find_recipe(recipe).options
    dataset, defence = ({**options, **given}[key] for key in ("dataset", "defence"))
    known = known_settings(str(defence))
    foreign = [f"`{key}`" for key in options if key not in known and key not in given]
    if not foreign:
        return
    fitting = [
        f"'{name}'"
        for name, other in RECIPES.items()
        if (other.options["dataset"], other.options["defence"]) == (dataset, defence)
    ]
    instead = f"use recipe {' or '.join(fitting)}" if fitting else "train without a recipe"
    raise ConfigError(
        f"recipe '{recipe}' sets {' and '.join(foreign)}, but defence '{defence}' has no such "
        f"setting; keep the recipe's defence '{options['defence']}', or {instead}"
    )


def known_settings(defence: str) -> set[str]:
    """Names of the settings of a run with this defence."""
    return {*RUN_KEYS, *find_defence(defence).setting_types()}
