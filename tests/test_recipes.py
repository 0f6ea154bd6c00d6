"""Trainings by name, and what overrides them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitveil.cli import app
from splitveil.commands import merge
from splitveil.config import build_defence, find_net, make_config
from splitveil.errors import ConfigError
from splitveil.recipes import NAMED_RECIPES, find_recipe


def call(*words: str) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("name", NAMED_RECIPES)
def test_every_recipe_is_a_run_that_can_be_built(name: str) -> None:
    recipe = find_recipe(name)
    config = make_config(recipe.options)
    assert recipe.summary
    assert name.startswith(f"{config.dataset}-")
    assert find_net(config.net).cut_at >= 1
    assert build_defence(config).settings().items() >= config.settings.items()
    assert make_config({"name": f"{name}-s0"}).folder.name == f"{name}-s0"


def test_the_flagship_stands_beside_cem_on_the_same_architecture() -> None:
    ours, theirs = find_recipe("cifar10-veil-vgg11").options, find_recipe("cifar10-cem").options
    assert {**ours, "defence": "cem"} == theirs


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match="unknown recipe 'digit-veil'; did you mean 'digits-veil'"
    ):
        find_recipe("digit-veil")
    result = call("train", "--recipe", "digit-veil")
    assert result.exit_code == 2
    assert "did you mean 'digits-veil'?" in re.sub(r"\s+", " ", result.stderr)


def test_a_file_overrides_a_recipe_and_set_the_file_and_options_all(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("lambd = 5.0\nepochs = 3\nreg_strength = 0.1\n", encoding="utf-8")
    alone = merge("digits-veil", None, [], {}, resume=False)
    assert (alone.dataset, alone.defence, alone.folder.name) == ("digits", "veil", "digits-veil-s0")
    filed = merge("digits-veil", file, [], {}, resume=False)
    assert (filed.settings["lambd"], filed.epochs, filed.noise_std) == (5.0, 3, 0.1)
    asked = merge("digits-veil", file, ["lambd=7", "epochs=4", "seed=2"], {}, resume=False)
    assert (asked.settings["lambd"], asked.epochs, asked.noise_std) == (7.0, 4, 0.1)
    assert asked.folder.name == "digits-veil-s2"
    given = {"epochs": 9, "name": "mine", "net": "auto"}
    last = merge("digits-veil", file, ["lambd=7", "epochs=4"], given, resume=False)
    assert (last.settings["lambd"], last.epochs, last.net) == (7.0, 9, "auto")
    assert last.folder.name == "mine"


def test_a_recipe_is_trained_and_resumed_under_its_name(tmp_path: Path) -> None:
    words = ("train", "--recipe", "digits-veil", "--epochs", "1", "--runs-dir", str(tmp_path))
    result = call(*words, "--json")
    assert result.exit_code == 0, result.stderr
    run = tmp_path / "digits-veil-s0"
    assert json.loads(result.stdout)["run"] == str(run)
    written = (run / "config.toml").read_text(encoding="utf-8")
    assert 'defence = "veil"' in written
    assert not [line for line in written.splitlines() if line.startswith("recipe")]
    assert call(*words).exit_code == 2
    before = (run / "checkpoint.safetensors").read_bytes()
    assert call(*words, "--resume").exit_code == 0
    assert (run / "checkpoint.safetensors").read_bytes() == before


def test_recipes_are_listed_with_their_settings() -> None:
    listed = json.loads(call("recipes", "--json").stdout)
    assert list(listed) == list(NAMED_RECIPES)
    assert listed["cifar10-veil-vgg11"]["options"]["net"] == "vgg11"
    shown = call("recipes").stdout
    assert all(name in shown for name in NAMED_RECIPES)
