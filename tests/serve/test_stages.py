"""The client's channel in numpy is the channel of the trained network."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serve.made import manifest
from torch import nn

from splitveil.cli.deploy import export_lines
from splitveil.errors import ExportError
from splitveil.nets.channel import Channel, Clip, Dropout, GaussianNoise, Quantise, TopK
from splitveil.serve.export import stages_json
from splitveil.serve.stages import STAGES, apply_stages, check_stages, total_noise


def smashed(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 2, 3, 3, generator=torch.Generator().manual_seed(seed)) / 2 + 0.4


QUIET = [
    TopK(0.0), TopK(0.3), TopK(0.75), Quantise(1), Quantise(4), Quantise(16), Clip(-0.2, 0.7)
]  # fmt: skip


@pytest.mark.parametrize("stage", QUIET, ids=repr)
@given(n=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_stages_that_draw_nothing_are_torchs_bit_for_bit(
    stage: nn.Module, n: int, seed: int
) -> None:
    z = smashed(n, seed)
    channel = Channel([stage])
    found = apply_stages(z.numpy(), stages_json(channel))
    assert found.dtype == np.float32
    assert np.array_equal(found, channel(z).numpy())


def test_ties_are_pruned_from_the_front_as_in_torch() -> None:
    z = torch.tensor([[0.5, -0.5, 0.5, 0.5]])
    found = apply_stages(z.numpy(), [{"kind": "topk", "prune": 0.5}])
    assert found.tolist() == TopK(0.5)(z).tolist() == [[0.0, 0.0, 0.5, 0.5]]


def test_gaussian_noise_has_its_standard_deviation_and_no_memory() -> None:
    z = np.full((1000, 40), 13 * 0.3 / 16, np.float32)  # on the grid: nothing is rounded
    stages = stages_json(Channel([GaussianNoise(0.3)]))
    first, second = (apply_stages(z, stages) - z for _ in range(2))
    for drawn in (first, second):
        assert abs(drawn.std() / 0.3 - 1) < 6 / math.sqrt(2 * drawn.size)
        assert abs(drawn.mean()) < 6 * 0.3 / math.sqrt(drawn.size)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 6 / math.sqrt(first.size)
    assert abs(np.corrcoef(first[0::2].ravel(), first[1::2].ravel())[0, 1]) < 0.05


def test_dropout_zeroes_its_share_and_leaves_the_rest() -> None:
    z = np.full((1000, 40), 0.25, np.float32)
    found = apply_stages(z, stages_json(Channel([Dropout(0.3)])))
    assert set(np.unique(found)) == {np.float32(0), np.float32(0.25)}
    assert abs((found == 0).mean() - 0.3) < 6 * math.sqrt(0.21 / z.size)


def test_stages_follow_each_other_in_order() -> None:
    z = np.array([[0.1, 0.9]], np.float32)
    cut, round_up = {"kind": "clip", "low": 0.0, "high": 0.6}, {"kind": "quantise", "bits": 1}
    assert apply_stages(z, [cut, round_up]).tolist() == [[0.0, 1.0]]
    assert apply_stages(z, [round_up, cut]).tolist() == [[0.0, np.float32(0.6)]]
    assert apply_stages(z, []) is z


def test_the_channel_of_a_defence_survives_the_way_to_json() -> None:
    channel = Channel([Clip(0.1, 0.9), GaussianNoise(0.3), GaussianNoise(0.4), Quantise(8)])
    stages = stages_json(channel)
    assert [s["kind"] for s in stages] == ["clip", "gaussian", "gaussian", "quantise"]
    assert total_noise(stages) == pytest.approx(0.5)
    assert {s["kind"] for s in stages} <= STAGES.keys()
    assert stages_json(Channel()) == ()


class Blur(nn.Module):
    """A stage of somebody else."""


def test_an_unknown_stage_is_rejected_on_both_sides() -> None:
    with pytest.raises(ExportError, match=r"channel stage Blur cannot be exported; the client kno"):
        stages_json(Channel([GaussianNoise(0.1), Blur()]))
    with pytest.raises(ExportError, match=r"channel stage Blur"):
        stages_json(Blur())


class QuietNoise(GaussianNoise):
    """A subclass may do anything, so it is not its parent."""


def test_a_subclass_of_a_stage_is_unknown() -> None:
    with pytest.raises(ExportError, match="QuietNoise"):
        stages_json(Channel([QuietNoise(0.1)]))


BAD: list[Any] = [
    {"kind": "blur"}, {}, "gaussian", {"kind": "gaussian"}, {"kind": "gaussian", "std": "0.1"},
    {"kind": "gaussian", "std": float("nan")}, {"kind": "clip", "low": 0.0},
    {"kind": "gaussian", "std": True}, {"kind": ["gaussian"], "std": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("stage", BAD, ids=repr)
def test_a_stage_that_is_not_complete_is_refused(stage: Any) -> None:  # noqa: ANN401
    with pytest.raises(ExportError, match="channel stage"):
        check_stages([stage])


def test_export_tells_what_is_random_about_the_channel() -> None:
    stages = stages_json(Channel([Dropout(0.2), TopK(0.5)]))
    made = manifest(stages=stages, parity={"logits_max_abs_diff": 0.0})
    assert ", dropout of 0.2 of the values, " in export_lines(Path("e"), made)[0]
    quiet = manifest(parity={"logits_max_abs_diff": 0.0})
    assert ", no noise, " in export_lines(Path("e"), quiet)[0]
