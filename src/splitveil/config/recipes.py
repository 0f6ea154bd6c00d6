"""Recipes: the settings of named trainings, read from `recipes.toml`."""

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
    """A recipe: what it is for, and flat settings, the run's and the defence's mixed."""

    summary: str
    options: Mapping[str, Setting]


def _read_recipes() -> Mapping[str, Recipe]:
    text = resources.files("splitveil.config").joinpath("recipes.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    return {k: Recipe(summary=table.pop("summary"), options=table) for k, table in tables.items()}


RECIPES: Mapping[str, Recipe] = _read_recipes()


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    >>> find_recipe("digits-veil").options["defence"]
    'veil'
    """
    if name not in RECIPES:
        raise ConfigError(unknown("recipe", name, RECIPES))
    return RECIPES[name]


def check_recipe(recipe: str, given: Mapping[str, Any]) -> None:
    """Refuse another defence than the recipe's if it lacks settings that the recipe makes."""
    told = find_recipe(recipe).options
    defence = str(given.get("defence", told["defence"]))
    foreign = [key for key in told if key not in known_settings(defence) and key not in given]
    if not foreign:
        return
    dataset = given.get("dataset", told["dataset"])
    fitting = [
        name
        for name, other in RECIPES.items()
        if (other.options["dataset"], other.options["defence"]) == (dataset, defence)
    ]
    instead = f"use the recipe {' or '.join(fitting)}" if fitting else "leave the recipe out"
    raise ConfigError(
        f"recipe '{recipe}' sets {', '.join(foreign)} of its defence '{told['defence']}', but "
        f"defence '{defence}' has no such setting; leave that defence out, or {instead}"
    )


def known_settings(defence: str) -> set[str]:
    """The settings of a run with this defence."""
    return {*RUN_KEYS, *find_defence(defence).setting_types()}
