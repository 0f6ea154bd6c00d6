"""Backbones, thin clients, cuts, channels and decoders."""

from splitveil.nets.backbones import vgg11
from splitveil.nets.catalogue import NETS, Net
from splitveil.nets.channel import (
    Channel,
    Clip,
    Dropout,
    GaussianNoise,
    LearnedNoise,
    LearnedStage,
    Quantise,
    SparseCoding,
    TopK,
    before_squashing,
    front_of,
    learned_stages,
)
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.split import SplitModel, cut, sized

__all__ = [
    "NETS",
    "Channel",
    "Clip",
    "Dropout",
    "GaussianNoise",
    "LearnedNoise",
    "LearnedStage",
    "Net",
    "Quantise",
    "ResidualDecoder",
    "SparseCoding",
    "SplitModel",
    "TopK",
    "before_squashing",
    "cut",
    "front_of",
    "learned_stages",
    "sized",
    "vgg11",
]
