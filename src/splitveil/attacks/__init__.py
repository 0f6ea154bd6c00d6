"""Attacks by name, and the profiles that fix their budgets.

To add an attack: a file with a frozen dataclass that has `access` and `fit`, and a line in
`ATTACKS` and in the profiles it belongs to. An attack never measures its own success.
"""

from collections.abc import Mapping

from splitveil.attacks.decoder import Decoder
from splitveil.attacks.floor import ClassMean, MeanImage, class_means
from splitveil.attacks.linear import Linear
from splitveil.types import Attack

ATTACKS: Mapping[str, type[Attack]] = {
    "mean": MeanImage,
    "class-mean": ClassMean,
    "linear": Linear,
    "decoder": Decoder,
}

_CHEAP: Mapping[str, Attack] = {"mean": MeanImage(), "class-mean": ClassMean(), "linear": Linear()}

PROFILES: Mapping[str, Mapping[str, Attack]] = {
    "smoke": {
        **_CHEAP,
        "decoder": Decoder(width=16, blocks=1, epochs=2, min_steps=100, batch_size=64),
    },
    "quick": {
        **_CHEAP,
        "decoder": Decoder(blocks=2, epochs=1, min_steps=600, batch_size=64, lr=8e-3),
    },
    "standard": {**_CHEAP, "decoder": Decoder(epochs=16, min_steps=3000)},
    "paper": {
        **_CHEAP,
        "decoder": Decoder(
            epochs=50, lr=1e-3, weight_decay=1e-4, schedule="cosine", min_steps=3000
        ),
    },
}

__all__ = ["ATTACKS", "PROFILES", "ClassMean", "Decoder", "Linear", "MeanImage", "class_means"]
