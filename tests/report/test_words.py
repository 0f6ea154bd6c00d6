"""English and Chinese: every visible string is in the table, and none is missing its twin."""

import re
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest
from matplotlib.figure import Figure

import splitveil.report
from splitveil.audits.flags import FLAGS
from splitveil.errors import ConfigError
from splitveil.insight.diagnosis import RULES
from splitveil.insight.pictures import WeightWords
from splitveil.record.files import RunFiles
from splitveil.report.canvas import Drawing
from splitveil.report.curves import PhaseKind
from splitveil.report.figures import Pictures
from splitveil.report.page import ReportContent, fill_page
from splitveil.report.sentences import verdict
from splitveil.report.words import LOCALE, RECORDED, TERMS, Sentence, language, sentence, word
from splitveil.threat import Access

from .markup import Page

ROOM = Path(splitveil.report.__file__).parent
INSIGHT, CLI = ROOM.parent / "insight", ROOM.parent / "cli"
EXPERIMENTS = ROOM.parent / "experiments"
PHASES = get_args(PhaseKind)
WEIGHTS = WeightWords.__dataclass_fields__
PAPER = Path(__file__).parents[2] / "paper"  # this repository's own tables
DOCS = PAPER.parent / "docs"
TEMPLATES = sorted((ROOM / "templates").glob("*.html.j2"))
HAN = re.compile(r"[\u4e00-\u9fff]")
SAME_IN_BOTH = {
    "term.mse", "term.psnr", "term.ssim", "column.mse", "column.psnr", "column.ssim",
    "picture.attack",
}  # fmt: skip
NAMES = {  # of metrics, units, products and what records call things
    "SplitVeil", "MSE", "SSIM", "PSNR", "MAC", "AUC", "Fano", "dB", "log", "k-query",
    "none", "veil", "mean", "class-mean", "linear", "decoder", "digits", "quick", "train",
}  # fmt: skip


PARTS = {  # of the page that `explain` writes, each with a title
    f"{part}{end}"
    for part in ("flow", "curves", "sizes", "gates", "shut-gates", "groups", "slot", "cluster",
                 "variance", "map")
    for end in ("", "-title")
}  # fmt: skip
DOT = Drawing(Figure((1, 1)), "x", ["veil"])
BLANK = Pictures(grid=DOT, tradeoff=DOT, attacks=DOT, curves=(DOT,))
KNOWLEDGE = ("train", "held-out", "test90", "val")


TABLE = {key: (english, LOCALE["zh"].get(key, "")) for key, english in LOCALE["en"].items()}


def test_both_languages_have_the_same_keys_in_the_same_order() -> None:
    assert list(LOCALE["en"]) == list(LOCALE["zh"])


@pytest.mark.parametrize("key", sorted(TABLE))
def test_every_english_string_has_its_chinese_one(key: str) -> None:
    english, chinese = TABLE[key]
    assert english.strip() == english != ""
    assert not HAN.search(english)
    assert chinese.strip() == chinese != ""
    assert (key in SAME_IN_BOTH) == (english == chinese)
    assert (key in SAME_IN_BOTH | {"doctor.also"}) == (not HAN.search(chinese))
    for part in (english, chinese):
        assert part.count("`") % 2 == 0
        assert part.count("**") % 2 == 0
    fields = [{name for _, name, _, _ in Formatter().parse(text) if name} for text in TABLE[key]]
    assert fields[0] == fields[1]


PLAIN_ENGLISH = {  # words that Chinese sentences keep: signs, options, files, names of methods
    "Adam", "AUC", "CIFAR", "Fano", "GPU", "MAC", "MSE", "NaN", "PSNR", "PyTorch", "SIGMA", "SNR",
    "SSIM", "Softplus", "SplitVeil", "attack", "attacks", "attention", "aux", "bits", "clip",
    "decoder", "digits", "epoch", "eps", "final", "gated", "json", "lambd", "log", "lr", "noise",
    "none", "overwrite", "record", "resume", "splitveil", "sweep", "val", "veil",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(TABLE))
def test_no_chinese_sentence_is_half_english(key: str) -> None:
    said = re.sub(r"`[^`]*`|\{\w+\}", " ", TABLE[key][1])
    words = re.findall(r"(?<![\w=-])[A-Za-z]{2,}(?![\w=-])", said)
    assert set(words) <= PLAIN_ENGLISH


def test_chinese_is_set_with_chinese_marks() -> None:
    near = re.compile(r"[\u4e00-\u9fff][,:;()?!]|[,:;()?!] ?[\u4e00-\u9fff]|[\uff0c\uff1a\uff1b] ")
    assert [key for key, (_, chinese) in TABLE.items() if near.search(chinese)] == []


def test_the_terms_are_the_agreed_ones() -> None:
    agreed = {
        "smashed data": "中间表示", "label-only error": "仅凭标签的误差", "certificate": "证书",
        "leakage": "泄露",
        "strongest attack": "最强攻击", "channel noise": "噪声", "random channel": "信道",
        "seed": "随机种子", "reconstruction": "重构",
    }  # fmt: skip
    for english, chinese in agreed.items():
        told = [pair for pair in TABLE.values() if re.search(rf"\b{english}s?\b", pair[0].lower())]
        assert told, english
        for pair in told:
            assert chinese in pair[1] or "种子" in pair[1], pair


def glossary(page: str, english: int) -> dict[str, str]:
    """The Chinese of every English term of a glossary whose English stands in this column."""
    said = (DOCS / page).read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+\|$", said, re.MULTILINE)
    return {row[english]: row[1 - english] for row in rows}


def test_both_glossaries_and_the_report_have_the_same_chinese_terms() -> None:
    agreed, chinese = glossary("reference/glossary.md", 0), glossary("zh/glossary.md", 1)
    shared = agreed.keys() & chinese.keys()
    assert len(shared) > 30
    assert {term: chinese[term] for term in shared} == {term: agreed[term] for term in shared}
    report = {
        "column.accuracy": "accuracy", "term.leakage": "leakage",
        "term.ceiling": "label-only error",
        "term.certificate": "certificate", "term.worst-case": "worst case", "term.flag": "flag",
        "gallery.rebuilt": "reconstruction", "band.warm-up": "warm-up", "differ.profile": "profile",
        "heading.passports": "passport", "plot.hard-gate": "SNR gate",
        "plot.soft-gate": "dimension gate",
    }  # fmt: skip
    assert {key: TABLE[key][1] for key in report} == {key: agreed[t] for key, t in report.items()}


def test_every_word_is_used() -> None:
    rooms = [path for room in (ROOM, INSIGHT, CLI, EXPERIMENTS) for path in room.glob("*.py")]
    files = [*rooms, *(ROOM / "templates").iterdir(), *PAPER.glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)

    def used(key: str) -> bool:
        room, _, name = key.partition(".")
        if room in RECORDED:  # found by what they match
            return True
        if room in ("weight", "slots"):
            return name in WEIGHTS
        if room == "doctor":
            return f'say("{name}"' in source or f'"{key}"' in source
        made = f'"{room}.{{' in source or f"'{room}.{{" in source or f'"{room}." ~' in source
        listed = name in {*TERMS, *FLAGS, *Access, *KNOWLEDGE, *RULES, *PHASES, *WEIGHTS, *PARTS}
        literal = f'"{key}"' in source or f"'{key}'" in source
        return literal or (made and (listed or f'"{name}"' in source))

    assert [key for key in TABLE if not used(key)] == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_hold_no_words_of_their_own(template: Path) -> None:
    source = template.read_text(encoding="utf-8")
    spoken = re.findall(r'(?:alt|aria-label|title|placeholder)="([^"]*)', source)
    assert all(value.startswith("{{") for value in spoken)
    bare = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|<[^>]*>", " ", source, flags=re.DOTALL)
    assert set(re.findall(r"[^\W\d_]{2,}", bare)) <= {"MSE", "nbsp"}


def test_no_english_is_left_in_chinese(rich: list[RunFiles]) -> None:
    content = ReportContent(runs=rich, lang="zh", skipped=[("some/path", "no run folder")])
    page = Page(fill_page(content, BLANK))
    assert page.tags[0] == ("html", {"lang": "zh-CN"})
    left = {word for part in page.words for word in re.findall(r"[A-Za-z][A-Za-z-]*[A-Za-z]", part)}
    assert left <= NAMES
    assert "最强攻击" in page.text


def test_the_verdict_is_the_same_sentence_in_both_languages(rich: list[RunFiles]) -> None:
    numbers = [re.findall(r"\d+\.\d+", verdict(rich).plain(lang)) for lang in ("en", "zh")]
    assert numbers[0] == numbers[1] == ["0.00052", "0.0462", "0.0493", "98.6", "97.8"]


def test_every_flag_and_access_has_words() -> None:
    for name, advice in FLAGS.items():
        assert TABLE[f"flag.{name}"][0] == name
        assert TABLE[f"advice.{name}"][0] == advice
    for access in Access:
        assert TABLE[f"access.{access}"][0] == str(access)


def test_values_are_escaped_for_each_dress() -> None:
    evil = "<b>|`*{x}"
    made = sentence("note.no-gallery", names=(evil, "b"))
    assert "<b>|`*{x}, b" in made.plain()
    assert "&lt;b&gt;|`*{x}" in made.html()
    assert "<code>gallery.json</code>" in made.html()
    assert "<b>|`*{x}、b" in made.plain("zh")


def test_a_sentence_inside_a_sentence_takes_its_language() -> None:
    outer = sentence("caveat.differ", what=sentence("differ.dataset"), values=("a", "b"))
    assert outer.plain() == "The runs differ in dataset (a, b): do not compare them row by row."
    assert outer.plain("zh").startswith("各运行的数据集不同")


def test_unknown_languages_and_words_are_refused() -> None:
    assert (language("en"), language("zh")) == ("en", "zh")
    with pytest.raises(ConfigError, match="unknown language 'zn'; choose from: en, zh"):
        language("zn")
    with pytest.raises(KeyError):
        word("no such word")
    with pytest.raises(KeyError):
        Sentence("note.no-gallery").plain()
