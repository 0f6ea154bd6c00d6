"""Why a run does or does not protect: outcome and cause by rules, and the pages that say so."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.calling import call, text
from made_runs import make_gallery
from report.devtools import CONTRAST, WIDER, Tab, chromium

from splitveil.errors import RunError
from splitveil.insight.diagnosis import read_case
from splitveil.insight.run_page import rows_of
from splitveil.insight.verdict import judge, phrase
from splitveil.record.schema import AT_CHANCE, FAR_BELOW
from splitveil.report.answer_page import AnswerPage, Panel, write_answer

from .planted_runs import edited, judged, plant, without_penalty

Json = dict[str, Any]
GUESSING = {"val_accuracy": 0.1, "train_accuracy": 0.11}


def record(leakage: float | None = 0.8, defence: str = "veil", **more: Any) -> Json:  # noqa: ANN401
    """Of an audit by `standard`, with pictures' errors and what the log does not hold."""
    ceiling = {"ceiling": {"mse": 0.05}, "leakage": leakage}
    made = judged(
        0.95, defence, **ceiling, attacks={"decoder": {"mse": 0.01}, **more.pop("by", {})}
    )
    made["audit"] |= {"profile": "standard"}
    return made | more


def said(folder: Path, above: float | None = None) -> str:
    return " ".join(told.plain() for told in judge(read_case(folder), above).said)


@pytest.mark.parametrize(
    ("leakage", "begins"),
    [
        (0.8, "It does not protect: a stranger rebuilds 80 %"),
        (0.5, "It does not protect: a stranger rebuilds 50 %"),
        (0.49, "It protects in part: a stranger rebuilds 49 %"),
        (0.1, "It protects in part: a stranger rebuilds 10 %"),
        (0.09, "It protects against these attacks: a stranger rebuilds 9 %"),
        (-0.4, "It protects against these attacks: a stranger rebuilds 0 %"),
        (None, "Nobody knows what it leaks"),
    ],
)
def test_the_outcome_follows_from_the_leakage(
    leakage: float | None, begins: str, tmp_path: Path
) -> None:
    assert said(plant(tmp_path / "run", record=record(leakage))).startswith(begins)


LOUD: Json = {"true_rate_nats": 64 * 0.9, "client": {"wire_floats": 64}}
QUIET: Json = {"true_rate_nats": 64 * 0.2, "client": {"wire_floats": 64}}
BANDS: Json = {"leakage_bands": {"low": 0.9, "detail": 0.5}}
CAUSES: list[tuple[Json, str]] = [
    (
        {"defence": "none", "record": record(0.8, "none"), "noise_std": 0.0},
        "because nothing hides them: there is neither noise nor a penalty.",
    ),
    ({"record": record(), "noise_std": 0.0}, "because without noise every difference"),
    (
        {"record": record(**LOUD), "lambd": 0.0},
        "because the client hardly feels the penalty: lambd is 0: the penalty is switched off.",
    ),
    (
        {"record": record(**LOUD), "lines": edited({"rob_loss": 0.0})},
        "because the client hardly feels the penalty: rob_loss is 0 since epoch 1",
    ),
    (
        {"record": record(**LOUD)},
        "because the noise (σ = 0.05) is small against the differences between images of one",
    ),
    (
        {"record": record(**QUIET, by={"linear": {"mse": 0.018}})},  # rebuilds 64 % of .05
        "because the client is close to a linear map: ridge regression alone rebuilds 64 %.",
    ),
    (
        {"record": record(**QUIET), "lines": edited({"surrogate_to_true": 0.2})},
        "because the penalty does not see what leaks: the surrogate reports 20 % of the true rate",
    ),
    (
        {"record": record(**QUIET, **BANDS, by={"linear": {"mse": 0.0181}})},
        "because what is sent keeps light and shade of large areas: 90 % of a 4×4 thumbnail is "
        "rebuilt, and 50 % of the detail.",
    ),
    ({"record": record(0.05, **QUIET)}, "because the noise is as strong as what tells images"),
]


@pytest.mark.parametrize(("planted", "cause"), CAUSES)
def test_the_cause_is_the_first_that_applies(planted: Json, cause: str, tmp_path: Path) -> None:
    assert cause in said(plant(tmp_path / "run", **planted))


def test_without_a_known_cause_none_is_named(tmp_path: Path) -> None:
    told = said(plant(tmp_path / "run", record=record(**QUIET)))
    assert told == "It does not protect: a stranger rebuilds 80 % of what the label does not tell."


def test_the_share_of_loud_dimensions_is_told_where_it_was_measured(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", record=record(**LOUD))
    assert "in 77 % of the dimensions images of one class differ by more" in said(folder, 0.77)
    found = judge(read_case(folder), 0.77)
    assert [fact.value for fact in found.facts] == ["77 %", "0.90"]
    assert found.shows == "noise"


@pytest.mark.parametrize("leakage", [-0.75, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("flag", [AT_CHANCE, FAR_BELOW, None])
def test_a_dead_model_is_never_praised(leakage: float, flag: str | None, tmp_path: Path) -> None:
    flags = [{"name": flag, "seen": "accuracy is 10 %", "advice": "train it again"}] if flag else []
    lines = edited(GUESSING) if flag is None else None
    folder = plant(tmp_path / "run", lines=lines, record=record(leakage, flags=flags))
    told = said(folder)
    assert told.startswith(("It protects nothing of use", "It hides the images by giving up"))
    assert told.endswith("That little is rebuilt means nothing.")
    assert "It protects against" not in told


def test_the_row_of_a_dead_model_says_that_it_does_not_count(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", lines=edited(GUESSING), record=record(-0.4))
    page = call("doctor", run, "--out", tmp_path / "page")
    assert page.exit_code == 0, text(page)
    assert "answers too badly" in (tmp_path / "page" / "doctor.html").read_text(encoding="utf-8")


def test_answers_given_up_are_compared_with_the_plain_run(tmp_path: Path) -> None:
    plain = {"defence": "noise", "lines": without_penalty(edited())}
    low = edited({"val_accuracy": 0.5, "train_accuracy": 0.5})
    folder = plant(tmp_path / "run", lines=low, beside={"plain": plain})
    assert "50.0 % are right, and 96.9 % with “plain”" in said(folder)


def test_what_is_asked_rarely_counts_by_its_exposure(tmp_path: Path) -> None:
    exit_ = record(0.8, "early-exit", sent=0.3, leakage_sent=0.94, exposure=0.28)
    told = said(plant(tmp_path / "run", "early-exit", without_penalty(edited()), exit_))
    assert told.startswith(
        "It protects in part: of 10 pictures 7 never leave the device; of the others a stranger "
        "rebuilds 94 %"
    )
    assert "exposure of 28 %" in told


def test_the_undefended_run_beside_it_is_named(tmp_path: Path) -> None:
    bare = {"defence": "none", "lines": without_penalty(edited()), "record": record(0.84, "none")}
    folder = plant(tmp_path / "run", record=record(0.81), beside={"open": bare})
    assert "“open”, which has no penalty, leaks about as much: 84 %." in said(folder)
    better = plant(tmp_path / "better", record=record(0.6))
    assert "“open”, which has no penalty, leaks 84 %." in said(better)


def test_the_undefended_run_beside_it_has_its_own_gain(tmp_path: Path) -> None:
    """Both rows say what the server adds to the client alone, or neither does."""
    bare = {"defence": "none", "lines": without_penalty(edited()), "record": record(0.84, "none")}
    alone = {"defence": "alone", "record": judged(0.90, "alone", sent=0.0, exposure=0.0)}
    folder = plant(tmp_path / "run", record=record(0.81), beside={"open": bare, "silent": alone})
    rows = [row for t in rows_of(read_case(folder), "en", poor=False) for row in t.rows]
    assert [[said for said in row.cells.values() if said == "+5.0"] for row in rows] == [
        ["+5.0"], ["+5.0"],
    ]  # fmt: skip


def test_weak_attacks_are_said_to_be_weak(tmp_path: Path) -> None:
    flag = {"name": "decoder not converged", "seen": "one epoch", "advice": "more"}
    told = said(plant(tmp_path / "run", record=record(0.05, flags=[flag])))
    assert told.endswith(
        "The decoders had not converged: a more patient attacker may rebuild more."
    )


def test_every_verdict_has_the_same_numbers_in_chinese(tmp_path: Path) -> None:
    for at, (planted, _) in enumerate(CAUSES):
        found = judge(read_case(plant(tmp_path / str(at), **planted)))
        for told in found.said:
            english, chinese = told.plain(), told.plain("zh")
            assert sorted(re.findall(r"\d+(?:\.\d+)?", english)) == sorted(
                re.findall(r"\d+(?:\.\d+)?", chinese)
            )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The doctor's page about a run with pictures, beside an undefended one, in both languages."""
    folder = tmp_path_factory.mktemp("runs")
    bare = {"defence": "none", "lines": without_penalty(edited()), "record": record(0.84, "none")}
    run = plant(folder / "run", lines=edited({"skipped": 7}), beside={"open": bare},
                record=record(0.6, **LOUD, **BANDS))  # fmt: skip
    for name, defence in (("run", "veil"), ("open", "none")):
        gallery = json.dumps(make_gallery(defence))
        (folder / name / "gallery.json").write_text(gallery)
    for name in ("run", "open"):
        file = folder / name / "record.json"
        told = json.loads(file.read_text())
        told["strongest"]["mse_by"] = "decoder"
        file.write_text(json.dumps(told))
    for lang in ("en", "zh"):
        made = call("doctor", run, "--out", folder / lang, "--lang", lang)
        assert made.exit_code == 0, text(made)
    return {lang: folder / lang / "doctor.html" for lang in ("en", "zh")}


def test_the_page_is_one_small_file_that_escapes_what_it_shows(
    pages: dict[str, Path], tmp_path: Path
) -> None:
    for page in pages.values():
        html = page.read_text(encoding="utf-8")
        assert len(html) < 1_000_000
        assert not re.search(r"https?:|url\(", html)
    evil = Panel(title="<b>", text="'\"&", file="x.png", png=b"\x89PNG")
    said_only = Panel(title="none", text="there <i>is none")
    content = AnswerPage(
        title="<script>", verdict=[phrase("unfelt", seen="<u>")], chart=evil, panels=[said_only]
    )
    made, picture = write_answer(tmp_path / "a.html", content)
    html = made.read_text(encoding="utf-8")
    assert html.count("<script") == 1
    assert not re.search(r"<[bui]>", html)
    assert "&lt;script&gt;" in html
    assert '<p class="note">there &lt;i&gt;is none</p>' in html
    assert picture.read_bytes() == b"\x89PNG"
    with pytest.raises(RunError, match=r"cannot write .* Choose another folder"):
        write_answer(made / "a.html", content)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.browser
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("dark", [False, True])
def test_the_first_screen_holds_answer_pictures_and_figures(
    tab: Tab, pages: dict[str, Path], lang: str, dark: bool
) -> None:
    tab.open(pages[lang], dark=dark)
    bottoms = tab.value(
        "[...document.querySelectorAll('.verdict, .look img, .facts div, .carriers tr')]"
        ".map((e) => e.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) == 1 + 3 * 6 + 3 + 3  # two findings under a heading
    assert max(bottoms) <= 900
    assert tab.value("document.querySelectorAll('details[open]').length") == 0
    assert tab.complaints() == []
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert tab.value(CONTRAST)[1] == []
    tab.value("document.querySelectorAll('.look')[8].focus()")
    assert tab.value("document.getElementById('lens').hidden") is False


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_on_it_is_wider_than_the_window(
    tab: Tab, pages: dict[str, Path], width: int
) -> None:
    tab.open(pages["en"], width=width)
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(WIDER) == []
