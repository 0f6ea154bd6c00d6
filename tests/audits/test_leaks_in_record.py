"""Certificates and other leaks, as an audit of a run puts them into its record."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from audits.made import a_target, labelled

from splitveil import Run, RunConfig, fit
from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import LEAK_BUDGETS
from splitveil.audits.beyond_pixels import leaks_beyond_pixels
from splitveil.audits.suite import Store, run_attacks
from splitveil.data.catalogue import load
from splitveil.io import Json
from splitveil.threat import Attack, Labelled

BUDGET = LEAK_BUDGETS["smoke"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: trained(folder, name) for name in ("noise", "none", "clip+noise")}


def trained(folder: Path, defence: str) -> Run:
    run = fit(
        RunConfig(
            dataset="digits",
            defence=defence,
            epochs=2,
            runs_dir=str(folder),
            name=defence,
            device="cpu",
        )
    )
    run.audit("smoke", only=["linear"])
    return run


def certificates(run: Run) -> Json:
    assert run.record is not None
    found: Json = run.record.to_dict()["certificates"]
    return found


def test_a_noisy_client_has_every_certificate(runs: dict[str, Run]) -> None:
    found = certificates(runs["noise"])
    assert "refused" not in found["gallery"]
    assert "refused" not in found["population"]
    assert found["population"]["nats_given_class"] >= found["population"]["mean"]
    assert found["gallery"]["beaten"] is False


def test_the_gallerys_rate_is_the_records_true_rate(runs: dict[str, Run]) -> None:
    record = runs["noise"].record
    assert record is not None
    said = record.certificates["gallery"].nats_given_class
    assert said == pytest.approx(record.true_rate_nats, rel=1e-6)


def test_copies_of_training_images_certify_nothing(tmp_path: Path) -> None:
    digits = load("digits")
    x, y = digits.images.numpy(), digits.labels.numpy()
    np.savez(
        tmp_path / "copied.npz",
        x_train=x[:1000], y_train=y[:1000], x_test=x[800:1200], y_test=y[800:1200],
    )  # fmt: skip
    config = RunConfig(
        dataset=f"npz:{tmp_path / 'copied.npz'}", defence="noise", epochs=1, runs_dir=str(tmp_path),
        name="copied", device="cpu",
    )  # fmt: skip
    found = fit(config).audit("smoke", only=["linear"]).certificates
    assert "overlap training data in 200 images" in str(found["population"].refused)
    assert found["gallery"].refused is None


def test_a_deterministic_client_has_none(runs: dict[str, Run]) -> None:
    for entry in certificates(runs["none"]).values():
        assert "the channel is deterministic" in entry["refused"]


def test_a_clip_halves_the_box_of_a_certificate(runs: dict[str, Run]) -> None:
    wide, narrow = (certificates(runs[n])["capacity"] for n in ("noise", "clip+noise"))
    assert narrow["dims"] == wide["dims"]
    assert narrow["nats"] < wide["nats"]


def test_the_leaks_of_a_run_stand_beside_chance(runs: dict[str, Run]) -> None:
    record = runs["none"].record
    assert record is not None
    assert set(record.leaks) == {"attribute", "membership", "re-id", "repeats"}
    assert record.leaks["re-id"]["wire"]["rank_1"] > 0.9  # an undefended client
    assert record.leaks["re-id"]["wire"]["chance_1"] == pytest.approx(1 / 200)


def test_every_run_says_what_repeated_sendings_add(runs: dict[str, Run]) -> None:
    found = {}
    for name, run in runs.items():
        assert run.record is not None
        found[name] = run.record.leaks["repeats"]
        assert found[name]["attack"] == "linear"
        assert found[name]["n"] == run.record.audit.scored
        assert "leakage_doubles" not in certificates(run)["gallery"]
    silent, noisy = (list(found[n]["leakage"].values()) for n in ("none", "noise"))
    assert len(set(silent)) == 1  # nothing is drawn: what is sent again says nothing new
    assert noisy == sorted(noisy)
    assert noisy[0] < noisy[-1]


def test_stored_reconstructions_are_re_identified_alike(tmp_path: Path) -> None:
    known = {"members": labelled(30, 0), "outsiders": labelled(30, 0)}
    target = replace(a_target(identity="this"), **known)  # type: ignore[arg-type]
    attacks: dict[str, Attack] = {"mean": MeanImage(), "linear": Linear()}
    store = Store(tmp_path, "code")
    first, again = (
        leaks_beyond_pixels(target, run_attacks(target, attacks, store=store), BUDGET)
        for _ in range(2)
    )
    assert len(list(tmp_path.iterdir())) == len(attacks)
    assert first["re-id"] == again["re-id"]
    assert "linear/mse" in first["re-id"]


def test_too_few_images_are_a_reason_and_no_crash() -> None:
    few = Labelled(torch.rand(3, 1, 8, 8), torch.zeros(3, dtype=torch.long))
    target = replace(a_target(), members=few, outsiders=few)
    attempts = run_attacks(target, {"linear": Linear()})
    found = leaks_beyond_pixels(target, attempts, BUDGET)
    assert "membership needs at least 20" in found["refused"]["membership"]
    assert found.keys() == {"attribute", "re-id", "repeats", "arithmetic", "refused"}
    told = leaks_beyond_pixels(replace(target, members="who knows"), attempts, BUDGET)
    assert told["refused"] == {"membership": "who knows"}
