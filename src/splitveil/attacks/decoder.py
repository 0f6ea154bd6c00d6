"""The decoding attack: a residual network trained to invert the client from queries on aux."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.fitting import Budget, Schedule, minimise
from splitveil.attacks.objectives import (
    Objective,
    anchored_ssim_loss,
    fit_features,
    perceptual_loss,
)
from splitveil.attacks.units import InUnits, measured_units
from splitveil.errors import AuditError, ConfigError, unknown
from splitveil.graphs import compiled
from splitveil.nets import ResidualDecoder
from splitveil.rng import seeded_globals, stream
from splitveil.types import (
    Access,
    Attack,
    BlackBox,
    Fitted,
    Labelled,
    Observation,
    Progress,
    silent,
)

Loss = Literal["mse", "ssim", "perceptual"]


def _decode(net: nn.Module, z: Tensor) -> Tensor:
    """Images in float32; on a GPU by way of bfloat16, with the channels last."""
    on_gpu = z.device.type == "cuda"
    if on_gpu and z.ndim == 4:  # noqa: PLR2004 - maps, not vectors
        z = z.contiguous(memory_format=torch.channels_last)
    # Casts of weights that are kept across calls would go stale in a replayed step.
    with torch.autocast(z.device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
        images: Tensor = net(z)
    return images.float()


def _part(progress: Progress, before: int, of: int, name: str) -> Progress:
    """The display of one part of a longer work, which follows `before` units of others."""

    def told(done: int, total: int, note: str = "") -> None:
        del total, note
        progress(before + done, of, name)

    return told


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Residual decoder N`blocks`C`width`, fresh channel noise at every step.

    `loss` is what it minimises: "mse"; "ssim", 1 − SSIM and a little MSE; "perceptual", MSE and
    the distance between features of a classifier fitted on aux for `feature_steps`. `schedule`
    "one-cycle" is AdamW on a one-cycle schedule; "cosine" is the published setting, Adam with L2
    decay and a cosine down to a hundredth. The budget (`epochs`, `batch_size`, `min_steps`) is
    fixed by the profile, never by the defence; small aux sets get more epochs until `min_steps`
    is reached. `fused` has torch compile the network on a GPU.
    """

    access: Access = Access.BLACK_BOX
    loss: Loss = "mse"
    width: int = 64
    blocks: int = 8
    epochs: int = 16
    min_steps: int = 0
    batch_size: int = 256
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: Schedule = "one-cycle"
    feature_steps: int = 1000
    min_aux: int = 2  # BatchNorm needs two
    effort: float = 10.0
    fused: bool = False

    def __post_init__(self) -> None:
        if self.loss not in get_args(Loss):
            raise ConfigError(unknown("loss", self.loss, get_args(Loss)))

    @property
    def summary(self) -> str:
        """One line for a catalogue."""
        return f"Residual decoder N{self.blocks}C{self.width}, {self.loss} loss, fresh noise."

    @property
    def budget(self) -> Budget:
        """How long the decoder is trained."""
        return Budget(
            epochs=self.epochs,
            batch_size=self.batch_size,
            min_steps=self.min_steps,
            lr=self.lr,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
        )

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Fitted:
        """Train on aux; the last weights are used, nothing is picked on the scored images."""
        if len(aux) < self.min_aux:
            raise AuditError(
                f"the decoder attack needs at least {self.min_aux} aux images, got {len(aux)}"
            )
        device, n = victim.device, len(aux)
        first = self.feature_steps if self.loss == "perceptual" else 0
        total = first + self.budget.steps(n)
        objective = self._objective(
            aux, generator, device, _part(progress, 0, total, "fitting the features")
        )
        wire = tuple(victim.send(aux.images[:1], generator).shape[1:])
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with seeded_globals(seed, device):
            net = ResidualDecoder(
                wire, tuple(aux.images.shape[1:]), width=self.width, blocks=self.blocks
            ).to(device)
            if device.type == "cuda":
                net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

            reader = InUnits(net, measured_units(victim, aux.images, generator))
            send = victim.sender(aux.images)
            fitted = compiled(reader) if self.fused and device.type == "cuda" else reader

            def loss(x: Tensor, rows: Tensor) -> Tensor:
                return objective(_decode(fitted, send(rows, generator)), x)

            told = _part(progress, first, total, "fitting the decoder")
            data = (aux.images, torch.arange(n, device=aux.images.device))
            curve = minimise(loss, reader, data, self.budget, generator, progress=told)
        reader.eval()

        @torch.no_grad()
        def reconstruct(seen: Observation) -> Tensor:
            images = torch.cat([_decode(reader, z) for z in torch.split(seen.z, 1000)])
            return images.clamp(0, 1)

        return Fitted(reconstruct, curve, reader)

    def _objective(
        self, aux: Labelled, generator: Generator, device: torch.device, progress: Progress
    ) -> Objective:
        """What to minimise.

        Features have a stream of their own, so that decoders of one seed differ by loss alone.
        """
        if self.loss == "ssim":
            return anchored_ssim_loss
        if self.loss == "mse":
            return F.mse_loss
        features = fit_features(
            aux,
            stream(generator.initial_seed(), "features", generator.device),
            steps=self.feature_steps,
            batch_size=self.batch_size,
            device=device,
            progress=progress,
        )
        return perceptual_loss(features)


def fused(attack: Attack) -> Attack:
    """The same attack; on a GPU torch compiles its decoders, wherever it has some.

    >>> fused(Decoder()).fused
    True
    """
    if not is_dataclass(attack):
        return attack
    held = {f.name: getattr(attack, f.name) for f in fields(attack)}
    changed: dict[str, Any] = {k: fused(v) for k, v in held.items() if isinstance(v, Decoder)}
    changed |= {"fused": True} if isinstance(attack, Decoder) else {}
    return cast(Attack, replace(attack, **changed))
