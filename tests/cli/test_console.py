"""What the terminal shows: words whole, names as they are, nothing cut off."""

import logging

import pytest
from lightning_fabric import Fabric
from rich.progress import Task, TaskID

from splitveil.cli import console
from splitveil.table import TimeLeft, TimeSpent


@pytest.mark.parametrize("width", [200, 80, 40])
def test_a_table_loses_nothing_however_narrow_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "_width", width)
    headings = ["attack", "access", "MSE ↑", "PSNR ↓", "SSIM ↓", "seconds", "remark"]
    row = [
        "decoder-perceptual",
        "black-box",
        "0.0447",
        "13.50",
        "0.743",
        "0.7",
        "32 images, linear",
    ]
    console.show_table("title", headings, [row])
    shown = capsys.readouterr().out.split()
    for word in " ".join(["title", *headings, *row]).split():
        assert word in shown


def test_names_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "_width", 80)
    console.show_table("[red]run", ["[bold]x"], [["a:-1:b"]])
    console.show_error("port :-1: of [red]host")
    told = capsys.readouterr()
    assert all(name in told.out for name in ("[red]run", "[bold]x", "a:-1:b"))
    assert "port :-1: of [red]host" in told.err


def test_notes_of_the_training_library_stay_out_of_the_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = logging.getLogger("lightning_fabric")
    monkeypatch.setattr(library, "propagate", True)
    console.setup_logging()
    library.setLevel(logging.INFO)  # as its import does, which comes after
    Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    assert caplog.messages == []


def test_bars_tell_time_as_people_do() -> None:
    clock = [0.0]
    bar = Task(TaskID(0), "train", total=4, completed=0, _get_time=lambda: clock[0])
    assert [str(column.render(bar)) for column in (TimeLeft(), TimeSpent())] == ["–", "–"]
    bar.start_time, clock[0] = 0.0, 252.3
    assert str(TimeSpent().render(bar)) == "4 min 12 s"
    bar.finished_time = 75.0
    assert str(TimeLeft().render(bar)) == "1 min 15 s"


def test_without_a_terminal_every_epoch_leaves_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar("train") as progress:
        for step in range(1, 7):
            progress(step, 6, f"epoch {(step + 1) // 2}/3 loss {step / 10:.1f}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["33", "66", "100"]
    assert [line.split("epoch ")[1] for line in lines] == [
        "1/3 loss 0.2", "2/3 loss 0.4", "3/3 loss 0.6",
    ]  # fmt: skip


def test_long_work_within_an_epoch_leaves_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    lines = console.ProgressLines("train")
    for step in range(1, 21):
        lines(step, 100, "epoch 1/1")
    assert 4 < len(capsys.readouterr().err.splitlines()) < 20
