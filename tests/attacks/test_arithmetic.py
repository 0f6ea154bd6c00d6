"""Arithmetic finds images behind floating-point noise, and none but distance's behind a grid."""

import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks.arithmetic import (
    MODELS,
    Arithmetic,
    excluded,
    model_of,
    reaches_by_floats,
    reaches_by_grid,
)
from splitveil.data.catalogue import load
from splitveil.nets.channel import Channel, GaussianNoise, deployed
from splitveil.record.statistics import exact

SENT = 1000


@pytest.fixture(scope="module")
def smashed() -> Tensor:
    """Z of every digit under a random client of 48 numbers."""
    images = load("digits").images.float() / 255
    torch.manual_seed(0)
    with torch.no_grad():
        z: Tensor = nn.Sequential(nn.Flatten(), nn.Linear(64, 48))(images)
    return torch.sigmoid(4 * z)


def shares(sent: Tensor, own: Tensor, z: Tensor, std: float) -> tuple[float, float, str | None]:
    model = model_of(own, z[SENT:], std)
    every = torch.arange(SENT)
    found = Arithmetic().name(sent, z, std, model)[:2]
    first, second = (float((a == every).double().mean()) for a in found)
    return first, second, model


@pytest.mark.parametrize("std", [0.025, 0.5, 5.0])
def test_behind_a_grid_arithmetic_is_as_good_as_distance(smashed: Tensor, std: float) -> None:
    sent = deployed(GaussianNoise(std))(smashed, torch.Generator().manual_seed(1))
    found, near, model = shares(sent[:SENT], sent[SENT:], smashed, std)
    low, high = exact(round(near * SENT), SENT)
    assert model == "grid"
    assert low <= found <= high


@pytest.mark.parametrize("std", [0.5, 5.0])
def test_behind_floating_point_noise_it_is_far_better(smashed: Tensor, std: float) -> None:
    sent = Channel([GaussianNoise(std)])(smashed, torch.Generator().manual_seed(1))
    found, near, model = shares(sent[:SENT], sent[SENT:], smashed, std)
    assert model == "float32"
    assert found > near + 0.05


def test_exclusion_is_the_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(6, 5, generator=generator)
    sent = GaussianNoise(5.0)(z, generator)
    for model, reaches in (("float32", reaches_by_floats), ("grid", reaches_by_grid)):
        expected = [[not bool(reaches(s, c, 5.0).all()) for c in z] for s in sent]
        assert excluded(sent, z, 5.0, model).tolist() == expected  # type: ignore[arg-type]
    assert not excluded(sent, z, 5.0, None).any()
    assert model_of(sent + 0.001, z, 5.0) in (None, *MODELS)


def test_where_everything_is_excluded_distance_decides() -> None:
    z = torch.tensor([[0.25], [0.75]])
    sent = torch.tensor([[0.7000001]])
    answers, near, out = Arithmetic().name(sent, z, 0.5, "grid")
    assert bool(out.all())
    assert answers.tolist() == near.tolist() == [1]
