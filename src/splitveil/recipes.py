"""Trainings by name: `splitveil train --recipe NAME`. To add one: a line in `NAMED_RECIPES`.

A recipe is nothing but settings, so that a run made from one is described by its own
`config.toml`; a settings file, `--set` and options override it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from splitveil.errors import ConfigError, unknown

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Named:
    """A recipe: what it is for, and flat settings, the run's and the defence's mixed."""

    summary: str
    options: Mapping[str, Setting]


def _on(dataset: str, summary: str, defence: str, net: str, **settings: Setting) -> Named:
    options = {"dataset": dataset, "defence": defence, "net": net, **settings}
    return Named(summary=summary, options=options)


def _cifar10(summary: str, defence: str, net: str, **settings: Setting) -> Named:
    return _on("cifar10", summary, defence, net, **settings)


NAMED_RECIPES: Mapping[str, Named] = {
    "cifar10-none": _cifar10("no defence, VGG11", "none", "vgg11"),
    "cifar10-noise": _cifar10("noise alone, VGG11", "noise", "vgg11"),
    "cifar10-cem": _cifar10("the published CEM, VGG11", "cem", "vgg11"),
    "cifar10-gated-att": _cifar10("seed 003, VGG11", "gated-att", "vgg11"),
    "cifar10-slot-cross": _cifar10("seed 001, VGG11", "slot-cross", "vgg11"),
    "cifar10-arl-cem": _cifar10("an adversary in training and CEM, VGG11", "arl+cem", "vgg11"),
    "cifar10-arl-veil": _cifar10(
        "an adversary in training and the flagship, VGG11", "arl+veil", "vgg11", lambd=0.5
    ),
    "cifar10-arl-veil-long": _cifar10(
        "the same trained twice as long, with smoothed labels",
        "arl+veil",
        "vgg11",
        lambd=0.5,
        epochs=160,
        label_smoothing=0.1,
    ),
    "cifar10-veil": _cifar10("the flagship, thin deep client", "veil", "thin-deep", epochs=160),
    "cifar10-veil-accurate": _cifar10(
        "the flagship with a third of the weight", "veil", "thin-deep", epochs=160, lambd=0.1
    ),
    "cifar10-veil-fast": _cifar10(
        "the flagship on the thin ResNet, 80 epochs", "veil", "thin-resnet"
    ),
    "cifar10-veil-vgg11": _cifar10("the flagship on CEM's own VGG11", "veil", "vgg11"),
    "cifar10-resnet20-none": _cifar10("no defence, ResNet-20", "none", "resnet20"),
    "cifar10-resnet20-veil": _cifar10("the flagship's penalty on ResNet-20", "veil", "resnet20"),
    "cifar10-mobilenetv2-none": _cifar10("no defence, MobileNetV2", "none", "mobilenetv2"),
    "cifar10-mobilenetv2-veil": _cifar10(
        "the flagship's penalty on MobileNetV2", "veil", "mobilenetv2"
    ),
    # A batch has few images of each of many classes: a bank remembers some.
    "cifar100-none": _on("cifar100", "no defence, VGG11", "none", "vgg11"),
    "cifar100-cem": _on("cifar100", "the published CEM, VGG11", "cem", "vgg11"),
    "cifar100-veil": _on(
        "cifar100", "the flagship, 100 classes", "veil", "thin-deep", epochs=160, bank=16
    ),
    "tiny-imagenet-none": _on("tiny-imagenet", "no defence, VGG11, 64×64", "none", "vgg11"),
    "tiny-imagenet-veil": _on(
        "tiny-imagenet", "the flagship, 200 classes, 64×64", "veil", "thin-deep", bank=32
    ),
    "fashion-mnist-none": _on("fashion-mnist", "no defence, 28×28", "none", "small"),
    "fashion-mnist-veil": _on("fashion-mnist", "the flagship's penalty, 28×28", "veil", "small"),
    "digits-none": _on("digits", "no defence, 8×8, seconds on a CPU", "none", "small"),
    "digits-veil": _on("digits", "the flagship on 8×8 digits, minutes on a CPU", "veil", "small"),
}


def find_recipe(name: str) -> Named:
    """The recipe of this name.

    >>> find_recipe("digits-veil").options["defence"]
    'veil'
    """
    if name not in NAMED_RECIPES:
        raise ConfigError(unknown("recipe", name, NAMED_RECIPES))
    return NAMED_RECIPES[name]
