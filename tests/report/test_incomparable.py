"""What makes rows incomparable, seeds no row, and a record none."""

import math
from pathlib import Path

import pytest
from made_records import grouped, one, put, record, trained

from splitveil.config.run_config import RUN_KEYS, RunConfig
from splitveil.record.groups import UNSAID, Records, find_records
from splitveil.report.comparison import TRAINING, caption, warnings


def test_what_makes_rows_incomparable_is_said() -> None:
    more = record(profile="quick") | {"attacks": {"decoder": {}, "rmle": {}}}
    said = warnings(Records((one("a"), grouped("b", ((more,),)), one("c", record(aux="test90")))))
    start = "cifar10, attacker knows train: rows"
    assert said == [
        f"{start} differ in audit profile: standard (a); quick (b)",
        f"{start} were not attacked by the same attacks: decoder (a); decoder, rmle (b)",
    ]
    assert warnings(Records((one("a"), one("b")))) == []


def test_rows_with_other_training_settings_are_named() -> None:
    rows = one("a", trained(epochs=160)), one("b", trained(label_smoothing=0.1)), one("c")
    start = "cifar10, attacker knows train: rows differ in"
    assert warnings(Records(rows)) == [
        f"{start} epochs: 160 (a); 80 (b, c)",
        f"{start} label_smoothing: 0.0 (a, c); 0.1 (b)",
    ]
    stranger = record()
    del stranger["config"]["epochs"]  # a client that was trained elsewhere
    assert warnings(Records((one("a"), one("stranger", stranger)))) == []


def test_rows_of_another_precision_or_of_other_attacks_are_named() -> None:
    """A record of 0.1.0 names neither: its GPU computed in bf16, its CPU in float32."""
    old, new = trained(device="cpu"), trained(device="cpu", precision="bf16")
    new["audit"] |= {"attacks_version": 2, "precision": "bf16"}
    old["device"] = "cpu (x86_64, 2 threads)"
    start = "cifar10, attacker knows train: rows differ in"
    assert warnings(Records((one("a", old), one("b", new)))) == [
        f"{start} precision: float32 (a); bf16 (b)",
        f"{start} the version of their attacks: 1 (a); 2 (b)",
        f"{start} the precision of their attacks: float32 (a); bf16 (b)",
    ]
    said = warnings(
        Records((grouped("a", ((old,), (trained(1, precision="bf16", device="cpu"),))),))
    )
    assert "row a: its seeds differ in precision: bf16, float32" in said
    on_gpu = trained(device="cuda") | {"device": "cuda (NVIDIA H200)"}
    assert warnings(Records((one("a", on_gpu), one("b", new))))[:1] == [
        f"{start} the version of their attacks: 1 (a); 2 (b)"
    ]


def test_seeds_of_a_row_that_do_not_belong_together_are_named() -> None:
    other = record(net="vgg11", seed=1)
    said = warnings(Records((grouped("a", ((record(), record()), (other,))),)))
    assert said == [
        "row a: its seeds differ in net: thin-resnet, vgg11",
        "row a: training seed 0 with attack seed 0 appears twice",
    ]


def test_a_defence_setting_that_differs_between_seeds_is_named() -> None:
    alike = trained(lambd=0.3, name="s0"), trained(1, lambd=0.3, name="s1", compile=True)
    assert warnings(Records((grouped("a", tuple((r,) for r in alike)),))) == []
    mixed = trained(lambd=0.3), trained(1, lambd=0.1), trained(2)  # the last does not say it
    said = warnings(Records((grouped("a", tuple((r,) for r in mixed)),)))
    assert said == ["row a: its seeds differ in lambd: 0.1, 0.3"]


def test_a_seed_that_does_not_name_a_setting_has_its_default() -> None:
    mixed = trained(), trained(1, label_smoothing=0.1)
    said = warnings(Records((grouped("a", tuple((r,) for r in mixed)),)))
    assert said[0] == "row a: its seeds differ in label_smoothing: 0.0, 0.1"


def test_a_mean_of_fewer_seeds_than_are_counted_is_named() -> None:
    nothing = record(seed=1) | {"accuracy": None, "leakage": math.nan}
    said = warnings(Records((grouped("a", ((record(),), (nothing,), (record(seed=2),))),)))
    assert said == [
        "row a: 1 of its 3 records has no accuracy; the mean is of the others",
        "row a: 1 of its 3 records has no leakage; the mean is of the others",
    ]
    assert warnings(Records((one("a", nothing),))) == []  # it has none at all, and shows none


def test_one_training_in_two_folders_is_named() -> None:
    (said,) = warnings(Records((grouped("a", ((record(),), (record(attack=1),))),)))
    assert said.startswith("row a: 2 folders have training seed 0 and count as separate trainings")


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("", "leakage", 5.0, "`leakage` must be at most 1, got 5.0"),
        ("strongest", "ssim", 7, "`strongest.ssim` must be in [-1, 1], got 7.0"),
        ("client", "macs", -3, "`client.macs` must be at least 0, got -3"),
    ],
)
def test_a_record_with_an_impossible_value_is_left_out(
    part: str, key: str, value: float, said: str, tmp_path: Path
) -> None:
    made = record()
    (made[part] if part else made)[key] = value
    put(tmp_path / "bad", made)
    put(tmp_path / "good", record() | {"leakage": -0.5})  # worse than the label alone: it may be
    found = find_records([tmp_path / "bad", tmp_path / "good"])
    assert [group.name for group in found.groups] == ["good"]
    assert list(found.broken.values()) == [said]


def test_the_caption_names_who_was_trained_otherwise() -> None:
    usual, smooth = one("usual", trained(lr=0.2)), trained(lr=0.2, label_smoothing=0.1)
    assert "label_smoothing" not in caption([usual, one("said", trained(label_smoothing=0.0))])
    said = caption([usual, one("again", trained(lr=0.2)), one("smooth", smooth)])
    assert "80 epochs; `label_smoothing` 0.0 (0.1: `smooth`); trained on" in said
    assert "`lr`" not in said


def test_what_an_older_record_does_not_say_is_the_default() -> None:
    assert set(UNSAID) <= set(TRAINING) <= {*RUN_KEYS}
    assert {key: str(getattr(RunConfig, key)).lower() for key in UNSAID} == UNSAID
