"""Several companions as one: prices add up, each learns as alone, and none leaves no trace."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast
from unittest.mock import patch

import pytest
import torch
from defences.made import trained
from torch import Tensor, nn

from splitveil.defences.base import Companion, CompanionStack, FixedPenalty, NoiseOnly
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.defences.nopeek import DistanceCorrelation
from splitveil.errors import ConfigError
from splitveil.nets.catalogue import small
from splitveil.nets.split import SplitModel, cut, with_stage_shapes
from splitveil.train.state import read_checkpoint

IMAGE = (1, 8, 8)


def model() -> SplitModel:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return cut(small(IMAGE, 4), 1)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(16, *IMAGE, generator=draw)
    return model().encoder(x).detach(), x, torch.arange(16) % 4


class Paid(FixedPenalty):
    """A price of its own that notes how far the run is."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self.price, self.told = price, 0.0

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        del x, y
        return self.price * z.mean()

    def after_step(self, done: float) -> None:
        self.told = done


def test_prices_add_up() -> None:
    z, x, y = batch()
    both = find_defence("nopeek+bido").companion(model(), IMAGE, 4)
    assert isinstance(both, CompanionStack)
    alone = [find_defence(name).companion(model(), IMAGE, 4) for name in ("nopeek", "bido")]
    paid = [cast(Companion, part).penalty(z, x, y) for part in alone]
    assert float(both.penalty(z, x, y)) == pytest.approx(sum(map(float, paid)), rel=1e-6)
    assert float(both.own_loss(z, x, y)) == 0
    assert both.lr == 0


def test_a_learner_keeps_its_rate_and_its_loss_in_a_stack() -> None:
    z, x, y = batch()
    both = find_defence("arl+nopeek").companion(model(), IMAGE, 4)
    assert isinstance(both, CompanionStack)
    assert both.lr == 1e-3
    assert 0 < float(both.own_loss(z, x, y).detach()) < 2
    z = z.requires_grad_()
    (slope,) = torch.autograd.grad(both.penalty(z, x, y), z)
    assert float(slope.abs().sum()) > 0


def test_companions_that_act_between_steps_are_called() -> None:
    parts = [Paid(1.0), DistanceCorrelation(0.3), Paid(2.0)]
    CompanionStack(parts).after_step(0.25)
    assert [part.told for part in parts if isinstance(part, Paid)] == [0.25, 0.25]


class Learner(nn.Module):
    """Learns the mean of z from any start; the encoder pays nothing."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.guess = lr, nn.Parameter(torch.zeros(1))

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        del x, y
        return (self.guess - z.mean() - 10).square().sum()

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        del x, y
        return 0 * z.sum()


def test_each_companion_learns_at_its_own_rate(tmp_path: Path) -> None:
    """Adam's first steps are as long as its rate, whatever the loss."""
    found: dict[str, list[float]] = {}
    for name, rates in (("both", [1e-3, 1e-1]), ("slow", [1e-3]), ("fast", [1e-1])):

        @dataclass(frozen=True, kw_only=True)
        class Learns(NoiseOnly):
            rates: ClassVar[list[float]]

            def companion(self, *words: object) -> nn.Module:
                del words
                return CompanionStack([Learner(lr) for lr in self.rates])

        Learns.rates = rates
        with patch.dict(DEFENCES, {"learns": Learns(summary="learns")}):
            trained(tmp_path, name, "learns")
        saved = read_checkpoint(tmp_path / name / "checkpoint.safetensors").part("companion")
        found[name] = [float(saved[f"parts.{i}.guess"]) for i in range(len(rates))]
    assert found["both"] == [*found["slow"], *found["fast"]]
    assert found["fast"][0] > 10 * found["slow"][0] > 0


class Broken(Paid):
    """Asks for what is no number."""

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return super().penalty(z, x, y) * math.nan


def test_a_broken_companion_is_counted_and_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, skipped = {}, {}
    for name, parts in (("sound", [Paid(3.0)]), ("broken", [Broken(1.0), Paid(3.0)]), ("none", [])):

        @dataclass(frozen=True, kw_only=True)
        class Pays(NoiseOnly):
            parts: ClassVar[list[nn.Module]]

            def companion(self, *words: object) -> nn.Module | None:
                del words
                return CompanionStack(self.parts) if self.parts else None

        Pays.parts = list(parts)
        with patch.dict(DEFENCES, {"pays": Pays(summary="pays")}):
            found[name] = trained(tmp_path, name, "pays")
        last = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]
        skipped[name] = json.loads(last)["skipped"]
    sound, broken, plain = (found[name] for name in ("sound", "broken", "none"))
    assert all(torch.equal(value, sound[key]) for key, value in broken.items())
    assert not all(torch.equal(value, plain[key]) for key, value in broken.items())
    assert skipped["sound"] == skipped["none"] == 0
    assert skipped["broken"] > 0
    assert "lower the companion's strength and learning rate or lr" in caplog.text


def test_two_learners_and_a_penalty_are_all_trained(tmp_path: Path) -> None:
    trained(tmp_path, "run", "arl+infoscissors+vib+cem", arl_strength=0.5)
    with torch.random.fork_rng([]):
        start = find_defence("arl+infoscissors+vib+cem").companion(
            with_stage_shapes(cut(small(IMAGE, 10), 1, find_defence("vib").channel(0.1)), IMAGE),
            IMAGE,
            10,
        )
    assert start is not None
    saved = read_checkpoint(tmp_path / "run" / "checkpoint.safetensors").part("companion")
    assert saved.keys() == start.state_dict().keys()
    assert {key.split(".")[1] for key in saved} == {"0", "1"}  # a price has nothing to learn
    log = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (last,) = [line for line in map(json.loads, log) if line["kind"] == "epoch"]
    assert all(math.isfinite(last[key]) for key in ("companion_loss", "companion_penalty"))


@pytest.mark.parametrize("name", ["vib+shredder", "shredder+arl+vib+bido"])
def test_two_that_learn_the_noise_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="each learn the noise, but only one part of a stack can"):
        find_defence(name)


def test_a_companion_of_strength_zero_leaves_no_trace_in_a_stack(tmp_path: Path) -> None:
    alone = trained(tmp_path, "alone", "nopeek")
    off = trained(tmp_path, "off", "bido+nopeek", bido_strength=0.0)
    on = trained(tmp_path, "on", "bido+nopeek")
    assert all(torch.equal(v, alone[k]) for k, v in off.items())
    assert not all(torch.equal(v, alone[k]) for k, v in on.items())
