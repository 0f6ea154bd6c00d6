"""Attacks by name.

To add an attack: write a file with a frozen dataclass that has `access` and `fit`, add a line to
`ATTACKS` and one to each profile it belongs to. An attack never measures its own success.
"""

from collections.abc import Mapping

from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.prior import Prior
from splitveil.attacks.rmle import Rmle
from splitveil.attacks.wgan import Wgan
from splitveil.threat import Attack

ATTACKS: Mapping[str, type[Attack]] = {
    "mean": MeanImage,
    "class-mean": ClassMean,
    "nearest": Nearest,
    "linear": Linear,
    "decoder-small": Decoder,
    "decoder": Decoder,
    "decoder-large": Decoder,
    "decoder-ssim": Decoder,
    "decoder-perceptual": Decoder,
    "rmle": Rmle,
    "prior": Prior,
    "gan": Wgan,
    "k-query": KQuery,
}
