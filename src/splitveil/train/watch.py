"""What is made of the smashed data of one pass, beside the server's answer."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from splitveil.gradient import scale_gradient
from splitveil.train.compose import penalty
from splitveil.train.distributed import gathered, global_batch
from splitveil.train.schedule import Weights
from splitveil.train.state import TrainState, companions
from splitveil.types import Companion, Remembers, SurrogateOutput

Tap = Callable[[Tensor], None]


class Watch:
    """Shown z of one batch, it keeps the losses of the surrogate and of the companion.

    With several processes both see the whole batch. `remembers`: while the penalty is not active
    (`weights` None), a surrogate with a memory keeps the batch.
    """

    def __init__(
        self,
        batch: tuple[Tensor, Tensor],
        weights: Weights | None,
        state: TrainState,
        fabric: Fabric,
        *,
        remembers: bool,
    ) -> None:
        self._images, self._labels = batch
        self._weights, self._state, self._fabric = weights, state, fabric
        self._penalties: list[tuple[Tensor, SurrogateOutput]] = []
        self._beside: list[tuple[Tensor, list[Tensor]]] = []
        self._looks: list[Tap] = []
        if state.surrogate is not None and weights is not None:
            self._looks.append(self._measure)
        elif remembers and isinstance(state.surrogate, Remembers):
            self._looks.append(self._remember)
        if state.companion is not None:
            self._looks.append(self._accompany)

    @property
    def tap(self) -> Tap | None:
        """What a pass shows z to; None where nobody looks."""
        return self._look if self._looks else None

    def losses(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Terms to add to the task's loss, and what to log of them."""
        terms: list[Tensor] = []
        values: dict[str, Tensor] = {}
        for rob, said in self._penalties:
            self._state.aside.join()
            terms.append(rob)
            scalars = {k: v for k, v in said.diagnostics.items() if v.ndim == 0}
            values |= {"rob_loss": said.loss, "intra_mse": said.intra_mse} | scalars
        for own, paid in self._beside:
            terms += [own, *(torch.where(torch.isfinite(p), p, torch.zeros_like(p)) for p in paid)]
            values |= {"companion_loss": own, "companion_penalty": torch.stack(paid).sum()}
        return terms, values

    def _look(self, z: Tensor) -> None:
        for look in self._looks:
            look(z)

    def _measure(self, z: Tensor) -> None:
        z, labels = global_batch(z, self._labels, self._fabric)
        assert self._state.surrogate is not None and self._weights is not None  # noqa: S101, PT018 - else no look
        work = partial(
            penalty,
            y=labels,
            surrogate=self._state.surrogate,
            weights=self._weights,
            guard=self._state.guard,
        )
        self._penalties.append(self._state.aside.run(work, z))

    def _remember(self, z: Tensor) -> None:
        z, labels = global_batch(z.detach(), self._labels, self._fabric)
        cast(Remembers, self._state.surrogate).remember(z, labels)

    def _accompany(self, z: Tensor) -> None:
        z, labels = global_batch(z, self._labels, self._fabric)
        images = gathered(self._images, self._fabric)
        companion = cast(nn.Module, self._state.companion)
        own = cast(Companion, companion).learn(z.detach(), images, labels)
        paid = []
        for part in companions(companion):  # each on its own: one that breaks harms no other
            guarded = scale_gradient(z, 1.0, self._state.guard.gradient)
            paid.append(cast(Companion, part).penalty(guarded, images, labels))
        self._beside.append((own, paid))
