"""Attacks: one file each, a catalogue of names, and profiles that fix their budgets."""

from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest, class_means
from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.decoder import Decoder, with_compiled_decoders
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.prior import Prior
from splitveil.attacks.profiles import PROFILES, scale_search_budgets
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
    "class_means",
    "scale_search_budgets",
    "with_compiled_decoders",
]
