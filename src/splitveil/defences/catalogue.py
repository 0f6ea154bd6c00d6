"""Defences by name. A new one is a file with a frozen dataclass, and a line in `DEFENCES`.

Names joined by `+` are a stack, for example `noise+dropout`.
"""

from collections.abc import Mapping

from splitveil.defences.answering import Alone, EarlyExit
from splitveil.defences.arl import Arl
from splitveil.defences.base import Defence, NoiseOnly, stack
from splitveil.defences.bido import Bido
from splitveil.defences.channel_only import (
    Clipping,
    FeatureDropout,
    Quantisation,
    Sparse,
    TopKPruning,
)
from splitveil.defences.conditional_entropy import Cem, GatedAttention, SlotCross
from splitveil.defences.infoscissors import InfoScissors
from splitveil.defences.nopeek import NoPeek
from splitveil.defences.patrol import Patrol
from splitveil.defences.shredder import Shredder
from splitveil.defences.siamese import Siamese
from splitveil.defences.vib import VariationalBottleneck
from splitveil.errors import ConfigError, unknown

DEFENCES: Mapping[str, Defence] = {
    "none": Defence(summary="no defence: clean smashed data"),
    "alone": Alone(summary="the client answers by itself, and nothing leaves the device"),
    "early-exit": EarlyExit(summary="sends, with noise, only what the client is unsure of"),
    "noise": NoiseOnly(summary="Gaussian noise on the wire, no penalty"),
    "dropout": FeatureDropout(summary="values zeroed at random, in deployment too"),
    "topk": TopKPruning(summary="each image's smallest values zeroed"),
    "quantise": Quantisation(summary="values rounded to few levels"),
    "arl": Arl(summary="ResSFL: a decoder trained beside the encoder, hinge on its SSIM"),
    "clip": Clipping(summary="values clipped to a box before the noise"),
    "nopeek": NoPeek(summary="NoPeek: penalty on the distance correlation of image and z"),
    "vib": VariationalBottleneck(summary="VIB/MID: learned Gaussian noise, penalty on its KL"),
    "siamese": Siamese(summary="Siamese embedding: contrastive loss on z, pairs of the batch"),
    "sparse": Sparse(summary="as in SCA: z coded by few atoms of a learned dictionary"),
    "bido": Bido(summary="BiDO: penalty on HSIC of image and z, reward on that of z and label"),
    "shredder": Shredder(summary="as in Shredder: learned noise, rewarded for being large"),
    "infoscissors": InfoScissors(summary="InfoScissors: CLUB's bound on the image's information"),
    "patrol": Patrol(summary="as in PATROL: arl's decoder, and a client pruned late in the run"),
    "cem": Cem(summary="CEM (CVPR 2025): k-means per class, hinge on the cluster variance"),
    "gated-att": GatedAttention(summary="reference R3: gated attention, gated softplus penalty"),
    "gated-att-simple": GatedAttention(
        summary="reference R0: gated attention, hinge on the log-variance", form="hinge"
    ),
    "gated-att-trace": GatedAttention(
        summary="reference R2: gated attention, hinge on the log of the trace",
        form="trace",
        attention_loss_scale=1.0,
        attention_warmup_epochs=0,
        w_lr="constant",
        attention_gets_lambda=True,
        lambd=0.1,  # R2 names no λ; at 1 the digits stay at chance
    ),
    "slot-cross": SlotCross(summary="reference R1: slots, gated cross-attention, early shut-off"),
    "veil": GatedAttention(
        summary="flagship: rate of raw z against the noise, adversarial attention, thin client",
        client="thin-deep",  # at equal cost depth protects better than width
        penalty="rate",
        attention="maximise",
        lambd=0.3,
        attention_loss_scale=1.0,
        attention_warmup_epochs=0,
        w_lr="constant",
        skip_first_epoch=False,  # nothing is fitted at the end of an epoch
        attention_lr=1e-3,
        ramp=0.5,
    ),
}


def find_defence(name: str) -> Defence:
    """The defence of a name, or a stack of several names joined by `+`.

    Args:
        name: A name that `splitveil defences` lists, or several joined by `+`.

    Returns:
        The defence with its default settings.

    >>> find_defence("noise+topk").noisy
    True
    """
    names = [name] if name in DEFENCES else name.split("+")
    for part in names:
        if part not in DEFENCES:
            raise ConfigError(unknown("defence", part, DEFENCES))
    parts = [(part, DEFENCES[part]) for part in names]
    return parts[0][1] if len(parts) == 1 else stack(parts)
