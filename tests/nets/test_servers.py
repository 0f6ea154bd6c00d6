"""Servers by name fit any wire, or say why not; a client and a server are a net."""

import pytest
import torch

from splitveil.errors import ConfigError
from splitveil.nets.catalogue import find_client, find_net, paired
from splitveil.nets.servers import SERVERS, find_server
from splitveil.nets.split import Cost, cut

CIFAR = (3, 32, 32)


@pytest.mark.parametrize(
    "wire", [(8, 8, 8), (2, 16, 16), (1, 32, 32), (32, 4, 4), (3, 5, 7), (512,)]
)
@pytest.mark.parametrize("name", ["resnet-64", "resnet-8"])
def test_a_residual_server_enters_from_any_wire(name: str, wire: tuple[int, ...]) -> None:
    server = find_server(name).build(wire, CIFAR, 7).eval()
    assert server(torch.rand(2, *wire)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "macs"), [("resnet-64", 22.8), ("resnet-128", 90.8), ("vgg11", 133.2)]
)
def test_what_a_server_costs_from_a_map_of_8x8x8(name: str, macs: float) -> None:
    cost = Cost.of(find_server(name).build((8, 8, 8), CIFAR, 10), (8, 8, 8))
    assert round(cost.macs / 1e6, 1) == macs


@pytest.mark.parametrize(
    ("name", "wire", "said"),
    [
        ("vgg11", (8, 5, 5), "does not fit the wire"),
        ("vgg11", (512,), "does not fit the wire"),
        ("small", (512,), "does not fit the wire"),
        ("resnet-64", (4, 4), "takes maps (c, h, w) or rows of numbers, got shape (4, 4)"),
    ],
)
def test_a_server_that_does_not_fit_says_so(name: str, wire: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        find_server(name).build(wire, CIFAR, 10)
    assert said in str(told.value)


@pytest.mark.parametrize("name", ["resnet", "resnet-4", "resnet-2048", "vgg", "resnet-064"])
def test_an_unknown_server_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown server|must be in \[8, 1024\]"):
        find_server(name)


def test_a_thin_client_with_the_rest_of_vgg11_is_the_net_of_that_name() -> None:
    torch.manual_seed(0)
    one = find_net("thin-resnet").build(CIFAR, 10)
    torch.manual_seed(0)
    other = paired(find_client("thin-resnet"), find_server("vgg11")).build(CIFAR, 10)
    assert one.state_dict().keys() == other.state_dict().keys()
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_every_server_answers_behind_a_tapped_client() -> None:
    client = find_client("strided-8-8x2.16.32-c8@2")
    for name in SERVERS:
        model = cut(paired(client, find_server(name)).build(CIFAR, 10), 1).eval()
        assert model(torch.rand(2, *CIFAR)).shape == (2, 10), name


@pytest.mark.parametrize("name", ["thin-dep", "small@0", "small@x", "nothing"])
def test_an_unknown_client_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown client|tap in NAME@N"):
        find_client(name)
