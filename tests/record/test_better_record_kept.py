"""Which record may take the place of another."""

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
def test_as_much_or_more_takes_the_place(new: Record) -> None:
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
def test_less_or_something_else_does_not(new: Record) -> None:
    assert not is_at_least_as_strong(new, record(), PROFILES)


def test_a_table_of_attributes_is_not_lost_to_an_audit_without_it() -> None:
    assert not is_at_least_as_strong(record(), record(attributes=["age"]), PROFILES)
