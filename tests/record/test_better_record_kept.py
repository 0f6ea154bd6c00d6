"""Which record may replace another."""

from typing import Any

import pytest

from splitveil.record.files import is_at_least_as_strong
from splitveil.record.schema import Record

Json = dict[str, Any]
PROFILES = ("smoke", "quick", "standard", "paper")
SOME: Json = {"mean": {}, "linear": {}}


def record(
    profile: str = "quick", aux: str = "train", seed: int = 0, attacks: Json = SOME, **audit: object
) -> Record:
    made = {
        "audit": {"profile": profile, "aux": aux, "model": "abc"} | audit,
        "splits": {"scored": aux},
        "seeds": {"attack": seed},
        "attacks": attacks,
        "leaks": {"re-id": {}, "refused": {}},
    }
    return Record.from_dict(made)


@pytest.mark.parametrize(
    "new",
    [
        record(),
        record(attacks=SOME | {"decoder": {}}),
        record("standard", attacks={"mean": {}}),  # all of the larger profile
        record(attributes=["age"]),
    ],
)
def test_an_equal_or_stronger_record_replaces_the_old_one(new: Record) -> None:
    assert is_at_least_as_strong(new, record(), PROFILES)


@pytest.mark.parametrize(
    "new",
    [
        record("smoke", attacks=SOME | {"gan": {}}),
        record(aux="val"),
        record(seed=1),
        record(model="another"),
        record(attacks={"mean": {}}),
        record("standard", attacks={"mean": {}}, only=["mean"]),
        record("standard", attacks={"mean": {}}, left_out={"linear": "why"}),
        Record.from_dict(record().to_dict() | {"leaks": {"refused": {"re-id": "why"}}}),
    ],
)
def test_a_weaker_or_different_record_does_not(new: Record) -> None:
    assert not is_at_least_as_strong(new, record(), PROFILES)


def test_an_audit_without_attributes_does_not_replace_one_with() -> None:
    assert not is_at_least_as_strong(record(), record(attributes=["age"]), PROFILES)
