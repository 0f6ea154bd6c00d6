"""What may be varied, what it becomes, and what is refused before anything starts."""

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.errors import ConfigError
from splitveil.experiments.search import (
    Dimension,
    applies,
    corners,
    grid_settings,
    grid_size,
    random_settings,
    spaces,
)


def test_a_defence_varies_only_settings_that_it_has() -> None:
    found = spaces(
        ["lambd=0.1,1", "reg_strength=log:0.01:0.2", "batch_size=lin:32:128"],
        ["none", "noise", "veil"],
    )
    assert {name: [d.key for d in space] for name, space in found.items()} == {
        "none": ["batch_size"],
        "noise": ["noise_std", "batch_size"],
        "veil": ["lambd", "noise_std", "batch_size"],
    }
    lambd = found["veil"][0]
    assert [(v, type(v)) for v in lambd.values] == [(0.1, float), (1.0, float)]
    assert found["none"] == (
        Dimension(key="batch_size", low=32.0, high=128.0, log=False, points=None, whole=True),
    )


def test_words_and_switches_can_be_listed() -> None:
    space = spaces(["form=hinge,gated", "skip_first_epoch=true,false"], ["gated-att"])["gated-att"]
    assert [d.values for d in space] == [
        ("hinge", "gated"),
        (True, False),
    ]


BAD = [
    ("lamda=0.1,1", "unknown setting of noise, veil 'lamda'; did you mean 'lambd'?"),
    ("lambd", "--vary needs key=a,b,c"),
    ("lambd=", "--vary needs key=a,b,c"),
    ("=1", "--vary needs key=a,b,c"),
    ("lambd=1,,2", "empty value"),
    ("lambd=big,small", "lambd must be a number, got 'big'"),
    ("batch_size=1.5,2", "batch_size must be a whole number, got 1.5"),
    ("batch_size=lin:1.5:8", "batch_size is a whole number, and so must be both ends"),
    ("form=lin:0:1", "form is not a number; list its values"),
    ("form=hinge,flat", "form must be one of"),
    ("lambd=lin:1:1", "the low end must be below the high end"),
    ("lambd=lin:2:1", "the low end must be below the high end"),
    ("lambd=log:0:1", "a log range must start above 0"),
    ("lambd=log:-1:1", "a log range must start above 0"),
    ("lambd=lin:0:inf", "both finite"),
    ("lambd=lin:nan:1", "both finite"),
    ("seed=lin:-1e308:1e308", "both finite"),
    ("lambd=lin:0", "is not a range"),
    ("lambd=lin:0:1:2:3", "is not a range"),
    ("lambd=lin:0:1:2.5", "is not a range"),
    ("lambd=lin:a:b", "is not a range"),
    ("lambd=lin:0:1:1", "the count must be from 2 to 10000, got 1; or leave it out"),
    ("lambd=lin:0:1:100000000", "the count must be from 2 to 10000, got 100000000"),
    ("lambd=1,1.0", "names a value twice"),
    ("name=a,b", "all trials of a sweep share name"),
    ("final=true,false", "all trials of a sweep share final"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_a_bad_range_is_refused_with_its_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spaces([text], ["noise", "veil"])
    assert said in str(caught.value)


def test_a_setting_is_varied_once_and_must_have_an_effect() -> None:
    with pytest.raises(ConfigError, match="noise_std is given twice"):
        spaces(["noise_std=0.1", "reg_strength=0.2"], ["noise"])
    with pytest.raises(ConfigError, match="noise_std has no effect with the defences none"):
        spaces(["noise_std=0.1"], ["none"])
    assert not applies("noise_std", "none")
    assert applies("noise_std", "noise+dropout")


def test_a_grid_is_every_combination() -> None:
    veil = spaces(["lambd=log:0.01:1:3", "epochs=lin:1:3:3"], ["veil"])["veil"]
    assert grid_settings(veil) == [
        {"lambd": a, "epochs": b} for a in (0.01, 0.1, 1.0) for b in (1, 2, 3)
    ]
    assert grid_settings(()) == [{}]
    whole = Dimension(key="epochs", low=1.0, high=2.0, log=False, points=5, whole=True)
    assert whole.listed() == [1, 2]
    with pytest.raises(ConfigError, match=r"write lambd=log:0\.01:1:5 for 5 of them"):
        grid_settings(spaces(["lambd=log:0.01:1"], ["veil"])["veil"])


def test_a_grid_is_counted_before_it_is_built() -> None:
    texts = ["lambd=lin:0:1:10000", "noise_std=lin:0.1:1:5000", "epochs=1,2"]
    veil = spaces(texts, ["veil"])["veil"]
    said = "a grid of 10000 of lambd × 5000 of noise_std × 2 of epochs has 100000000 points, but"
    for build in (grid_settings, grid_size):
        with pytest.raises(ConfigError, match=said):
            build(veil)
    assert grid_size(veil[:1]) == len(grid_settings(veil[:1])) == 10_000


numbers = st.floats(1e-6, 1e6)


@given(numbers, numbers, st.booleans(), st.booleans(), st.floats(0, 1))
def test_a_value_lies_in_its_range(
    one: float, other: float, log: bool, whole: bool, share: float
) -> None:
    low, high = sorted((one, other))
    if whole:
        low, high = math.ceil(low), math.ceil(high)
    value = Dimension(key="k", low=float(low), high=float(high), log=log, whole=whole).at(share)
    assert low * (1 - 1e-11) <= value <= high * (1 + 1e-11)
    assert isinstance(value, int) == whole


def test_a_log_range_is_drawn_evenly_in_its_logarithm() -> None:
    space = (
        *spaces(["lambd=log:0.01:1"], ["veil"])["veil"],
        Dimension(key="form", values=("a", "b")),
    )
    random = Random(0)  # noqa: S311
    drawn: list[Any] = [random_settings(space, random) for _ in range(2000)]
    below = sum(d["lambd"] < 0.1 for d in drawn) / len(drawn)
    assert abs(below - 0.5) < 0.05
    assert abs(sum(d["form"] == "a" for d in drawn) / len(drawn) - 0.5) < 0.05


def test_the_corners_hold_every_listed_value_and_both_ends() -> None:
    space = (Dimension(key="a", values=(1, 2, 3)), Dimension(key="b", low=0.0, high=1.0, log=False))
    assert corners(space) == [{"a": 1, "b": 0.0}, {"a": 2, "b": 1.0}, {"a": 3, "b": 0.0}]
    assert corners(()) == [{}]
