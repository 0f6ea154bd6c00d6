"""Backbones, cuts, channels and decoders."""

from splitveil.nets.backbones import NETS, Net, small, thin_resnet, vgg11
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.split import SplitModel, SplitOutput, count_macs, cut

__all__ = [
    "NETS",
    "Channel",
    "GaussianNoise",
    "Net",
    "ResidualDecoder",
    "SplitModel",
    "SplitOutput",
    "count_macs",
    "cut",
    "small",
    "thin_resnet",
    "vgg11",
]
