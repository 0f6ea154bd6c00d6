"""The tuning doctor: for every rule a planted sick run, and the same run mended."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from insight.planted_runs import (
    EPOCHS,
    PLANTED,
    Plan,
    edited,
    healthy_lines,
    open_slots,
    plant,
    without_penalty,
)
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli.app import app
from splitveil.defences.catalogue import DEFENCES
from splitveil.errors import ConfigError, RunError
from splitveil.insight.diagnosis import RULES, Diagnosis, RunHistory, diagnose, read_case
from splitveil.record.schema import Record


def names(folder: Path) -> list[str]:
    return [finding.name for finding in diagnose(read_case(folder))]


@pytest.mark.parametrize(("rule", "sick", "mended", "seen", "advice"), PLANTED)
def test_a_rule_finds_its_sick_run_and_passes_the_mended_one(  # noqa: PLR0917
    rule: str, sick: Plan, mended: Plan, seen: str, advice: str, tmp_path: Path
) -> None:
    found = {f.name: f for f in diagnose(read_case(plant(tmp_path / "sick", **sick)))}
    assert rule in found
    assert seen in found[rule].seen
    assert advice in found[rule].advice
    assert rule not in names(plant(tmp_path / "mended", **mended))


@pytest.mark.parametrize(("rate", "found"), [(0.354, []), (0.356, ["noise too small"])])
def test_a_rate_that_reads_like_the_limit_is_no_finding(
    rate: float, found: list[str], tmp_path: Path
) -> None:
    record = {"true_rate_nats": 64 * rate, "client": {"wire_floats": 64}}
    assert names(plant(tmp_path / "run", record=record)) == found


def test_every_rule_has_a_planted_run() -> None:
    assert {planted[0] for planted in PLANTED} == set(RULES)


@pytest.mark.parametrize("defence", sorted(DEFENCES))
def test_a_healthy_run_of_every_defence_has_nothing_to_mend(defence: str, tmp_path: Path) -> None:
    lines = edited(open_slots(0.0)) if defence == "slot-cross" else healthy_lines()
    if "lambd" not in DEFENCES[defence].settings():
        lines = without_penalty(lines)
    assert names(plant(tmp_path / "run", defence, lines)) == []


def test_accuracy_is_compared_with_the_plainest_run_beside_it(tmp_path: Path) -> None:
    run = plant(tmp_path / "veil", lines=edited({"val_accuracy": 0.9}))
    assert names(run) == []
    plant(tmp_path / "noisy", "noise", without_penalty(edited({"val_accuracy": 0.95})))
    plant(tmp_path / "bare", "none", without_penalty(edited({"val_accuracy": 0.99})))
    plant(tmp_path / "other", "none", without_penalty(healthy_lines()), dataset="cifar10")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("defence = [")
    beside = read_case(run).plain
    assert beside is not None
    assert beside.name == "bare"
    assert beside.accuracy == pytest.approx(0.99)
    (finding,) = diagnose(read_case(run))
    assert finding.seen == "accuracy is 90.0 %, that of the plain run 'bare' 99.0 %"
    assert names(tmp_path / "bare") == []  # a plain run is compared with none
    chosen = read_case(run, tmp_path / "noisy").plain
    assert chosen is not None
    assert chosen.name == "noisy"
    assert chosen.accuracy == pytest.approx(0.95)


def test_a_short_real_run_is_told_to_train_longer(tmp_path: Path) -> None:
    run = sv.fit(sv.RunConfig(defence="gated-att", epochs=1, device="cpu", runs_dir=str(tmp_path)))
    assert names(run.path) == ["run not converged", "rob_loss stuck at 0"]
    result = CliRunner().invoke(app, ["doctor", str(run.path), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert "starts in epoch 6, the run has 1" in said["findings"][1]["seen"]
    assert said["rules"] == list(RULES)


def test_the_command_says_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    well = CliRunner().invoke(app, ["doctor", str(plant(tmp_path / "well"))])
    assert (well.exit_code, well.stdout.strip()) == (0, f"{tmp_path / 'well'}: no problems found")
    sick = plant(tmp_path / "sick", lines=edited({"skipped": 7}))
    ill = CliRunner().invoke(app, ["doctor", str(sick)])
    assert ill.exit_code == 0
    assert "1. values not finite\n   seen: the penalty" in ill.stdout
    assert "\n   do: lambd 0.3 → 0.15" in ill.stdout
    beside = plant(tmp_path / "beside", "arl+veil", lines=edited({"skipped": 7}))
    shown = " ".join(CliRunner().invoke(app, ["doctor", str(beside)]).stdout.split())
    assert "or adversary_lr 0.001 → 0.0001" in shown


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.toml", None, "is not a run: it has no config.toml"),
        ("config.toml", "defence = 'vell'\nimage_shape = [1, 8, 8]\nnum_classes = 10\n"
         "data_hash = 'x'", "unknown defence 'vell'"),
        ("config.toml", "dataset = 'digits'", "so it is not from a training run"),
        ("metrics.jsonl", None, "has no finished epoch"),
        ("metrics.jsonl", "{\n{}", "is not valid JSON"),
        ("metrics.jsonl", '{"kind": "epoch", "epoch": 1, "rob_loss": "much"}', "must be a number"),
        ("record.json", "[", "is not valid JSON"),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_folder_is_refused_with_its_reason(
    file: str, text: str | None, message: str, tmp_path: Path
) -> None:
    run = plant(tmp_path / "run")
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text)
    result = CliRunner().invoke(app, ["doctor", str(run)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_missing_folder_and_a_plain_run_of_no_use_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(RunError, match="no run folder"):
        read_case(tmp_path / "nowhere")
    run = plant(tmp_path / "run")
    gone = {"val_accuracy": None, "train_accuracy": None}
    bare = plant(tmp_path / "bare", "none", without_penalty(edited(gone)))
    with pytest.raises(RunError, match="no accuracy to compare with"):
        read_case(run, bare)
    with pytest.raises(ConfigError):
        read_case(plant(tmp_path / "odd", lambd=-1.0))


def test_the_doctor_reads_a_final_run_by_its_audit() -> None:
    lines = tuple(line | {"val_accuracy": None} for line in healthy_lines())
    config = {"lambd": 0.3, "epochs": EPOCHS, "batch_size": 128, "ramp": 0.5}
    case = RunHistory(
        name="x", config=config, epochs=lines, num_classes=10,
        record=Record.from_dict({"accuracy": 0.9}),
    )  # fmt: skip
    better = replace(case, name="p", record=Record.from_dict({"accuracy": 0.95}))
    case = replace(case, plain=better)
    assert [f.name for f in diagnose(case)] == ["accuracy lost"]
    assert diagnose(case)[0] == Diagnosis(
        name="accuracy lost",
        seen="accuracy is 90.0 %, that of the plain run 'p' 95.0 %",
        advice="lambd 0.3 → 0.15",
    )


def test_the_document_has_a_section_for_every_rule_in_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == list(RULES)
    sections = re.split(r"^## .+$", text, flags=re.M)[1:]
    assert all("**Seen if**" in part and "**What to do.**" in part for part in sections)


@pytest.mark.parametrize(("rule", "sick", "_mended", "seen", "_advice"), PLANTED)
def test_every_finding_is_said_in_chinese(
    rule: str, sick: Plan, _mended: Plan, seen: str, _advice: str, tmp_path: Path
) -> None:
    case = read_case(plant(tmp_path / "sick", **sick))
    english = {f.name: f for f in diagnose(case)}
    chinese = {f.name: f for f in diagnose(case, "zh")}
    assert list(english) == list(chinese)
    told = chinese[rule]
    assert re.search("[\u4e00-\u9fff]", told.seen)
    for text, before in ((told.seen, english[rule].seen), (told.advice, english[rule].advice)):
        said = re.sub(r"[\w.]+ → [\w.]+|\w+=\w+|--\w+", " ", text)
        assert not re.search(r"\b[a-z]{3,} [a-z]{3,}\b", said)
        numbers = [sorted(re.findall(r"\d+\.\d+", found)) for found in (text, before)]
        assert numbers[0] == numbers[1]


def test_the_command_speaks_chinese(tmp_path: Path) -> None:
    sick = plant(tmp_path / "病" / "run", lines=edited({"skipped": 7}))
    ill = CliRunner().invoke(app, ["doctor", str(sick), "--lang", "zh"])
    assert ill.exit_code == 0, ill.output
    assert "：发现 1 个问题\n1. 出现非有限值\n   看到：" in ill.stdout
    assert "\n   处理：lambd 0.3 → 0.15 或 lr 0.1 → 0.05；" in ill.stdout
    wrong = CliRunner().invoke(app, ["doctor", str(sick), "--lang", "cn"])
    assert (wrong.exit_code, "choose from: en, zh" in wrong.output) == (2, True)
