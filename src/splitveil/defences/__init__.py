"""Defences by name. To add one: a file with a frozen dataclass, and a line in this dict.

`stack` makes one defence of several: `noise+dropout` on the command line.
"""

from collections.abc import Mapping

from splitveil.defences.arl import Arl, DecodingAdversary
from splitveil.defences.base import Defence, NoiseOnly
from splitveil.defences.bido import Bido, BilateralDependency
from splitveil.defences.clip import Clipping
from splitveil.defences.dropout import FeatureDropout
from splitveil.defences.gated_attention import GatedAttention
from splitveil.defences.infoscissors import InfoScissors, ScissorsBound
from splitveil.defences.kmeans import KMeans
from splitveil.defences.nopeek import DistanceCorrelation, NoPeek
from splitveil.defences.patrol import Patrol, PruningAdversary
from splitveil.defences.quantise import Quantisation
from splitveil.defences.shredder import Amplifier, Shredder
from splitveil.defences.siamese import Siamese, SiameseEmbedding
from splitveil.defences.slot_cross import SlotCross
from splitveil.defences.sparse import Sparse
from splitveil.defences.stack import Stack, stack
from splitveil.defences.topk import TopKPruning
from splitveil.defences.vib import BottleneckPrice, VariationalBottleneck

DEFENCES: Mapping[str, Defence] = {
    "none": Defence(summary="no defence: clean smashed data"),
    "noise": NoiseOnly(summary="Gaussian noise on the wire, no penalty"),
    "dropout": FeatureDropout(summary="values zeroed at random, in deployment too"),
    "topk": TopKPruning(summary="each image's smallest values zeroed"),
    "quantise": Quantisation(summary="values rounded to few levels"),
    "arl": Arl(summary="ResSFL: a decoder trained beside the encoder, hinge on its SSIM"),
    "clip": Clipping(summary="values clipped to a box before the noise"),
    "nopeek": NoPeek(summary="NoPeek: price on the distance correlation of image and z"),
    "vib": VariationalBottleneck(summary="VIB/MID: learned Gaussian noise, price on its KL"),
    "siamese": Siamese(summary="Siamese embedding: contrastive loss on z, pairs of the batch"),
    "sparse": Sparse(summary="after SCA: z coded by few atoms of a learned dictionary"),
    "bido": Bido(summary="BiDO: price on HSIC of image and z, reward on that of z and label"),
    "shredder": Shredder(summary="after Shredder: learned noise, rewarded for being loud"),
    "infoscissors": InfoScissors(summary="InfoScissors: CLUB's bound on the image's information"),
    "patrol": Patrol(summary="after PATROL: arl's decoder, and a client pruned late in the run"),
    "cem": KMeans(summary="CEM (CVPR 2025): k-means per class, hinge on the cluster variance"),
    "gated-att": GatedAttention(summary="seed 003: gated attention, gated softplus penalty"),
    "gated-att-simple": GatedAttention(
        summary="seed 000: gated attention, hinge on the log-variance", form="hinge"
    ),
    "gated-att-trace": GatedAttention(
        summary="seed 002: gated attention, hinge on the log of the trace",
        form="trace",
        attention_loss_scale=1.0,
        attention_warmup_epochs=0,
        w_lr="constant",
        attention_gets_lambda=True,
        lambd=1.0,
    ),
    "slot-cross": SlotCross(summary="seed 001: slots and gated cross-attention, early shut-off"),
    "veil": GatedAttention(
        summary="flagship: rate of raw z against the noise, adversarial attention, thin client",
        client="thin-deep",
        penalty="rate",
        attention="maximise",
        lambd=0.3,
        attention_loss_scale=1.0,
        attention_warmup_epochs=0,
        w_lr="constant",
        skip_first_epoch=False,
        attention_lr=1e-3,
        ramp=0.5,
    ),
}

__all__ = [
    "DEFENCES",
    "Amplifier",
    "Arl",
    "Bido",
    "BilateralDependency",
    "BottleneckPrice",
    "Clipping",
    "DecodingAdversary",
    "Defence",
    "DistanceCorrelation",
    "FeatureDropout",
    "GatedAttention",
    "InfoScissors",
    "KMeans",
    "NoPeek",
    "NoiseOnly",
    "Patrol",
    "PruningAdversary",
    "Quantisation",
    "ScissorsBound",
    "Shredder",
    "Siamese",
    "SiameseEmbedding",
    "SlotCross",
    "Sparse",
    "Stack",
    "TopKPruning",
    "VariationalBottleneck",
    "stack",
]
