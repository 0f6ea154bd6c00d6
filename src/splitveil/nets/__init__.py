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
    before_noise,
    insert_before_sigmoid,
    learned_stages,
)
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.split import SplitModel, cut, with_stage_shapes

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
    "before_noise",
    "cut",
    "insert_before_sigmoid",
    "learned_stages",
    "vgg11",
    "with_stage_shapes",
]
