"""One training step: what it remembers, what it counts, and that its replay is the same."""

from collections.abc import Callable

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from splitveil.config.resolve import TrainParts
from splitveil.config.run_config import RunConfig
from splitveil.defences.base import PenaltyPlan
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import SplitModel
from splitveil.surrogates.base import Surrogate
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM
from splitveil.train.step import (
    Meters,
    NonFiniteCounter,
    StepLoss,
    Stepper,
    TrainSet,
    TrainState,
    Weights,
    new_state,
    penalty,
)

CLASSES, WIRE = 3, 8
PENALISED = Weights(0.3, 1.0)


def prepared(
    surrogate: nn.Module | None,
    device: str = "cpu",
    *,
    remembers: bool = False,
    capture: bool = True,
    compiled: bool = False,
    config: RunConfig | None = None,
) -> tuple[Stepper, TrainState]:
    fabric = Fabric(accelerator=device, devices=1, precision="32-true")
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, WIRE), nn.BatchNorm1d(WIRE), nn.Sigmoid())
    model = SplitModel(encoder, Channel([GaussianNoise(0.05)]), nn.Linear(WIRE, CLASSES))
    stepped = model.compiled(backend="aot_eager") if compiled else model
    plan = PenaltyPlan(lambd=0.3, attention_lr=1e-3)
    parts = TrainParts(model, surrogate, penalty=plan)
    state = new_state(parts, config or RunConfig(), fabric.device)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (24, 1, 4, 4), dtype=torch.uint8, generator=generator)
    labels = torch.arange(24) % CLASSES
    data = TrainSet(
        images=images.to(fabric.device),
        labels=labels.to(fabric.device),
        crop_pad=1,
        flip=True,
    )
    model.train()
    loss = StepLoss(stepped, state, fabric, remembers=remembers)
    return Stepper(loss, data, capture=capture), state


def train(stepper: Stepper, steps: int, weights: Weights | None, device: str = "cpu") -> None:
    for index in range(steps):
        rows = (torch.arange(12) + 12 * (index % 2)).to(device)
        stepper(rows, 0.1 / (1 + index), weights)


def test_a_bank_fills_while_the_penalty_waits() -> None:
    rate = Rate(WIRE, CLASSES, noise_std=0.05, bank=6)
    stepper, _ = prepared(rate, remembers=True)
    train(stepper, 1, None)
    assert rate.bank is not None
    assert rate.bank.held.tolist() == [4, 4, 4]
    train(stepper, 1, None)
    assert rate.bank.held.tolist() == [6, 6, 6]


def test_it_does_not_fill_in_a_run_without_a_penalty() -> None:
    rate = Rate(WIRE, CLASSES, noise_std=0.05, bank=6)
    stepper, _ = prepared(rate)
    train(stepper, 2, None)
    assert rate.bank is not None
    assert rate.bank.held.tolist() == [0, 0, 0]


def test_remembering_changes_nothing_else() -> None:
    weights = []
    for remembers in (False, True):
        rate = Rate(WIRE, CLASSES, noise_std=0.05, bank=6)
        stepper, state = prepared(rate, remembers=remembers)
        train(stepper, 3, None)
        weights.append([p.detach().clone() for p in state.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
def test_a_compiled_model_is_trained_as_the_model_itself() -> None:
    found = []
    for compiled in (False, True):
        stepper, state = prepared(Rate(WIRE, CLASSES, noise_std=0.05), compiled=compiled)
        train(stepper, 3, PENALISED)
        found.append([p.detach().clone() for p in state.model.parameters()])
    for written, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, written)


def test_the_first_step_with_nesterov_is_longer_by_the_momentum() -> None:
    moved = []
    for nesterov in (False, True):
        config = RunConfig(nesterov=nesterov, momentum=0.9, weight_decay=0.0)
        stepper, state = prepared(None, config=config)
        before = [p.detach().clone() for p in state.model.parameters()]
        train(stepper, 1, None)
        after = state.model.parameters()
        moved.append(torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]))
    torch.testing.assert_close(moved[1], 1.9 * moved[0], rtol=1e-4, atol=1e-6)


def test_every_value_is_averaged_over_the_steps_that_had_it() -> None:
    stepper, state = prepared(Rate(WIRE, CLASSES, noise_std=0.05))
    train(stepper, 2, None)
    train(stepper, 1, PENALISED)
    assert state.meters.counts["task_loss"] == 3
    assert state.meters.counts["rob_loss"] == 1
    assert "attention_weights" not in state.meters.sums
    total = float(state.meters.sums["task_loss"])
    assert state.meters.means()["task_loss"] == pytest.approx(total / 3)
    state.meters.reset()
    assert state.meters.means() == {}
    train(stepper, 1, None)
    assert set(state.meters.means()) == {"task_loss", "train_accuracy"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weights", [None, PENALISED], ids=["plain", "penalised"])
def test_a_replayed_step_is_the_step_as_written(weights: Weights | None) -> None:
    found, losses, before = [], [], []
    for capture in (False, True):
        torch.manual_seed(3)
        cem = GatedAttentionCEM(WIRE, CLASSES, penalty="rate", attention="maximise", bank=4)
        stepper, state = prepared(cem, "cuda", capture=capture)
        # A softmax does not see the bias of its scores: that gradient is rounding and nothing else.
        seen = [p for name, p in cem.named_parameters() if name != "pooling.score.bias"]
        parameters = [*state.model.parameters(), *seen]
        before = [p.detach().clone() for p in parameters]
        train(stepper, 12, weights, "cuda")
        found.append([p.detach().clone() for p in parameters])
        losses.append(float(state.meters.sums["task_loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    # Sums on a GPU have no fixed order, and Adam makes a whole step of the smallest gradient: what
    # two runs differ by is small against the way they went.
    for start, written, replayed in zip(before, *found, strict=True):
        way = (written - start).norm()
        assert float((replayed - written).norm()) <= 0.05 * float(way) + 1e-6


SURROGATES: dict[str, Callable[[], Surrogate]] = {
    "rate": lambda: Rate(WIRE, CLASSES, noise_std=0.05),
    "gated attention": lambda: GatedAttentionCEM(WIRE, CLASSES, reg_strength=0.05),
    "slots": lambda: SlotCrossAttentionCEM(WIRE, CLASSES, early_shut_steps=0),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_nan_features_at_the_first_step_are_left_out(name: str) -> None:
    """Counted, and the task's gradient is exact: as at any later step."""
    torch.manual_seed(0)
    z = torch.randn(12, WIRE, requires_grad=True)
    broken = torch.where(torch.arange(12)[:, None] == 0, torch.nan, z)
    guard = NonFiniteCounter.on("cpu")
    rob, _ = penalty(
        broken, torch.arange(12) % CLASSES, SURROGATES[name](), weights=PENALISED, guard=guard
    )
    (z.square().sum() + rob).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    torch.testing.assert_close(z.grad, 2 * z.detach(), rtol=0, atol=0)
    assert int(guard.loss) + int(guard.gradient) >= 1


def test_a_bad_step_does_not_hide_the_mean_of_the_others() -> None:
    meters = Meters("cpu")
    for rob in (1.0, float("nan"), 2.0):
        meters.add({"rob_loss": torch.tensor(rob), "task_loss": torch.tensor(rob)})
        meters.counts.update(("rob_loss", "task_loss"))
    assert meters.means() == {"rob_loss": 1.5, "task_loss": None}
    meters.reset()
    meters.add({"rob_loss": torch.tensor(float("inf"))})
    meters.counts.update(("rob_loss",))
    assert meters.means() == {"rob_loss": None}
