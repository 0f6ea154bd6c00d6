"""One training step on buffers that stay where they are, so that a GPU can replay it."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from splitveil.graphs import captured, set_rate
from splitveil.train.schedule import Weights
from splitveil.train.state import TrainState
from splitveil.train.step import Split, TrainSet, forward_loss, unit_floats
from splitveil.train.task import LABELS, Task


class Stepper:
    """Batch, loss, one backward pass and the update, for given rows, learning rate and weights.

    On one GPU the step is captured, once with the penalty and once without, and replayed: what
    changes between steps (rows, learning rate, weights) lies in tensors. Elsewhere it runs as
    written. `capture=False` runs it as written anywhere; `remembers` as in `forward_loss`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainSet,
        state: TrainState,
        fabric: Fabric,
        *,
        task: Task = LABELS,
        remembers: bool = False,
        capture: bool = True,
    ) -> None:
        self._model, self._data, self._state, self._fabric = model, data, state, fabric
        self._optimisers = [_wrap(fabric, o) for o in state.optimisers]
        self._task, self._remembers = task, remembers
        self._on_gpu = fabric.device.type == "cuda"
        self._capture = capture and self._on_gpu and fabric.world_size == 1
        self._rows: Tensor | None = None
        self._weights = Weights(*torch.zeros(2, device=fabric.device))
        self._replays: dict[bool, Callable[[], None]] = {}
        self._logged: dict[bool, tuple[str, ...]] = {}

    def __call__(self, rows: Tensor, lr: float, weights: Weights | None) -> None:
        """Train on the images of `rows`; every call has equally many."""
        self._rows = rows.clone() if self._rows is None else self._rows.copy_(rows)
        set_rate(self._state.optimisers[0], lr)
        if self._capture:
            self._replay(weights)
        else:
            self._work(weights)
        self._state.meters.tick(self._logged[weights is not None])

    def _replay(self, weights: Weights | None) -> None:
        penalised = weights is not None
        if weights is not None:
            cast(Tensor, self._weights.encoder).fill_(weights.encoder)
            cast(Tensor, self._weights.scale).fill_(weights.scale)
        if penalised not in self._replays:
            work = partial(self._work, self._weights if penalised else None)
            streams = list(self._state.streams.values())
            self._replays[penalised] = captured(work, self._fabric.device, streams)
        self._replays[penalised]()

    def _work(self, weights: Weights | None) -> None:
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        data, state = self._data, self._state
        x = data.augment(unit_floats(data.images[self._rows]), state.streams["augment"])
        y = data.labels[self._rows]
        if self._on_gpu:
            x = x.contiguous(memory_format=torch.channels_last)
        loss, values = forward_loss(
            cast(Split, self._model),
            (x, y),
            weights,
            state,
            self._fabric,
            task=self._task,
            remembers=self._remembers,
        )
        self._fabric.backward(loss)
        for optimiser in self._optimisers:
            optimiser.step()
        state.meters.add(values)
        self._logged[weights is not None] = tuple(values)


def _wrap(fabric: Fabric, optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return cast(torch.optim.Optimizer, fabric.setup_optimizers(optimiser))
