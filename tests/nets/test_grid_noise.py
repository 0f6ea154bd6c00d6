"""The deployed channel: noise on a grid, the same integers as the client's from the same words."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil.grid import nearest, rounded, step_of
from splitveil.nets.channel import (
    BeforeNoise,
    Channel,
    Dropout,
    GaussianNoise,
    LearnedNoise,
    Noise,
    TopK,
    before_noise,
    deployed,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smashed() -> Tensor:
    return torch.rand(40, 8, 4, 4, generator=generator(9))


def words_of(z: Tensor, seed: int = 0) -> np.ndarray:
    """The 64-bit words that the channel takes from a generator: upper halves, then lower ones."""
    high, low = torch.randint(1 << 32, (2, *z.shape), generator=generator(seed)).numpy()
    words: np.ndarray = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    return words


@pytest.mark.parametrize("std", [0.025, 0.5, 5.0])
def test_the_channel_sends_what_numpy_makes_of_the_same_words(std: float) -> None:
    z = smashed() * 3 - 1
    sent = deployed(GaussianNoise(std))(z, generator())
    n = nearest(z.numpy(), step_of(std)) + rounded(words_of(z), "gaussian")
    assert np.array_equal(sent.numpy(), n.astype(np.float32) * step_of(std))


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_learned_noise_has_a_grid_for_every_number(kind: Noise) -> None:
    z = smashed()
    stage = LearnedNoise(0.1, kind, moves=True)
    stage.size_to(tuple(z.shape[1:]))
    assert stage.gain is not None
    assert stage.location is not None
    with torch.no_grad():
        stage.gain.copy_(torch.rand(stage.gain.shape, generator=generator(1)) - 0.5)
        stage.location.copy_(torch.rand(stage.gain.shape, generator=generator(2)))
        sent = deployed(stage)(z, generator())
        step = step_of(stage.log_scales().exp().numpy())
    moved = z.double().numpy() + stage.location.detach().double().numpy()
    n = nearest(moved, step) + rounded(words_of(z), kind)
    assert np.array_equal(sent.numpy(), n.astype(np.float32) * step)


def test_words_that_are_equal_give_integers_that_are_equal_whatever_the_fraction_of_z() -> None:
    z = smashed()
    stage, step = deployed(GaussianNoise(0.5)), float(step_of(0.5))
    near = (z / step).round() * step + 0.49 * step * (2 * torch.rand(z.shape) - 1)
    sent, other = stage(z, generator()), stage(near, generator())
    assert torch.equal(sent, other)


def test_a_channel_is_deployed_as_a_copy_and_trains_as_before() -> None:
    channel, z = Channel([GaussianNoise(0.5), TopK(0.5), Dropout(0.1)]), smashed()
    there = deployed(channel)
    assert torch.equal(
        channel(z, generator()),
        Channel([*channel.stages])(z, generator()),
    )
    sent = there(z, generator()) * 32
    assert torch.equal(sent, sent.round())
    noise = channel(z, generator()) * 32
    assert not torch.equal(noise, noise.round())
    assert getattr(there, "noise_std") == channel.noise_std  # noqa: B009 - a module may lack it


def test_gradients_pass_straight_through() -> None:
    z = smashed().requires_grad_()
    deployed(GaussianNoise(0.5))(z, generator()).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.ones_like(z))


def test_what_is_not_finite_stays_so_and_the_rest_is_sent() -> None:
    z = torch.tensor([[1.0, torch.nan, torch.inf]])
    sent = deployed(GaussianNoise(0.5))(z, generator())
    assert sent.isfinite().tolist() == [[True, False, False]]


def test_without_noise_nothing_changes() -> None:
    z = smashed()
    assert torch.equal(deployed(Channel([GaussianNoise(0.0)]))(z, generator()), z)


def before(*stages: nn.Module) -> BeforeNoise:
    return before_noise(nn.Sigmoid(), deployed(Channel(stages)))


def test_of_two_noises_on_grids_the_first_is_what_certificates_hold_for() -> None:
    """The second rounds the sum, so that only the first is noise on a known z."""
    assert before(GaussianNoise(0.3), GaussianNoise(0.4)).noise_std == pytest.approx(0.3)
    plain = before_noise(nn.Sigmoid(), Channel([GaussianNoise(0.3), GaussianNoise(0.4)]))
    assert plain.noise_std == pytest.approx(0.5)


def test_z_enters_the_noise_as_certificates_see_it() -> None:
    z, front = smashed(), before(GaussianNoise(0.5))
    expected = nearest(z.numpy(), step_of(0.5)) * step_of(0.5).astype(np.float64)
    assert np.array_equal(front.rounded(z).numpy(), expected.astype(np.float32))
    assert torch.equal(before_noise(nn.Sigmoid(), GaussianNoise(0.5)).rounded(z), z)
