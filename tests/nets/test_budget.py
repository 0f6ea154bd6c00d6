"""Costs of clients against slow counts, and what a budget lets through."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.budget import Candidate, candidates, client_grid, nothing_fits, weigh
from splitveil.nets.catalogue import NETS
from splitveil.nets.clients import FAMILIES, THIN_CLIENTS, build_client, parse_client
from splitveil.nets.split import Cost, cut

IMAGE = (3, 32, 32)
Shape = tuple[int, int, int]


def slow_costs(client: nn.Sequential, shape: Shape) -> tuple[int, int, int, int]:
    """Multiply-adds, parameters, numbers sent, convolutions in a row: from the built client."""
    macs = 0

    def add(conv: nn.Module, _: tuple[Tensor], out: Tensor) -> None:
        nonlocal macs
        assert isinstance(conv, nn.Conv2d)
        taps = conv.kernel_size[0] * conv.kernel_size[1]
        macs += out.shape[1] * out.shape[2] * out.shape[3] * taps * conv.in_channels // conv.groups

    convs = {name: m for name, m in client.named_modules() if isinstance(m, nn.Conv2d)}
    for conv in convs.values():
        conv.register_forward_hook(add)
    with torch.no_grad():
        sent = client.eval()(torch.zeros(1, *shape)).numel()
    params = sum(p.numel() for p in client.parameters())
    return macs, params, sent, sum("shortcut" not in name for name in convs)


def check(found: Candidate, shape: Shape) -> None:
    client = build_client(found.spec, shape)
    stated = (found.macs, found.params, found.wire_floats, found.depth)
    assert stated == slow_costs(client, shape), found.net
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = client(torch.cat([torch.zeros_like(x), x]))
    assert tuple(z.shape[1:]) == found.spec.wire_shape(shape), found.net
    assert 0 <= float(z.min()) <= float(z.max()) <= 1, found.net


@pytest.mark.parametrize(
    ("shape", "max_macs", "wire"),
    [((1, 8, 8), 2e4, 16), ((3, 9, 13), 5e4, 30)],
)
def test_every_candidate_costs_and_sends_what_it_states(
    shape: Shape, max_macs: float, wire: int
) -> None:
    found = candidates(shape, max_macs=max_macs, wire_floats=wire)
    assert {c.spec.family for c in found} == set(FAMILIES)
    for candidate in found[::4]:
        check(candidate, shape)


def test_candidates_of_the_published_budget_cost_as_stated() -> None:
    for candidate in candidates(IMAGE, max_macs=21.9e6, wire_floats=512)[::160]:
        check(candidate, IMAGE)


@pytest.mark.parametrize(
    ("name", "macs"),
    [("thin-mobilenet", 20_963_328), ("thin-resnet", 19_873_792), ("thin-strided", 19_611_648)],
)
def test_named_clients_cost_no_more_than_vgg11_and_send_as_much(name: str, macs: int) -> None:
    model = cut(NETS[name].build(IMAGE, 10), NETS[name].cut_at)
    found = weigh(THIN_CLIENTS[name], IMAGE)
    assert (found.net, found.macs, found.wire_floats) == (name, macs, 512)
    assert model.macs(IMAGE) == macs <= 21_233_664
    assert model.wire_shape(IMAGE) == (8, 8, 8)
    assert model.client_params() == found.params
    assert found in candidates(IMAGE, max_macs=21.9e6, wire_floats=512)


def test_a_thin_mobilenet_of_21_mmac_is_among_the_candidates() -> None:
    found = candidates(IMAGE, max_macs=21.9e6, wire_floats=512, family="inverted")
    assert any(round(c.macs / 1e6, 1) == 21.0 and c.wire_floats == 512 for c in found)
    assert {c.net for c in found[:2]} == {"thin-deep", "thin-mobilenet"}


@pytest.mark.parametrize(
    "text",
    [
        "residual-2-2.2x2-c1",
        "residual-2s2-2.2-c1",
        "inverted-2-2.2x2.2-e2-c1",
        "strided-2-2x2.2x2-c1",
    ],
)
def test_one_number_on_the_wire_sees_exactly_its_receptive_field(text: str) -> None:
    spec, side = parse_client(text), 96
    client = build_client(spec, (1, side, side)).double().eval()
    for parameter in client.parameters():
        nn.init.constant_(parameter, 0.1)  # nothing is negative: no ReLU hides a pixel
    x = torch.ones(1, 1, side, side, dtype=torch.float64, requires_grad=True)
    z = client[:-1](x)
    middle = z.shape[2] // 2
    z[0, 0, middle, middle].backward()
    assert x.grad is not None
    rows, columns = x.grad[0, 0].nonzero(as_tuple=True)
    field = weigh(spec, (1, side, side)).receptive_field
    assert int(rows.max() - rows.min()) + 1 == field < side
    assert int(columns.max() - columns.min()) + 1 == field


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([((1, 28, 28), 60, True), ((1, 28, 28), 500, False), ((3, 9, 14), 7, False)]),
    st.floats(1e3, 1e8),
    st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_budgets_are_kept_and_nothing_that_fits_is_left_out(
    case: tuple[Shape, int, bool], macs: float, params: int | None
) -> None:
    shape, wire, smaller = case
    found = candidates(
        shape,
        max_macs=macs,
        wire_floats=wire,
        max_params=params,
        family="strided",
        smaller=smaller,
    )
    most = 10**9 if params is None else params
    specs = {c.spec for c in found}
    assert len(specs) == len(found)
    for spec in client_grid(shape, wire_floats=wire, family="strided", smaller=smaller):
        costs = weigh(spec, shape)
        fits = costs.macs <= macs and costs.params <= most
        assert costs.wire_floats <= wire
        assert spec.family == "strided"
        assert fits == (spec in specs)


def test_the_order_is_always_the_same_and_families_take_turns() -> None:
    found = candidates(IMAGE, max_macs=21.9e6, wire_floats=512)
    assert found == candidates(IMAGE, max_macs=21_900_000, wire_floats=512)
    assert [c.spec.family for c in found[:6]] == sorted(FAMILIES) * 2
    residual = [c for c in found if c.spec.family == "residual"]
    assert residual == candidates(IMAGE, max_macs=21.9e6, wire_floats=512, family="residual")
    full = [c for c in residual if c.macs > 0.9 * 21.9e6]
    assert residual[: len(full)] == full
    depths = [c.depth for c in full if c.net != "thin-resnet"]
    assert depths == sorted(depths, reverse=True)


def test_smaller_wires_come_on_request_and_last() -> None:
    asked = {"max_macs": 21.9e6, "wire_floats": 512, "family": "strided"}
    plain = candidates(IMAGE, **asked)  # type: ignore[arg-type]
    more = candidates(IMAGE, **asked, smaller=True)  # type: ignore[arg-type]
    sent = [c.wire_floats for c in more]
    assert all(c.wire_floats == 512 or c.spec.wire_channels == c.spec.widths[-1] for c in plain)
    assert set(plain) < set(more)
    assert sent[0] == 512
    assert {64, 128, 256, 512} <= set(sent)
    tenths = [-(-10 * n // 512) for n in sent]
    assert tenths == sorted(tenths, reverse=True)


@pytest.mark.parametrize(
    ("macs", "wire", "params", "words"),
    [
        (-1.0, 512, None, "macs must be a finite number > 0, got -1.0"),
        (float("nan"), 512, None, "macs must be a finite number > 0, got nan"),
        (float("inf"), 512, None, "macs must be a finite number > 0, got inf"),
        (1e6, 0, None, "wire must be at least 1, got 0"),
        (1e6, 512, 0, "params must be at least 1, got 0"),
        (0.0, -5, -5, "macs must be .*; wire must be .*; params must be"),
    ],
)
def test_a_senseless_budget_is_refused(
    macs: float, wire: int, params: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        candidates(IMAGE, max_macs=macs, wire_floats=wire, max_params=params)


def test_a_budget_nothing_fits_is_answered_with_the_cheapest() -> None:
    assert candidates(IMAGE, max_macs=1e3, wire_floats=512) == []
    costs = [weigh(spec, IMAGE) for spec in client_grid(IMAGE, wire_floats=512, family="residual")]
    least, fewest = min(c.macs for c in costs), min(c.params for c in costs)
    said = nothing_fits(IMAGE, max_macs=1e3, wire_floats=512, max_params=9, family="residual")
    assert "no residual client fits 1,000 multiply-adds, 9 parameters and 512 numbers" in said
    assert f"costs {least:,} multiply-adds" in said
    assert f"has {fewest:,} parameters" in said
    assert len(candidates(IMAGE, max_macs=least, wire_floats=512, family="residual")) >= 1
    assert candidates(IMAGE, max_macs=least - 1, wire_floats=512, family="residual") == []


def test_a_wire_too_small_is_answered_with_the_smallest() -> None:
    assert candidates(IMAGE, max_macs=1e9, wire_floats=15, family="strided") == []
    said = nothing_fits(IMAGE, max_macs=1e9, wire_floats=15, family="strided")
    assert said == "no strided client sends 15 numbers or fewer; the smallest wire has 16"
    assert candidates(IMAGE, max_macs=1e9, wire_floats=16, family="strided") != []


def test_small_images_get_clients_and_tiny_ones_an_error() -> None:
    found = candidates((1, 8, 8), max_macs=1e7, wire_floats=512, family="strided")
    assert all(c.net == f"client:{c.spec}" for c in found)
    assert max(c.spec.downsampling for c in found) == 8
    with pytest.raises(ConfigError, match=r"at least 1×4×4, got \(1, 3, 8\)"):
        candidates((1, 3, 8), max_macs=1e7, wire_floats=512)
    with pytest.raises(ConfigError, match="unknown client family 'resnet'"):
        candidates(IMAGE, max_macs=1e7, wire_floats=512, family="resnet")


def test_the_count_of_a_built_client_agrees() -> None:
    for name, spec in THIN_CLIENTS.items():
        assert Cost.of(build_client(spec, (1, 30, 50)), (1, 30, 50)).macs == (
            weigh(spec, (1, 30, 50)).macs
        ), name
