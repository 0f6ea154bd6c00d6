"""What holds for every line of `DEFENCES`, and for stacks of them."""

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Literal

import pytest
import torch
from torch import Tensor

from splitveil.config.resolve import build_defence, make_config
from splitveil.config.run_config import write_toml
from splitveil.defences.base import Companion, Defence, PenaltyPlan
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.errors import ConfigError
from splitveil.nets.catalogue import NETS
from splitveil.nets.channel import LearnedStage
from splitveil.nets.split import SplitModel, cut, with_stage_shapes
from splitveil.surrogates.base import RefitsEachEpoch, Surrogate
from splitveil.train.loop import Schedule

SIGMA = 0.05
IMAGE, CLASSES = (1, 8, 8), 4


def made(defence: Defence) -> SplitModel:
    """A small model with the defence's channel, as a run builds it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = NETS["small"]
        model = defence.assemble(cut(net.build(IMAGE, CLASSES), net.cut_at), IMAGE, CLASSES)
        model.channel = defence.channel(SIGMA)
        return with_stage_shapes(model, IMAGE)


def learned(model: SplitModel) -> list[Tensor]:
    """Parameters of the stages that a defence put into a model."""
    stages = (m for m in model.modules() if isinstance(m, LearnedStage))
    return [p for stage in stages for p in stage.parameters()]


def makes_companion(defence: Defence) -> bool:
    with torch.random.fork_rng([]):
        return defence.companion(made(defence), IMAGE, CLASSES) is not None


STACKS = ("noise+dropout", "topk+cem", "dropout+veil", "quantise+topk", "noise+vib", "sparse+arl",
          "arl+infoscissors+vib")  # fmt: skip
ALL: Mapping[str, Defence] = {**DEFENCES, **{name: find_defence(name) for name in STACKS}}
PENALISED = sorted(name for name, d in ALL.items() if d.penalty_plan().lambd > 0)
COMPANIONED = sorted(name for name, d in ALL.items() if makes_companion(d))
LEARNED = sorted(name for name, d in ALL.items() if learned(made(d)))
RATED = sorted(name for name, d in ALL.items() if d.settings().get("penalty") == "rate")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def schedule(plan: PenaltyPlan, kind: Literal["one-cycle", "cem"]) -> Schedule:
    return Schedule(kind=kind, peak_lr=0.1, epochs=12, steps_per_epoch=5, penalty=plan)


@pytest.fixture(params=sorted(ALL))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_it_has_a_summary_and_a_net_that_exists(name: str) -> None:
    assert ALL[name].summary.strip()
    assert ALL[name].client in NETS


def test_its_channel_acts_the_same_in_training_and_in_deployment(name: str) -> None:
    channel = ALL[name].channel(SIGMA)
    z = torch.rand(8, 4, 3, 3, generator=generator())
    trained = channel.train()(z, generator(1))
    deployed = channel.eval()(z, generator(1))
    assert torch.equal(trained, deployed)
    plain = ("none", "alone", "sparse")  # the last is a layer of f
    assert torch.equal(trained, z) is (name in plain)


def test_its_channel_has_the_runs_noise_or_none(name: str) -> None:
    defence = ALL[name]
    assert defence.channel(SIGMA).noise_std == (pytest.approx(SIGMA) if defence.noisy else 0.0)
    assert defence.channel(0.0).noise_std == 0.0


def test_it_has_a_penalty_exactly_if_it_has_a_surrogate(name: str) -> None:
    assert (ALL[name].surrogate(36, 4, SIGMA) is not None) is (name in PENALISED)


@pytest.mark.parametrize("name", sorted(set(PENALISED) - set(STACKS)))
def test_every_setting_is_the_plans_or_the_surrogates(name: str) -> None:
    """No field of a defence is forgotten: each reaches the plan, the module or its own methods."""
    defence = ALL[name]
    surrogate = defence.surrogate(36, 4, SIGMA)
    assert surrogate is not None
    plan = {"lambd", "attention_loss_scale", "attention_warmup_epochs", "w_lr", "ramp"}
    plan |= {"skip_first_epoch", "attention_gets_lambda", "attention_lr"}
    left = set(defence.settings()) - plan - set(inspect.signature(type(surrogate)).parameters)
    source = inspect.getsource(type(defence))
    assert all(f"self.{field}" in source for field in left), left


@pytest.mark.parametrize("name", PENALISED)
def test_its_surrogate_gives_a_finite_loss_and_moves_the_encoder(name: str) -> None:
    surrogate = ALL[name].surrogate(36, 4, SIGMA)
    assert surrogate is not None
    assert isinstance(surrogate, Surrogate)
    z = torch.rand(24, 4, 3, 3, generator=generator()).requires_grad_()
    y = torch.randint(4, (24,), generator=generator(1))
    if isinstance(surrogate, RefitsEachEpoch):
        other = torch.rand(24, 36, generator=generator(2))
        surrogate.refit_stream(lambda: [(other, y)], generator(3))
    surrogate.eval()  # an early shut-off acts in training only
    out = surrogate(z, y)
    out.loss.backward()
    assert bool(out.loss.isfinite())
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())
    assert float(z.grad.abs().sum()) > 0


def test_adversaries_and_learned_stages_are_among_them() -> None:
    assert {"arl", "nopeek", "vib", "infoscissors", "patrol"} <= set(COMPANIONED)
    assert {"vib", "shredder", "sparse", "sparse+arl"} <= set(LEARNED)


def reached(loss: Tensor, parameters: Iterable[Tensor]) -> list[bool]:
    """Which parameters the loss has a gradient for; every gradient is finite."""
    wanted = list(parameters)
    if not (loss.requires_grad and wanted):
        return [False] * len(wanted)
    found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    assert all(bool(g.isfinite().all()) for g in found if g is not None)
    return [g is not None for g in found]


@pytest.mark.parametrize("name", COMPANIONED)
def test_its_companion_learns_and_the_client_pays(name: str) -> None:
    model = made(ALL[name])
    with torch.random.fork_rng([]):
        companion = ALL[name].companion(model, IMAGE, CLASSES)
    assert companion is not None
    assert isinstance(companion, Companion)
    x = torch.rand(24, *IMAGE, generator=generator())
    y = torch.randint(CLASSES, (24,), generator=generator(1))
    z = model.encoder(x)
    own, paid = companion.own_loss(z.detach(), x, y), companion.penalty(z, x, y)
    assert bool(own.isfinite() & paid.isfinite())
    mine = list(companion.parameters())
    assert not {id(p) for p in mine} & {id(p) for p in model.parameters()}
    assert all(reached(own, mine))
    assert not any(reached(own, model.parameters()))
    assert not any(reached(paid, mine))
    assert any(reached(paid, [*model.encoder.parameters(), *model.channel.parameters()]))
    assert not any(reached(paid, model.head.parameters()))
    assert companion.lr > 0 or not mine


@pytest.mark.parametrize("name", LEARNED)
def test_its_stages_learn_from_the_task(name: str) -> None:
    model = made(ALL[name])
    own = learned(model)
    assert own
    assert {id(p) for p in own} <= {id(p) for p in model.parameters()}
    x = torch.rand(24, *IMAGE, generator=generator())
    assert all(reached(model.split_forward(x, generator(1)).logits.square().sum(), own))


OFF = {
    "arl": ({"arl_strength": 0.0}, "noise"),
    "bido": ({"bido_strength": 0.0}, "noise"),
    "infoscissors": ({"scissors_strength": 0.0}, "noise"),
    "nopeek": ({"nopeek_strength": 0.0}, "noise"),
    "patrol": ({"patrol_strength": 0.0}, "noise"),
    "shredder": ({"shredder_reward": 0.0}, "none"),
    "sparse": ({"sparse_threshold": 0.0}, "none"),
    "vib": ({"vib_beta": 0.0}, "none"),
}


@pytest.mark.parametrize("name", OFF)
def test_at_strength_zero_nothing_of_a_defence_is_left(name: str) -> None:
    """Same channel, same weights, no companion, no penalty: training is that of `plain`."""
    settings, plain = OFF[name]
    places = ({"sparse_place": "client"}, {"sparse_place": "wire"}) if name == "sparse" else ({},)
    for place in places:
        off, like = ALL[name].with_settings({**settings, **place}), ALL[plain]
        model, other = made(off), made(like)
        assert str(model) == str(other)
        assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
        before = torch.get_rng_state()
        assert off.companion(model, IMAGE, CLASSES) is None
        assert off.surrogate(36, CLASSES, SIGMA) is None
        assert torch.equal(torch.get_rng_state(), before)
        assert off.penalty_plan() == like.penalty_plan()


def test_every_companion_and_learned_stage_can_be_switched_off() -> None:
    assert set(OFF) == (set(COMPANIONED) | set(LEARNED)) - set(STACKS)


@pytest.mark.parametrize("kind", ["one-cycle", "cem"])
@pytest.mark.parametrize("name", PENALISED)
def test_lambda_zero_switches_it_off_at_every_step(
    name: str, kind: Literal["one-cycle", "cem"]
) -> None:
    on = schedule(ALL[name].penalty_plan(), kind)
    off = schedule(ALL[name].with_settings({"lambd": 0.0}).penalty_plan(), kind)
    assert any(on.weights_at(step) is not None for step in range(on.total_steps))
    assert all(off.weights_at(step) is None for step in range(off.total_steps))


def test_a_defence_without_a_penalty_is_off_at_every_step(name: str) -> None:
    plan = schedule(ALL[name].penalty_plan(), "one-cycle")
    active = [plan.weights_at(step) is not None for step in range(plan.total_steps)]
    assert any(active) is (name in PENALISED)


@pytest.mark.parametrize("lambd", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", PENALISED)
def test_a_penalty_that_would_be_a_reward_is_refused(name: str, lambd: float) -> None:
    with pytest.raises(ConfigError, match=f"lambd must be a finite number ≥ 0, got {lambd}"):
        ALL[name].with_settings({"lambd": lambd})
    with pytest.raises(ConfigError, match="lambd must be a finite number ≥ 0"):
        build_defence(make_config({"defence": name, "lambd": lambd}))


def test_every_setting_can_be_set_to_its_own_value(name: str) -> None:
    for key, value in ALL[name].settings().items():
        config = make_config({"defence": name, key: value})
        assert config.settings == {key: value}
        assert type(config.settings[key]) is type(value)
        assert build_defence(config) == ALL[name]


def test_its_settings_survive_toml(name: str) -> None:
    text = write_toml({"defence": name} | ALL[name].settings())
    config = make_config(tomllib.loads(text))
    assert config.settings == ALL[name].settings()
    assert build_defence(config) == ALL[name]


@pytest.mark.parametrize("name", PENALISED)
def test_a_setting_reaches_the_defence_it_is_given_to(name: str) -> None:
    built = build_defence(make_config({"defence": name, "lambd": 3}))
    assert built.penalty_plan().lambd == 3.0
    assert built != ALL[name]
    assert ALL[name].penalty_plan().lambd != 3.0


def test_what_describes_a_defence_cannot_be_set(name: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"unknown setting for defence '{name}' 'summary'")
    ):
        make_config({"defence": name, "summary": "x"})


def test_a_misspelt_key_is_refused_with_the_nearest_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'epoch'; did you mean 'epochs'\? choose from: "):
        make_config({"defence": name, "epoch": 3})
    for key in ALL[name].settings():
        with pytest.raises(ConfigError, match=rf"'{key}x'; did you mean '{key}'\?"):
            make_config({"defence": name, f"{key}x": 1})


def test_every_bad_key_is_named_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'epoch'.*'sed'.*seed must be a whole number"):
        make_config({"defence": name, "epoch": 3, "sed": 1, "seed": "one"})


def test_a_misspelt_defence_is_refused_with_the_nearest_one(name: str) -> None:
    last = name.rsplit("+", maxsplit=1)[-1]
    with pytest.raises(ConfigError, match=rf"unknown defence '{last}x'; did you mean '{last}'\?"):
        make_config({"defence": f"{name}x"})


def test_the_rate_is_someones_penalty() -> None:
    assert "veil" in RATED


@pytest.mark.parametrize("name", RATED)
def test_a_rate_without_noise_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a rate penalty needs channel noise"):
        ALL[name].surrogate(36, 4, 0.0)


@pytest.mark.parametrize("noise_std", [-0.1, float("nan")])
def test_noise_that_is_no_noise_is_refused(name: str, noise_std: float) -> None:
    with pytest.raises(ConfigError, match="noise_std must be a finite number ≥ 0"):
        make_config({"defence": name, "noise_std": noise_std})


@pytest.mark.parametrize("name", sorted(n for n, d in ALL.items() if d.noisy))
def test_reg_strength_is_another_name_of_the_noise(name: str) -> None:
    assert make_config({"defence": name, "reg_strength": 0.1}).noise_std == 0.1
    with pytest.raises(ConfigError, match="same number; give only one"):
        make_config({"defence": name, "reg_strength": 0.1, "noise_std": 0.1})
