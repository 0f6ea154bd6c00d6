"""Trainings by name, and what overrides them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from splitveil.cli.app import app
from splitveil.config.recipes import RECIPES, find_recipe
from splitveil.config.resolve import build_defence, make_config, merge, resolve
from splitveil.config.run_config import DATASET_DEFAULTS
from splitveil.data.catalogue import DATASETS
from splitveil.data.dataset import Dataset
from splitveil.errors import ConfigError
from splitveil.nets.catalogue import NETS, find_net
from splitveil.surrogates.gated_attention import GatedAttentionCEM

Shape = tuple[int, int, int]


def call(*words: str) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_run_that_can_be_built(name: str) -> None:
    recipe = find_recipe(name)
    config = make_config(recipe.options)
    assert recipe.summary
    assert name.startswith(f"{config.dataset}-")
    assert config.client is not None or find_net(config.net).cut_at >= 1
    assert build_defence(config).settings().items() >= config.settings.items()
    assert make_config({"name": f"{name}-s0"}).folder.name == f"{name}-s0"


def test_every_dataset_and_backbone_has_recipes() -> None:
    told = [recipe.options for recipe in RECIPES.values()]
    for defence in ("none", "veil"):
        chosen = [options for options in told if options["defence"] == defence]
        assert {options["dataset"] for options in chosen} == set(DATASET_DEFAULTS)
        nets = {options.get("net") for options in chosen}
        assert nets >= {"vgg11", "resnet20", "mobilenetv2"}
    assert set(DATASET_DEFAULTS) == {name for name in DATASETS if name not in {"folder", "npz"}}
    assert {options["net"] for options in told if "client" not in options} <= set(NETS)


def made_up(shape: Shape, classes: int, images: int) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    return Dataset(
        name="random",
        images=torch.randint(256, (images + 8, *shape), dtype=torch.uint8, generator=draw),
        labels=torch.arange(images + 8) % classes,
        classes=tuple(map(str, range(classes))),
        pool=torch.arange(images),
        test=torch.arange(images, images + 8),
    )


@pytest.mark.parametrize(
    ("name", "shape", "classes", "bank"),
    [
        ("cifar100-veil", (3, 32, 32), 100, 16),
        ("tiny-imagenet-veil", (3, 64, 64), 200, 32),
        ("fashion-mnist-veil", (1, 28, 28), 10, 0),
        ("cifar10-laptop", (3, 32, 32), 10, 0),
        ("cifar10-resnet20-veil", (3, 32, 32), 10, 0),
        ("cifar10-mobilenetv2-veil", (3, 32, 32), 10, 0),
    ],
)
def test_a_recipe_fits_its_images_and_classes(
    name: str, shape: Shape, classes: int, bank: int
) -> None:
    dataset = made_up(shape, classes, 2 * classes)
    parts = resolve(make_config({**find_recipe(name).options, "device": "cpu"}), dataset).build()
    x, y = dataset.images[:6] / 255, dataset.labels[:6]
    out = parts.model.split_forward(x)
    assert out.logits.shape == (6, classes)
    assert isinstance(parts.surrogate, GatedAttentionCEM)
    assert bool(parts.surrogate(out.z.flatten(1), y).loss.isfinite())
    kept = parts.surrogate.bank
    assert (kept is None) == (bank == 0)
    if kept is not None:
        assert kept.rows.shape[:2] == (classes, bank)
        assert kept.held.tolist() == [1] * 6 + [0] * (classes - 6)


def test_veil_and_cem_have_recipes_on_the_same_architecture() -> None:
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("cifar10-arl-veil", "--defence", "none"),
            "recipe 'cifar10-arl-veil' sets `lambd`, but defence 'none' has no such setting; keep "
            "the recipe's defence 'arl.veil', or use recipe 'cifar10-none' or",
        ),
        (
            ("cifar100-veil", "--set", "defence=noise"),
            "sets `bank`, but .* or train without a recipe",
        ),
        (("cifar10-arl-veil", "--defence", "none", "--set", "lambd=1"), "unknown setting for def"),
    ],
)
def test_a_defence_without_a_recipes_setting_is_refused(words: tuple[str, ...], said: str) -> None:
    result = call("train", "--recipe", *words, "--data-dir", "nowhere")
    assert result.exit_code == 2
    assert re.search(said, re.sub(r"\s+", " ", result.stderr)), result.stderr


def test_options_override_set_override_file_override_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("lambd = 5.0\nepochs = 3\nreg_strength = 0.1\n", encoding="utf-8")
    alone = merge("digits-veil", None, [], {})
    assert (alone.dataset, alone.defence, alone.folder.name) == ("digits", "veil", "digits-veil-s0")
    filed = merge("digits-veil", file, [], {})
    assert (filed.settings["lambd"], filed.epochs, filed.noise_std) == (5.0, 3, 0.1)
    asked = merge("digits-veil", file, ["lambd=7", "epochs=4", "seed=2"], {})
    assert (asked.settings["lambd"], asked.epochs, asked.noise_std) == (7.0, 4, 0.1)
    assert asked.folder.name == "digits-veil-s2"
    given = {"epochs": 9, "name": "mine", "net": "auto"}
    last = merge("digits-veil", file, ["lambd=7", "epochs=4"], given)
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
    assert list(listed) == list(RECIPES)
    assert listed["cifar10-veil-vgg11"]["options"]["net"] == "vgg11"
    shown = call("recipes").stdout
    assert all(name in shown for name in RECIPES)
