"""What commands share: output, progress bars, warnings, and options of several commands."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.measure import Measurement
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from splitveil.errors import ConfigError
from splitveil.io import Progress, finite, printable
from splitveil.table import TimeLeft, duration

if TYPE_CHECKING:
    from splitveil.record.files import RunFiles

# What files and strangers are called is printed as it is: "[red]" is no colour, ":-1:" no emoji.
# Only control characters are left out, here and wherever a text meets these two.
out = Console(markup=False, emoji=False, highlight=False)
err = Console(stderr=True, markup=False, emoji=False, highlight=False)


# Values that may be left out; the help says what is the default.
OptText = str | None
OptTexts = list[str] | None
OptInt = int | None
OptNumber = float | None
OptPath = Path | None
OptPaths = list[Path] | None

# Options that several commands have.
JsonFlag = Annotated[bool, Option("--json", help="Print JSON instead of tables and text.")]
RunFolder = Annotated[Path, Argument(help="Folder of a trained run, such as runs/first.")]
RunsDir = Annotated[OptText, Option(help="Folder that holds the runs (default: runs).")]
DataDir = Annotated[
    OptText, Option(help="Folder of datasets (default: $SPLITVEIL_DATA or a cache).")
]
DatasetOption = Annotated[OptText, Option(help="A name that `splitveil datasets` lists.")]
Device = Annotated[OptText, Option(help="Where to compute: auto, cpu or cuda.")]
NetOption = Annotated[
    OptText, Option(help="A net that `splitveil clients` lists, or NAME@N for a cut.")
]
SettingsOption = Annotated[
    OptTexts, Option("--set", help="key=value, for example lambd=0.3; repeatable.")
]
Precision = Annotated[OptText, Option(help="auto, float32 or bf16 (default: auto).")]
Threads = Annotated[OptInt, Option(help="CPU threads (default: all cores it may use).")]
OutFolder = Annotated[OptPath, Option("--out", help="Folder to write the results to.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the folder if it exists.")]
PublishedOption = Annotated[OptPath, Option(help="JSON file of published rows to show as well.")]
Profile = Annotated[str, Option(help="Budget: smoke, demo, quick, laptop, standard or paper.")]
Language = Annotated[str, Option("--lang", help="Language of what is written: en or zh.")]
TrainingSeed = Annotated[OptInt, Option(help="Random seed of the training (default: 0).")]


def setup_logging() -> None:
    """Warnings of the product reach the terminal; libraries stay quiet."""
    handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    handler.addFilter(_printable_record)
    logger = logging.getLogger("splitveil")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    # The level of `lightning_fabric` itself is set anew when it is imported, later.
    logging.getLogger("lightning_fabric.utilities.rank_zero").setLevel(logging.ERROR)


def _printable_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


LINE_EVERY_S = 30.0  # between lines of progress, where there is no terminal


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar with the time left, at the end the time taken; on stderr, apart from results.

    Without a terminal (a file, a pipe, the log of a scheduler) it prints lines instead: one after
    each epoch or attack, and one after half a minute within it.
    """
    if not err.is_terminal:
        lines = ProgressLines(title)
        try:
            yield lines
        finally:
            lines.flush()
        return
    with RichProgress(
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=8), TaskProgressColumn(),
        TimeLeft(), TextColumn("{task.fields[note]}", markup=False), console=err,
    ) as bar:  # fmt: skip
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note="": bar.update(
            task, completed=done, total=total, note=printable(note)
        )


class ProgressLines:
    """A `Progress` that prints lines; a part of the work ends when the note names another one."""

    def __init__(self, title: str) -> None:
        self._title, self._part = title, ""
        self._last: tuple[int, int, float, str] | None = None  # done, total, seconds, note
        self._began = self._printed = time.monotonic()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Note the state, and print it if it is time to."""
        words = note.split()
        part = " ".join(words[: 2 if note.startswith("epoch ") else 1])
        if part != self._part:
            self.flush()
        self._part = part
        self._last = done, total, time.monotonic() - self._began, note
        if time.monotonic() - self._printed >= LINE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Print the last state that was not printed."""
        if self._last is None:
            return
        done, total, spent, note = self._last
        line = f"{self._title} {100 * done // max(total, 1)} % after {duration(spent)}  {note}"
        err.print(printable(line.rstrip()), soft_wrap=True)
        self._printed, self._last = time.monotonic(), None


def show_json(data: Any) -> None:  # noqa: ANN401 - any JSON value
    """Print machine-readable results, and nothing else, on stdout."""
    print(json.dumps(data, indent=2, allow_nan=False))


WHOLE_WORD = 12  # letters up to which a word is never broken


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; every cell is plain text."""
    title, headings = printable(title), list(map(printable, headings))
    rows = [list(map(printable, row)) for row in rows]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for index, heading in enumerate(headings):
        cells = (heading, *(row[index] for row in rows))
        widest = max((len(word) for cell in cells for word in cell.split()), default=1)
        table.add_column(
            heading, overflow="fold", no_wrap=index == 0, min_width=min(widest, WHOLE_WORD)
        )
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    # A narrow terminal wraps what it cannot hold; nothing is cut off.
    least = Measurement.get(out, out.options, table).minimum
    out.print(table, width=max(out.width, least), crop=False)


def warn(message: str) -> None:
    """Print something the user should know before believing a number."""
    err.print(printable(message), style="yellow", soft_wrap=True)


def announce(message: str) -> None:
    """Print what a long job is about to do, apart from results."""
    err.print(printable(message), soft_wrap=True)


def show_error(message: str) -> None:
    """Print what is wrong and what to do."""
    err.print("error:", style="bold red", end=" ")
    err.print(printable(message), soft_wrap=True)


def show_records(runs: "Sequence[RunFiles]") -> None:
    """Print the records of some runs as JSON."""
    show_json(finite({str(run.path): run.record.to_dict() for run in runs}))


def show_result(data: Any, *lines: str, json_: bool) -> None:  # noqa: ANN401 - any JSON value
    """Print a result as JSON or as lines of text."""
    if json_:
        show_json(data)
    else:
        print_lines(*lines)


def show_catalogue(
    title: str, entries: dict[str, str], facts: dict[str, Any] | None = None, *, json_: bool
) -> None:
    """Print names and what they stand for; as JSON the `facts`, where they say more."""
    if json_:
        show_json(facts or entries)
    else:
        show_table(title, ["name", "what it is"], [list(item) for item in entries.items()])


def print_lines(*lines: str) -> None:
    """Print on stdout without a box, whose columns would fold long names."""
    for line in lines:
        out.print(printable(line), soft_wrap=True)


def seeds_of(text: str) -> list[int]:
    """Seeds from the command line, each once.

    >>> seeds_of("0,1, 2")
    [0, 1, 2]
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--seeds must be whole numbers from 0, such as 0,1,2, got {text!r}")
    if len(set(map(int, words))) < len(words):
        raise ConfigError(f"--seeds names a seed twice: {text}")
    return [int(word) for word in words]


def names_of(text: str | None, more: OptTexts = None) -> OptTexts:
    """Names from the command line, each once; None if none is given.

    >>> names_of("linear, decoder", ["linear"])
    ['linear', 'decoder']
    """
    words = [] if text is None else [name.strip() for name in text.split(",")]
    return list(dict.fromkeys([*words, *(more or [])])) or None


def start() -> None:
    """Prepare the process and its messages."""
    from splitveil.runs import flush_denormals

    flush_denormals()
    setup_logging()
