"""Wherever a backbone is cut, the two halves answer bit for bit what the whole answers."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from splitveil.nets.catalogue import NETS, mobilenetv2, resnet20, vgg11
from splitveil.nets.split import cut

Shape = tuple[int, int, int]
Build = Callable[[Shape, int], nn.Sequential]

IMAGE = (3, 32, 32)
BACKBONES: Mapping[str, Build] = {
    **{name: net.build for name, net in NETS.items()},
    "bare vgg11": partial(vgg11, bottleneck=None),
    "bare resnet20": partial(resnet20, bottleneck=None),
    "bare mobilenetv2": partial(mobilenetv2, bottleneck=None),
}


def images(n: int, shape: Shape) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def stirred(build: Build, shape: Shape) -> nn.Sequential:
    """In eval mode, with BatchNorm statistics other than those it is born with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build(shape, 5)
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
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2"])
def test_other_images_too(name: str, shape: Shape) -> None:
    check_every_cut(stirred(BACKBONES[name], shape), shape)


@pytest.mark.parametrize(("build", "step"), [(resnet20, 1), (mobilenetv2, 3)])
def test_the_bottleneck_stands_at_any_cutlayer(
    build: Callable[..., nn.Sequential], step: int
) -> None:
    x = images(2, (3, 16, 16))
    whole = build((3, 16, 16), 5, bottleneck=None)
    for cutlayer in range(1, len(whole) - 2, step):
        net = build((3, 16, 16), 5, cutlayer=cutlayer, bottleneck=3).eval()
        assert len(net) == len(whole)
        model = cut(net, cutlayer)
        with torch.no_grad():
            z, plain = model.encoder(x), whole[:cutlayer].eval()(x)
            assert torch.equal(model.head(z), net(x))
        assert z.shape == (2, 3, *plain.shape[2:])
        assert bool(((z > 0) & (z < 1)).all())


@pytest.mark.parametrize("name", ["bare resnet20", "bare mobilenetv2"])
def test_the_gradient_reaches_every_parameter(name: str) -> None:
    net = stirred(BACKBONES[name], IMAGE)
    net(images(2, IMAGE)).square().sum().backward()
    dead = [n for n, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert dead == []
