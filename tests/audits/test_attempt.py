"""An attempt's means, its subset, and its form on disk."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from audits.made import a_target, an_attempt
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from splitveil.attacks.linear import Linear
from splitveil.audits.suite import run_attacks
from splitveil.audits.target import Attempt, from_bytes, to_bytes

CPU = torch.device("cpu")


def same(one: Attempt, other: Attempt) -> bool:
    """Equal in every field, tensors by type, shape and bits."""

    def equal(a: object, b: object) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and a == b

    return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Attempt))


def test_pooled_psnr_is_that_of_the_mean_error() -> None:
    scores = an_attempt([0.1, 0.001], [10.0, 30.0]).scores()
    assert scores.psnr == pytest.approx(20.0)
    assert scores.psnr_pooled == pytest.approx(-10 * math.log10(0.0505), abs=1e-4)


def test_a_perfect_copy_pools_to_100_decibels() -> None:
    assert an_attempt([0.0, 0.0]).scores().psnr_pooled == 100.0


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert an_attempt([0.1] * 4, right=[True, False, True, True]).scores().accuracy == 0.75


def test_scores_at_rows_are_those_of_the_named_images() -> None:
    attempt = an_attempt([0.25, 0.5, 0.75], rows=[4, 0, 2], scored=5, right=[True, False, False])
    assert not attempt.whole
    assert attempt.scores().mse == 0.5
    assert attempt.scores(torch.tensor([2])).mse == 0.75
    assert attempt.scores(torch.tensor([2, 4])).mse == 0.5
    assert attempt.scores(torch.tensor([4])).accuracy == 1.0
    assert attempt.mse[attempt.place(torch.tensor([0, 4]))].tolist() == [0.5, 0.25]


def test_its_part_of_a_record_says_only_what_there_is_to_say() -> None:
    plain = an_attempt([0.25, 0.75], right=[True, False]).to_json()
    assert plain["mse"] == 0.5
    assert plain["accuracy"] == 0.5
    assert (plain["access"], plain["images"], plain["ssim"]) == ("black-box", 2, None)
    assert not {"subset", "repeats", "curve", "aux_mse"} & plain.keys()
    rich = an_attempt(
        [0.25], rows=[3], scored=9, repeats=4, curve=(1.0, 0.5), aux_mse=0.125
    ).to_json()
    assert rich["subset"] == "fixed-1"
    assert (rich["repeats"], rich["curve"], rich["aux_mse"]) == (4, [1.0, 0.5], 0.125)
    assert json.loads(json.dumps(rich, allow_nan=False)) == rich


ATTEMPTS = {
    "plain": an_attempt([0.1, 0.2]),
    "no metric but the needed": an_attempt([0.1], curve=(0.1, 1 / 3), aux_mse=1e-30),
    "everything": replace(
        an_attempt([0.1, 0.7], ssim=[0.3, -0.2], rows=[5, 1], scored=7, repeats=3),
        ssim_valid=torch.tensor([math.pi, 1e-40]),
        images=torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2),
        seconds=1.234,
    ),
}


@pytest.mark.parametrize("kind", ATTEMPTS)
def test_bytes_give_back_every_bit(kind: str) -> None:
    attempt = ATTEMPTS[kind]
    again = from_bytes(to_bytes(attempt), CPU)
    assert again is not None
    assert same(again, attempt)
    assert again.to_json() == attempt.to_json()


def test_a_measured_attempt_survives_too() -> None:
    attempt = run_attacks(a_target(), {"linear": Linear()})["linear"]
    again = from_bytes(to_bytes(attempt), CPU)
    assert again is not None
    assert same(again, attempt)
    assert not same(again, replace(attempt, mse=attempt.mse + 1e-6))


BLOB = to_bytes(ATTEMPTS["everything"])


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, len(BLOB) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed_or_changes_nothing(at: int, bit: int) -> None:
    spoiled = bytearray(BLOB)
    spoiled[at] ^= 1 << bit
    found = from_bytes(bytes(spoiled), CPU)
    assert found is None or same(found, ATTEMPTS["everything"])


@pytest.mark.parametrize("kind", [b'"I32"', b'"U32"'])
def test_numbers_read_as_another_type_are_noticed(kind: bytes) -> None:
    assert b'"F32"' in BLOB
    assert from_bytes(BLOB.replace(b'"F32"', kind), CPU) is None


@settings(deadline=None, max_examples=50)
@given(length=st.integers(0, len(BLOB) - 1))
def test_a_truncated_file_is_no_attempt(length: int) -> None:
    assert from_bytes(BLOB[:length], CPU) is None


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"not a file of ours",
        bytes(100),
        save({"mse": torch.zeros(2)}),
        save({"mse": torch.zeros(2)}, {"attempt": "{}"}),
        save({"mse": torch.zeros(2)}, {"attempt": "[]", "sha256": "0" * 64}),
    ],
    ids=["empty", "text", "zeros", "foreign", "no hash", "wrong hash"],
)
def test_foreign_bytes_are_no_attempt(blob: bytes) -> None:
    assert from_bytes(blob, CPU) is None
