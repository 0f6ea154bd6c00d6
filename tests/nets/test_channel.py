"""The channel is the defence that is always there: exact noise, in every mode."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.errors import ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.rng import normal_like


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smashed() -> Tensor:
    return torch.rand(50, 8, 4, 4, generator=generator(9))


@pytest.mark.parametrize("std", [0.025, 1.0, 7.0])
def test_measured_noise_has_the_stated_variance_and_no_mean(std: float) -> None:
    z = torch.zeros(200_000, dtype=torch.float64)
    noise = GaussianNoise(std)(z, generator())
    n = len(noise)
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(n)
    # the sample variance of n normals has standard error σ²·√(2/(n−1))
    assert abs(float(noise.var()) - std**2) < 4 * std**2 * math.sqrt(2 / (n - 1))


def test_noise_is_drawn_afresh_for_every_entry_and_call() -> None:
    stage, stream = GaussianNoise(1.0), generator()
    zeros = torch.zeros(500, dtype=torch.float64)
    one, other = stage(zeros, stream), stage(zeros, stream)
    assert len(set(torch.cat([one, other]).tolist())) == 1000


@pytest.mark.parametrize("training", [True, False])
def test_the_same_generator_gives_the_same_bits_in_either_mode(training: bool) -> None:
    z = smashed()
    channel = Channel([GaussianNoise(0.5)]).train(training)
    sent = channel(z, generator())
    assert torch.equal(sent, channel(z, generator()))
    assert torch.equal(sent, z + 0.5 * torch.randn(z.shape, generator=generator()))
    assert not torch.equal(sent, channel(z, generator(1)))


def test_without_a_generator_the_global_stream_is_used() -> None:
    z = smashed()
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        sent = GaussianNoise(1.0)(z)
    assert torch.equal(sent, z + torch.randn(z.shape, generator=generator(4)))


def test_a_generator_leaves_the_global_stream_alone() -> None:
    state = torch.get_rng_state()
    Channel([GaussianNoise(1.0)])(smashed(), generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_two_stages_of_noise_add_in_quadrature() -> None:
    channel = Channel([GaussianNoise(0.3), GaussianNoise(0.4)])
    assert channel.noise_std == pytest.approx(0.5, abs=1e-15)
    noise = channel(torch.zeros(200_000, dtype=torch.float64), generator())
    assert float(noise.var()) == pytest.approx(0.25, abs=4 * 0.25 * math.sqrt(2 / 200_000))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), max_size=5))
def test_noise_std_is_the_euclidean_norm_of_the_stages(stds: list[float]) -> None:
    assert Channel([GaussianNoise(s) for s in stds]).noise_std == pytest.approx(math.hypot(*stds))


def test_an_empty_channel_is_the_identity() -> None:
    z = smashed()
    assert torch.equal(Channel()(z, generator()), z)
    assert Channel().noise_std == 0.0


def test_noise_of_zero_changes_nothing() -> None:
    z = smashed()
    assert torch.equal(GaussianNoise(0.0)(z, generator()), z)


@pytest.mark.parametrize("std", [-0.1, float("nan"), float("inf"), -float("inf")])
def test_a_std_that_is_no_std_is_refused(std: float) -> None:
    with pytest.raises(ConfigError, match=f"finite number ≥ 0, got {std}"):
        GaussianNoise(std)


def test_the_channel_passes_gradients_unchanged() -> None:
    z = smashed().requires_grad_()
    Channel([GaussianNoise(0.5)])(z, generator()).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.ones_like(z))


def test_noise_is_drawn_on_the_generators_device() -> None:
    like = torch.empty(3, 2, device="meta")
    noise = normal_like(like, generator())
    assert (noise.device.type, noise.shape, noise.dtype) == ("meta", (3, 2), torch.float32)
    used, fresh = generator(), generator()
    normal_like(like, used)
    torch.randn(3, 2, generator=fresh)
    assert torch.equal(used.get_state(), fresh.get_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cpu_generator_gives_a_gpu_the_noise_it_gives_a_cpu() -> None:
    z = torch.zeros(64, 512)
    stage = GaussianNoise(1.0)
    assert torch.equal(stage(z.cuda(), generator()).cpu(), stage(z, generator()))
