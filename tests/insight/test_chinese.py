"""Chinese: names and paths in it are kept, pages are in it, and a missing font harms nothing."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli.app import app
from splitveil.insight import explanation
from splitveil.report import canvas, method_charts
from splitveil.report.canvas import NO_FONT

HAN = re.compile("[\u4e00-\u9fff]")


def told(output: str) -> str:
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", output).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    """A run on images whose folder and classes have Chinese names."""
    folder = tmp_path_factory.mktemp("数据 与 模型")
    rng = np.random.default_rng(0)
    y = np.arange(240) % 2
    x = (rng.integers(0, 120, (240, 8, 8)) + 130 * y[:, None, None]).astype(np.uint8)
    np.savez(folder / "图像.npz", x=x, y=y, classes=np.array(["暗的", "亮的"]))
    config = sv.RunConfig(
        dataset=f"npz:{folder / '图像.npz'}", defence="gated-att", epochs=2, device="cpu",
        name="first", runs_dir=str(folder / "运行"), settings={"attention_warmup_epochs": 0},
    )  # fmt: skip
    return sv.fit(config)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "LIMIT", 120)
    monkeypatch.setattr(explanation, "MAPPED", 40)


@pytest.fixture
def no_font(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Chinese fonts."""
    monkeypatch.setattr(canvas, "chinese_font", lambda: None)
    monkeypatch.setattr(method_charts, "chinese_font", lambda: None)


def test_an_audit_speaks_chinese(run: sv.Run) -> None:
    words = ["audit", str(run.path), "--profile", "smoke", "--attacks", "linear", "--lang", "zh"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said = told(result.output)
    assert "警示：有攻击未运行：" in said
    assert "没有运行；报告该数字之前，请不带 --attacks 重新审计" in said
    assert "这些是测试图像。" in said
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in page
    assert "没有运行" in page
    assert "did not run" not in page


@pytest.mark.usefixtures("small")
def test_explain_speaks_chinese(run: sv.Run, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["explain", str(run.path), "--lang", "zh", "--out", str(tmp_path / "页面")]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "页面" / "explain.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in page
    assert "first 为什么这样做" in page
    ours = r"<style>.*?</style>|<script>.*?</script>|<code>.*?</code>|<[^>]*>|--\w+ \w+"
    body = re.sub(ours, " ", page, flags=re.DOTALL)
    assert HAN.search(body)
    assert not re.search(r"\b[a-z]{3,} [a-z]{3,}\b", body)


@pytest.mark.usefixtures("small", "no_font")
def test_without_a_chinese_font_pages_are_chinese_and_pictures_english(
    run: sv.Run, tmp_path: Path
) -> None:
    for words in (["explain", str(run.path)], ["report", str(run.path)]):
        result = CliRunner().invoke(app, [*words, "--lang", "zh", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert NO_FONT in told(result.output)
    assert "apt install fonts-noto-cjk" in NO_FONT
    for name in ("explain.html", "report.html"):
        assert HAN.search((tmp_path / name).read_text(encoding="utf-8"))


@pytest.mark.usefixtures("no_font")
def test_signs_that_no_font_has_are_replaced() -> None:
    assert canvas.shown("亮的 bright") == "?? bright"


def test_signs_of_an_installed_font_are_drawn() -> None:
    if canvas.chinese_font() is None:
        pytest.skip("no Chinese font is installed")
    assert canvas.shown("亮的 bright") == "亮的 bright"


def test_a_name_that_a_run_cannot_have_says_which_it_can(tmp_path: Path) -> None:
    words = ["train", "--dataset", "digits", "--defence", "none", "--epochs", "1"]
    result = CliRunner().invoke(
        app, [*words, "--name", "第一次", "--runs-dir", str(tmp_path / "运行")]
    )
    assert result.exit_code == 2
    assert "must start with a letter or digit" in told(result.output)
    assert "第一次" in told(result.output)
    assert not (tmp_path / "运行").exists()


@pytest.mark.parametrize("words", [["doctor"], ["explain"], ["audit"], ["report"]])
def test_a_chinese_path_that_is_no_run_is_named(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*words, str(tmp_path / "没有"), "--lang", "zh"])
    assert result.exit_code == 2
    assert "没有" in told(result.output)
