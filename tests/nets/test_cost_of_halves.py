"""What both halves cost, as the protocol counts it: against hooks, folded nets and by hand."""

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from splitveil.defences.base import Defence
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError
from splitveil.nets.blocks import ResidualBlock, plain_conv
from splitveil.nets.budget import weigh
from splitveil.nets.catalogue import NETS, find_client, paired
from splitveil.nets.channel import Channel, GaussianNoise, SparseCoding, wire_bits
from splitveil.nets.clients import build_client, parse_client
from splitveil.nets.servers import find_server
from splitveil.nets.split import (
    TRACKS,
    SplitModel,
    count_network,
    cut,
    deployed_cost,
    find_track,
    track_of,
    with_channel,
)

IMAGE = (3, 32, 32)
EXIT, ALONE = find_defence("early-exit"), find_defence("alone")
BODY = "inverted-24s2-24x2.32x3.64x2-e2-c32"


def model_of(defence: Defence, client: str = BODY, noise: float = 0.025) -> SplitModel:
    net = paired(find_client(client), find_server("resnet-64"))
    made = defence.assemble(cut(net.build(IMAGE, 10), 1), IMAGE, 10)
    return with_channel(made, defence.channel(noise), IMAGE)


def fuse(network: nn.Module) -> nn.Module:
    """The network in eval mode with every BatchNorm folded into the convolution before it."""
    network.eval()
    for owner in list(network.modules()):
        for (first, conv), (second, norm) in itertools.pairwise(list(owner.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(owner, first, fuse_conv_bn_eval(conv, norm))
                setattr(owner, second, nn.Identity())
    return network


def hooked_macs(run: Callable[[Tensor], object], parts: list[nn.Module], x: Tensor) -> int:
    """Multiply-adds by hooks on convolutions and linear maps: outputs × weights behind each."""
    macs = 0

    def add(layer: nn.Module, _: tuple[Tensor], out: Tensor) -> None:
        nonlocal macs
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        behind = layer.weight[0].numel()
        macs += out[0].numel() * behind

    for part in parts:
        for layer in part.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(add)
    with torch.no_grad():
        run(x)
    return macs


def test_the_client_of_an_early_exit_counts_body_wire_and_own_head() -> None:
    model = model_of(EXIT, f"{BODY}@5")
    found = deployed_cost(model, IMAGE)
    watched = copy.deepcopy(model).eval()
    assert watched.exit is not None
    parts = [watched.encoder, watched.exit.head]
    assert found.client.macs == hooked_macs(watched.both_answers, parts, torch.zeros(1, *IMAGE))
    own_head = 64 * 10
    at_tap = 24 * 9 * (512 // 64) * 8 * 8  # 3×3 from 24 channels at 16×16 to 8×8×8
    alone = count_network(model_of(ALONE).encoder, IMAGE).macs
    assert found.client.macs == alone + own_head + at_tap == 3_248_768
    assert (found.wire_floats, found.number_bits) == (512, 16)


def test_alone_sends_nothing_and_its_head_counts() -> None:
    model = model_of(ALONE)
    found = deployed_cost(model, IMAGE)
    both = nn.Sequential(copy.deepcopy(model.encoder), copy.deepcopy(model.head)).eval()
    assert found.client.macs == hooked_macs(both, [both], torch.zeros(1, *IMAGE))
    assert found.client.shape == (10,)
    assert (found.wire_floats, found.server) == (0, None)
    said = found.to_json(0.0)
    assert said["client"]["bits_per_image"] == said["server"]["macs_per_image"] == 0


@pytest.mark.parametrize("name", sorted(NETS))
def test_stored_numbers_are_those_of_the_folded_client(name: str) -> None:
    shape = (1, 28, 28) if name == "small" else IMAGE
    client = cut(NETS[name].build(shape, 10), NETS[name].cut_at).encoder.eval()
    folded, x = fuse(copy.deepcopy(client)), torch.rand(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), client(x))
    assert count_network(client, shape).stored == sum(p.numel() for p in folded.parameters())


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["residual", "inverted", "strided"]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=2, max_size=3),
    st.integers(1, 4),
)
def test_a_spec_states_what_its_built_and_folded_client_costs(
    family: str, stages: list[tuple[int, int]], expansion: int
) -> None:
    inside = f"-e{expansion}" if family == "inverted" else ""
    parts = ".".join(f"{w}x{d}" if d > 1 else str(w) for w, d in stages)
    spec = parse_client(f"{family}-5-{parts}{inside}-c3")
    client = build_client(spec, (1, 12, 12))
    found, stated = count_network(client, (1, 12, 12)), weigh(spec, (1, 12, 12))
    assert (found.macs, found.params, found.stored) == (stated.macs, stated.params, stated.stored)
    folded = fuse(copy.deepcopy(client))
    assert found.stored == sum(p.numel() for p in folded.parameters())


class NormFirst(nn.Module):
    """A BatchNorm before its convolution, one beside a shortcut, a convolution used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(4)
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.shared = nn.Conv2d(4, 4, 1, bias=False)
        self.after = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.first(x))
        y = y + self.norm(y)  # read twice, so it cannot be folded
        out: Tensor = self.after[0](self.shared(y)) + self.after[1](self.shared(x))
        return out


def test_a_norm_that_cannot_be_folded_keeps_scale_and_shift() -> None:
    assert count_network(NormFirst(), (4, 5, 5)).stored == 9 * 16 + 16 + 4 * (2 * 4)


def test_maps_of_the_channel_and_its_noise_count() -> None:
    plain = cut(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), 1)
    sparse = with_channel(plain, Channel([SparseCoding(0.1), GaussianNoise(0.5)]), (4,))
    found = deployed_cost(sparse, (4,))
    assert found.client.macs == 4 * 6 + 2 * 36  # W z and back
    assert found.client.stored == 4 * 6 + 6 + 36 + 1  # the dictionary, one scale
    learned = find_defence("shredder").channel(0.1)
    model = with_channel(cut(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), 1), learned, (4,))
    scales = sum(p.numel() for p in learned.parameters())
    assert deployed_cost(model, (4,)).client.stored == 4 * 6 + 6 + scales > 30


def test_pooling_and_activations_count_nothing_and_are_listed() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Sigmoid())
    found = count_network(net, (1, 4, 4))
    assert (found.macs, found.pooled, found.activated) == (32, 32, 32 + 8)


def test_averages_per_image_follow_the_share_that_is_sent() -> None:
    found = deployed_cost(model_of(EXIT), IMAGE)
    assert found.server is not None
    said = found.to_json(0.25)
    assert said["client"]["wire_bits"] == found.wire_floats * 16
    assert said["client"]["bits_per_image"] == found.wire_floats * 4
    assert said["server"]["macs_per_image"] == found.server.macs / 4


def test_sixteen_bits_where_the_grid_surely_fits_them() -> None:
    bounded, unbounded = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()), nn.Linear(2, 2)
    noise = Channel([GaussianNoise(0.025)])
    assert wire_bits(bounded, noise) == 16
    assert wire_bits(unbounded, noise) == 32
    assert wire_bits(bounded, Channel([GaussianNoise(1 / 4096)])) == 32
    assert wire_bits(bounded, Channel([GaussianNoise(0.1), GaussianNoise(0.1)])) == 32
    assert wire_bits(bounded, Channel()) == 32


@pytest.mark.parametrize(
    ("costs", "track"),
    [
        ((1_000_000, 16_000, 512, 32), "B1"),
        ((1_000_001, 16_000, 512, 32), "B5"),
        ((1_000_000, 16_001, 512, 16), "B5"),
        ((5_000_000, 64_000, 512, 32), "B5"),
        ((5_000_000, 64_001, 0, 0), "B21"),
        ((21_900_000, 500_000, 512, 32), "B21"),
        ((21_900_001, 1, 1, 1), None),
        ((1, 500_001, 1, 1), None),
        ((1, 1, 513, 1), None),
        ((1, 1, 1, 64), None),
    ],
)
def test_a_client_belongs_to_the_smallest_track_that_holds_it(
    costs: tuple[int, int, int, int], track: str | None
) -> None:
    assert track_of(*costs) == track


def test_tracks_stand_in_order_and_unknown_ones_are_refused() -> None:
    assert list(TRACKS) == ["B1", "B5", "B21"]
    with pytest.raises(ConfigError, match="unknown track 'B6'; choose from: B1, B21, B5"):
        find_track("B6")


def test_counting_draws_nothing_and_changes_nothing() -> None:
    model = model_of(EXIT).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    deployed_cost(model, IMAGE)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_layers_behind_a_tap_are_not_stored_where_nobody_reads_them() -> None:
    tapped = find_client(f"{BODY}@5").build(IMAGE)
    whole = sum(p.numel() for p in tapped.parameters())
    projection = 24 * 9 * 8 + 8
    stem, block = 3 * 9 * 24 + 24, (24 * 48 + 48) + (9 * 48 + 48) + (48 * 24 + 24)
    assert count_network(tapped, IMAGE).stored == stem + 2 * block + projection < whole


def test_a_residual_block_and_a_plain_one_by_hand() -> None:
    net = nn.Sequential(plain_conv(3, 4), ResidualBlock(4, 8, 2))
    found = count_network(net, (3, 8, 8))
    convs = [(3 * 9 * 4, 64, 4), (4 * 9 * 8, 16, 8), (8 * 9 * 8, 16, 8), (4 * 8, 16, 8)]
    assert found.macs == sum(weights * places for weights, places, _ in convs)
    assert found.stored == sum(weights + bias for weights, _, bias in convs)
    assert found.params == sum(weights + 2 * bias for weights, _, bias in convs)
    assert math.prod(found.shape) == 8 * 16
