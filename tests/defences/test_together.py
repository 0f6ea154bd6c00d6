"""Several companions as one: prices add up, one may learn, and none leaves no trace."""

from pathlib import Path
from typing import cast

import pytest
import torch
from defences.made import trained
from torch import Tensor

from splitveil.config import find_defence
from splitveil.defences import DistanceCorrelation
from splitveil.defences.base import Price
from splitveil.defences.stack import Together
from splitveil.errors import ConfigError
from splitveil.nets import SplitModel, cut, small
from splitveil.types import Companion

IMAGE = (1, 8, 8)


def model() -> SplitModel:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return cut(small(IMAGE, 4), 1)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(16, *IMAGE, generator=draw)
    return model().encoder(x).detach(), x, torch.arange(16) % 4


class Paid(Price):
    """A price of its own that notes how far the run is."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self.price, self.told = price, 0.0

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        del x, y
        return self.price * z.mean()

    def pace(self, done: float) -> None:
        self.told = done


def test_prices_add_up() -> None:
    z, x, y = batch()
    both = find_defence("nopeek+bido").companion(model(), IMAGE, 4)
    assert isinstance(both, Together)
    alone = [find_defence(name).companion(model(), IMAGE, 4) for name in ("nopeek", "bido")]
    paid = [cast(Companion, part).penalty(z, x, y) for part in alone]
    assert float(both.penalty(z, x, y)) == pytest.approx(sum(map(float, paid)), rel=1e-6)
    assert float(both.learn(z, x, y)) == 0
    assert both.lr == 0


def test_one_that_learns_keeps_its_rate_and_its_loss_beside_a_price() -> None:
    z, x, y = batch()
    both = find_defence("arl+nopeek").companion(model(), IMAGE, 4)
    assert isinstance(both, Together)
    assert both.lr == 1e-3
    assert 0 < float(both.learn(z, x, y).detach()) < 2
    z = z.requires_grad_()
    (slope,) = torch.autograd.grad(both.penalty(z, x, y), z)
    assert float(slope.abs().sum()) > 0


def test_those_that_act_between_steps_are_told() -> None:
    parts = [Paid(1.0), DistanceCorrelation(0.3), Paid(2.0)]
    Together(parts).pace(0.25)
    assert [part.told for part in parts if isinstance(part, Paid)] == [0.25, 0.25]


@pytest.mark.parametrize("name", ["arl+vib", "nopeek+arl+patrol", "vib+shredder+bido"])
def test_two_that_learn_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="each train a companion and a stack can have one"):
        find_defence(name)


def test_a_companion_of_strength_zero_leaves_no_trace_in_a_stack(tmp_path: Path) -> None:
    alone = trained(tmp_path, "alone", "nopeek")
    off = trained(tmp_path, "off", "bido+nopeek", bido_strength=0.0)
    on = trained(tmp_path, "on", "bido+nopeek")
    assert all(torch.equal(v, alone[k]) for k, v in off.items())
    assert not all(torch.equal(v, alone[k]) for k, v in on.items())
