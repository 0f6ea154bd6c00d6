"""The channel of a trained client for an export: what joins the encoder, what stays a stage."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from splitveil.nets import (
    Channel,
    Clip,
    Dropout,
    GaussianNoise,
    LearnedNoise,
    Quantise,
    SparseCoding,
    SplitModel,
    TopK,
    sized,
)
from splitveil.serve.faults import ExportError
from splitveil.serve.manifest import Json, Shape
from splitveil.serve.stages import mean_std, pack_noise

_STAGES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    GaussianNoise: ("gaussian", ("std",)),
    Dropout: ("dropout", ("p",)),
    TopK: ("topk", ("prune",)),
    Quantise: ("quantise", ("bits",)),
    Clip: ("clip", ("low", "high")),
    LearnedNoise: ("learned", ()),
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Copies on the CPU, in eval mode: the client's network, its stages, the server's network."""

    encoder: nn.Module
    stages: tuple[nn.Module, ...]
    head: nn.Module


def parts_of(model: SplitModel, image_shape: Shape) -> Parts:
    """What is exported of a model.

    Sparse coding draws nothing and is a layer of the client's network, unless a stage stands
    before it: then `stages_of` refuses it.
    """
    model = sized(copy.deepcopy(model).cpu().eval(), image_shape)
    every = _each(model.channel)
    codes = list(takewhile(lambda stage: type(stage) is SparseCoding, every))
    encoder = nn.Sequential(model.encoder, *codes) if codes else model.encoder
    return Parts(encoder=encoder, stages=tuple(every[len(codes) :]), head=model.head)


def _each(channel: nn.Module) -> list[nn.Module]:
    return list(channel.stages) if type(channel) is Channel else [channel]


def stages_of(channel: nn.Module | Sequence[nn.Module]) -> tuple[Json, ...]:
    """The channel as plain JSON; an unknown stage is refused, never left out.

    >>> stages_of(Channel([GaussianNoise(0.1), Quantise(4)]))
    ({'kind': 'gaussian', 'std': 0.1}, {'kind': 'quantise', 'bits': 4})
    """
    parts = _each(channel) if isinstance(channel, nn.Module) else list(channel)
    for stage in parts:
        if type(stage) is SparseCoding:
            raise ExportError(
                "channel stage SparseCoding stands behind another stage and cannot be exported; "
                "the client's network ends before its channel: put sparse coding first"
            )
        if type(stage) not in _STAGES:
            known = ", ".join(["SparseCoding", *(kind.__name__ for kind in _STAGES)])
            raise ExportError(
                f"channel stage {type(stage).__name__} cannot be exported; the client knows "
                f"{known}. A stage that draws nothing can be part of the encoder instead"
            )
    return tuple(_described(number, stage) for number, stage in enumerate(parts))


def _described(number: int, stage: nn.Module) -> Json:
    kind, keys = _STAGES[type(stage)]
    if isinstance(stage, LearnedNoise):
        std = mean_std(_scale(stage).numpy(), stage.kind)
        return {"kind": kind, "noise": stage.kind, "file": f"noise-{number}.f32", "std": std}
    return {"kind": kind} | {k: getattr(stage, k) for k in keys}


@torch.no_grad()
def _scale(stage: LearnedNoise) -> Tensor:
    return stage.log_scales().exp().cpu()


def write_noise(stages: Sequence[nn.Module], place: Path) -> None:
    """The file of every learned stage, as `stages_of` names it."""
    for number, stage in enumerate(stages):
        if isinstance(stage, LearnedNoise):
            scale = _scale(stage)
            place_of = torch.zeros_like(scale) if stage.location is None else stage.location
            content = pack_noise(scale.numpy(), place_of.detach().cpu().numpy())
            (place / f"noise-{number}.f32").write_bytes(content)
