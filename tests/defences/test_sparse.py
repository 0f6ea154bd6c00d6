"""Sparse coding as a defence: a layer of the client that is trained, deployed and saved."""

from pathlib import Path

import pytest
import torch
from defences.made import trained

from splitveil.config import build_defence, find_defence, make_config
from splitveil.defences import DEFENCES
from splitveil.errors import ConfigError
from splitveil.nets import SparseCoding
from splitveil.runs import load_run


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_its_channel_is_the_formula_in_either_mode() -> None:
    channel = DEFENCES["sparse"].with_settings({"sparse_threshold": 0.2}).channel(0.0)
    z = torch.rand(5, 3, 2, 2, generator=generator(), dtype=torch.float64)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        sent = channel.train()(z, generator())
    w = channel.stages[0].dictionary.double()
    a = torch.stack([w @ row for row in z.flatten(1)])
    code = a.sign() * (a.abs() - 0.2).clamp_min(0)
    by_hand = torch.stack([w.T @ row for row in code]).reshape(z.shape)
    torch.testing.assert_close(sent, by_hand)
    assert torch.equal(channel.eval()(z, generator()), sent)


def test_it_draws_nothing_and_has_no_noise() -> None:
    defence, stream = DEFENCES["sparse"], generator()
    defence.channel(0.3)(torch.rand(2, 4, generator=generator(1)), stream)
    assert torch.equal(stream.get_state(), generator().get_state())
    assert not defence.noisy
    assert defence.channel(0.3).noise_std == 0


def test_in_a_stack_it_stands_before_the_noise() -> None:
    stages = find_defence("noise+dropout+sparse").channel(0.05).stages
    assert [type(s).__name__ for s in stages] == ["SparseCoding", "GaussianNoise", "Dropout"]


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"sparse_threshold must be a finite .* got {value}"):
        build_defence(make_config({"defence": "sparse", "sparse_threshold": value}))


def test_at_threshold_zero_it_is_no_defence_and_above_it_the_dictionary_learns(
    tmp_path: Path,
) -> None:
    off = trained(tmp_path, "off", "sparse", sparse_threshold=0.0)
    plain = trained(tmp_path, "plain", "none")
    assert off.keys() == plain.keys()
    assert all(torch.equal(off[k], plain[k]) for k in plain)
    learned = trained(tmp_path, "on", "sparse", sparse_threshold=0.1)["channel.stages.0.dictionary"]
    far = (learned @ learned.T - torch.eye(64)).abs().max()
    assert float(far) > 1e-3  # it started orthogonal
    back = load_run(tmp_path / "on")
    stage = back.model.channel.stages[0]  # type: ignore[index]
    assert isinstance(stage, SparseCoding)
    assert stage.dictionary is not None
    assert torch.equal(stage.dictionary, learned)
    x = torch.rand(3, 1, 8, 8, generator=generator())
    with torch.no_grad():
        sent = back.victim.send(x, generator())
        torch.testing.assert_close(sent, stage(back.model.encoder(x)))
