"""What repeated sendings add, as the report tells it in both languages."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_record, rich_record

from splitveil.record.files import RunFiles
from splitveil.record.schema import Record
from splitveil.report.columns import doubles, sendings
from splitveil.report.figures import Pictures
from splitveil.report.page import ReportContent, fill_page
from splitveil.report.words import written

from .markup import Page

Json = dict[str, Any]
EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())


def counted(**said: object) -> Json:
    record = rich_record("veil")
    leakage = {"1": 0.125, "2": 0.25, "16": 0.5}
    entry = {"attack": "linear", "n": 200, "leakage": leakage, "doubles": said}
    return record | {"leaks": record["leaks"] | {"repeats": entry}}


def run(name: str, record: Json) -> RunFiles:
    return RunFiles(name=name, path=Path(name), record=Record.from_dict(record))


@pytest.mark.parametrize(
    ("said", "english", "chinese"),
    [
        ({"kind": "between", "after": 2, "by": 4}, "between 2 and 4 sendings", "2 到 4 次"),
        ({"kind": "between", "after": 1, "by": 2}, "at 2 sendings", "发送 2 次时"),
        ({"kind": "never"}, "not within 16 sendings", "16 次以内"),
        ({"kind": "cannot"}, "cannot: more than half leaks already", "已超过一半"),
        ({"kind": "nothing", "by": None}, "nothing leaks that could double", "没有可翻倍的泄露"),
        ({"kind": "nothing", "by": 8}, "nothing leaks at one sending, something at 8", "8 次"),
        ({"kind": "new", "says": "in other words"}, "in other words", "in other words"),
        ({}, "–", "–"),
    ],
)
def test_every_kind_of_doubling_has_its_words(said: Json, english: str, chinese: str) -> None:
    told = doubles(Record.from_dict(counted(**said))) or "–"
    assert written(told, "en") == english
    assert chinese in written(told, "zh")


def test_runs_that_were_not_counted_have_no_row() -> None:
    runs = [
        run("old", rich_record("veil")),
        run("bare", make_record("none")),
        run("unaudited", {}),
    ]
    assert sendings(runs)[1] == []
    table, rows = sendings([*runs, run("new", counted(kind="never"))])
    assert [column.label() for column in table.columns] == [
        "row", "k = 1 (%) ↓", "k = 2 (%) ↓", "k = 16 (%) ↓", "leakage doubles", "attack", "images",
    ]  # fmt: skip
    said = "not within 16 sendings"
    assert table.cells(rows) == [["new", "12.5", "25.0", "50.0", said, "linear", "200"]]
    (dash,) = sendings([run("odd", counted())])[0].cells([run("odd", counted())])
    assert dash[4] == "–"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_shows_it_and_old_records_do_without(lang: Any) -> None:  # noqa: ANN401
    old = ReportContent(runs=[run("old", rich_record("veil"))], lang=lang)
    new = ReportContent(runs=[run("new", counted(kind="between", after=2, by=4))], lang=lang)
    words = {"en": "between 2 and 4 sendings", "zh": "发送 2 到 4 次之间"}[lang]
    before, now = (Page(fill_page(content, EMPTY)).text for content in (old, new))
    assert words in now
    assert "k = 16" in now
    assert "k = 16" not in before
