"""The demo in its smallest form, and its two rows from one training."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from cli.calling import TINY

import splitveil as sv
from splitveil.attacks.profiles import PROFILES
from splitveil.audits import pipeline
from splitveil.errors import ConfigError
from splitveil.experiments.demo import SHOWN, run_demo, with_share
from splitveil.record.schema import get
from splitveil.runs import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    with patch.dict(PROFILES, {"smoke": TINY}), patch.object(pipeline, "leaks_beyond_pixels") as no:
        no.return_value = {}
        folder = str(tmp_path_factory.mktemp("demo"))
        yield [sv.load_run(p) for p in run_demo(folder, "smoke", dataset="digits", epochs=2)]


def test_the_demo_has_six_rows(runs: list[Run]) -> None:
    assert [run.path.name for run in runs] == list(SHOWN)
    alone, bare, _, _, unsure, larger = (run.record for run in runs)
    assert alone is not None
    assert bare is not None
    assert unsure is not None
    assert larger is not None
    assert (alone.sent, bare.sent, larger.sent) == (0, 1, 0)
    assert (alone.exposure, larger.exposure) == (0, 0)
    assert bare.exposure == pytest.approx(
        bare.leakage, abs=1e-3
    )  # a rule that sends everything is none
    assert unsure.sent is not None
    assert 0.1 < unsure.sent < 0.5


def test_undefended_and_if_unsure_are_one_training_and_one_attack(runs: list[Run]) -> None:
    bare, unsure = runs[1], runs[4]
    ours, theirs = bare.model.state_dict(), unsure.model.state_dict()
    changed = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert changed == ["exit.thresholds"]
    records = [run.record for run in (bare, unsure)]
    seconds = [get(record, "attacks.linear.seconds") for record in records if record is not None]
    assert seconds[0] == seconds[1]  # read, not run again


def test_another_share_is_what_a_training_with_it_would_have_set(
    runs: list[Run], tmp_path: Path
) -> None:
    del tmp_path
    again = with_share(sv.load_run(runs[4].path), "as-before", 0.3)
    assert again.model.exit is not None
    assert runs[4].model.exit is not None
    assert torch.equal(again.model.exit.thresholds, runs[4].model.exit.thresholds)
    assert sv.load_run(again.path).config.settings["send"] == 0.3


def test_a_run_without_an_exit_rule_has_no_share(runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match="has no exit rule; train it with --defence early-exit"):
        with_share(runs[2], "x", 0.5)
