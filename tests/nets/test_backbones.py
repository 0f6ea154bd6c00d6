"""The published client, its cheaper rivals, and what each puts on the wire."""

import pytest
import torch
from torch import nn

from splitveil.errors import ConfigError
from splitveil.nets import NETS, SplitModel, cut, small, thin_resnet, vgg11

IMAGE = (3, 32, 32)
CUTLAYERS = range(1, 13)


def params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def convolutions(module: nn.Module) -> int:
    return sum(isinstance(layer, nn.Conv2d) for layer in module.modules())


def named(name: str, image_shape: tuple[int, int, int]) -> SplitModel:
    net = NETS[name]
    return cut(net.build(image_shape, 10), net.cut_at)


def test_vgg11_client_is_the_published_one() -> None:
    model = named("vgg11", IMAGE)
    assert model.client_params() == 85_256
    assert model.macs(IMAGE) == 21_233_664
    assert model.wire_shape(IMAGE) == (8, 8, 8)
    assert model.wire_floats(IMAGE) == 512


def test_vgg11_server_has_the_other_six_convolutions_and_the_way_back() -> None:
    model = named("vgg11", IMAGE)
    assert (convolutions(model.encoder), convolutions(model.head)) == (3, 7)
    assert params(model.head) == 9_689_738


def test_thin_resnet_costs_no_more_than_vgg11_and_sends_as_much() -> None:
    model = named("thin-resnet", IMAGE)
    assert model.macs(IMAGE) == 19_873_792
    assert model.macs(IMAGE) <= min(21.9e6, named("vgg11", IMAGE).macs(IMAGE))
    assert model.wire_shape(IMAGE) == (8, 8, 8)
    assert params(model.head) == 9_689_738


@pytest.mark.parametrize(
    ("image_shape", "wire"),
    [((1, 8, 8), (4, 4, 4)), ((1, 28, 28), (4, 7, 7)), ((1, 15, 15), (4, 8, 8))],
)
def test_small_sends_a_quarter_size_map(
    image_shape: tuple[int, int, int], wire: tuple[int, int, int]
) -> None:
    model = named("small", image_shape)
    assert model.wire_shape(image_shape) == wire
    assert model.wire_floats(image_shape) == wire[0] * wire[1] * wire[2]


def test_small_sends_64_floats_for_digits_and_196_for_fashion() -> None:
    assert named("small", (1, 8, 8)).wire_floats((1, 8, 8)) == 64
    assert named("small", (1, 28, 28)).wire_floats((1, 28, 28)) == 196


@pytest.mark.parametrize("bottleneck", [8, None])
@pytest.mark.parametrize("cutlayer", CUTLAYERS)
def test_every_cutlayer_of_vgg11_builds_and_runs(cutlayer: int, bottleneck: int | None) -> None:
    backbone = vgg11(IMAGE, 10, cutlayer=cutlayer, bottleneck=bottleneck).eval()
    x = torch.rand(2, *IMAGE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z, _, logits = cut(backbone, cutlayer).split_forward(x)
    assert logits.shape == (2, 10)
    # channels of the plain VGG11 at each entry, and how often it has halved the image by then
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512)
    halvings = (0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4)
    side = 32 // 2 ** halvings[cutlayer - 1]
    assert z.shape == (2, bottleneck or widths[cutlayer - 1], side, side)
    if bottleneck is not None:
        assert bool(((z > 0) & (z < 1)).all())


@pytest.mark.parametrize("cutlayer", [0, -1, 13, 99])
def test_vgg11_names_the_cutlayers_it_has(cutlayer: int) -> None:
    with pytest.raises(ConfigError, match=rf"1\.\.12, got {cutlayer}"):
        vgg11(IMAGE, 10, cutlayer=cutlayer)


@pytest.mark.parametrize("image_shape", [(3, 32, 32), (1, 40, 70), (3, 61, 61), (3, 63, 32)])
@pytest.mark.parametrize("name", ["vgg11", "thin-resnet", "thin-mobilenet", "thin-strided"])
def test_large_nets_take_any_image_from_32_pixels(
    name: str, image_shape: tuple[int, int, int]
) -> None:
    model = named(name, image_shape).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, *image_shape)).shape == (1, 10)


@pytest.mark.parametrize("image_shape", [(1, 4, 4), (3, 5, 9), (1, 8, 8), (3, 16, 15), (1, 28, 28)])
def test_small_takes_any_image_from_4_pixels(image_shape: tuple[int, int, int]) -> None:
    model = named("small", image_shape).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, *image_shape)).shape == (1, 10)


def test_images_that_are_too_small_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"at least 32×32, got \(3, 31, 40\); use --net small"):
        vgg11((3, 31, 40), 10)
    with pytest.raises(ConfigError, match=r"at least 32×32, got \(3, 40, 31\); use --net small"):
        thin_resnet((3, 40, 31), 10)
    with pytest.raises(ConfigError, match=r"at least 4×4, got \(1, 3, 8\)"):
        small((1, 3, 8), 10)


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_net_sends_numbers_between_0_and_1(name: str) -> None:
    model = named(name, IMAGE).eval()
    x = torch.rand(2, *IMAGE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = model.encoder(x)
    assert 0 < float(z.min()) < float(z.max()) < 1
