"""The code and the commands of the pages run as they are printed."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from documents import FENCE, ROOT, python_blocks, read, sections
from typer.testing import CliRunner

from splitveil.attacks.profiles import PROFILES
from splitveil.cli.app import app

SECTIONS = [
    pytest.param(name, title, python_blocks(text), id=f"{name}: {title}")
    for name in ("project/adding.md", "project/errata.md")
    for title, text in sections(read(name)).items()
    if python_blocks(text)
]


@pytest.mark.parametrize(("name", "title", "blocks"), SECTIONS)
def test_the_code_of_a_section_runs(
    name: str, title: str, blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs.section"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{name}, {title}, block {number}", "exec"), namespace)  # noqa: S102
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_every_section_that_adds_something_has_code() -> None:
    with_code = [p.values[1] for p in SECTIONS if p.values[0] == "project/adding.md"]
    assert with_code == list(sections(read("project/adding.md")))


def follow(text: str, folder: Path) -> None:
    """Run the blocks of a page in order: commands, code, and files that are saved by name."""
    namespace: dict[str, Any] = {"__name__": "docs.followed"}
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


@pytest.mark.parametrize(
    ("names", "left"),
    [
        pytest.param(
            # The guides use the runs of the tutorial.
            ("start/tutorial.md", "guides/audit.md", "guides/report.md"),
            ("page/report.html", "page/deck.pptx", "runs/veil/explain.html",
             "runs/veil/export/client.onnx", "runs/none/record.json", "table.csv", "table.md",
             "table.tex"),
            marks=pytest.mark.slow, id="tutorial, audit, report",
        ),
        pytest.param(
            ("zh/tutorial.md", "zh/methods.md", "zh/tuning.md"),
            ("page/report.html", "runs/gated/explain.html", "runs/zh-slots/record.json"),
            marks=pytest.mark.slow, id="Chinese pages",
        ),
        pytest.param(
            ("start/own-data.md",),
            ("runs/arrays/config.toml", "runs/shapes/record.json", "runs/small-shapes/config.toml"),
            id="own data",
        ),
        pytest.param(
            ("start/own-model.md",), ("mymodel.safetensors", "runs/client/record.json"),
            id="own model",
        ),
        pytest.param(("guides/settings.md",), ("runs/taught/config.toml",), id="settings"),
    ],
)  # fmt: skip
def test_pages_can_be_followed(
    names: tuple[str, ...], left: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {attack: PROFILES["smoke"][attack] for attack in ("mean", "class-mean", "linear")}
    monkeypatch.setitem(cast("dict[str, Any]", PROFILES), "smoke", few)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for name in names:
            text = (
                read(name)
                .replace("runs/demo/undefended", "runs/none")
                .replace("runs/demo/", "runs/")
            )
            # A training takes one epoch, whether it says how many or not.
            text = re.sub(r" --epochs \d+", "", text)
            follow(re.sub(r"^splitveil train .+", r"\g<0> --epochs 1", text, flags=re.M), tmp_path)
    finally:
        sys.modules.pop("mymodel", None)
    assert not [path for path in left if not (tmp_path / path).is_file()]


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {attack: PROFILES["quick"][attack] for attack in ("mean", "class-mean", "linear")}
    monkeypatch.setitem(cast("dict[str, Any]", PROFILES), "quick", few)
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    exec(block.replace("seed=0", "seed=0, epochs=1"), {})  # noqa: S102
    assert (tmp_path / "runs" / "first" / "record.json").is_file()


def test_the_code_of_the_chinese_readme_runs() -> None:
    (block,) = python_blocks((ROOT / "README.zh.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102
    # The slots are shut off for their first 100 calls: the gradient is there, and it is 0.
    assert names["z"].grad.shape == names["z"].shape
    assert float(names["out"].intra_mse) > 0
