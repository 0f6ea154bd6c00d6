"""Runs through the library: off-switch, load, refusals, the whole way to a page."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits.made import attacks_alone
from short_runs import config

import splitveil as sv
from splitveil.attacks.profiles import PROFILES
from splitveil.config import resolve
from splitveil.config.machine import has_bf16
from splitveil.config.resolve import build_defence, flat_config
from splitveil.defences.base import Defence
from splitveil.errors import AuditError, CheckpointError, ConfigError, DataError, RunError
from splitveil.serve.manifest import LOGITS, WIRE
from splitveil.serve.wire import TensorSpec, encode_request
from splitveil.threat import Labelled
from splitveil.train.state import read_checkpoint


def weights(run: sv.Run) -> dict[str, torch.Tensor]:
    return read_checkpoint(run.path / "checkpoint.safetensors").part("model")


@pytest.fixture(scope="module")
def veil(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    return sv.fit(config(tmp_path_factory.mktemp("runs"), name="x"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after a short training without a penalty."""
    return weights(sv.fit(config(tmp_path_factory.mktemp("plain"), "noise")))


@pytest.fixture(scope="module")
def record(veil: sv.Run) -> sv.Record:
    return sv.audit(veil, profile="smoke")


@pytest.fixture
def copy(veil: sv.Run, tmp_path: Path) -> sv.Run:
    """The trained run in a folder of the test's own."""
    shutil.copytree(veil.path, tmp_path / "copy")
    return sv.load_run(tmp_path / "copy")


def test_a_run_builds_its_defence_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def noted(config: sv.RunConfig) -> Defence:
        built.append(config.defence)
        return build_defence(config)

    monkeypatch.setattr(resolve, "build_defence", noted)
    sv.fit(config(tmp_path, "veil"))
    assert built == ["veil"]


@pytest.mark.parametrize("defence", ["gated-att", "gated-att-trace", "veil"])
def test_lambda_zero_is_bit_equal_to_plain_training(
    tmp_path: Path, defence: str, plain: dict[str, torch.Tensor]
) -> None:
    """Same noise, same seed: a penalty of weight 0 changes nothing."""
    off = sv.fit(config(tmp_path, defence, settings={"lambd": 0.0}))
    now = {"attention_warmup_epochs": 0}
    on = sv.fit(config(tmp_path, defence, name="on", settings=now))
    assert all(torch.equal(v, plain[k]) for k, v in weights(off).items())
    assert not all(torch.equal(v, plain[k]) for k, v in weights(on).items())


@pytest.mark.skipif(not has_bf16(), reason="the processor has no bf16")
def test_a_run_and_its_audit_in_bf16_say_so_and_learn_alike(
    tmp_path: Path, plain: dict[str, torch.Tensor]
) -> None:
    run = sv.fit(config(tmp_path, "noise", precision="bf16", name="short"))
    record = run.audit("smoke", only=["decoder"], precision="bf16")
    assert record.config["precision"] == record.audit.precision == "bf16"
    other = run.audit("smoke", only=["decoder"], precision="float32")
    assert other.audit.precision == "float32"
    assert other.attacks["decoder"].mse != record.attacks["decoder"].mse
    assert other.attacks["decoder"].mse == pytest.approx(record.attacks["decoder"].mse, rel=0.2)
    learned = weights(run)
    assert all(value.dtype == plain[key].dtype for key, value in learned.items())
    assert not all(torch.equal(value, plain[key]) for key, value in learned.items())


def test_a_seed_fixes_every_bit_and_leaves_the_callers_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first, again, other = (
        weights(sv.fit(config(tmp_path, name=n, epochs=1, seed=s)))
        for n, s in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    assert not torch.equal(first["encoder.0.0.0.weight"], other["encoder.0.0.0.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_loaded_run_sends_the_same_bits(veil: sv.Run) -> None:
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    sent = [
        run.victim.send(x, generator=torch.Generator().manual_seed(3))
        for run in (veil, sv.load_run(veil.path))
    ]
    assert torch.equal(sent[0], sent[1])
    assert sent[0].shape == (5, 4, 4, 4)


def test_configuration_survives_the_folder(veil: sv.Run) -> None:
    assert flat_config(sv.load_run(veil.path).config) == flat_config(veil.config)


def test_record_has_its_passport(record: sv.Record, veil: sv.Run) -> None:
    data = json.loads((veil.path / "record.json").read_text())
    assert data == record.to_dict()
    assert 0 <= data["accuracy"] <= 1
    assert set(data["attacks"]) == set(PROFILES["smoke"])
    for scores in (*data["attacks"].values(), data["strongest"], data["worst_case"]):
        assert all(math.isfinite(scores[k]) for k in ("mse", "psnr", "ssim"))
    ranked = [a for a in data["attacks"].values() if not {"subset", "repeats"} & set(a)]
    assert data["strongest"]["mse"] == min(a["mse"] for a in ranked)
    assert data["worst_case"]["mse"] <= data["strongest"]["mse"]
    assert data["leakage"] == pytest.approx(1 - data["strongest"]["mse"] / data["ceiling"]["mse"])
    assert data["client"] == {
        "macs": 846848, "params": 39108, "stored": 38885, "wire_floats": 64, "wire_bits": 1024,
        "bits_per_image": 1024.0, "track": "B5",
        "uncounted": {"activations": 5184, "pooling": 0},
    }  # fmt: skip
    assert data["true_rate_nats"] > 0
    assert {"train", "val", "test", "aux", "scored", "data"} <= set(data["splits"])
    assert data["splits"]["aux"] == data["splits"]["train"]
    assert data["config"]["defence"] == "veil"
    assert data["seeds"] == {"train": 0, "attack": 0, "split": 0}
    assert {"torch", "python", "splitveil", "commit"} <= set(data["versions"])
    assert data["seconds"]["train"] > 0
    assert veil.record == record


def test_digits_ceiling_is_the_class_mean_of_train_on_test(record: sv.Record) -> None:
    """The number by numpy, from the splits themselves."""
    dataset = sv.data.load("digits")
    splits = sv.data.make_splits(dataset)
    x, y = dataset.images.double() / 255, dataset.labels
    means = torch.stack([x[splits.train][y[splits.train] == c].mean(0) for c in range(10)])
    error = (x[splits.test] - means[y[splits.test]]).square().mean()
    assert record.ceiling.mse == pytest.approx(error.item(), abs=1e-6)


def test_audits_repeat_and_depend_on_their_seed(copy: sv.Run, record: sv.Record) -> None:
    some = ["linear", "decoder-small", "rmle"]
    again = sv.audit(copy, profile="smoke", only=some, fresh=True).to_dict()
    first = record.to_dict()
    for name in ("mean", "class-mean", *some):
        a, b = first["attacks"][name], again["attacks"][name]
        assert a | {"seconds": 0} == b | {"seconds": 0}
    other = sv.audit(copy, profile="smoke", seed=1, only=["decoder-small"])
    assert other.attacks["decoder-small"].mse != first["attacks"]["decoder-small"]["mse"]


def test_an_audit_to_choose_by_looks_at_no_test_image(
    copy: sv.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Tensor] = []
    labelled = sv.data.Dataset.labelled

    def noted(self: sv.data.Dataset, rows: torch.Tensor) -> Labelled:
        taken.append(rows)
        return labelled(self, rows)

    monkeypatch.setattr(sv.data.Dataset, "labelled", noted)
    made = sv.audit(copy, profile="smoke", aux="val", only=["linear"])
    splits = sv.data.make_splits(sv.data.load("digits"))
    assert not set(torch.cat(taken).tolist()) & set(splits.test.tolist())
    assert made.splits.scored == made.to_dict()["splits"]["val"] == splits.hashes()["val"]
    assert made.audit.scored == len(splits.val)
    assert "validation images scored" in made.flag_names
    assert "overlap training data" in str(made.certificates["population"].refused)
    assert made.leaks["re-id"]["wire"]["gallery"] == len(splits.val)


def test_knowledge_levels(copy: sv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacks_alone(monkeypatch)
    tenth = sv.audit(copy, profile="smoke", aux="test90", only=["linear"])
    assert tenth.audit.scored == 36
    assert tenth.audit.aux_images == 323
    with pytest.raises(DataError, match="reserved none"):
        sv.audit(copy, profile="smoke", aux="held-out")
    reserved = sv.fit(config(tmp_path, "none", epochs=1, held_out=0.3))
    assert reserved.record is None  # before its audit
    held = sv.audit(reserved, profile="smoke", aux="held-out", only=["linear"])
    assert held.audit.aux_images == 431


def test_some_attacks_alone_are_said_to_be_some(
    copy: sv.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks_alone(monkeypatch)
    some = sv.audit(copy, profile="smoke", only=["linear"], fresh=True)
    assert list(some.attacks) == ["mean", "class-mean", "linear"]
    assert "attacks left out" in some.flag_names
    with pytest.raises(ConfigError, match="compile is for a GPU"):
        sv.audit(copy, profile="smoke", compile=True)


@pytest.mark.parametrize("copies", [0, 3])
def test_scored_copies_of_training_images_are_flagged(
    tmp_path: Path, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks_alone(monkeypatch)
    x, y = np.random.default_rng(0).random((60, 8, 8)), np.arange(60) % 3
    x[40 : 40 + copies] = x[:copies]
    file = tmp_path / "twice.npz"
    np.savez(file, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    run = sv.fit(config(tmp_path, "noise", dataset=f"npz:{file}", epochs=1, final=True))
    made = sv.audit(run, profile="smoke", only=["linear"])
    told = {flag.name: flag.seen or "" for flag in made.flags or ()}
    expected = f"{copies} of 20 are copies of images that were trained on or that the attacker has"
    assert told.get("scored images known before") == (expected if copies else None)


def test_final_trains_on_validation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacks_alone(monkeypatch)
    run = sv.fit(config(tmp_path, "none", epochs=1, final=True))
    line = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["val_accuracy"] is None
    audited = sv.audit(run, profile="smoke", only=["linear"]).audit
    assert audited.aux_images == 1438
    assert audited.final is True


def test_an_existing_run_is_kept(veil: sv.Run) -> None:
    with pytest.raises(RunError, match=r"exists already.*--resume.*--overwrite"):
        sv.fit(config(veil.path.parent, name="x"))


def test_a_run_that_cannot_be_built_does_not_cost_the_old_one(veil: sv.Run) -> None:
    before = (veil.path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="32×32"):
        sv.fit(config(veil.path.parent, name="x", net="vgg11"), overwrite=True)
    assert (veil.path / "checkpoint.safetensors").read_bytes() == before


def test_a_checkpoint_of_another_architecture_is_refused(copy: sv.Run) -> None:
    path = copy.path / "config.toml"
    path.write_text(path.read_text().replace("num_classes = 10", "num_classes = 7"))
    with pytest.raises(CheckpointError, match="another architecture"):
        sv.load_run(copy.path)


def test_changed_data_are_refused(copy: sv.Run) -> None:
    path = copy.path / "config.toml"
    path.write_text(path.read_text().replace(copy.built.data_hash, "0" * 16))
    with pytest.raises(AuditError, match="not those the run was trained on"):
        sv.audit(sv.load_run(copy.path), profile="smoke")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no config\.toml"):
        sv.load_run(tmp_path)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dataset": "digit"}, "did you mean 'digits'"),
        ({"defence": "vail"}, "did you mean 'veil'"),
        ({"net": "vgg"}, "did you mean 'vgg11'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": -1.0}, "lr must be"),
        ({"noise_std": 0.0}, "needs channel noise"),
        ({"noise_std": math.nan}, "noise_std must be"),
        ({"settings": {"lambd": -1.0}}, "lambd must be .* got -1.0"),
        ({"settings": {"lambda": 1.0}}, "did you mean 'lambd'"),
        ({"settings": {"form": "cubic"}}, "form must be one of"),
        ({"held_out": 1.5}, "held_out must be"),
        ({"name": "a/b"}, "name must start with"),
    ],
)
def test_bad_configurations(tmp_path: Path, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sv.fit(config(tmp_path, **{"defence": "veil", **kwargs}))
    assert list(tmp_path.iterdir()) == []


def test_a_diverging_run_stops_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"diverged.*lower lr"):
        sv.fit(config(tmp_path, "none", lr=1e12, epochs=3))


def test_skipped_penalties_are_counted_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plain: dict[str, torch.Tensor]
) -> None:
    """A penalty whose weight overflows the gradient is left out, with a warning."""
    run = sv.fit(config(tmp_path, settings={"lambd": 1e39, "ramp": 0.0}))
    line = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["skipped"] > 0
    assert "not finite" in caplog.text
    assert "lower lambd or lr" in caplog.text
    assert all(torch.equal(v, plain[k]) for k, v in weights(run).items())


def test_attacks_on_an_undefended_client_beat_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks_alone(monkeypatch)
    run = sv.fit(config(tmp_path, "none", epochs=4))
    record = sv.audit(run, profile="smoke", only=["linear", "decoder"])
    mse, floor = {name: found.mse or 1 for name, found in record.attacks.items()}, record.floor.mse
    assert floor is not None
    assert mse["linear"] < 0.6 * floor
    assert max(mse["decoder"], mse["class-mean"]) < floor
    assert (record.leakage or 0) > 0
    assert record.true_rate_nats is None


def test_classes_of_equal_images_are_refused_before_any_attack(tmp_path: Path) -> None:
    y = np.arange(200) % 2
    np.savez(
        tmp_path / "flat.npz", x=np.stack([np.full((8, 8), 200 * k, np.uint8) for k in y]), y=y
    )
    run = sv.fit(config(tmp_path, "none", dataset=f"npz:{tmp_path / 'flat.npz'}", epochs=1))
    with pytest.raises(AuditError, match="all images of a class are alike"):
        run.audit("smoke")


def test_what_is_sent_lies_channels_last_and_reads_in_the_usual_order(veil: sv.Run) -> None:
    """The wire's order is that of `flatten`, whatever lies in memory."""
    z = veil.model.encoder(torch.rand(2, 1, 8, 8))
    assert z.is_contiguous(memory_format=torch.channels_last)
    by_hand = torch.stack([z[:, c, i, j] for c in range(4) for i in range(4) for j in range(4)], 1)
    assert torch.equal(z.flatten(1), by_hand)
    spec = TensorSpec(name=WIRE, shape=(4, 4, 4))
    body, raw = encode_request(z.detach().numpy(), spec, LOGITS).body, by_hand.detach().numpy()
    assert body.endswith(raw.astype("<f4").tobytes())
