"""Every flag of the wire has something heard that raises it and something that does not."""

from typing import Any

import pytest
from audits.made import a_target

from splitveil.audits.flags import FLAGS, raise_flags
from splitveil.io import Json


def heard(*failed: str, measured: float = 0.05, **more: Any) -> Json:  # noqa: ANN401 - JSON
    noise = {"declared": 0.05, "measured": measured, "measured_low": 0.0494, "measured_high": 0.051}
    tests = {name: {"seen": 0.25, "p": 1e-9} for name in failed}
    return {"images": 9, "noise": noise, "tests": tests, "failed": list(failed)} | more


def offline(difference: float, p: float) -> Json:
    return {"offline": {"attack": "linear", "mse": 0.02, "difference": difference, "p": p}}


def seen(flag: str, wire: Json) -> str | None:
    raised = raise_flags(a_target(), {}, certificates={}, leaks={}, wire=wire)
    return next((found.seen for found in raised if found.name == flag), None)


RAISED: dict[str, list[Json]] = {
    "noise missing on the wire": [
        heard("quieter", measured=0.0),
        heard("quieter", "repeats", "shape", measured=0.03),
        {"tests": {"nearer": {"seen": 0.5, "p": 0.0}}, "failed": ["nearer"]},
    ],
    "noise repeats on the wire": [heard("repeats"), heard("starts"), heard("quieter", "repeats")],
    "floating-point noise on the wire": [heard("grid"), heard("low bits")],
    "noise not as declared on the wire": [
        heard(name)
        for name in ("louder", "shape", "farther", "next image", "next number", "other number")
    ],
    "another client on the wire": [heard(name) for name in ("offset", "slope", "different")],
    "more than z on the wire": [heard(beside=["exif in its tensor"])],
    "wire leaks more than the audit": [offline(-0.01, 1e-5)],
}
SOUND: dict[str, list[Json]] = {
    "noise missing on the wire": [{}, heard(), heard("louder")],
    "noise repeats on the wire": [{}, heard(), heard("quieter", "repeats", measured=0.0)],
    "floating-point noise on the wire": [{}, heard(), heard("grid", measured=0.0)],
    "noise not as declared on the wire": [{}, heard(), heard("quieter", "shape", measured=1e-9)],
    "another client on the wire": [{}, heard(), heard("quieter")],
    "more than z on the wire": [{}, heard(beside=[])],
    "wire leaks more than the audit": [
        {}, offline(0.01, 1e-5), offline(-0.01, 0.01), {"offline": {"refused": "no audit"}},
    ],
}  # fmt: skip


def test_every_flag_of_the_wire_is_planted_and_has_a_sound_case() -> None:
    assert RAISED.keys() == SOUND.keys() == {n for n in FLAGS if "wire" in n}


@pytest.mark.parametrize(("flag", "given"), [(f, g) for f in RAISED for g in RAISED[f]])
def test_what_was_heard_raises_its_flag(flag: str, given: Json) -> None:
    assert seen(flag, given)


@pytest.mark.parametrize(("flag", "given"), [(f, g) for f in SOUND for g in SOUND[f]])
def test_what_is_sound_raises_none(flag: str, given: Json) -> None:
    assert seen(flag, given) is None


def test_a_flag_names_numbers() -> None:
    words = seen("noise missing on the wire", heard("quieter", measured=0.03))
    assert words is not None
    assert "9 images has deviation 0.03; declared is 0.05, which gives no less than 0.0494" in words
    words = seen("wire leaks more than the audit", offline(-0.01, 1e-5))
    assert words == "linear has MSE 0.0100 on the wire, 0.0200 in the run's audit"
