"""Attacks: one file each, `ATTACKS` by name, and `PROFILES` with their budgets."""

from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest
from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.prior import Prior
from splitveil.attacks.profiles import PROFILES
from splitveil.attacks.rmle import Rmle
from splitveil.attacks.wgan import Wgan

__all__ = [
    "ATTACKS",
    "PROFILES",
    "ClassMean",
    "Decoder",
    "KQuery",
    "Linear",
    "MeanImage",
    "Nearest",
    "Prior",
    "Rmle",
    "Wgan",
]
