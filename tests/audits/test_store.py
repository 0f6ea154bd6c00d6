"""Finished attacks are not run again, and nothing else is taken for a finished attack."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from audits.made import Counting, a_target, labelled
from safetensors.torch import save

from splitveil.attacks.baseline import MeanImage
from splitveil.audits.suite import Store, attempt_key, run_attacks
from splitveil.audits.target import Target
from splitveil.audits.trained_run import code_version
from splitveil.errors import RunError
from splitveil.threat import Attack


@dataclass(frozen=True)
class InMemory(Store):
    """A store that keeps its bytes in a dictionary."""

    kept: dict[str, bytes] = field(default_factory=dict)

    def read(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def write(self, key: str, blob: bytes) -> None:
        self.kept[key] = blob


class Shelf(dict[str, bytes]):
    """What a store holds."""

    @property
    def store(self) -> Store:
        return InMemory(Path(), "code", kept=self)


CASE = a_target(identity="model and data")


def test_a_finished_attack_is_read_and_not_fitted_again() -> None:
    shelf, attack = Shelf(), Counting()
    first = run_attacks(CASE, {"a": attack}, store=shelf.store)["a"]
    again = run_attacks(CASE, {"a": attack}, store=shelf.store)["a"]
    assert len(attack.fits) == 1
    assert again.to_json() == first.to_json()
    assert torch.equal(again.mse, first.mse)
    assert torch.equal(again.images, first.images)
    assert again.curve == (0.5, 0.25)


@pytest.mark.parametrize(
    ("case", "name", "budget", "seed"),
    [
        (CASE, "a", 1, 1),
        (CASE, "b", 1, 0),
        (CASE, "a", 2, 0),
        (replace(CASE, identity="another"), "a", 1, 0),
    ],
    ids=["seed", "name", "budget", "identity"],
)
def test_another_seed_name_budget_or_model_runs_again(
    case: Target, name: str, budget: int, seed: int
) -> None:
    shelf, attack = Shelf(), Counting(budget)
    run_attacks(CASE, {"a": Counting()}, store=shelf.store)
    run_attacks(replace(case, seed=seed), {name: attack}, store=shelf.store)
    assert len(attack.fits) == 1
    assert len(shelf) == 2


def test_without_a_store_or_an_identity_nothing_is_kept() -> None:
    shelf, attack = Shelf(), Counting()
    for _ in range(2):
        run_attacks(CASE, {"a": attack})
        run_attacks(replace(CASE, identity=""), {"a": attack}, store=shelf.store)
    assert len(attack.fits) == 4
    assert shelf == {}


def test_broken_and_foreign_bytes_are_replaced() -> None:
    shelf, attack = Shelf(), Counting()
    run_attacks(CASE, {"a": attack}, store=shelf.store)
    ((key, good),) = shelf.items()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    broken = [b"", b"\x00" * 99, good[:-1], bytes(flipped), save({"mse": torch.zeros(12)})]
    for count, blob in enumerate(broken):
        shelf[key] = blob
        run_attacks(CASE, {"a": attack}, store=shelf.store)
        assert len(attack.fits) == 2 + count
        assert len(shelf[key]) == len(good)
    run_attacks(CASE, {"a": attack}, store=shelf.store)
    assert len(attack.fits) == 1 + len(broken)


def test_an_attempt_on_other_images_is_not_believed() -> None:
    shelf, attack = Shelf(), Counting()
    run_attacks(CASE, {"a": attack}, store=shelf.store)
    found = run_attacks(replace(CASE, scored=labelled(9, 1)), {"a": attack}, store=shelf.store)["a"]
    assert (found.scored, len(attack.fits)) == (9, 2)


def test_an_interrupted_audit_continues_with_the_attack_it_was_at() -> None:
    shelf, one, other = Shelf(), Counting(), Counting(failing=[True])
    attacks: dict[str, Attack] = {"one": one, "other": other}
    with pytest.raises(KeyboardInterrupt):
        run_attacks(CASE, attacks, store=shelf.store)
    assert len(shelf) == 1
    other.failing.clear()
    heard: list[tuple[int, int]] = []
    found = run_attacks(
        CASE, attacks, lambda done, total, note="": heard.append((done, total)),
        store=shelf.store,
    )  # fmt: skip
    assert (len(one.fits), len(other.fits), len(shelf)) == (1, 1, 2)
    assert list(found) == ["one", "other"]
    assert heard == [(0, 2000), (1000, 2000), (2000, 2000)]
    straight = run_attacks(CASE, {"one": Counting(), "other": Counting()})
    assert all(torch.equal(found[n].mse, straight[n].mse) for n in found)


def test_a_failing_attack_leaves_nothing() -> None:
    shelf = Shelf()
    with pytest.raises(KeyboardInterrupt):
        run_attacks(CASE, {"a": Counting(failing=[True])}, store=shelf.store)
    assert shelf == {}


class Mute(MeanImage):
    """Does not say how it is set."""

    __repr__ = object.__repr__


class Outside(MeanImage):
    """From outside the package, and states no version."""


class Stated(MeanImage):
    """From outside the package, with a version."""

    version = "3"


def test_an_attack_without_an_identity_is_never_stored() -> None:
    shelf = Shelf()
    for attack in (Mute(), Outside()):
        assert attempt_key(CASE, "a", attack, "code") is None
        run_attacks(CASE, {"a": attack}, store=shelf.store)
    assert shelf == {}
    assert attempt_key(CASE, "a", MeanImage(), "code") is not None


def test_another_version_of_an_attack_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attempt_key(CASE, "a", Stated(), "code")
    assert before is not None
    assert attempt_key(CASE, "a", Stated(), "code") == before
    monkeypatch.setattr(Stated, "version", "4")
    assert attempt_key(CASE, "a", Stated(), "code") != before


def test_other_code_runs_again_and_changed_code_keeps_nothing() -> None:
    shelf, attack = Shelf(), Counting()
    for code in ("one", "two", "two"):
        run_attacks(CASE, {"a": attack}, store=replace(shelf.store, code=code))
    assert (len(attack.fits), len(shelf)) == (2, 2)
    run_attacks(CASE, {"a": attack}, store=replace(shelf.store, code=None))
    assert (len(attack.fits), len(shelf)) == (3, 2)


def test_the_code_of_a_checkout_with_changes_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for commit, name in (("abc", "abc"), ("abc+", None)):
        monkeypatch.setenv("SPLITVEIL_COMMIT", commit)
        found = code_version()
        assert (found is None) if name is None else (found or "").endswith(f" {name}")


def test_a_folder_keeps_files_and_forgives_what_it_cannot_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "audit", "code")
    assert store.read("k") is None
    store.write("k", b"one")
    store.write("k", b"two")
    assert store.read("k") == b"two"
    assert [p.name for p in (tmp_path / "audit").iterdir()] == ["k.safetensors"]
    (tmp_path / "audit" / "d.safetensors").mkdir()
    assert store.read("d") is None


def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        Store(tmp_path / "file" / "audit", "code").write("k", b"")
