"""Backbones, thin clients, cuts, channels and decoders."""

from splitveil.nets.catalogue import NETS, Net, vgg11
from splitveil.nets.channel import (
    Channel,
    Clip,
    Dropout,
    GaussianNoise,
    LearnedNoise,
    Quantise,
    SparseCoding,
    TopK,
)
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.split import SplitModel, cut

__all__ = [
    "NETS",
    "Channel",
    "Clip",
    "Dropout",
    "GaussianNoise",
    "LearnedNoise",
    "Net",
    "Quantise",
    "ResidualDecoder",
    "SparseCoding",
    "SplitModel",
    "TopK",
    "cut",
    "vgg11",
]
