"""Pages that are followed from top to bottom, and what their tables say of the code."""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from documents import FENCE, ROOT, table
from typer.testing import CliRunner

from splitveil.attacks.profiles import PROFILES
from splitveil.cli.app import app
from splitveil.defences.catalogue import DEFENCES


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads, by much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def walk(text: str, folder: Path) -> None:
    """Run the blocks of a page in order: commands, code, and files that are called by name."""
    namespace: dict[str, Any] = {"__name__": "docs.walked"}
    for kind, block in [(m[1], m[2]) for m in FENCE.finditer(text)]:
        if kind == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            (folder / name[1]).write_text(block, encoding="utf-8")
        elif kind == "python":
            exec(compile(block, "block", "exec"), namespace)  # noqa: S102
        elif kind == "sh":
            for line in block.splitlines():
                program, *words = shlex.split(line)
                assert program == "splitveil", line
                sys.modules.pop("mymodel", None)  # a command is a new process
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "left"),
    [
        (
            "start/tutorial.md",
            ["page/report.html", "runs/veil/explain.html", "runs/veil/export/client.onnx",
             "runs/none/record.json", "table.csv", "table.md", "table.tex"],
        ),
        ("start/own-data.md", ["runs/arrays/config.toml", "runs/shapes/record.json",
                         "runs/client/record.json", "small/disc/00.png"]),
    ],
)  # fmt: skip
def test_a_page_can_be_followed_from_top_to_bottom(
    name: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8").replace("--epochs 20", "--epochs 2")
    few = {attack: PROFILES["smoke"][attack] for attack in ("mean", "class-mean", "linear")}
    monkeypatch.setitem(cast("dict[str, Any]", PROFILES), "smoke", few)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        walk(text, tmp_path)
    finally:
        sys.modules.pop("mymodel", None)
    missing = [path for path in left if not (tmp_path / path).is_file()]
    assert not missing


def resolve(name: str) -> Any:  # noqa: ANN401 - whatever the documents name
    """The object at a dotted name inside the package."""
    found: Any = import_module("splitveil")
    path = "splitveil"
    for part in name.split("."):
        path += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else import_module(path)
    return found


STEPS = [
    "features", "grouping", "weights", "statistic", "floor, threshold", "gates",
    "penalty of a class", "sum over classes", "schedule", "gradient route", "what it cannot see",
    "cost",
]  # fmt: skip


def test_every_step_of_the_terms_is_told_for_each_method_and_named_in_the_code() -> None:
    rows = table((ROOT / "docs" / "reference" / "terms.md").read_text(encoding="utf-8"), "step")
    assert [row[0] for row in rows] == STEPS
    for _, chinese, *methods, code in rows:
        assert re.search(r"[\u4e00-\u9fff]", chinese)
        assert len(methods) == 4
        assert all(methods)
        names = re.findall(r"[\w./]+", code.replace("`", ""))
        assert names
        for name in names:
            assert (ROOT / name).is_file() if "/" in name else callable(resolve(name)), name


def test_the_symbols_of_the_maths_are_named_in_the_code() -> None:
    rows = table((ROOT / "docs" / "reference" / "maths.md").read_text(encoding="utf-8"), "section")
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"[\w.]+", row[-1].replace("`", ""))
        assert all(callable(resolve(name)) for name in names), row


def test_the_schedules_of_the_maths_are_those_of_the_presets() -> None:
    text = (
        (ROOT / "docs" / "reference" / "maths.md")
        .read_text(encoding="utf-8")
        .split("## Schedules")[1]
    )
    printed: dict[str, tuple[Any, ...]] = {}
    for names, lambd, scale, warmup, first, w_lr, ramp, _ in table(text, "preset"):
        facts = (float(lambd), float(scale), int(warmup), first == "skipped", w_lr, float(ramp))
        printed |= dict.fromkeys(re.findall(r"[a-z][a-z-]+", names.split(" (")[0]), facts)
    plans = {name: DEFENCES[name].penalty_plan() for name in printed}
    assert {"cem", "gated-att", "slot-cross", "veil"} < set(printed)
    assert printed == {
        name: (p.lambd, p.scale, p.warmup_epochs, p.skip_first_epoch, p.w_lr, p.ramp)
        for name, p in plans.items()
    }


def test_the_glossary_is_sorted_and_says_one_sentence_of_each_term_in_two_languages() -> None:
    rows = table((ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8"), "term")
    terms = [row[0].lower() for row in rows]
    assert terms == sorted(set(terms))
    assert len(terms) >= 60
    for term, chinese, meaning in rows:
        assert re.search(r"[\u4e00-\u9fff]", chinese), term
        assert meaning.endswith("."), term
