"""Sparse coding as a defence: a layer of the client that is trained, deployed and saved."""

from pathlib import Path

import pytest
import torch
from defences.made import trained
from torch import Tensor, nn

from splitveil.config.resolve import DataFacts, build_defence, make_config, plan_of
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.errors import ConfigError
from splitveil.nets.channel import Channel, SparseCoding, before_noise, insert_before_sigmoid
from splitveil.nets.split import SplitModel
from splitveil.runs import load_run

AT_THE_WIRE = DEFENCES["sparse"].with_settings({"sparse_place": "wire"})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def built(**settings: float | str) -> SplitModel:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        config = make_config({"dataset": "digits", "defence": "sparse", "net": "small"} | settings)
        return plan_of(config, DataFacts((1, 8, 8), 10, "")).build_model().eval()


def layer(model: SplitModel) -> SparseCoding:
    (found,) = [m for m in model.modules() if isinstance(m, SparseCoding)]
    return found


def by_hand(w: Tensor, z: Tensor, threshold: float) -> Tensor:
    """The formula, an image at a time."""
    a = torch.stack([w @ row for row in z.flatten(1)])
    code = a.sign() * (a.abs() - threshold).clamp_min(0)
    return torch.stack([w.T @ row for row in code]).reshape(z.shape)


@torch.no_grad()
def test_it_stands_before_the_sigmoid_that_ends_the_client() -> None:
    model, plain = built(sparse_threshold=0.02), built(sparse_threshold=0.0)
    x = torch.rand(5, 1, 8, 8, generator=generator())
    z = plain.encoder(x)
    w = layer(model).dictionary
    assert w is not None
    sent = by_hand(w, torch.logit(z), 0.02).sigmoid()
    torch.testing.assert_close(model.encoder(x), sent, rtol=1e-4, atol=1e-5)
    assert float((sent - z).abs().max()) > 0.01  # it does something
    assert float(sent.std()) > 0.001


def test_its_rows_start_with_length_one() -> None:
    model, plain = built(), built(sparse_threshold=0.0)
    state = model.state_dict()
    (w,) = [value for name, value in state.items() if name.endswith("dictionary")]
    torch.testing.assert_close(w.norm(dim=1), torch.ones(64))
    assert float((w @ w.T - torch.eye(64)).abs().max()) > 0.2  # not orthogonal
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    assert len(state) == len(plain.state_dict()) + 1


def test_what_is_sent_stays_bounded_and_its_cost_is_the_clients() -> None:
    model, plain = built(), built(sparse_threshold=0.0)
    assert before_noise(model.encoder, model.channel).bounds == (0.0, 1.0)
    assert model.client_params() - plain.client_params() == 64 * 64
    assert model.macs((1, 8, 8)) - plain.macs((1, 8, 8)) == 2 * 64 * 64
    wire = built(sparse_place="wire")
    assert before_noise(wire.encoder, wire.channel).bounds is None


def test_a_client_that_ends_otherwise_gets_it_at_its_end() -> None:
    new = nn.Identity()
    conv, relu = nn.Conv2d(1, 1, 1), nn.ReLU()
    assert list(insert_before_sigmoid(nn.Sequential(conv, relu), new)) == [conv, relu, new]
    assert list(insert_before_sigmoid(conv, new)) == [conv, new]
    assert list(insert_before_sigmoid(nn.Sequential(), new)) == [new]
    nested = nn.Sequential(conv, nn.Sequential(relu, nn.Tanh()))
    first, last = insert_before_sigmoid(nested, new)
    assert isinstance(last, nn.Sequential)
    assert (first, last[0], last[1]) == (conv, relu, new)
    assert isinstance(last[2], nn.Tanh)


def test_a_penalty_reaches_the_dictionary_only_in_the_client() -> None:
    x = torch.rand(6, 1, 8, 8, generator=generator())
    for place, reached in (("client", True), ("wire", False)):
        model = built(sparse_place=place)
        w = layer(model).dictionary
        assert w is not None
        z = model.encoder(x)
        (found,) = torch.autograd.grad(z.square().sum(), [w], allow_unused=True)
        assert (found is not None) is reached


def test_at_the_wire_its_channel_is_the_formula_in_either_mode() -> None:
    channel = AT_THE_WIRE.with_settings({"sparse_threshold": 0.2}).channel(0.0)
    z = torch.rand(5, 3, 2, 2, generator=generator(), dtype=torch.float64)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        sent = channel.train()(z, generator())
    w = channel.stages[0].get_parameter("dictionary").double()
    torch.testing.assert_close(sent, by_hand(w, z, 0.2))
    assert torch.equal(channel.eval()(z, generator()), sent)


def test_it_draws_nothing_and_has_no_noise() -> None:
    stream = generator()
    for defence in (DEFENCES["sparse"], AT_THE_WIRE):
        defence.channel(0.3)(torch.rand(2, 4, generator=generator(1)), stream)
        assert torch.equal(stream.get_state(), generator().get_state())
        assert not defence.noisy
        assert defence.channel(0.3).noise_std == 0


def test_in_a_stack_it_stands_before_the_noise() -> None:
    stack = find_defence("noise+dropout+sparse")
    assert [type(s).__name__ for s in stack.channel(0.05).stages] == ["GaussianNoise", "Dropout"]
    model = stack.assemble(SplitModel(nn.Sigmoid(), Channel(), nn.Flatten()), (2, 3, 3), 2)
    code, squash = model.encoder.children()
    assert isinstance(code, SparseCoding)
    assert isinstance(squash, nn.Sigmoid)
    stages = stack.with_settings({"sparse_place": "wire"}).channel(0.05).stages
    assert [type(s).__name__ for s in stages] == ["SparseCoding", "GaussianNoise", "Dropout"]


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"sparse_threshold must be a finite .* got {value}"):
        build_defence(make_config({"defence": "sparse", "sparse_threshold": value}))


@pytest.mark.parametrize("place", ["client", "wire"])
def test_a_run_learns_the_dictionary_and_loads_it_again(tmp_path: Path, place: str) -> None:
    start = layer(built(sparse_threshold=0.1, sparse_place=place)).dictionary
    assert start is not None
    on = trained(tmp_path, "on", "sparse", sparse_threshold=0.1, sparse_place=place)
    (learned,) = [value for name, value in on.items() if name.endswith("dictionary")]
    assert learned.shape == start.shape
    lengths = learned.norm(dim=1)
    assert float((lengths - 1).abs().max()) > 1e-4  # all were 1
    back = load_run(tmp_path / "on")
    stage = layer(back.model)
    assert stage.dictionary is not None
    assert torch.equal(stage.dictionary, learned)
    x = torch.rand(3, 1, 8, 8, generator=generator())
    with torch.no_grad():
        sent, z = back.victim.send(x, generator()), back.model.encoder(x)
        torch.testing.assert_close(sent, stage(z) if place == "wire" else z)
