"""Thin clients: spelling, building, the wire they make, and the servers behind them."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.catalogue import NETS, find_net
from splitveil.nets.clients import (
    FAMILIES,
    THIN_CLIENTS,
    ClientSpec,
    build_client,
    parse_client,
    parse_image,
)
from splitveil.nets.split import Cost, cut

IMAGE = (3, 32, 32)
Shape = tuple[int, int, int]
SPECS = [
    "residual-4-4.8-c2",
    "residual-8s2-8-c1",
    "residual-6-4x2.8.8x2-c3",
    "inverted-4-4.8-e1-c2",
    "inverted-6s2-6x2.12x2-e3-c4",
    "inverted-4-8.8.16.16-e2-c5",
    "strided-4-4.8-c2",
    "strided-8s2-8x3.4.6-c7",
]


Arguments = dict[str, Any]


@st.composite
def arguments(draw: st.DrawFn) -> Arguments:
    """Of a spec; the spec itself is built in the test, for type checks draw random numbers."""
    stem_stride = draw(st.sampled_from([1, 2]))
    stages = draw(st.integers(3 - stem_stride, 6 - stem_stride))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    some = st.lists(st.integers(1, 64), min_size=stages, max_size=stages)
    return {
        "family": family,
        "stem": draw(st.integers(1, 4096)),
        "widths": tuple(draw(some)),
        "depths": tuple(draw(some)),
        "wire_channels": draw(st.integers(1, 4096)),
        "expansion": draw(st.integers(1, 64)) if family == "inverted" else 1,
        "stem_stride": stem_stride,
    }


def images(n: int, shape: Shape) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def seeded(build: object, *args: object) -> nn.Sequential:
    assert callable(build)
    torch.manual_seed(3)
    made = build(*args)
    assert isinstance(made, nn.Sequential)
    return made


@given(arguments())
def test_a_spec_is_read_back_from_its_string(given_: Arguments) -> None:
    spec = ClientSpec(**given_)
    assert parse_client(str(spec)) == spec


@given(st.text(alphabet="residualnvtp0128.-xsec", max_size=24))
def test_whatever_is_accepted_is_spelt_the_only_way(text: str) -> None:
    try:
        spec = parse_client(text)
    except ConfigError:
        return
    assert str(spec) == text


def test_the_parts_of_a_string_mean_what_they_say() -> None:
    assert parse_client("inverted-16s2-24x2.48-e4-c8") == ClientSpec(
        family="inverted",
        stem=16,
        widths=(24, 48),
        depths=(2, 1),
        wire_channels=8,
        expansion=4,
        stem_stride=2,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "malformed client ''; write FAMILY-STEM-"),
        ("residual", "for example residual-16-16.32x2.64-c8"),
        ("residual-16-16.32x2.64", "malformed"),
        ("residual-16-16.32x2.64-c8 ", "malformed"),
        ("residual-16-16..32-c8", "malformed"),
        ("residual-16-016.32-c8", "malformed"),
        ("residual-16-16.0-c8", "malformed"),
        ("residual-16-16.32x1-c8", "write residual-16-16.32-c8"),
        ("inverted-16-16.32-c8", "write inverted-16-16.32-e1-c8"),
        (
            "residual-16-16.32-e4-c8",
            "expansion must be in [1, 1], got 4; only inverted clients have an expansion",
        ),
        ("resdual-16-16.32-c8", "unknown client family 'resdual'; did you mean 'residual'?"),
        ("strided-16-16-c8", "halvings must be in [1, 4], got 0; each stage after the first"),
        ("strided-16-8.8.8.8.8.8-c8", "halvings must be in [1, 4], got 5"),
        ("strided-16-16.5000-c8", "widths must be in [1, 4096], got 5000"),
        ("strided-16-16.32x65-c8", "depths must be in [1, 64], got 65"),
        ("inverted-16-16.32-e65-c8", "expansion must be in [1, 64], got 65"),
    ],
)
def test_a_malformed_client_is_refused_with_the_right_form(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_client(text)


def test_a_spec_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"depths must be as many as widths \(8, 8\), got \(1,\)"):
        ClientSpec(family="strided", stem=8, widths=(8, 8), depths=(1,), wire_channels=1)
    with pytest.raises(ConfigError, match=r"stem_stride must be in \[1, 2\], got 3"):
        ClientSpec(
            family="strided", stem=8, widths=(8, 8), depths=(1, 1), wire_channels=1, stem_stride=3
        )


@pytest.mark.parametrize("text", ["", "3x32", "3x32x32x1", "0x8x8", "3x-8x8", "axbxc", "3x8x99999"])
def test_a_malformed_image_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"such as 3x32x32; got '{text}'")):
        parse_image(text)


def test_multiply_adds_of_a_small_client_by_hand() -> None:
    # 8×8 image, stem 4, one inverted block 4 → 4, one 4 → 6 with stride 2, all widened twofold
    client = build_client(parse_client("inverted-4-4.6-e2-c3"), (1, 8, 8))
    first = 64 * (9 * 4 + 4 * 8 + 9 * 8 + 8 * 4)
    second = 64 * (4 * 8) + 16 * (9 * 8 + 8 * 6)
    assert Cost.of(client, (1, 8, 8)).macs == first + second + 16 * (6 * 6 + 9 * 6 * 3)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 17, 9)])
@pytest.mark.parametrize("text", SPECS)
def test_a_client_sends_the_stated_map_in_0_to_1(text: str, shape: Shape) -> None:
    spec = parse_client(text)
    client = build_client(spec, shape)
    x = torch.cat([torch.zeros(2, *shape), torch.ones(1, *shape), images(3, shape)])
    for training in (True, False):
        with torch.no_grad():
            z = client.train(training)(x)
        assert tuple(z.shape[1:]) == spec.wire_shape(shape)
        assert 0 <= float(z.min()) < float(z.max()) <= 1
        if training:  # untrained statistics let a signal die out in a deep client
            assert torch.equal(z[0], z[1])
            assert not torch.equal(z[0], z[-1])


@pytest.mark.parametrize("text", [*SPECS, *map(str, THIN_CLIENTS.values())])
def test_the_gradient_reaches_every_parameter(text: str) -> None:
    # in eval mode: BatchNorm's own mean would cancel the bias of a convolution before it
    client = build_client(parse_client(text), (3, 16, 16)).eval()
    client(images(4, (3, 16, 16))).square().sum().backward()
    for name, parameter in client.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.ne(0).any()), name


@pytest.mark.parametrize("name", ["thin-mobilenet", "thin-strided"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), IMAGE, (3, 64, 64), (3, 45, 33)])
def test_the_named_nets_take_small_and_large_images(name: str, shape: Shape) -> None:
    model = cut(NETS[name].build(shape, 7), NETS[name].cut_at).eval()
    with torch.no_grad():
        assert model(images(2, shape)).shape == (2, 7)
    assert model.wire_shape(shape) == THIN_CLIENTS[name].wire_shape(shape)


@pytest.mark.parametrize(
    "text", ["strided-8s2-8-c3", "strided-8-8.8.8.8-c3", "strided-8-8.8.8.8.8-c3"]
)
@pytest.mark.parametrize("shape", [(3, 33, 40), (1, 31, 31)])
def test_a_server_stands_behind_every_downsampling(text: str, shape: Shape) -> None:
    net = find_net(f"client:{text}")
    model = cut(net.build(shape, 5), net.cut_at).eval()
    with torch.no_grad():
        assert model(images(1, shape)).shape == (1, 5)


@pytest.mark.parametrize("name", sorted(THIN_CLIENTS))
def test_server_of_client_is_the_named_net(name: str) -> None:
    backbone, x = NETS[name].build(IMAGE, 10), images(4, IMAGE)
    with torch.no_grad():
        backbone.train()(x)
        model = cut(backbone.eval(), NETS[name].cut_at)
        assert torch.equal(model.head(model.encoder(x)), backbone(x))


@pytest.mark.parametrize(
    ("text", "shape", "least"),
    [("strided-8-8.8-c3", (1, 3, 9), 4), ("strided-8-8.8.8.8-c3", (1, 9, 7), 8)],
)
def test_an_image_that_is_too_small_is_refused_with_a_way_out(
    text: str, shape: Shape, least: int
) -> None:
    with pytest.raises(ConfigError, match=f"at least {least}×{least}, got .*; use larger images"):
        build_client(parse_client(text), shape)


@pytest.mark.parametrize("name", ["vgg11@2", "vgg11@6", "resnet20@8", "mobilenetv2@11"])
def test_a_backbone_is_cut_where_its_name_says(name: str) -> None:
    net, x = find_net(name), images(2, IMAGE)
    assert net.cut_at == int(name.partition("@")[2])
    model = cut(net.build(IMAGE, 10), net.cut_at).eval()
    z = model.encoder(x).detach()
    assert z.shape[1] == 8  # the bottleneck stands at the cut
    assert 0 <= float(z.min()) <= float(z.max()) <= 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vgg11@99", r"cutlayer must be in \[1, 12\], got 99"),
        ("vgg11@x", "must be a whole number from 1 on, got 'vgg11@x'; for example vgg11@4"),
        ("vgg11@", "got 'vgg11@'"),
        ("thin-deep@2", "only one cut; NAME@N works for mobilenetv2, resnet20, vgg11"),
        ("vgg12@3", "unknown net 'vgg12'; did you mean 'vgg11'"),
    ],
)
def test_a_cut_that_a_net_has_not_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_net(name)


def test_a_net_is_found_by_name_or_by_spec() -> None:
    assert find_net("vgg11") is NETS["vgg11"]
    x, net = images(2, IMAGE), find_net(f"client:{THIN_CLIENTS['thin-strided']}")
    named = seeded(NETS["thin-strided"].build, IMAGE, 10).eval()
    with torch.no_grad():
        assert torch.equal(seeded(net.build, IMAGE, 10).eval()(x), named(x))
    with pytest.raises(ConfigError, match=r"unknown net 'thin-renset'; did you mean 'thin-resnet'"):
        find_net("thin-renset")
    with pytest.raises(ConfigError, match="choose from: auto, client:SPEC, "):
        find_net("client")
