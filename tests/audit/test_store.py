"""Finished attacks are not run again, and nothing else is taken for a finished attack."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from audit.made import Counting, a_case, labelled
from safetensors.torch import save

from splitveil.attacks import Decoder, Linear, MeanImage
from splitveil.audits import Case, Store, run_attacks, suite
from splitveil.audits.suite import attempt_key, source
from splitveil.audits.trained_run import folder_store
from splitveil.errors import RunError
from splitveil.types import Attack


class Shelf(dict[str, bytes]):
    """A store in memory."""

    @property
    def store(self) -> Store:
        return Store(self.get, self.__setitem__)


CASE = a_case(identity="model and data")


def test_a_finished_attack_is_read_and_not_fitted_again() -> None:
    shelf, attack = Shelf(), Counting()
    first = run_attacks(CASE, {"a": attack}, 0, store=shelf.store)["a"]
    again = run_attacks(CASE, {"a": attack}, 0, store=shelf.store)["a"]
    assert len(attack.fits) == 1
    assert again.to_json() == first.to_json()
    assert torch.equal(again.mse, first.mse)
    assert torch.equal(again.pictures, first.pictures)
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
    case: Case, name: str, budget: int, seed: int
) -> None:
    shelf, attack = Shelf(), Counting(budget)
    run_attacks(CASE, {"a": Counting()}, 0, store=shelf.store)
    run_attacks(case, {name: attack}, seed, store=shelf.store)
    assert len(attack.fits) == 1
    assert len(shelf) == 2


def test_without_a_store_or_an_identity_nothing_is_kept() -> None:
    shelf, attack = Shelf(), Counting()
    for _ in range(2):
        run_attacks(CASE, {"a": attack}, 0)
        run_attacks(replace(CASE, identity=""), {"a": attack}, 0, store=shelf.store)
    assert len(attack.fits) == 4
    assert shelf == {}


def test_broken_and_foreign_bytes_are_replaced() -> None:
    shelf, attack = Shelf(), Counting()
    run_attacks(CASE, {"a": attack}, 0, store=shelf.store)
    ((key, good),) = shelf.items()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    broken = [b"", b"\x00" * 99, good[:-1], bytes(flipped), save({"mse": torch.zeros(12)})]
    for count, blob in enumerate(broken):
        shelf[key] = blob
        run_attacks(CASE, {"a": attack}, 0, store=shelf.store)
        assert len(attack.fits) == 2 + count
        assert len(shelf[key]) == len(good)
    run_attacks(CASE, {"a": attack}, 0, store=shelf.store)
    assert len(attack.fits) == 1 + len(broken)


def test_an_attempt_on_other_images_is_not_believed() -> None:
    shelf, attack = Shelf(), Counting()
    run_attacks(CASE, {"a": attack}, 0, store=shelf.store)
    found = run_attacks(replace(CASE, scored=labelled(9, 1)), {"a": attack}, 0, store=shelf.store)[
        "a"
    ]
    assert (found.scored, len(attack.fits)) == (9, 2)


def test_an_interrupted_audit_continues_with_the_attack_it_was_at() -> None:
    shelf, one, other = Shelf(), Counting(), Counting(failing=[True])
    attacks: dict[str, Attack] = {"one": one, "other": other}
    with pytest.raises(KeyboardInterrupt):
        run_attacks(CASE, attacks, 0, store=shelf.store)
    assert len(shelf) == 1
    other.failing.clear()
    heard: list[tuple[int, int]] = []
    found = run_attacks(
        CASE, attacks, 0, lambda done, total, note="": heard.append((done, total)),
        store=shelf.store,
    )  # fmt: skip
    assert (len(one.fits), len(other.fits), len(shelf)) == (1, 1, 2)
    assert list(found) == ["one", "other"]
    assert heard == [(0, 2000), (1000, 2000), (2000, 2000)]
    straight = run_attacks(CASE, {"one": Counting(), "other": Counting()}, 0)
    assert all(torch.equal(found[n].mse, straight[n].mse) for n in found)


def test_a_failing_attack_leaves_nothing() -> None:
    shelf = Shelf()
    with pytest.raises(KeyboardInterrupt):
        run_attacks(CASE, {"a": Counting(failing=[True])}, 0, store=shelf.store)
    assert shelf == {}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose attack takes a function from a module beside it."""
    folder = tmp_path / "outsider"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("def help() -> int:\n    return 1\n")
    (folder / "other.py").write_text("X = 1\n")
    (folder / "attack.py").write_text(
        "from splitveil.attacks.floor import MeanImage\nfrom outsider.helper import help\n"
        "class Ours(MeanImage):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [n for n in sys.modules if n.partition(".")[0] == "outsider"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "changes"), [("attack.py", True), ("helper.py", True), ("other.py", False)]
)
def test_an_attack_whose_source_changed_runs_again(package: Path, file: str, changes: bool) -> None:
    importlib.import_module("outsider.other")

    def key() -> str | None:
        ours = importlib.import_module("outsider.attack").Ours
        return attempt_key("m", "ours", ours(), 0)

    before = key()
    assert before is not None
    assert key() == before
    path = package / file
    path.write_text(path.read_text() + "# better\n")
    assert (key() != before) is changes


def test_the_source_of_an_attack_holds_what_it_is_made_of_and_no_other_attack() -> None:
    decoder, linear = (source(a.__module__) or "" for a in (Decoder, Linear))
    assert "def minimise(" in decoder
    assert "class ResidualDecoder(" in decoder
    assert "def ridge(" in linear
    assert "def ridge(" not in decoder
    assert "def minimise(" not in linear
    scoring = source("splitveil.audits.suite") or ""
    assert "def ssim_zeropad(" in scoring
    assert "def attacked_rows(" in scoring


def test_other_ways_of_scoring_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attempt_key("m", "a", Linear(), 0)

    def better(module: str) -> str | None:
        text = source(module) or ""
        return f"{text}# better" if module == "splitveil.audits.suite" else text

    monkeypatch.setattr(suite, "source", better)
    assert attempt_key("m", "a", Linear(), 0) != before


def test_an_attack_from_outside_rests_on_ours_too(package: Path) -> None:
    assert package.is_dir()
    importlib.import_module("outsider.attack")
    text = source("outsider.attack") or ""
    assert "def help(" in text
    assert "class MeanImage" in text


def test_an_attack_that_cannot_be_told_from_another_is_never_stored() -> None:
    class Mute(MeanImage):
        __repr__ = object.__repr__

    homeless = type("Homeless", (MeanImage,), {"__module__": "no.such.module"})
    shelf = Shelf()
    for attack in (Mute(), homeless()):
        assert attempt_key("m", "a", attack, 0) is None
        run_attacks(CASE, {"a": attack}, 0, store=shelf.store)
    assert shelf == {}
    assert attempt_key("m", "a", MeanImage(), 0) is not None


def test_a_folder_keeps_files_and_forgives_what_it_cannot_read(tmp_path: Path) -> None:
    store = folder_store(tmp_path / "audit")
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
        folder_store(tmp_path / "file" / "audit").write("k", b"")
