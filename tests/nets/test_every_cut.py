"""Wherever a backbone is cut, the two halves answer bit for bit what the whole answers."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from splitveil.nets import NETS, cut, suggest_cuts, vgg11
from splitveil.nets.mobilenet import mobilenetv2
from splitveil.nets.resnet import resnet20

Shape = tuple[int, int, int]
Build = Callable[[Shape, int], nn.Sequential]

IMAGE = (3, 32, 32)
BACKBONES: Mapping[str, Build] = {
    **{name: net.build for name, net in NETS.items()},
    "bare vgg11": partial(vgg11, bottleneck=None),
    "bare resnet20": partial(resnet20, bottleneck=None),
    "opened resnet20": partial(resnet20, bottleneck=None, opened=True),
    "bare mobilenetv2": partial(mobilenetv2, bottleneck=None),
    "opened mobilenetv2": partial(mobilenetv2, bottleneck=None, opened=True),
}
OPENED: Mapping[str, Callable[..., nn.Sequential]] = {
    "resnet20": resnet20,
    "mobilenetv2": mobilenetv2,
}


def images(n: int, shape: Shape) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def stirred(build: Callable[..., nn.Sequential], shape: Shape, **options: object) -> nn.Sequential:
    """In eval mode, with BatchNorm statistics other than those it is born with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build(shape, 5, **options)
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean = torch.linspace(-0.2, 0.2, layer.num_features)
                layer.running_var = torch.linspace(0.3, 1.5, layer.num_features)
    return net.eval()


def check_every_cut(net: nn.Sequential, shape: Shape) -> None:
    x = images(2, shape)
    with torch.no_grad():
        whole = net(x)
        assert bool((whole[0] != whole[1]).any())
        for at in range(1, len(net)):
            model = cut(net, at)
            assert torch.equal(model.head(model.encoder(x)), whole), f"cut at {at}"


@pytest.mark.parametrize("name", BACKBONES)
def test_two_halves_equal_the_whole_at_every_cut(name: str) -> None:
    check_every_cut(stirred(BACKBONES[name], IMAGE), IMAGE)


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 9, 33)])
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2", "opened mobilenetv2"])
def test_other_images_too(name: str, shape: Shape) -> None:
    check_every_cut(stirred(BACKBONES[name], shape), shape)


@pytest.mark.parametrize("name", OPENED)
def test_opening_the_blocks_changes_no_bit_of_the_answer(name: str) -> None:
    build, x = OPENED[name], images(3, IMAGE)
    closed = stirred(build, IMAGE, bottleneck=None)
    opened = stirred(build, IMAGE, bottleneck=None, opened=True)
    with torch.no_grad():
        assert torch.equal(opened(x), closed(x))
    sizes = [sum(p.numel() for p in net.parameters()) for net in (closed, opened)]
    assert sizes[0] == sizes[1]


def test_blocks_of_resnet20_have_three_entries_and_those_of_mobilenetv2_too() -> None:
    # stem, blocks, pool, flatten, linear; MobileNetV2's first block does not widen
    assert len(resnet20(IMAGE, 5, opened=True)) == 1 + 9 * 3 + 3
    assert len(mobilenetv2(IMAGE, 5, opened=True)) == 1 + 2 + 16 * 3 + 1 + 3


def test_a_cut_inside_a_block_sends_body_and_shortcut() -> None:
    opened = resnet20(IMAGE, 5, bottleneck=None, opened=True)
    first, joined, done = suggest_cuts(opened, IMAGE, 1e9, 10**6)[1:4]
    assert first.wire_shape == (16 + 16, 32, 32)
    assert joined.wire_shape == done.wire_shape == (16, 32, 32)
    wide = mobilenetv2(IMAGE, 5, bottleneck=None, opened=True)
    shapes = [c.wire_shape[0] for c in suggest_cuts(wide, IMAGE, 1e9, 10**6)[:9]]
    # stem, block 1 (filter, narrow), block 2 (no shortcut, 6 × 16 inside), block 3 (6 × 24 + 24)
    assert shapes == [32, 32, 16, 96, 96, 24, 144 + 24, 144 + 24, 24]


@pytest.mark.parametrize(
    ("name", "opened", "step"),
    [
        ("resnet20", False, 1),
        ("resnet20", True, 4),  # coprime to the three entries of a block: meets each kind
        ("mobilenetv2", False, 3),
        ("mobilenetv2", True, 10),
    ],
)
def test_the_bottleneck_stands_at_any_cutlayer(name: str, opened: bool, step: int) -> None:
    build, x = OPENED[name], images(2, (3, 16, 16))
    whole = build((3, 16, 16), 5, bottleneck=None, opened=opened)
    for cutlayer in range(1, len(whole) - 2, step):
        net = build((3, 16, 16), 5, cutlayer=cutlayer, bottleneck=3, opened=opened).eval()
        assert len(net) == len(whole)
        model = cut(net, cutlayer)
        with torch.no_grad():
            z, plain = model.encoder(x), whole[:cutlayer].eval()(x)
            assert torch.equal(model.head(z), net(x))
        assert z.shape == (2, 3, *plain.shape[2:])
        assert bool(((z > 0) & (z < 1)).all())


@pytest.mark.parametrize("name", ["opened resnet20", "opened mobilenetv2"])
def test_the_gradient_reaches_every_parameter_of_an_opened_net(name: str) -> None:
    net = stirred(BACKBONES[name], IMAGE)
    net(images(2, IMAGE)).square().sum().backward()
    dead = [n for n, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert dead == []
