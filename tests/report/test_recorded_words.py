"""What records and flow charts say in English can be said in Chinese."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import splitveil
from splitveil.audits.flags import FLAGS
from splitveil.config.resolve import DataFacts
from splitveil.defences.catalogue import DEFENCES
from splitveil.nets.split import cut
from splitveil.report.flow_chart import FlowStep, in_words_of, run_flow
from splitveil.report.words import translated

AUDITS = Path(splitveil.__file__).parent / "audits"
HAN = re.compile(r"[\u4e00-\u9fff]")
MODEL = cut(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)), at=2)
DATA = DataFacts(image_shape=(1, 8, 8), num_classes=10, data_hash="")
NAMES = {"LayerNorm", "k-means"}  # as the reference documents write them


def written(node: ast.expr) -> str:
    """A text of the source with 7 in each of its places."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "7" for v in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def seen_by_flags() -> Iterator[str]:
    """Every sentence that a function of the flags can return."""
    tree = ast.parse((AUDITS / "flags.py").read_text(encoding="utf-8"))
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        parts = {id(v) for node in nodes if isinstance(node, ast.JoinedStr) for v in node.values}
        whole = [node for node in nodes if isinstance(node, ast.expr) and id(node) not in parts]
        yield from (text for text in map(written, whole) if text.count(" ") > 2)


def refusals() -> Iterator[str]:
    """Every reason why there is no certificate."""
    for file in ("bounds.py", "certificates.py"):
        for node in ast.walk(ast.parse((AUDITS / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AuditError":
                text = written(node.args[0])
                if text.startswith(("no certificate", "vacuous")):
                    yield text


def half_english(text: str) -> bool:
    return not HAN.search(text) or bool(re.search(r"[a-z]{2,} [a-z]{2,}", text))


def test_every_sight_of_a_flag_has_a_chinese_sentence() -> None:
    found = [t for t in seen_by_flags() if "." not in t and t not in FLAGS]
    assert len(found) > 12
    assert [text for text in found if half_english(translated(text, "zh"))] == []


def test_every_refused_certificate_has_a_chinese_reason() -> None:
    found = list(refusals())
    assert len(found) > 8
    assert [text for text in found if half_english(translated(text, "zh"))] == []


def test_numbers_and_names_stay_where_they_belong() -> None:
    seen = "rmle has MSE 0.0500 where decoder has 0.0400"
    assert translated(seen, "zh") == "rmle 的 MSE 是 0.0500，而 decoder 是 0.0400"
    assert translated(seen, "en") == seen
    assert translated("what a stranger wrote", "zh") == "what a stranger wrote"
    inner = "no certificate: noise of unknown scale; declare it with --noise SIGMA"
    assert translated(inner, "zh") == "没有证书：噪声大小未知；请用 --noise SIGMA 声明"


@pytest.mark.parametrize("defence", sorted(DEFENCES))
def test_the_flow_of_every_defence_has_chinese_words(defence: str) -> None:
    config = {"net": "small", "noise_std": 0.05, "defence": defence, "bank": 0}
    flow = run_flow(
        config | DEFENCES[defence].settings(), MODEL, DATA, (FlowStep("noise", ("std=0.05",)),),
        statistic="raw",
    )  # fmt: skip
    told = in_words_of(flow, "zh")
    assert in_words_of(flow, "en") == flow
    texts = [text for step in (*told.wire, *told.penalty) for text in (step.title, *step.lines)]
    spoken = [text for text in texts if re.search(r"[A-Za-z]{4,}", text) and text not in NAMES]
    own = {defence, "LayerNorm(z)", "网络 small"}
    assert [text for text in spoken if not HAN.search(text) and text not in own] == []
