"""The published client, its cheaper rivals, and what each puts on the wire."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.nets.blocks import StridedDepthwise, plain_conv
from splitveil.nets.catalogue import NETS, mobilenetv2, resnet20, small, vgg11
from splitveil.nets.split import Cost, SplitModel, cut

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


def test_vgg11s_server_has_the_other_six_convolutions() -> None:
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
    with pytest.raises(ConfigError, match=rf"in \[1, 12\], got {cutlayer}"):
        vgg11(IMAGE, 10, cutlayer=cutlayer)


FACES = [(3, 64, 64), (3, 96, 96), (1, 62, 47)]


@pytest.mark.parametrize("image_shape", [IMAGE, *FACES, (1, 40, 70), (3, 61, 61), (3, 63, 32)])
@pytest.mark.parametrize("name", sorted(NETS))
def test_large_nets_take_any_image_from_32_pixels(
    name: str, image_shape: tuple[int, int, int]
) -> None:
    with torch.device("meta"), torch.no_grad():  # shapes alone, in a moment
        model = named(name, image_shape).eval()
        assert model(torch.zeros(1, *image_shape)).shape == (1, 10)


@pytest.mark.parametrize("image_shape", [(1, 4, 4), (3, 5, 9), (1, 8, 8), (3, 16, 15), (1, 28, 28)])
def test_small_takes_any_image_from_4_pixels(image_shape: tuple[int, int, int]) -> None:
    model = named("small", image_shape).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, *image_shape)).shape == (1, 10)


def test_resnet20_costs_what_the_sum_over_its_convolutions_gives() -> None:
    stem = 3 * 16 * 9 * 32**2
    stages = 6 * 16 * 16 * 9 * 32**2
    for width, side in ((32, 16), (64, 8)):  # entry, five convolutions, shortcut
        stages += (width // 2 * width * 9 + 5 * width * width * 9 + width // 2 * width) * side**2
    net = resnet20(IMAGE, 10, bottleneck=None)
    assert Cost.of(net, IMAGE).macs == stem + stages + 64 * 10 == 40_813_184
    assert params(net) == 272_474
    assert convolutions(net) == 1 + 18 + 2


def test_resnet20_client_is_stem_and_four_blocks() -> None:
    model = named("resnet20", IMAGE)
    bare = 442_368 + 14_155_776 + 1_179_648 + 2_359_296 + 131_072
    assert model.macs(IMAGE) == bare + 32 * 8 * 9 * 16**2
    assert model.wire_shape(IMAGE) == (8, 16, 16)
    assert named("resnet20", (3, 64, 64)).wire_shape((3, 64, 64)) == (8, 32, 32)


def mobilenet_macs(side: int, classes: int, *, large: bool) -> int:
    """Multiply-adds from the rows of the paper's table 2, one convolution after the other."""
    side = side // 2 if large else side
    total, width = 3 * 32 * 9 * side**2, 32
    rows = ((1, 16, 1, 1), (6, 24, 2, 2 if large else 1), (6, 32, 3, 2), (6, 64, 4, 2))
    for t, c, n, s in (*rows, (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):
        for stride in (s, *[1] * (n - 1)):
            widen = width * width * t * side**2 if t > 1 else 0
            side //= stride
            total += widen + width * t * 9 * side**2 + width * t * c * side**2
            width = c
    return total + 320 * 1280 * side**2 + 1280 * classes


def test_mobilenetv2_costs_what_the_table_of_its_paper_gives() -> None:
    photo = (3, 224, 224)
    net = mobilenetv2(photo, 1000, bottleneck=None)
    assert Cost.of(net, photo).macs == mobilenet_macs(224, 1000, large=True) == 300_774_272
    assert params(net) == 3_504_872
    small_one = mobilenetv2(IMAGE, 10, bottleneck=None)
    assert Cost.of(small_one, IMAGE).macs == mobilenet_macs(32, 10, large=False) == 87_976_448


@pytest.mark.parametrize(
    ("image_shape", "wire", "last"),
    [
        (IMAGE, (8, 8, 8), (4, 4)),
        ((3, 63, 80), (8, 16, 20), (8, 10)),
        ((3, 64, 64), (8, 4, 4), (2, 2)),
        ((3, 96, 96), (8, 6, 6), (3, 3)),
    ],
)
def test_mobilenetv2_has_five_halvings_from_64_pixels(
    image_shape: tuple[int, int, int], wire: tuple[int, int, int], last: tuple[int, int]
) -> None:
    with torch.device("meta"):
        net = mobilenetv2(image_shape, 10)
    assert cut(net, 8).wire_shape(image_shape) == wire
    assert cut(net, 19).wire_shape(image_shape) == (1280, *last)


@pytest.mark.parametrize("cutlayer", [0, 11])
def test_resnet20_names_the_cutlayers_it_has(cutlayer: int) -> None:
    with pytest.raises(ConfigError, match=rf"in \[1, 10\], got {cutlayer}"):
        resnet20(IMAGE, 10, cutlayer=cutlayer)
    with pytest.raises(ConfigError, match=r"in \[1, 19\], got 20"):
        mobilenetv2(IMAGE, 10, cutlayer=20)


@pytest.mark.parametrize("name", sorted(NETS))
def test_an_image_of_one_pixel_is_refused_by_every_net(name: str) -> None:
    with pytest.raises(ConfigError, match=r"at least \d+×\d+, got \(3, 1, 1\)"):
        NETS[name].build((3, 1, 1), 10)


def test_images_that_are_too_small_are_refused_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError,
        match=r"at least 32×32, got \(3, 31, 40\); use larger",
    ):
        vgg11((3, 31, 40), 10)
    with pytest.raises(ConfigError, match=r"at least 4×4, got \(1, 3, 8\)"):
        small((1, 3, 8), 10)
    with pytest.raises(ConfigError, match=r"at least 4×4, got \(1, 8, 3\); use larger"):
        resnet20((1, 8, 3), 10)
    with pytest.raises(ConfigError, match=r"at least 8×8, got \(3, 7, 9\); use larger"):
        mobilenetv2((3, 7, 9), 10)


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_net_sends_numbers_between_0_and_1(name: str) -> None:
    model = named(name, IMAGE).eval()
    x = torch.rand(2, *IMAGE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = model.encoder(x)
    assert 0 < float(z.min()) < float(z.max()) < 1


@pytest.mark.parametrize("side", [8, 7])
def test_a_strided_depthwise_convolution_is_the_same_map_by_its_way_through_bfloat16(
    side: int,
) -> None:
    layer = plain_conv(4, 4, 2, groups=4)[0]
    assert isinstance(layer, StridedDepthwise)
    x = torch.rand(3, 4, side, side, generator=torch.Generator().manual_seed(0))
    written = F.conv2d(x, layer.weight, None, 2, 1, 1, 4)
    expected = torch.autograd.grad(written.square().sum(), layer.weight)[0]
    assert torch.equal(layer(x), written)

    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.bfloat16
    assert mixed.shape == written.shape
    torch.testing.assert_close(mixed.float(), written, atol=0.02, rtol=0.02)
    gradient = torch.autograd.grad(mixed.float().square().sum(), layer.weight)[0]
    torch.testing.assert_close(gradient, expected, atol=0.1, rtol=0.03)
