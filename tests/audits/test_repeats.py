"""What k sendings of one image add: closed forms, what cannot double, and whose draws these are."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.audits.beyond_pixels import SENDINGS, WIDEST, doubling, repeat_leaks, running_max
from splitveil.audits.suite import label_only_mse, run_attacks
from splitveil.audits.target import Target
from splitveil.errors import AuditError
from splitveil.io import Json
from splitveil.nets.channel import Channel, Dropout, GaussianNoise
from splitveil.threat import Labelled, Victim

SPREAD = 0.1  # of a pixel around grey: five deviations to black and white
BETWEEN = "doubles between {} and {} sendings of one image"


def gaussian(n: int, seed: int) -> Labelled:
    drawn = torch.randn(n, 1, 4, 4, generator=Generator().manual_seed(seed))
    return Labelled((0.5 + SPREAD * drawn).clamp(0, 1), torch.zeros(n, dtype=torch.long))


def turned() -> nn.Sequential:
    """A rotation of the pixels: it keeps everything and hides nothing."""
    drawn = torch.randn(16, 16, generator=Generator().manual_seed(3))
    layer = nn.Linear(16, 16, bias=False)
    layer.weight.data = torch.linalg.qr(drawn)[0]
    return nn.Sequential(nn.Flatten(), layer)


def case_of(*stages: nn.Module, encoder: nn.Module | None = None) -> Target:
    return Target(
        victim=Victim(encoder or turned(), Channel(list(stages))),
        head=nn.LazyLinear(1),
        classes=["only"],
        aux=gaussian(3000, 0),
        scored=gaussian(1000, 1),
    )


def told(case: Target, seed: int = 0) -> Json:
    return repeat_leaks(replace(case, seed=seed))


@pytest.mark.parametrize("std", [0.1, 0.2, 0.3])
def test_a_gaussian_clients_leakage_is_the_closed_form(std: float) -> None:
    found = told(case_of(GaussianNoise(std)))
    assert found["leakage"].keys() == {str(k) for k in SENDINGS}
    for k in SENDINGS:
        optimum = SPREAD**2 / (SPREAD**2 + std**2 / k)
        assert found["leakage"][str(k)] == pytest.approx(optimum, abs=0.02)


def test_a_gaussian_client_doubles_where_the_closed_form_does() -> None:
    found = told(case_of(GaussianNoise(0.2)))
    exact = next(k for k in range(2, 17) if k / (k + 4) >= 2 / 5)  # leakage k/(k + σ²/s²)
    assert exact == 3
    assert found["doubles"] == {
        "kind": "between",
        "after": 2,
        "by": 4,
        "says": "doubles between 2 and 4 sendings of one image",
    }
    assert (found["attack"], found["access"]) == ("linear", "repeats")
    assert (found["aux"], found["n"]) == (3000, 1000)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_it_is_the_linear_attack_of_the_suite_given_k_sendings() -> None:
    case = case_of(GaussianNoise(0.2))
    found, ceiling = told(case), label_only_mse(case.aux, case.scored, 1)
    assert found["ceiling"] == pytest.approx(ceiling)
    attacks = {f"{k}": KQuery(repeats=k, inner=Linear()) for k in (1, 4)}
    for k, attempt in run_attacks(case, attacks).items():
        assert found["mse"][k] == pytest.approx(attempt.scores().mse, rel=0.02)


def test_dropout_has_its_account_without_a_certificate() -> None:
    leakage = told(case_of(Dropout(0.5)))["leakage"]
    assert 0 < leakage["1"] < leakage["4"] < leakage["16"]


def test_a_deterministic_client_is_flat() -> None:
    half = nn.Sequential(turned(), nn.Linear(16, 4, bias=False))
    half[1].weight.data = torch.eye(4, 16)
    found = told(case_of(encoder=half))
    assert len(set(found["leakage"].values())) == 1
    assert found["leakage"]["1"] == pytest.approx(0.25, abs=0.02)  # 4 of 16 directions
    assert found["doubles"]["kind"] == "never"
    assert found["doubles"]["says"] == "does not double within 16 sendings of one image"


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 16)


def test_a_client_that_sends_noise_alone_has_nothing_to_double() -> None:
    found = told(case_of(GaussianNoise(1.0), encoder=Nothing()))
    assert max(found["leakage"].values()) <= 0.0
    assert found["doubles"]["says"] == "nothing leaks to double"


def test_seeds_fix_every_bit_and_change_little() -> None:
    case = case_of(GaussianNoise(0.2))
    first, other = told(case), told(case, seed=1)
    assert told(case) == first != other
    assert first["doubles"] == other["doubles"]
    for k in first["leakage"]:
        assert first["leakage"][k] == pytest.approx(other["leakage"][k], abs=0.02)


def test_no_other_stream_moves() -> None:
    case = case_of(GaussianNoise(0.2))
    z, state = case.sent.z.clone(), torch.get_rng_state()
    repeat_leaks(case)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(case.sent.z, z)
    assert torch.equal(replace(case).sent.z, z)


def test_the_cost_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitveil.audits.beyond_pixels.AUX", 200)
    monkeypatch.setattr("splitveil.audits.beyond_pixels.SCORED", 50)
    found = told(case_of(GaussianNoise(0.2)))
    assert (found["aux"], found["n"]) == (200, 50)


def test_what_cannot_be_counted_is_refused_with_its_reason() -> None:
    case = case_of(GaussianNoise(0.2))
    few = Labelled(case.aux.images[:9], case.aux.labels[:9])
    with pytest.raises(AuditError, match="at least 10 aux images, got 9"):
        told(replace(case, aux=few))
    wide = case_of(encoder=nn.Sequential(nn.Flatten(), nn.Linear(16, WIDEST + 1)))
    with pytest.raises(AuditError, match=r"at most 4096 numbers .* sends 4097"):
        told(wide)
    same = Labelled(torch.full((20, 1, 4, 4), 0.5), torch.zeros(20, dtype=torch.long))
    with pytest.raises(AuditError, match="every scored image is the mean image"):
        told(replace(case, aux=same, scored=same))


@pytest.mark.parametrize(
    ("leakage", "kind", "after", "by", "says"),
    [
        ({1: 0.2, 2: 0.4, 4: 0.9}, "between", 1, 2, "doubles at 2 sendings of one image"),
        ({1: 0.1, 2: 0.1, 8: 0.3}, "between", 2, 8, BETWEEN.format(2, 8)),
        ({1: 0.1, 2: 0.3, 4: 0.1}, "between", 1, 2, "doubles at 2 sendings of one image"),
        ({1: 0.5, 8: 0.99}, "never", None, None, "does not double within 8 sendings of one image"),
        ({1: 0.5, 8: 1.0}, "between", 1, 8, BETWEEN.format(1, 8)),
        ({1: 0.6, 2: 0.9}, "cannot", None, None, "cannot double: more than half leaks already"),
        ({1: 0.0, 2: -0.1}, "nothing", None, None, "nothing leaks to double"),
        (
            {1: -0.1, 2: 0.0, 4: 0.1},
            "nothing",
            2,
            4,
            "nothing leaks to double at one sending of an image; something does at 4",
        ),
    ],
)
def test_doubling_in_words(
    leakage: dict[int, float], kind: str, after: int | None, by: int | None, says: str
) -> None:
    found = doubling(leakage)
    assert (found.kind, found.after, found.by, found.says) == (kind, after, by, says)


def test_one_sending_must_have_been_measured() -> None:
    with pytest.raises(AuditError, match=r"leakage of one sending is needed, got k = \[2, 4\]"):
        doubling({4: 0.4, 2: 0.1})


MEASURED = st.dictionaries(st.integers(1, 20), st.floats(-1, 1), min_size=1)


@given(leakage=MEASURED)
def test_more_sendings_never_give_less(leakage: dict[int, float]) -> None:
    found = running_max(leakage)
    assert list(found) == sorted(leakage)
    for k, value in found.items():
        assert value == max(leakage[other] for other in leakage if other <= k)


@given(leakage=MEASURED, once=st.floats(1e-6, 0.5))
def test_doubling_brackets_the_first_number_at_twice(
    leakage: dict[int, float], once: float
) -> None:
    leakage = leakage | {1: once}
    reached = [k for k in leakage if leakage[k] >= 2 * once]
    found = doubling(leakage)
    if not reached:
        assert found.by is None or math.isclose(leakage[found.by], 2 * once)
    else:
        assert found.by == min(reached) or math.isclose(leakage[found.by or 1], 2 * once)
        assert found.after is not None
        assert found.after < min(reached)
