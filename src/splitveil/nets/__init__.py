"""Backbones, thin clients, cuts, channels and decoders."""

from splitveil.nets.backbones import (
    NETS,
    Net,
    client_net,
    cut_elsewhere,
    every_cut,
    small,
    thin_resnet,
    vgg11,
)
from splitveil.nets.budget import THIN_CLIENTS, Candidate, candidates, grid, nothing_fits, weigh
from splitveil.nets.channel import Channel, Dropout, GaussianNoise, Quantise, TopK
from splitveil.nets.clients import (
    CLIENT_PREFIX,
    FAMILIES,
    ClientSpec,
    build_client,
    parse_client,
    parse_image,
)
from splitveil.nets.clip import Clip, Front, front_of
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.mobilenet import mobilenetv2
from splitveil.nets.resnet import resnet20
from splitveil.nets.split import SplitModel, SplitOutput, count_macs, cut
from splitveil.nets.stages import (
    LearnedNoise,
    LearnedStage,
    SparseCoding,
    before_squashing,
    learned_stages,
    sized,
    with_channel,
)
from splitveil.nets.suggest import Bottleneck, CutCost, cuts_of_nets, suggest_cuts

__all__ = [
    "CLIENT_PREFIX",
    "FAMILIES",
    "NETS",
    "THIN_CLIENTS",
    "Bottleneck",
    "Candidate",
    "Channel",
    "ClientSpec",
    "Clip",
    "CutCost",
    "Dropout",
    "Front",
    "GaussianNoise",
    "LearnedNoise",
    "LearnedStage",
    "Net",
    "Quantise",
    "ResidualDecoder",
    "SparseCoding",
    "SplitModel",
    "SplitOutput",
    "TopK",
    "before_squashing",
    "build_client",
    "candidates",
    "client_net",
    "count_macs",
    "cut",
    "cut_elsewhere",
    "cuts_of_nets",
    "every_cut",
    "front_of",
    "grid",
    "learned_stages",
    "mobilenetv2",
    "nothing_fits",
    "parse_client",
    "parse_image",
    "resnet20",
    "sized",
    "small",
    "suggest_cuts",
    "thin_resnet",
    "vgg11",
    "weigh",
    "with_channel",
]
