"""The decoding attack: a residual network trained to invert the client from queries on aux."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from splitveil.errors import AuditError
from splitveil.nets import ResidualDecoder
from splitveil.rng import seeded_globals
from splitveil.types import (
    Access,
    BlackBox,
    Labelled,
    Observation,
    Progress,
    Reconstruct,
    silent,
)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Residual decoder N`blocks`C`width`, MSE loss, fresh channel noise at every step.

    `schedule` "one-cycle" is AdamW on a one-cycle schedule; "cosine" is the published setting,
    Adam with L2 decay and a cosine down to a hundredth. The budget (`epochs`, `batch_size`,
    `min_steps`) is fixed by the profile, never by the defence; small aux sets get more epochs
    until `min_steps` is reached.
    """

    access: Access = Access.BLACK_BOX
    width: int = 64
    blocks: int = 8
    epochs: int = 16
    min_steps: int = 0
    batch_size: int = 256
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: Literal["one-cycle", "cosine"] = "one-cycle"

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstruct:
        """Train on aux; the last weights are used, nothing is picked on the scored images."""
        if len(aux) < 2:  # noqa: PLR2004 - BatchNorm needs two
            raise AuditError(f"the decoder attack needs at least 2 aux images, got {len(aux)}")
        device = victim.device
        wire = tuple(victim.send(aux.images[:1], generator).shape[1:])
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with seeded_globals(seed, device):
            net = ResidualDecoder(
                wire, tuple(aux.images.shape[1:]), width=self.width, blocks=self.blocks
            ).to(device)
            self._train(net, victim, aux, generator)
        net.eval()

        @torch.no_grad()
        def reconstruct(seen: Observation) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                images = torch.cat([net(z) for z in torch.split(seen.z, 1000)])
            return images.float().clamp(0, 1)

        return reconstruct

    def _lr_at(self, progress: float) -> float:
        """Learning rate after a share `progress` of the steps."""
        rise = 0.3 if self.schedule == "one-cycle" else 0.0
        if progress < rise:
            return self.lr * (0.04 + 0.96 * progress / rise)
        fall = 0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise)))
        return self.lr * (0.01 + 0.99 * fall)

    def _train(
        self, net: ResidualDecoder, victim: BlackBox, aux: Labelled, generator: Generator
    ) -> None:
        device = victim.device
        batch = min(self.batch_size, len(aux))
        per_epoch = len(aux) // batch
        steps = max(self.epochs * per_epoch, self.min_steps)
        kind = torch.optim.AdamW if self.schedule == "one-cycle" else torch.optim.Adam
        fused = device.type == "cuda"
        optimiser = kind(net.parameters(), self.lr, weight_decay=self.weight_decay, fused=fused)
        order = torch.empty(0)
        net.train()
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = self._lr_at(step / steps)
            index = step % per_epoch
            if index == 0:
                order = torch.randperm(len(aux), generator=generator, device=generator.device)
                order = order.to(aux.images.device)
            x = aux.images[order[index * batch : (index + 1) * batch]].to(device)
            z = victim.send(x, generator)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                guess = net(z)
            loss = F.mse_loss(guess.float(), x)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
