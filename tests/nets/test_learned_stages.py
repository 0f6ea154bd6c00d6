"""Stages with parameters: exact noise, one dictionary, sized with the model, active everywhere."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.catalogue import NETS
from splitveil.nets.channel import (
    MAX_WIRE,
    RATE,
    Channel,
    Dropout,
    GaussianNoise,
    LearnedNoise,
    LearnedStage,
    SparseCoding,
    deployed,
    learned_stages,
    standard_noise,
)
from splitveil.nets.split import cut, with_stage_shapes
from splitveil.train.state import Checkpoint, load_module, read_checkpoint, write_checkpoint

STAGES: dict[str, Callable[[], LearnedStage]] = {
    "gaussian": lambda: LearnedNoise(0.1),
    "laplace": lambda: LearnedNoise(0.1, "laplace", moves=True),
    "sparse": lambda: SparseCoding(0.05),
}
WIRE = (5, 4, 4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smashed(n: int = 20) -> Tensor:
    return torch.rand(n, *WIRE, generator=generator(9))


@pytest.fixture(params=sorted(STAGES))
def stage(request: pytest.FixtureRequest) -> LearnedStage:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        found = STAGES[request.param]()
        found.size_to(WIRE)
    return found


def test_train_and_eval_mode_send_the_same_bits(stage: LearnedStage) -> None:
    z = smashed()
    sent = stage.train()(z, generator())
    assert torch.equal(sent, stage.eval()(z, generator()))
    assert not torch.equal(sent, z)


def test_shape_type_and_layout_are_kept(stage: LearnedStage) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        z = smashed().to(dtype).contiguous(memory_format=torch.channels_last)
        sent = stage(z, generator())
        assert (sent.shape, sent.dtype, sent.stride()) == (z.shape, dtype, z.stride())


def test_the_generator_is_all_its_randomness(stage: LearnedStage) -> None:
    z, state = smashed(), torch.get_rng_state()
    assert torch.equal(stage(z, generator(3)), stage(z, generator(3)))
    assert torch.equal(torch.get_rng_state(), state)
    stream = generator(3)
    assert torch.equal(stage(z, stream), stage(z, stream)) is isinstance(stage, SparseCoding)


def test_victims_send_through_a_frozen_copy(stage: LearnedStage) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 80), nn.Unflatten(1, WIRE), nn.Sigmoid())
    model = cut(nn.Sequential(*net, nn.Flatten(), nn.Linear(80, 2)), 4, Channel([stage]))
    victim, x = model.victim(), torch.rand(6, 1, 4, 4, generator=generator())
    before = victim.send(x, generator(1))
    with torch.no_grad():
        assert torch.equal(before, deployed(stage)(net(x), generator(1)))
        for parameter in stage.parameters():
            parameter.add_(1.0)
    assert torch.equal(victim.send(x, generator(1)), before)


def test_gradients_reach_z_and_every_parameter(stage: LearnedStage) -> None:
    z = smashed().requires_grad_()
    stage(z, generator()).square().sum().backward()
    for found in (z, *stage.parameters()):
        assert found.grad is not None
        assert bool(found.grad.isfinite().all())
        assert float(found.grad.abs().sum()) > 0


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_what_is_sent_is_finite_at_every_scale(stage: LearnedStage, scale: float) -> None:
    z = (scale * smashed()).requires_grad_()
    sent = stage(z, generator())
    sent.sum().backward()
    assert z.grad is not None
    assert bool(sent.isfinite().all() & z.grad.isfinite().all())


def test_another_wire_is_refused(stage: LearnedStage) -> None:
    with pytest.raises(ConfigError, match=r"smashed data of shape \(5, 4, 4\), got \(3,\)"):
        stage(torch.zeros(2, 3), generator())


def test_a_stage_called_early_takes_the_shape_of_its_input() -> None:
    found = LearnedNoise(0.1)
    assert (found.shape, list(found.parameters())) == (None, [])
    with pytest.raises(ConfigError, match="no scales yet"):
        found.log_scales()
    found(smashed(), generator())
    assert found.shape == WIRE


def test_sizing_makes_parameters_before_the_first_call() -> None:
    def build(channel: Channel) -> dict[str, Tensor]:
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            model = cut(NETS["small"].build((1, 8, 8), 10), NETS["small"].cut_at, channel)
            return with_stage_shapes(model, (1, 8, 8)).state_dict()

    plain = build(Channel([GaussianNoise(0.1)]))
    learned = build(Channel([SparseCoding(0.1), GaussianNoise(0.1), LearnedNoise(0.1)]))
    own = {"channel.stages.0.dictionary", "channel.stages.2.gain"}
    assert set(learned) - set(plain) == own
    assert all(torch.equal(learned[k], v) for k, v in plain.items())
    assert learned["channel.stages.0.dictionary"].shape == (64, 64)


def test_only_stages_with_parameters_are_found() -> None:
    channel = Channel([GaussianNoise(0.1), SparseCoding(0.1), Dropout(0.1)])
    assert [type(s) for s in learned_stages(channel)] == [SparseCoding]


def test_a_checkpoint_brings_the_parameters_back(stage: LearnedStage, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(0.03)
    write_checkpoint(tmp_path / "c.safetensors", Checkpoint(stage.state_dict(), {}))
    with torch.random.fork_rng([]):
        other = copy.deepcopy(stage)
        for parameter in other.parameters():
            nn.init.normal_(parameter)
    load_module(other, read_checkpoint(tmp_path / "c.safetensors").tensors, "stage")
    assert torch.equal(other(smashed(), generator()), stage(smashed(), generator()))


@pytest.mark.parametrize(("kind", "variance"), [("gaussian", 1.0), ("laplace", 2.0)])
def test_measured_noise_has_the_stated_moments(kind: str, variance: float) -> None:
    n = 200_000
    noise = standard_noise(torch.zeros(n, dtype=torch.float64), kind, generator())  # type: ignore[arg-type]
    assert abs(float(noise.mean())) < 4 * math.sqrt(variance / n)
    excess = {"gaussian": 0.0, "laplace": 3.0}[kind]
    error = variance * math.sqrt((2 + excess) / n)  # of a sample variance
    assert abs(float(noise.var()) - variance) < 4 * error
    beyond = {"gaussian": math.erfc(2 / math.sqrt(2)), "laplace": math.exp(-2)}[kind]
    share = float((noise.abs() > 2).double().mean())
    assert abs(share - beyond) < 4 * math.sqrt(beyond / n)


def test_noise_by_hand() -> None:
    found, z = LearnedNoise(0.5, moves=True), smashed().double()
    found.size_to(WIRE)
    assert found.gain is not None
    assert found.location is not None
    with torch.no_grad():
        found.gain[0, 0, 0] = math.log(3) / RATE
        found.location[1, 2, 3] = -7.0
    added = found(z, generator()) - z
    draw = torch.randn(z.shape, dtype=z.dtype, generator=generator())
    torch.testing.assert_close(added[:, 0, 0, 0], 1.5 * draw[:, 0, 0, 0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(added[:, 1, 2, 3], 0.5 * draw[:, 1, 2, 3] - 7, rtol=1e-6, atol=1e-9)


def test_the_scale_cannot_run_away_and_finds_its_way_back() -> None:
    found = LearnedNoise(1.0)
    found.size_to((2,))
    assert found.gain is not None
    with torch.no_grad():
        found.gain.copy_(torch.tensor([100.0, -100.0]))
    assert found.log_scales().tolist() == [10.0, -10.0]
    assert bool(found(torch.zeros(3, 2), generator()).isfinite().all())
    (back,) = torch.autograd.grad(found.log_scales().sum(), found.gain)
    assert back.tolist() == [RATE, RATE]


def test_sparse_coding_by_hand() -> None:
    found = SparseCoding(1.0)
    found.size_to((2,))
    assert found.dictionary is not None
    with torch.no_grad():
        found.dictionary.copy_(torch.tensor([[3.0, 4.0], [4.0, -3.0]]) / 5)
    z = torch.tensor([[1.0, 3.0]])  # W z = (3, −1); softened (2, 0); back: 2·(.6, .8)
    torch.testing.assert_close(found.code(z), torch.tensor([[2.0, 0.0]]))
    torch.testing.assert_close(found(z), torch.tensor([[1.2, 1.6]]))


def test_with_theta_zero_the_dictionary_sends_z() -> None:
    found = SparseCoding(0.0)
    z = smashed()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        sent = found(z)
    assert found.dictionary is not None
    torch.testing.assert_close(found.dictionary.norm(dim=1), torch.ones(80))
    torch.testing.assert_close(sent, z)
    assert not torch.allclose(found.dictionary, torch.eye(80), atol=0.1)


def test_a_larger_threshold_leaves_fewer_atoms() -> None:
    z, used = smashed(), []
    for threshold in (0.01, 0.1, 0.5):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            used.append(int((SparseCoding(threshold).code(z) != 0).sum()))
    assert used[0] > used[1] > used[2] > 0


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_bad_numbers_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"sparse_threshold must be .* got {value}"):
        SparseCoding(value)
    with pytest.raises(
        ConfigError,
        match=f"initial scale of the learned noise must be a finite number > 0, got {value}",
    ):
        LearnedNoise(value)


@pytest.mark.usefixtures("as_users_run")
def test_other_misuse_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="initial scale of the learned noise must be a finite number > 0, got 0"
    ):
        LearnedNoise(0.0)
    with pytest.raises(ConfigError, match="one of gaussian, laplace; got 'pink'"):
        LearnedNoise(1.0, "pink")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"wire may have at most {MAX_WIRE}, got {MAX_WIRE + 1}"):
        SparseCoding(0.1).size_to((MAX_WIRE + 1,))
