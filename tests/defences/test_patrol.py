"""PATROL: arl's decoder, and filters that go late in the run and stay away."""

from pathlib import Path

import pytest
import torch
from defences.made import trained
from torch import Tensor, nn

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.arl import DecodingAdversary
from splitveil.defences.base import Companion
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.defences.patrol import PruningAdversary, filter_importance, kept_filters
from splitveil.errors import ConfigError
from splitveil.nets.catalogue import NETS
from splitveil.nets.split import cut

WIRE, IMAGE = (4, 4, 4), (1, 8, 8)
Y = torch.zeros(8, dtype=torch.long)


def decoder(threshold: float = -1.0) -> DecodingAdversary:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return DecodingAdversary(WIRE, IMAGE, strength=0.3, threshold=threshold, lr=1e-3)


def layer(filters: int = 4) -> nn.Conv2d:
    found = nn.Conv2d(1, filters, 1)
    with torch.no_grad():
        found.weight.fill_(1.0)
    return found


def pruner(*layers: nn.Conv2d, prune: float = 0.25) -> PruningAdversary:
    return PruningAdversary(decoder(), layers, prune=prune, prune_at=0.5)


def zeros(weight: Tensor) -> int:
    return int((weight.flatten(1) == 0).all(1).sum())


def test_importance_is_the_change_of_the_loss_to_first_order() -> None:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 2, 3, 3, generator=g, dtype=torch.float64).requires_grad_()
    x = torch.randn(2, 2, 6, 6, generator=g, dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return nn.functional.conv2d(x, w).tanh().sum()

    (gradient,) = torch.autograd.grad(loss(weight), weight)
    found = filter_importance(weight.detach(), gradient)
    for f in range(5):
        less = torch.ones(5, 1, 1, 1, dtype=torch.float64)
        less[f] = 1 - 1e-6
        change = (loss(weight) - loss(weight * less)).item() / 1e-6
        assert found[f].item() == pytest.approx(abs(change), rel=1e-3)


@pytest.mark.parametrize(
    ("share", "gone"), [(0.0, []), (0.24, []), (0.25, [2]), (0.5, [0, 2]), (0.99, [0, 1, 2])]
)
def test_the_least_important_share_goes_rounded_down(share: float, gone: list[int]) -> None:
    kept = kept_filters(torch.tensor([0.2, 0.3, 0.1, 0.9]), share)
    assert kept.tolist() == [0.0 if f in gone else 1.0 for f in range(4)]


def test_filters_go_when_their_time_has_come_and_stay_away() -> None:
    conv = layer()
    found = pruner(conv)
    for done in (0.1, 0.3, 0.49):
        conv.weight.grad = torch.tensor([3.0, 1.0, -0.5, 2.0]).reshape(4, 1, 1, 1)
        found.after_step(done)
        assert zeros(conv.weight) == 0
    for done in (0.5, 0.7, 1.0):
        conv.weight.grad = torch.tensor([0.0, 9.0, 9.0, 9.0]).reshape(4, 1, 1, 1)
        with torch.no_grad():
            conv.weight.add_(0.1)  # as a momentum would
            assert conv.bias is not None
            conv.bias.add_(0.1)
        found.after_step(done)
        assert [bool(w == 0) for w in conv.weight.flatten()] == [False, False, True, False]
        assert conv.bias[2].item() == 0
        assert conv.bias[0].item() != 0


def test_the_importance_is_a_running_mean_of_what_was_seen() -> None:
    conv = layer(2)
    found = pruner(conv)
    for value in (1.0, 3.0):
        conv.weight.grad = torch.full_like(conv.weight, value)
        found.after_step(0.1)
    assert found.importances()[0].tolist() == pytest.approx([0.9 * 0.1 + 0.3] * 2)


def test_a_resumed_run_finds_the_same_filters() -> None:
    conv = layer()
    found = pruner(conv)
    conv.weight.grad = torch.tensor([3.0, 1.0, 0.5, 2.0]).reshape(4, 1, 1, 1)
    found.after_step(0.4)
    found.after_step(0.6)
    again = layer()
    other = pruner(again)
    other.load_state_dict(found.state_dict())
    other.after_step(0.7)
    assert torch.equal(again.weight, conv.weight)


def test_layers_with_few_filters_lose_none() -> None:
    wide, thin = layer(40), layer(19)
    found = pruner(wide, thin, prune=0.05)
    found.after_step(0.9)
    assert (zeros(wide.weight), zeros(thin.weight)) == (2, 0)


def test_learning_and_paying_are_those_of_arl() -> None:
    g = torch.Generator().manual_seed(1)
    z, x = torch.rand(8, *WIRE, generator=g).requires_grad_(), torch.rand(8, *IMAGE, generator=g)
    found, alone = pruner(layer()), decoder()
    assert isinstance(found, Companion)
    assert torch.equal(found.own_loss(z, x, Y), alone.own_loss(z, x, Y))
    paid = found.penalty(z, x, Y)
    assert torch.equal(paid, alone.penalty(z, x, Y))
    paid.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_values_and_gradients_are_finite_at_every_scale(scale: float) -> None:
    g = torch.Generator().manual_seed(1)
    z = (scale * torch.rand(8, *WIRE, generator=g)).requires_grad_()
    x, found = torch.rand(8, *IMAGE, generator=g), pruner(layer())
    total = found.own_loss(z, x, Y) + found.penalty(z, x, Y)
    total.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(total.isfinite() & z.grad.isfinite().all())


def test_its_state_has_importances_and_no_weights() -> None:
    model = cut(NETS["small"].build(IMAGE, 10), NETS["small"].cut_at)
    with torch.random.fork_rng([]):
        found = DEFENCES["patrol"].companion(model, IMAGE, 10)
    assert isinstance(found, PruningAdversary)
    convs = [m for m in model.encoder.modules() if isinstance(m, nn.Conv2d)]
    assert [len(v) for v in found.importances()] == [m.out_channels for m in convs]
    assert all(k.startswith(("adversary.", "importance")) for k in found.state_dict())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patrol_strength", -0.1), ("patrol_threshold", 1.5), ("patrol_lr", 0.0),
        ("patrol_prune", 1.0), ("patrol_prune", float("nan")), ("patrol_prune_at", 0.0),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be .*, got {value}"):
        build_defence(make_config({"defence": "patrol", key: value}))


def test_it_stacks_with_a_penalty_and_with_another_adversary() -> None:
    assert find_defence("patrol+cem").surrogate(64, 10, 0.05) is not None
    both = find_defence("patrol+arl").settings()
    assert {"patrol_strength", "arl_strength"} <= both.keys()


def test_a_run_prunes_half_of_every_convolution(tmp_path: Path) -> None:
    on = trained(tmp_path, "on", "patrol", patrol_prune=0.5, patrol_prune_at=0.5)
    filters = [v for k, v in on.items() if k.startswith("encoder") and v.ndim == 4]
    assert [zeros(v) for v in filters] == [len(v) // 2 for v in filters]
