"""The rows of the tables: what each is trained with, and who attacks it."""

from pathlib import Path
from types import ModuleType

from paper_tables.made import Planned, settings_of

from paper.headline_rows import REPORT, TABLE1
from splitveil.config.recipes import find_recipe
from splitveil.config.resolve import build_defence, make_config


def test_every_row_of_table_1_is_a_run(planned: Planned, tmp_path: Path) -> None:
    commands = planned("--table", "table1", "--out", str(tmp_path))
    own = [c for c in commands if c[1] == "train" and "--recipe" not in c]
    shared = [c[c.index("--name") + 1] for c in commands if c[1] == "train" and "--recipe" in c]
    assert sorted(shared) == [
        "arl+cem-s0", "arl+veil-s0", "cem-s0", "noise-s0", "none-s0", "veil-vgg11-s0",
    ]  # fmt: skip
    names = [str(settings_of(c)["name"]) for c in own]
    rows = [row.name for row in TABLE1 if f"{row.name}-s0" not in shared]
    assert sorted(names) == sorted(f"table1-{row}-s0" for row in rows)
    assert len(TABLE1) == 4 + 6 * 3  # noise besides, and six defences, each alone and with two
    for command in own:
        config = make_config(settings_of(command))
        noise = 0.025 if config.noise_std is None else config.noise_std
        assert (config.dataset, config.net, config.epochs) == ("cifar10", "vgg11", None)
        build_defence(config).surrogate(512, 10, noise)  # a penalty that has no noise refuses
    noises = {n: settings_of(c).get("noise_std") for n, c in zip(names, own, strict=True)}
    assert noises["table1-ResSFL-s0"] == noises["table1-DistCorr-s0"] == 0.0
    assert noises["table1-ResSFL+veil-s0"] == noises["table1-DistCorr+cem-s0"] == 0.01
    assert noises["table1-arl-s0"] is noises["table1-nopeek+veil-s0"] is None
    assert all(c[-4:] == ["--aux", "train", "--seed", "0"] for c in commands if c[1] == "audit")


def test_controls_are_trained_like_the_rows_they_control(planned: Planned, tmp_path: Path) -> None:
    beside = {
        "noise-thin-deep-s0": "cifar10-veil",
        "cem-thin-deep-s0": "cifar10-veil",
        "arl+cem-long-s0": "cifar10-arl-veil-long",
    }
    commands = planned("--table", "controls", "--seeds", "0", "--out", str(tmp_path))
    asked = [settings_of(c) for c in commands if c[1] == "train"]
    assert {str(own["name"]) for own in asked} == set(beside)
    for own in asked:
        name = str(own["name"])
        made = {**find_recipe(str(own["recipe"])).options, **own}
        ours = find_recipe(beside[name]).options
        for key in ("net", "epochs", "label_smoothing"):
            assert made.get(key) == ours.get(key), (name, key)
        assert made["defence"] != ours["defence"]


def test_the_documents_rows_are_those_of_the_command(planned: Planned, tmp_path: Path) -> None:
    commands = planned("--table", "documents", "--out", str(tmp_path))
    trained = {str(settings_of(c)["name"]): c for c in commands if c[1] == "train"}
    layered = [row for row in REPORT.rows if row.startswith("sparse+") and "tuned" not in row]
    assert len(layered) == 4
    assert len(trained) == len(REPORT.rows) + len(layered)
    for row in layered:
        behind = settings_of(trained[f"documents-{row}-wire-s0"])
        assert behind.pop("sparse_place") == "wire"
        before = settings_of(trained[f"documents-{row}-s0"])
        assert behind | {"name": before["name"]} == before
    for row in REPORT.rows:
        name = f"documents-{row}-s0"
        wanted = {**REPORT.settings(row), "seed": 0, "name": name}
        made = {**settings_of(trained[name]), "final": "--final" in trained[name]}
        assert make_config(made) == make_config(wanted)
    audits = [c for c in commands if c[1] == "audit"]
    by_train = [c for c in audits if c[c.index("--aux") + 1] == "train"]
    every = {c[2].rpartition("/")[2] for c in by_train if "--attacks" not in c}
    reported = {c[2].rpartition("/")[2] for c in by_train if "--attacks" in c}
    assert every == {f"documents-sparse+gated-att{form}-s0" for form in ("", "-wire")}
    assert reported == {f"documents-sparse+{name}-s0" for name in ("cem", "gated-att-simple")}
    assert len(audits) - len(by_train) == len(trained)
    assert {c[c.index("--aux") + 1] for c in audits} == {"train", "test90"}


def test_a_whole_table_can_be_trained_compiled(planned: Planned, tmp_path: Path) -> None:
    commands = planned("--out", str(tmp_path), "--compile")
    assert all(settings_of(c)["compile"] is True for c in commands if c[1] == "train")
    assert all("--compile" in c for c in commands if c[1] == "audit")


def test_the_main_audits_record_lies_in_the_rows_folder(script: ModuleType, tmp_path: Path) -> None:
    row = script.TABLES["documents"].rows[0]
    place = script.place(tmp_path, row, 2, row.audits[0])
    assert place == tmp_path / "cem" / "seed2" / "record.json"
