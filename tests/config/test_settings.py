"""Settings from text: types, near names, TOML there and back."""

import math
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import pytest

import splitveil as sv
from splitveil.config.resolve import flat_config, make_config
from splitveil.config.run_config import RunConfig, parse_pairs, read_toml, write_toml
from splitveil.defences.base import Defence
from splitveil.defences.catalogue import DEFENCES
from splitveil.errors import ConfigError, Range


def test_pairs_have_toml_types() -> None:
    texts = ["a=1", "b=0.5", "c=true", "d=word", 'e="7"', "f=1e-3", "g = two words "]
    assert parse_pairs(texts) == {
        "a": 1, "b": 0.5, "c": True, "d": "word", "e": "7", "f": 1e-3, "g": "two words",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".5", 0.5),
        ("-.1", -0.1),
        ("5.", 5.0),
        (".1e-2", 0.001),
        (".", "."),
        (".a", ".a"),
        ("e5", "e5"),
    ],
)
def test_a_number_may_begin_or_end_with_its_point(text: str, value: float | str) -> None:
    assert parse_pairs([f"a={text}"]) == {"a": value}


@pytest.mark.parametrize("text", ["lambd", "=3", ""])
def test_text_that_is_not_key_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_pairs([text])


def test_a_repeated_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse_pairs(["a=1", "a=2"])


@pytest.mark.parametrize("defence", DEFENCES)
def test_every_configuration_survives_toml(defence: str, tmp_path: Path) -> None:
    config = make_config({"defence": defence, "name": "none", "seed": 3})
    path = tmp_path / "config.toml"
    path.write_text(write_toml(flat_config(config)), encoding="utf-8")
    back = make_config(read_toml(path))
    assert flat_config(back) == flat_config(config)
    assert back.name == "none"


def test_names_of_the_reference_documents_are_settings() -> None:
    config = make_config({"defence": "gated-att", "lambd": 8, "snr_thresh": 0.2, "hidden_dim": 32})
    assert config.settings == {"lambd": 8.0, "snr_thresh": 0.2, "hidden_dim": 32}
    known = {f.name for f in fields(DEFENCES["gated-att"])}
    seeds = "lambd attention_loss_scale attention_warmup_epochs var_threshold class_gate_a"
    seeds += " class_gate_b snr_thresh snr_sharp softplus_beta margin_m slot_power eps"
    assert set(seeds.split()) <= known


def test_reg_strength_is_the_channels_noise() -> None:
    assert make_config({"reg_strength": 0.1}).noise_std == 0.1
    with pytest.raises(ConfigError, match="same number"):
        make_config({"reg_strength": 0.1, "noise_std": 0.1})


def test_none_switches_an_optional_setting_off() -> None:
    assert make_config({"attention_lr": "none"}).settings == {"attention_lr": None}


def test_a_path_is_a_text() -> None:
    assert make_config({"runs_dir": Path("a") / "b"}).runs_dir == str(Path("a") / "b")


def test_a_run_config_made_in_python_is_checked_alike() -> None:
    assert RunConfig(runs_dir="a", lr=1.0) == make_config({"runs_dir": Path("a"), "lr": 1})
    program = "from splitveil.config import RunConfig; RunConfig(seed='0', epochs=1.5)"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    said = "ConfigError: seed must be a whole number, got '0'; epochs must be a whole number, got 1"
    assert said in ran.stderr


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"lamda": 1, "form": "cubic", "bias": 3, "hidden_dim": "wide"})
    for words in ("did you mean 'lambd'", "form must be one of gated, hinge, trace",
                  "bias must be true or false", "hidden_dim must be a whole number"):  # fmt: skip
        assert words in str(caught.value)


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_toml(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("lambd = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(bad)


@dataclass(frozen=True, kw_only=True)
class NamedAsTheRun(Defence):
    """Its field would be read back as the run's noise."""

    noise_std: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Listing(Defence):
    """No flat file gives its field back."""

    levels: tuple[float, ...] = (0.1, 0.2)


@dataclass(frozen=True, kw_only=True)
class Unset(Defence):
    """Its preset is not of the type it declares."""

    width: float = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("defence", "said"),
    [
        (NamedAsTheRun(summary=""), "has a field 'noise_std', but that is a setting of every run"),
        (
            Listing(summary=""),
            "has a field 'levels' of type tuple, which config.toml cannot store; use",
        ),
        (Unset(summary=""), "has a default of the wrong type: width must be a number, got None"),
    ],
)
def test_a_defence_that_config_toml_cannot_store_is_refused(
    defence: Defence, said: str, tmp_path: Path
) -> None:
    config = RunConfig(dataset="digits", defence="mine", epochs=1, runs_dir=str(tmp_path / "runs"))
    with (
        patch.dict(DEFENCES, {"mine": defence}),
        pytest.raises(ConfigError, match=re.escape(f"defence 'mine' {said}")),
    ):
        sv.fit(config)
    assert not (tmp_path / "runs").exists()


@dataclass(frozen=True, kw_only=True)
class Ranged(Defence):
    """Declares its ranges at the fields."""

    share: Annotated[float, Range(0, 1, below=True, hint="0 is nothing")] = 0.5
    rate: Annotated[float, Range(0, above=True)] | None = None
    rounds: Annotated[int, Range(1)] = 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"share": 1.0}, "share must be in [0, 1), got 1.0; 0 is nothing"),
        ({"share": math.nan}, "share must be in [0, 1), got nan; 0 is nothing"),
        ({"rate": 0.0}, "rate must be a finite number > 0, got 0.0"),
        ({"rate": math.inf}, "rate must be a finite number > 0, got inf"),
        ({"rounds": 0, "share": -1.0}, "share must be in [0, 1), got -1.0; 0 is nothing; rounds"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ],
)
def test_a_field_outside_the_range_it_declares_is_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Ranged(summary="").with_settings(settings)
    assert Ranged(summary="", share=0.0, rate=1e-9, rounds=1).setting_types()["share"] is float


@pytest.mark.parametrize(
    ("name", "instead"),
    [("use_attention_cem", "gated-att"), ("random_ini_centers", "skip_first_epoch"),
     ("tau", "var_threshold"), ("num_epochs", "epochs")],
)  # fmt: skip
def test_names_of_the_documents_are_answered(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' has another name here; .*{instead}"):
        make_config({"defence": "slot-cross", name: "1"})


@pytest.mark.parametrize("name", ["lambda", "λ", "lambd"])
def test_lambda_may_be_written_in_three_ways(name: str) -> None:
    assert make_config({"defence": "veil", name: 0.5}).settings == {"lambd": 0.5}
    with pytest.raises(ConfigError, match=r"reg_strength and noise_std are the same number"):
        make_config({"defence": "veil", "reg_strength": 0.1, "noise_std": 0.1})
