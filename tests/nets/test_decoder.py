"""The attacker's network fits every wire and every image."""

import re

import pytest
import torch
from torch import nn

from splitveil.errors import ConfigError
from splitveil.nets.decoder import ResidualDecoder, ShuffleDecoder


def test_n8c64_has_the_published_number_of_parameters() -> None:
    net = ResidualDecoder((8, 8, 8), (3, 32, 32), width=64, blocks=8)
    assert sum(p.numel() for p in net.parameters()) == 711_539


def test_n8c64_is_the_default() -> None:
    default = ResidualDecoder((8, 8, 8), (3, 32, 32)).state_dict()
    asked = ResidualDecoder((8, 8, 8), (3, 32, 32), width=64, blocks=8).state_dict()
    assert {k: v.shape for k, v in default.items()} == {k: v.shape for k, v in asked.items()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("wire", "image", "doublings"),
    [
        ((8, 8, 8), (3, 32, 32), 2),
        ((4, 7, 7), (1, 28, 28), 2),
        ((4, 8, 5), (3, 30, 20), 1),
        ((2, 1, 1), (1, 9, 9), 3),
        ((5, 32, 32), (3, 32, 32), 0),
        ((2, 12, 12), (1, 8, 8), 0),
        ((11,), (3, 30, 20), 2),
        ((6,), (1, 28, 28), 2),
        ((3,), (1, 3, 3), 1),
    ],
)
def test_images_come_out_whole_and_between_0_and_1(
    wire: tuple[int, ...], image: tuple[int, int, int], doublings: int, training: bool
) -> None:
    net = ResidualDecoder(wire, image, width=6, blocks=1).train(training)
    z = 50 * torch.randn(3, *wire, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = net(z)
    assert images.shape == (3, *image)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert sum(isinstance(m, nn.ConvTranspose2d) for m in net.modules()) == doublings


def test_every_parameter_learns() -> None:
    net = ResidualDecoder((4, 7, 7), (1, 28, 28), width=6, blocks=2)
    z = torch.randn(4, 4, 7, 7, generator=torch.Generator().manual_seed(0))
    net(z).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in net.parameters())


@pytest.mark.parametrize("wire", [(), (4, 4), (1, 2, 3, 4)])
def test_a_wire_of_another_rank_is_refused(wire: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"(d,) or (c, h, w), got {wire}")):
        ResidualDecoder(wire, (1, 8, 8))


@pytest.mark.parametrize("wire", [(8, 8, 8), (4, 4, 4), (64,), (4, 32, 32), (32, 3, 3)])
@pytest.mark.parametrize("image", [(3, 32, 32), (1, 28, 28)])
def test_a_shuffle_decoder_makes_images_of_any_wire(
    wire: tuple[int, ...], image: tuple[int, int, int]
) -> None:
    net = ShuffleDecoder(wire, image, width=16, blocks=1).eval()
    out = net(torch.randn(2, *wire)).detach()
    assert out.shape == (2, *image)
    assert 0 < float(out.min()) <= float(out.max()) < 1
