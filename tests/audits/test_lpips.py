"""LPIPS is used where its package is installed, and absent where it is not."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from splitveil.audits import metrics


class FarthestPixel(nn.Module):
    """Stands for the real network: the largest difference in its own range [−1, 1]."""

    def forward(self, x: Tensor, guess: Tensor) -> Tensor:
        assert x.shape[1] == 3
        assert float(x.min()) >= -1.0
        return (x - guess).abs().flatten(1).amax(1).view(-1, 1, 1, 1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package of that name; yields which networks were asked for."""
    asked: list[str] = []
    package = ModuleType("lpips")

    def build(net: str, verbose: bool) -> nn.Module:
        del verbose
        asked.append(net)
        return FarthestPixel()

    package.LPIPS = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lpips", package)
    metrics._lpips_net.cache_clear()
    yield asked
    metrics._lpips_net.cache_clear()


@pytest.mark.parametrize("channels", [1, 3])
def test_images_enter_lpips_as_three_channels_in_its_range(
    installed: list[str], channels: int
) -> None:
    x = torch.zeros(2, channels, 32, 32)
    guess = x.clone()
    guess[1, 0, 3, 4] = 0.25
    value = metrics.lpips(x, guess)
    assert value is not None
    assert value.tolist() == [0.0, 0.5]
    assert installed == ["alex"]
    found = metrics.measured(x, guess)["lpips"]
    assert found is not None
    assert torch.equal(found, value)
    assert installed == ["alex"]  # fetched once


def test_small_images_have_none(installed: list[str]) -> None:
    x = torch.zeros(1, 3, 31, 40)
    assert metrics.lpips(x, x) is None
    assert installed == []


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)  # an import of it fails
    metrics._lpips_net.cache_clear()
    x = torch.zeros(1, 3, 32, 32)
    assert metrics.lpips(x, x) is None
    metrics._lpips_net.cache_clear()
