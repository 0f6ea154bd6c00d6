"""Flags and certificates of a record: names, numbers, refusals, and dashes for what is absent."""

import pytest
from made_runs import MakeRun, make_record, rich_record

from splitveil.errors import RunError
from splitveil.record.files import RunFiles
from splitveil.report.columns import CERTIFICATES, audited, flags_of, refused_certificates
from splitveil.report.figures import Pictures
from splitveil.report.page import ReportContent, fill_page

from .markup import Page

EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())


def audit_row(run: RunFiles, lang: str = "en") -> list[str]:
    return CERTIFICATES.cells([run], lang)[0]


def test_golden_audit_rows(rich: list[RunFiles]) -> None:
    none, veil = (audit_row(run) for run in rich)
    open_ = "linearly invertible, quick audit"
    assert none == ["none", open_, "refused", "refused", "refused", "refused"]
    assert veil == ["veil", "none, quick audit", "44.4", "5.2, vacuous", "7.8", "12.5"]
    assert audit_row(rich[0], "zh")[1:3] == ["可线性反演、quick 档位审计", "未出具"]
    assert len(CERTIFICATES.columns) == len(none)


def test_an_audit_with_the_standard_budget_is_not_called_brief(make_run: MakeRun) -> None:
    record = rich_record("veil")
    record["audit"]["profile"] = "standard"
    run = make_run("x", record=record, gallery=None, metrics=None)
    assert audit_row(run)[1] == "none"


def test_a_record_without_checks_is_a_row_of_dashes(three: list[RunFiles]) -> None:
    assert audit_row(three[0]) == ["none"] + ["–"] * 5
    assert flags_of(three[0]) is None
    assert not audited(three)


@pytest.mark.parametrize(
    ("reason", "shown", "chinese"),
    [
        ("vacuous: 6.2 nats are not below log 359 − log 2 = 5.19", "vacuous", "无约束力"),
        ("identification needs at least 2 images, got 1", "refused", "未出具"),
    ],
)
def test_a_refused_identification_error_is_no_dash(
    make_run: MakeRun, reason: str, shown: str, chinese: str
) -> None:
    record = rich_record("veil")
    record["certificates"]["gallery"]["identification_error"] = {"refused": reason}
    run = make_run("x", record=record, gallery=None, metrics=None)
    assert audit_row(run)[-1] == shown
    assert audit_row(run, "zh")[-1] == chinese
    del record["certificates"]["gallery"]["identification_error"]
    assert audit_row(make_run("y", record=record, gallery=None, metrics=None))[-1] == "–"


@pytest.mark.parametrize(
    ("marks", "shown"),
    [
        ({"identification_error": {"refused": "vacuous: 7.75 nats are not below"}}, "7.8, vacuous"),
        ({"identification_error": {"refused": "identification needs 2 images"}}, "7.8"),
        ({"identification_error": {"at_least": 0.25}}, "7.8"),
        ({"vacuous": False, "identification_error": {"refused": "vacuous: so"}}, "7.8"),
    ],
)
def test_a_population_bound_is_vacuous_where_fano_finds_it_so(
    make_run: MakeRun, marks: dict[str, object], shown: str
) -> None:
    record = rich_record("veil")
    record["certificates"]["population"] |= marks
    assert audit_row(make_run("x", record=record, gallery=None, metrics=None))[4] == shown


def test_equal_reasons_stand_together(make_run: MakeRun, rich: list[RunFiles]) -> None:
    again = make_run("again", record=rich_record("none"), gallery=None, metrics=None)
    ((runs, certificates, reason),) = refused_certificates([*rich, again])
    assert (runs, certificates) == ("none, again", "capacity, gallery, population")
    assert reason.startswith("no certificate: the channel is deterministic")


def test_advice_of_another_version_is_shown_as_it_stands(make_run: MakeRun) -> None:
    record = make_record("veil")
    record["flags"] = [{"name": "linearly invertible", "seen": "x", "advice": "do better"}]
    record["flags"].append({"name": "from the future", "seen": "y", "advice": "wait"})
    flags = flags_of(make_run("x", record=record))
    assert flags is not None
    assert flags[0][2] == "do better"
    assert flags[1] == ("from the future", "y", "wait")


@pytest.mark.parametrize("flags", [3, {"name": "x"}, ["x"], "x"])
def test_flags_of_the_wrong_type_are_refused(make_run: MakeRun, flags: object) -> None:
    with pytest.raises(RunError, match=r"`flags(\[0\]` must be an object|` must be a list), got"):
        make_run("x", record=make_record("veil") | {"flags": flags})


def test_the_page_has_the_table_the_flags_and_the_refusals(rich: list[RunFiles]) -> None:
    page = Page(fill_page(ReportContent(runs=rich), EMPTY))
    assert "Flags and certificates" in page.headings
    for run in rich:
        assert audit_row(run) in page.rows
    seen, advice = "ridge regression has MSE 0.0005", "treat the client as sending the image itself"
    assert ["none", "linearly invertible", seen, advice] in page.rows
    reason = "no certificate: the channel is deterministic; add Gaussian noise"
    assert ["none", "capacity, gallery, population", reason] in page.rows
    assert [
        "veil", "50.0", "–", "25.0", "0.625", "0.500", "12.5", "2.5, vacuous", "5.5", "9",
    ] in page.rows  # fmt: skip
