"""Stages that drop, prune and round: exact counts, in every mode, image by image."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.channel import Channel, Dropout, GaussianNoise, Quantise, TopK
from splitveil.nets.split import cut, with_channel
from splitveil.threat import Victim

STAGES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Dropout(0.3),
    "topk": lambda: TopK(0.6),
    "quantise": lambda: Quantise(3),
}
PLAIN = ["topk", "quantise"]  # they draw nothing


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smashed(n: int = 20) -> Tensor:
    return torch.rand(n, 5, 4, 4, generator=generator(9))


@pytest.fixture(params=sorted(STAGES))
def stage(request: pytest.FixtureRequest) -> nn.Module:
    return STAGES[request.param]()


def test_train_and_eval_mode_send_the_same_bits(stage: nn.Module) -> None:
    z = smashed()
    sent = stage.train()(z, generator())
    assert torch.equal(sent, stage.eval()(z, generator()))
    assert not torch.equal(sent, z)


def test_shape_type_and_layout_are_kept(stage: nn.Module) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        z = smashed().to(dtype).contiguous(memory_format=torch.channels_last)
        sent = stage(z, generator())
        assert (sent.shape, sent.dtype, sent.stride()) == (z.shape, dtype, z.stride())
    flat = torch.rand(3, 7, generator=generator())
    assert stage(flat, generator()).shape == (3, 7)


def test_the_generator_is_all_its_randomness(stage: nn.Module) -> None:
    z, state = smashed(), torch.get_rng_state()
    assert torch.equal(stage(z, generator(3)), stage(z, generator(3)))
    assert torch.equal(torch.get_rng_state(), state)
    stream = generator(3)
    assert torch.equal(stage(z, stream), stage(z, stream)) is not isinstance(stage, Dropout)


@pytest.mark.parametrize("name", PLAIN)
def test_a_stage_without_randomness_leaves_the_generator_alone(name: str) -> None:
    stream = generator()
    STAGES[name]()(smashed(), stream)
    assert torch.equal(stream.get_state(), generator().get_state())


def test_an_image_does_not_depend_on_its_neighbours(stage: nn.Module) -> None:
    z = smashed()
    other = torch.cat([z[:1], 100 * z[1:].flip(0)])
    assert torch.equal(stage(z, generator())[0], stage(other, generator())[0])
    if not isinstance(stage, Dropout):  # whose draws of image 3 follow those of images 0 to 2
        assert torch.equal(stage(z)[3:4], stage(z[3:4]))


def test_victims_send_through_it(stage: nn.Module) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid())
    model = cut(nn.Sequential(*encoder, nn.Linear(12, 2)), 3, Channel([stage])).train()
    victim, x = model.victim(), torch.rand(6, 1, 4, 4, generator=generator())
    assert isinstance(victim, Victim)
    with torch.no_grad():
        clean = encoder(x)
        assert torch.equal(victim.send(x, generator(1)), stage(clean, generator(1)))
        assert torch.equal(model.split_forward(x, generator(1)).z_sent, stage(clean, generator(1)))
    assert not torch.equal(victim.send(x, generator(1)), clean)


def test_it_is_no_gaussian_noise(stage: nn.Module) -> None:
    assert Channel([stage]).noise_std == 0.0
    assert Channel([GaussianNoise(0.3), stage, GaussianNoise(0.4)]).noise_std == pytest.approx(0.5)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.2, 0.5, 0.95])
def test_the_measured_drop_rate_is_the_stated_one(p: float) -> None:
    n = 200_000
    sent = Dropout(p)(torch.full((n,), 7.0, dtype=torch.bfloat16), generator())
    rate = float((sent == 0).double().mean())
    assert abs(rate - p) <= 4 * math.sqrt(p * (1 - p) / n)
    assert set(sent.tolist()) <= {0.0, 7.0}  # what is sent is not rescaled


def test_dropout_draws_every_value_and_call_afresh() -> None:
    stage, stream, z = Dropout(0.5), generator(), torch.ones(400, 100)
    one, other = stage(z, stream), stage(z, stream)
    assert abs(float((one == other).double().mean()) - 0.5) < 4 * 0.5 / 200
    assert abs(float((one[:, 1:] == one[:, :-1]).double().mean()) - 0.5) < 4 * 0.5 / 198


def test_dropout_without_a_generator_uses_the_global_stream() -> None:
    z = smashed()
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        sent = Dropout(0.5)(z)
    assert torch.equal(sent, Dropout(0.5)(z, generator(4)))


def test_dropout_draws_where_the_generator_lives() -> None:
    used, fresh = generator(), generator()
    sent = Dropout(0.5)(torch.empty(3, 2, device="meta"), used)
    torch.rand(3, 2, generator=fresh)
    assert sent.device.type == "meta"
    assert torch.equal(used.get_state(), fresh.get_state())


@pytest.mark.parametrize("name", ["dropout", "topk"])
def test_the_gradient_is_one_where_a_value_is_sent(name: str) -> None:
    z = (smashed() + 0.1).requires_grad_()
    sent = STAGES[name]()(z, generator())
    sent.sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, (sent != 0).float())
    assert torch.equal(sent[sent != 0], z[sent != 0])


def pruned_slowly(row: list[float], prune: float) -> list[float]:
    """One image: go through its values from the smallest magnitude on."""
    order = sorted(range(len(row)), key=lambda i: abs(row[i]))
    gone = set(order[: round(prune * len(row))])
    return [0.0 if i in gone else v for i, v in enumerate(row)]


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 9).flatmap(
        lambda d: st.lists(
            st.lists(st.sampled_from([-2.0, -1.0, 0.5, 1.0, 3.0]), min_size=d, max_size=d),
            min_size=1,
            max_size=4,
        )
    ),
    st.floats(0, 0.99),
)
def test_topk_keeps_the_largest_magnitudes(rows: list[list[float]], prune: float) -> None:
    sent = TopK(prune)(torch.tensor(rows))
    assert sent.tolist() == [pruned_slowly(row, prune) for row in rows]


@pytest.mark.parametrize(("prune", "left"), [(0.0, 80), (0.5, 40), (0.29, 57), (0.7, 24)])
def test_topk_leaves_the_same_count_in_every_image(prune: float, left: int) -> None:
    for z in (smashed() + 0.1, torch.ones(20, 80), -smashed() - 0.1):  # also where all are equal
        assert (TopK(prune)(z) != 0).flatten(1).sum(1).tolist() == [left] * 20


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_quantiser_takes_the_nearest_level(bits: int, dtype: torch.dtype) -> None:
    z = torch.linspace(0, 1, 10_007, dtype=dtype)
    sent = Quantise(bits)(z)
    levels = torch.arange(2**bits, dtype=dtype) / (2**bits - 1)
    assert torch.equal(sent.unique(), levels)
    assert float((sent - z).abs().max()) <= 0.5 / (2**bits - 1) + 1e-6
    assert torch.equal(Quantise(bits)(sent), sent)


def test_the_quantiser_takes_the_same_level_in_half() -> None:
    z = torch.linspace(0, 1, 5_003).bfloat16()
    assert torch.equal(Quantise(8)(z), Quantise(8)(z.float()).bfloat16())


def test_the_quantiser_clips_what_lies_outside() -> None:
    z = torch.tensor([-math.inf, -0.4, 1.2, math.inf])
    assert Quantise(4)(z).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_the_quantisers_gradient_is_straight_through() -> None:
    z = torch.tensor([-0.2, 0.0, 0.1, 0.5, 0.9, 1.0, 1.3], requires_grad=True)
    (torch.arange(1.0, 8.0) * Quantise(2)(z)).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]


def test_what_no_stage_can_do_is_refused() -> None:
    for bad in (-0.1, 1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=rf"dropout must be in \[0, 1\), got {bad}"):
            Dropout(bad)
        with pytest.raises(ConfigError, match=rf"prune must be in \[0, 1\), got {bad}"):
            TopK(bad)
    for bits in (0, -1, 17):
        with pytest.raises(ConfigError, match=rf"bits must be in \[1, 16\], got {bits}"):
            Quantise(bits)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_needs_no_sync_and_equals_the_cpu(stage: nn.Module) -> None:
    z = torch.rand(64, 8, 8, 8, generator=generator())
    assert torch.equal(stage(z.cuda(), generator()).cpu(), stage(z, generator()))
    here, stream = z.cuda(), torch.Generator("cuda").manual_seed(0)
    stage(here, stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stage(here, stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(stream)
    with torch.cuda.graph(graph):
        sent = stage(here, stream)
    graph.replay()
    first = sent.clone()
    graph.replay()
    assert torch.equal(first, sent) is not isinstance(stage, Dropout)
    if not isinstance(stage, Dropout):
        assert torch.equal(first.cpu(), stage(z))


class Flattens(nn.Module):
    def forward(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        del generator
        return z.flatten(1)


class TakesNoGenerator(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z


@pytest.mark.parametrize(
    ("channel", "said"),
    [
        (Channel([Flattens()]), r"must keep the shape of smashed data, \(2, 3, 6, 6\), got shape"),
        (
            Channel([TakesNoGenerator()]),
            r"the channel fails on smashed data.*called with \(z, generator\)",
        ),
        (None, r"must be a Channel, got NoneType; return Channel\("),
        ([Dropout(0.3)], "must be a Channel, got list"),
    ],
)
def test_a_channel_that_no_model_can_have_is_refused(channel: object, said: str) -> None:
    model = cut(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), at=1)
    with pytest.raises(ConfigError, match=said):
        with_channel(model, channel, (1, 8, 8))


def test_trying_a_channel_draws_nothing_of_the_global_stream(stage: nn.Module) -> None:
    model = cut(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), at=1)
    before = torch.get_rng_state()
    with_channel(model, Channel([stage]), (1, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)
