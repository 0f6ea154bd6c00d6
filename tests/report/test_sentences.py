"""The verdict in one sentence, whatever the runs, and what must be known before believing it."""

from dataclasses import replace
from typing import Any

from made_runs import MakeRun, make_record, rich_record

from splitveil.record.files import RunFiles
from splitveil.record.schema import Record
from splitveil.report.sentences import caveats, statement, verdict


def run_of(
    make_run: MakeRun,
    name: str,
    defence: str = "veil",
    seed: int = 0,
    **record: Any,  # noqa: ANN401
) -> RunFiles:
    return make_run(name, record=make_record(defence, seed) | record, gallery=None, metrics=None)


def test_the_change_from_undefended_to_most_private(three: list[RunFiles]) -> None:
    assert verdict(three).plain() == (
        "From “none” to “veil”, the error of the strongest attack goes from 0.00052 to 0.0462 "
        "(label-only error 0.0493) and the accuracy from 98.6 % to 97.8 %."
    )
    assert verdict(three[::-1]).plain() == verdict(three).plain()


def test_another_undefended_seed_is_never_the_defence(make_run: MakeRun) -> None:
    strongest = make_record("none")["strongest"] | {"mse": 0.5}
    lucky = run_of(make_run, "none-1", "none", 1, strongest=strongest)
    runs = [run_of(make_run, "none-0", "none"), lucky, run_of(make_run, "veil")]
    assert "From “none” (mean ± sd of 2 seeds) to “veil”" in verdict(runs).plain()


def errors(make_run: MakeRun, defence: str, *mses: float) -> list[RunFiles]:
    """Runs of a defence, one seed after another, with these errors of the strongest attack."""
    strongest = {"mse_by": "decoder"}
    return [
        run_of(make_run, f"{defence}-s{seed}", defence, seed, strongest=strongest | {"mse": mse})
        for seed, mse in enumerate(mses)
    ]


def test_a_lucky_seed_does_not_win_over_a_better_mean(make_run: MakeRun) -> None:
    lucky = errors(make_run, "gated-att", 0.01, 0.045, 0.02)
    steady = errors(make_run, "veil", 0.039, 0.041, 0.040)
    bare = errors(make_run, "none", 0.001, 0.002, 0.003)
    assert verdict([*lucky, *bare, *steady]).plain() == (
        "From “none” (mean ± sd of 3 seeds) to “veil” (mean ± sd of 3 seeds), the error of the "
        "strongest attack goes from 0.0020 ± 0.0010 to 0.0400 ± 0.0010 (label-only error 0.0493) "
        "and the "
        "accuracy from 98.6 ± 0.0 % to 97.8 ± 0.0 %."
    )
    assert "“veil”（3 个种子的均值 ± 标准差）" in verdict([*lucky, *bare, *steady]).plain("zh")
    assert verdict([*lucky, *steady]).plain().startswith("Of 6 audited runs, “veil” (mean")
    alone = verdict(steady)
    assert alone.key == "verdict.one"
    assert "with an error of 0.0400 ± 0.0010" in alone.plain()


def test_audits_of_one_training_have_a_mean_and_no_sd(make_run: MakeRun) -> None:
    seeds = {"seeds": {"train": 0, "attack": 1}}
    runs = [
        replace(run, record=Record.from_dict(run.record.to_dict() | seeds))
        for run in errors(make_run, "veil", 0.03, 0.05)
    ]
    said = verdict(runs).plain()
    assert said.startswith("“veil” (mean of 2 audits) has an accuracy")
    assert "an error of 0.0400;" in said


def test_other_settings_or_another_audit_are_not_averaged(make_run: MakeRun) -> None:
    first, second = errors(make_run, "veil", 0.03, 0.05)
    for key, value in (("config", {"noise_std": 0.5}), ("audit", {"profile": "standard"})):
        record = second.record.to_dict()
        record[key] |= value
        said = verdict([first, replace(second, record=Record.from_dict(record))]).plain()
        assert "“veil-s1” leaks the least" in said


def test_one_run_is_described_alone(make_run: MakeRun) -> None:
    assert verdict([run_of(make_run, "v")]).plain() == (
        "“v” has an accuracy of 97.8 %. The strongest attack (decoder) rebuilds its images with "
        "an error of 0.0462; an attacker who knows only the label has 0.0493 (the label-only "
        "error). "
        "That is a leakage of 6.3 %."
    )


def test_without_an_undefended_run_no_gain_is_claimed(make_run: MakeRun) -> None:
    runs = [run_of(make_run, "g", "gated-att"), run_of(make_run, "v")]
    said = verdict(runs).plain()
    assert said.startswith("Of 2 audited runs, “v” leaks the least")
    assert said.endswith("so what the defence gained is unknown.")


def test_runs_without_any_defence_are_called_so(make_run: MakeRun) -> None:
    runs = [
        run_of(make_run, name, "none", config={"dataset": "digits", "defence": "none", "net": name})
        for name in ("a", "b")
    ]
    assert verdict(runs).plain().startswith("None of the 2 audited runs has a defence. On the one")


def test_runs_on_other_images_are_not_ranked(make_run: MakeRun) -> None:
    runs = [run_of(make_run, "a", "none"), run_of(make_run, "b", splits={"test": "ffff"})]
    assert verdict(runs).key == "verdict.mixed"


def test_nothing_audited_means_no_verdict(make_run: MakeRun) -> None:
    raw = make_run("raw", record=None, gallery=None)
    assert verdict([raw]).key == "verdict.none"
    assert verdict([raw, run_of(make_run, "v")]).key == "verdict.one"


def test_the_statement_counts_and_names(three: list[RunFiles]) -> None:
    assert statement(three).plain().startswith("3 models trained on digits: ")
    assert statement(three[:1]).plain().startswith("One model trained on digits: ")
    bare = replace(three[0], record=Record.from_dict({}))
    assert "an unnamed dataset" in statement([bare]).plain()
    assert "未命名数据集" in statement([bare]).plain("zh")


def test_runs_with_less_than_a_standard_audit_are_named(make_run: MakeRun) -> None:
    quick = make_run("q", record=rich_record("none"), gallery=None, metrics=None)
    record = rich_record("veil")
    record["audit"]["profile"] = "standard"
    full = make_run("s", record=record, gallery=None, metrics=None)
    told = [caveat.plain() for caveat in caveats([full, quick])]
    assert (
        "Audited with less than the standard budget: q. A stronger attacker may rebuild more."
        in told
    )
    assert "caveat.brief" not in [caveat.key for caveat in caveats([full])]


def test_flagged_runs_are_named_among_the_caveats(make_run: MakeRun) -> None:
    flagged = make_run("f", record=rich_record("none"), gallery=None, metrics=None)
    clean = make_run("c", record=rich_record("veil"), gallery=None, metrics=None)
    told = [caveat.plain() for caveat in caveats([clean, flagged])]
    assert told[0] == "Flags were raised on: f. Read them before the numbers."
    assert "caveat.flags" not in [caveat.key for caveat in caveats([clean])]


ALONE: dict[str, Any] = {"sent": 0.0, "exposure": 0.0, "leakage": 0.0, "leakage_sent": None}
PART: dict[str, Any] = {"sent": 0.2, "exposure": 0.12, "leakage_sent": 0.7, "leakage": 0.7}
SMALL: dict[str, Any] = {"client": {"macs": 900_000, "params": 12_000, "wire_floats": 64}}


def named(defence: str) -> dict[str, Any]:
    return {"dataset": "digits", "defence": defence, "net": "small"}


def beside_alone(make_run: MakeRun, alone: float, **part: Any) -> list[RunFiles]:  # noqa: ANN401
    """An undefended run, veil, and a client alone with this accuracy."""
    return [
        run_of(make_run, "none", "none", config=named("none"), **SMALL),
        run_of(make_run, "veil", config=named("veil"), **SMALL, **part),
        run_of(make_run, "silent", config=named("alone"), accuracy=alone, **SMALL, **ALONE),
    ]


def test_the_verdict_says_what_the_server_gains_over_a_client_alone(make_run: MakeRun) -> None:
    said = verdict(beside_alone(make_run, 0.90))
    assert said.key == "verdict.gain"
    assert said.plain().startswith("From “none” to “veil”, the error")
    assert "The best client alone, “silent”, has an accuracy of 90.0 %" in said.plain()
    assert "“veil” gains +7.8 points (+4.3 to +11.2) at an exposure of 6.3 %" in said.plain()
    assert "提高 +7.8 个百分点" in said.plain("zh")


def test_a_row_without_a_sure_gain_is_called_so_whatever_it_leaks(make_run: MakeRun) -> None:
    said = verdict(beside_alone(make_run, 0.97))
    assert said.key == "verdict.no-gain"
    assert "has no sure gain (+0.8 points" in said.plain()


def test_an_early_exit_is_compared_by_exposure(make_run: MakeRun) -> None:
    said = verdict(beside_alone(make_run, 0.90, **PART)).plain()
    assert "From “none” to “veil”, the exposure goes from 98.9 % to 12.0 %" in said


def test_one_early_exit_and_one_client_alone_are_described(make_run: MakeRun) -> None:
    part = verdict([run_of(make_run, "e", config=named("early-exit"), **PART)]).plain()
    assert part == (
        "“e” has an accuracy of 97.8 % and sends 20.0 % of the images. Over all images that is an "
        "exposure of 12.0 %; the leakage of the sent is 70.0 %."
    )
    silent = verdict([run_of(make_run, "a", config=named("alone"), **ALONE)]).plain()
    assert silent == "“a” answers on the device with an accuracy of 97.8 %, and nothing leaves it."


def test_a_run_at_chance_is_never_praised(make_run: MakeRun) -> None:
    flags = {"flags": [{"name": "accuracy at chance", "seen": "accuracy is 10 %"}]}
    strongest = make_record("veil")["strongest"] | {"mse": 0.049}
    broken = run_of(make_run, "broken", config=named("veil"), accuracy=0.1, strongest=strongest)
    broken = replace(broken, record=Record.from_dict(broken.record.to_dict() | flags))
    runs = [*beside_alone(make_run, 0.90)[:2], broken]
    said = verdict(runs)
    assert said.key == "verdict.left-out"
    assert "From “none” to “veil”" in said.plain()
    assert said.plain().endswith("far below the same net without a defence: broken.")
    assert verdict([broken]).key == "verdict.unusable"
