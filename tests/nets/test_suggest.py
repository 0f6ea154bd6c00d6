"""Cuts of a given backbone: costs against built splits, and bottlenecks that really fit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.blocks import conv3x3
from splitveil.nets.budget import CutCost, suggest_cuts
from splitveil.nets.catalogue import vgg11
from splitveil.nets.split import cut

IMAGE = (3, 32, 32)
Shape = tuple[int, int, int]


def small_net() -> nn.Sequential:
    relu = nn.ReLU()  # one module in two places
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        relu,
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, stride=2),
        nn.BatchNorm2d(12),
        relu,
        nn.Flatten(),
        nn.Linear(12 * 3 * 3, 10),
    )


def test_every_legal_cut_costs_what_the_built_split_costs() -> None:
    net = small_net()
    found = suggest_cuts(net, (3, 14, 14), max_macs=1e9, wire_floats=10**6)
    assert [c.at for c in found] == list(range(1, len(net)))
    for cost in found:
        model = cut(net, cost.at)
        assert cost.macs == model.macs((3, 14, 14))
        assert cost.params == model.client_params()
        assert cost.wire_shape == model.wire_shape((3, 14, 14))
        assert cost.wire_floats == math.prod(cost.wire_shape)
        assert cost.layer == type(net[cost.at - 1]).__name__
        assert cost.fits
        assert cost.bottleneck is None


def test_vgg11_without_its_bottleneck_is_told_the_published_one() -> None:
    bare = vgg11(IMAGE, 10, bottleneck=None)
    fourth = suggest_cuts(bare, IMAGE, max_macs=21.9e6, wire_floats=512)[3]
    assert (fourth.wire_shape, fourth.fits) == ((128, 8, 8), False)
    assert fourth.bottleneck is not None
    assert (fourth.bottleneck.channels, fourth.bottleneck.wire_floats) == (8, 512)
    published = cut(vgg11(IMAGE, 10), 4)
    assert fourth.macs + fourth.bottleneck.macs == published.macs(IMAGE)
    assert fourth.params + fourth.bottleneck.params == published.client_params()


def fits_with(net: nn.Sequential, cost: CutCost, shape: Shape, budget: tuple[float, int]) -> bool:
    """Build the bottleneck into the backbone and count."""
    assert cost.bottleneck is not None
    narrow = conv3x3(cost.wire_shape[0], cost.bottleneck.channels)
    model = cut(
        nn.Sequential(*list(net)[: cost.at], narrow, nn.Sigmoid(), nn.Flatten()), cost.at + 2
    )
    return model.macs(shape) <= budget[0] and model.wire_floats(shape) <= budget[1]


@settings(max_examples=15, deadline=None)
@given(st.floats(1e3, 1e6), st.integers(1, 2000))
def test_a_bottleneck_fits_and_one_channel_more_would_not(macs: float, wire: int) -> None:
    net, shape = small_net(), (3, 14, 14)
    for cost in suggest_cuts(net, shape, macs, wire):
        assert cost.fits == (cost.macs <= macs and cost.wire_floats <= wire)
        one = 9 * math.prod(cost.wire_shape)
        area = math.prod(cost.wire_shape[1:])
        channels = 0 if cost.bottleneck is None else cost.bottleneck.channels
        if cost.bottleneck is not None:
            assert not cost.fits
            assert fits_with(net, cost, shape, (macs, wire))
        if not cost.fits and len(cost.wire_shape) == 3:
            more = channels + 1
            assert more * area > wire or cost.macs + more * one > macs
        if len(cost.wire_shape) == 1:
            assert cost.bottleneck is None


def test_counting_changes_nothing_about_the_net() -> None:
    net = small_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    suggest_cuts(net, (3, 14, 14), max_macs=1e6, wire_floats=64)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


def test_a_double_precision_backbone_is_counted_too() -> None:
    plain = suggest_cuts(small_net(), (3, 14, 14), 1e6, 64)
    assert suggest_cuts(small_net().double(), (3, 14, 14), 1e6, 64) == plain


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (nn.Sequential(nn.Flatten()), "of one child cannot be cut"),
        (Own(nn.Flatten(), nn.Flatten()), "needs a plain nn.Sequential, got Own"),
        (nn.Sequential(Pair(), nn.Flatten()), r"layer 1 \(Pair\) .* returns a tuple"),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten()), r"layer 2 \(Conv2d\) .*14"),
    ],
)
def test_a_backbone_that_cannot_be_cut_is_refused(net: nn.Sequential, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        suggest_cuts(net, (3, 14, 14), 1e6, 64)


@pytest.mark.parametrize(
    ("macs", "wire", "said"),
    [
        (0.0, 64, "macs must be a finite number > 0, got 0.0"),
        (float("nan"), 0, "macs must be .*; wire must be at least 1, got 0"),
    ],
)
def test_a_senseless_budget_is_refused(macs: float, wire: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        suggest_cuts(small_net(), (3, 14, 14), macs, wire)
