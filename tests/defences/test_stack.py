"""Stacks of defences: one order, one noise, one penalty, flat settings, from name to run folder."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli.app import app
from splitveil.config.resolve import build_defence, flat_config, make_config, read_folder, resolve
from splitveil.config.run_config import read_toml
from splitveil.data.catalogue import load
from splitveil.defences.base import Defence, PenaltyPlan, Stack, stack
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.errors import CheckpointError, ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.runs import load_run
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.train.state import read_checkpoint

STAGE_OF = {"dropout": "Dropout", "topk": "TopK", "quantise": "Quantise"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stages(name: str, noise_std: float = 0.05) -> list[str]:
    return [type(s).__name__ for s in find_defence(name).channel(noise_std).stages]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("noise+dropout", ["GaussianNoise", "Dropout"]),
        ("dropout+noise", ["GaussianNoise", "Dropout"]),
        ("dropout+veil+clip", ["Clip", "GaussianNoise", "Dropout"]),
        ("topk+cem", ["GaussianNoise", "TopK"]),
        ("quantise+dropout+veil+topk", ["GaussianNoise", "Quantise", "Dropout", "TopK"]),
        ("topk+dropout", ["TopK", "Dropout"]),
        ("noise+veil", ["GaussianNoise"]),
    ],
)
def test_noise_stands_first_and_once_and_the_rest_as_written(name: str, order: list[str]) -> None:
    assert stages(name) == order
    assert stages(name, 0.0) == [s for s in order if s != "GaussianNoise"]


@given(st.permutations(["noise", "veil", "dropout", "topk", "quantise"]))
def test_in_any_order_the_noise_is_that_of_the_run(names: list[str]) -> None:
    defence = find_defence("+".join(names))
    assert stages("+".join(names))[1:] == [STAGE_OF[n] for n in names if n in STAGE_OF]
    assert defence.channel(0.05).noise_std == pytest.approx(0.05)
    assert defence.noisy


def test_a_stack_sends_what_its_stages_send_one_after_another() -> None:
    z = torch.rand(6, 2, 4, 4, generator=generator(5))
    ours, stream = generator(), generator()
    noisy = GaussianNoise(0.05)(z, stream)
    dropped = DEFENCES["dropout"].channel(0.0)(noisy, stream)
    by_hand = DEFENCES["quantise"].channel(0.0)(dropped, stream)
    assert torch.equal(find_defence("dropout+quantise+cem").channel(0.05)(z, ours), by_hand)


def test_noise_hides_less_after_a_threshold_than_before_it() -> None:
    """Why the noise is first: .49 and .51 are alike under noise .1, but 0 and 1 are not."""
    z = torch.tensor([0.49, 0.51]).repeat_interleave(4000)[:, None]
    one_bit = DEFENCES["quantise"].with_settings({"bits": 1}).channel(0.0)

    def told_apart(sent: torch.Tensor) -> float:
        return float(((sent > 0.5) == (z > 0.5)).float().mean())

    ours = build_defence(make_config({"defence": "quantise+noise", "bits": 1})).channel(0.1)
    assert told_apart(GaussianNoise(0.1)(one_bit(z), generator())) > 0.99
    assert told_apart(ours(z, generator())) == pytest.approx(0.54, abs=0.02)  # Φ(.1) = .540


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [("topk+cem", KMeansCEM, "cem"), ("dropout+veil+topk", GatedAttentionCEM, "veil")],
)
def test_the_penalty_is_that_of_the_part_that_has_one(name: str, kind: type, part: str) -> None:
    defence = find_defence(name)
    assert isinstance(defence.surrogate(36, 4, 0.05), kind)
    assert defence.penalty_plan() == DEFENCES[part].penalty_plan()
    changed = build_defence(make_config({"defence": name, "lambd": 2})).penalty_plan()
    assert changed == DEFENCES[part].with_settings({"lambd": 2.0}).penalty_plan()


def test_without_a_penalty_there_is_no_surrogate() -> None:
    defence = find_defence("noise+dropout+topk")
    assert defence.surrogate(36, 4, 0.05) is None
    assert defence.penalty_plan() == PenaltyPlan()


def test_net_and_summary_come_from_the_parts() -> None:
    assert find_defence("veil+topk").client == find_defence("topk+veil").client == "thin-deep"
    assert find_defence("noise+topk").client == "vgg11"
    thin = replace(DEFENCES["topk"], client="small")
    assert stack([("topk", thin), ("veil", DEFENCES["veil"])]).client == "thin-deep"
    assert stack([("veil", DEFENCES["veil"]), ("topk", thin)]).client == "small"
    said = find_defence("topk+veil").summary
    assert said == f"{DEFENCES['topk'].summary} + {DEFENCES['veil'].summary}"


def test_each_setting_reaches_its_part_alone() -> None:
    config = make_config({"defence": "dropout+topk+veil", "prune": 0.25, "lambd": 1, "seed": 3})
    assert (config.seed, config.settings) == (3, {"prune": 0.25, "lambd": 1.0})
    built = build_defence(config)
    assert isinstance(built, Stack)
    parts = dict(built.parts)
    assert parts["dropout"] == DEFENCES["dropout"]
    assert parts["topk"] == DEFENCES["topk"].with_settings({"prune": 0.25})
    assert parts["veil"] == DEFENCES["veil"].with_settings({"lambd": 1.0})
    assert "Dropout(p=0.2)" in str(built.channel(0.1))
    assert "TopK(prune=0.25)" in str(built.channel(0.1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none+noise", "'none' is not a defence and cannot be stacked; leave it out"),
        ("topk+none", "'none' is not a defence"),
        ("noise+topk+noise", "'noise' appears twice in the stack noise+topk+noise; give it once"),
        ("cem+dropout+veil", "'cem' and 'veil' each have a penalty, but a stack can have only one"),
        ("noise+drpout", "unknown defence 'drpout'; did you mean 'dropout'? choose from: alone, "),
        ("noise+", "unknown defence ''; choose from: alone, arl, "),
        ("+", "unknown defence ''; choose from: alone, arl, "),
    ],
)
def test_what_cannot_be_stacked_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_config({"defence": name})


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"'none' is not .*'veil' appears twice.*'veil' and 'cem'"
    ):
        find_defence("veil+none+cem+veil")


@dataclass(frozen=True, kw_only=True)
class AlsoPrunes(Defence):
    """Has a setting of the same name as `topk`."""

    prune: float = 0.1


def test_parts_with_a_common_setting_are_refused() -> None:
    parts = [("topk", DEFENCES["topk"]), ("mine", AlsoPrunes(summary="mine"))]
    with pytest.raises(ConfigError, match=r"'topk' and 'mine' each have a setting 'prune'"):
        stack(parts)


@dataclass(frozen=True, kw_only=True)
class OwnNoise(Defence):
    """Adds noise that is not the run's."""

    sigma: float = 0.5

    def channel(self, noise_std: float) -> Channel:
        """As large as it says."""
        del noise_std
        return Channel([GaussianNoise(self.sigma)])


def test_a_part_with_noise_of_its_own_is_refused() -> None:
    parts = [("topk", DEFENCES["topk"]), ("mine", OwnNoise(summary="mine"))]
    with pytest.raises(ConfigError, match=r"'mine' adds Gaussian noise of its own"):
        stack(parts)


@pytest.mark.parametrize("penalised", [n for n, d in DEFENCES.items() if d.penalty_plan().lambd])
def test_no_two_presets_that_can_be_stacked_share_a_setting(penalised: str) -> None:
    stackable = {n: d for n, d in DEFENCES.items() if n != "none" and d.sends}
    plain = [n for n, d in stackable.items() if not d.penalty_plan().lambd]
    quiet = [n for n in plain if not DEFENCES[n].learns_noise]
    for loud in (n for n in plain if DEFENCES[n].learns_noise):
        names = [*quiet, loud, penalised]
        found = find_defence("+".join(names)).settings()
        assert len(found) == sum(len(DEFENCES[n].settings()) for n in names)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lambd": 1}, "unknown setting for defence 'noise+dropout' 'lambd'"),
        ({"parts": 1}, "unknown setting for defence 'noise+dropout' 'parts'"),
        ({"dropot": 0.1}, "did you mean 'dropout'?"),
        ({"dropout": "much"}, "dropout must be a number, got 'much'"),
        ({"dropout": 1.0}, "dropout must be in [0, 1), got 1.0"),
    ],
)
def test_bad_settings_of_a_stack_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_defence(make_config({"defence": "noise+dropout"} | options))


def test_a_setting_that_no_part_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'prun'; did you mean 'prune'\?"):
        find_defence("noise+topk").with_settings({"prun": 0.1})


def test_noise_std_of_a_quiet_stack_names_the_noisy_one() -> None:
    config = make_config({"defence": "topk+dropout", "noise_std": 0.1})
    with pytest.raises(ConfigError, match=r"adds no noise.*use defence 'noise\+topk\+dropout'"):
        resolve(config, load("digits", None))


def weights(run: sv.Run) -> dict[str, torch.Tensor]:
    return read_checkpoint(run.path / "checkpoint.safetensors").part("model")


def fit(folder: Path, defence: str, **options: Any) -> sv.Run:  # noqa: ANN401
    flat = {"dataset": "digits", "epochs": 1, "device": "cpu", "runs_dir": str(folder)}
    return sv.fit(make_config(flat | {"defence": defence} | options))


def test_a_penalty_of_weight_zero_leaves_no_trace_in_a_stack(tmp_path: Path) -> None:
    plain = weights(fit(tmp_path, "noise+dropout"))
    off = weights(fit(tmp_path, "dropout+veil", lambd=0.0))
    on = weights(fit(tmp_path, "dropout+veil", name="on"))
    assert all(torch.equal(v, plain[k]) for k, v in off.items())
    assert not all(torch.equal(v, plain[k]) for k, v in on.items())


def test_a_stack_goes_from_the_command_line_to_a_run_and_back(tmp_path: Path) -> None:
    words = ["--defence", "topk+noise+dropout", "--runs-dir", str(tmp_path)]
    new = ["train", *words, "--epochs", "1", "--device", "cpu", "--set", "dropout=0.3", "--json"]
    result = CliRunner().invoke(app, new)
    assert result.exit_code == 0, result.output
    folder = Path(json.loads(result.stdout)["run"])
    assert folder == tmp_path / "digits-topk+noise+dropout-s0"
    written = read_toml(folder / "config.toml")
    assert (written["defence"], written["dropout"], written["prune"], written["noise_std"]) == (
        "topk+noise+dropout", 0.3, 0.5, 0.05,
    )  # fmt: skip
    config, _ = read_folder(folder)
    assert flat_config(config).items() <= written.items()
    run = load_run(folder)
    assert isinstance(run.model.channel, Channel)
    kinds = [type(s).__name__ for s in run.model.channel.stages]
    assert kinds == ["GaussianNoise", "TopK", "Dropout"]
    assert run.noise_std == pytest.approx(0.05)
    x = torch.rand(4, *run.built.image_shape, generator=generator())
    zeros = (run.victim.send(x, generator()) == 0).flatten(1).float().mean(1)
    assert bool((zeros >= 0.5).all())
    again = CliRunner().invoke(app, ["train", *words, "--resume", "--json"])
    assert again.exit_code == 0, again.output
    other = make_config(flat_config(config) | {"dropout": 0.4})
    with pytest.raises(CheckpointError, match=r"dropout was 0\.3, is 0\.4"):
        sv.fit(other, resume=True)
