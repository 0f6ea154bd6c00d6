"""What a sweep shows: a table that lives while it runs, and the result in lines."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.table import Table
from rich.text import Text

from splitveil.sweep.journal import Entry
from splitveil.sweep.outcome import point
from splitveil.sweep.pareto import front
from splitveil.sweep.trial import Plan, Task
from splitveil.types import Json

RUNNING_SHOWN = 8


def in_words(settings: Mapping[str, Any], seed: int) -> str:
    """Settings as a user would type them.

    >>> in_words({"lambd": 0.30000001, "form": "hinge"}, 2)
    'lambd=0.3 form=hinge seed=2'
    """
    said = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items()]
    return " ".join([*said, *([] if "seed" in settings else [f"seed={seed}"])])


class Board:
    """One line per defence and one per running trial, drawn anew four times a second."""

    def __init__(self, plan: Plan, before: Sequence[Entry]) -> None:
        self._plan, self._done = plan, list(before)
        self._running: dict[str, tuple[Task, float]] = {}

    def started(self, task: Task) -> None:
        """Show a trial as running."""
        self._running[task.key] = task, time.monotonic()

    def finished(self, entry: Entry) -> None:
        """Count a trial."""
        self._running.pop(entry.task.key, None)
        self._done.append(entry)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """The board now."""
        del console, options
        table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        for heading in ("defence", "done", "failed", "on the front", "best acc %", "least leakage"):
            table.add_column(heading, justify="left" if heading == "defence" else "right")
        for cells in self.rows():
            table.add_row(*map(Text, cells))
        yield table
        for task, since in list(self._running.values())[:RUNNING_SHOWN]:
            words = in_words(task.settings, task.seed)
            yield Text(f"  running {time.monotonic() - since:5.0f} s  {task.key}  {words}")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """One row of text per defence."""
        good = [(e.defence, point(e)) for e in list(self._done) if e.found is not None]
        marks = front([found for _, found in good])
        for name in self._plan.defences:
            own = [found for defence, found in good if defence == name]
            ended = sum(e.defence == name for e in self._done)
            shown = sum(m for (defence, _), m in zip(good, marks, strict=True) if defence == name)
            yield (
                name,
                f"{ended}/{self._plan.trials}",
                str(ended - len(own)),
                str(shown),
                f"{100 * max(accuracy for accuracy, _ in own):.2f}" if own else "–",
                f"{min(leakage for _, leakage in own):.3f}" if own else "–",
            )

    @contextmanager
    def live(self, console: Console) -> Iterator[None]:
        """The board on a terminal; where there is none it is printed once, at the end."""
        try:
            with Live(self, console=console, refresh_per_second=4):
                yield
        finally:
            if not console.is_terminal:  # else its last line has an end already
                console.line()


def _volume(volume: Json | None) -> str:
    if volume is None:
        return "–"
    return f"{volume['value']:.3f} [{volume['low']:.3f}, {volume['high']:.3f}]"


def _trial(row: Json) -> str:
    return (
        f"{100 * row['accuracy']:6.2f} {max(row['leakage'], 0.0):7.3f} {row['mse']:7.4f} "
        f"{row['attack']:<13} {row['defence']} {in_words(row['settings'], row['seed'])}"
    )


def result_lines(result: Json) -> Iterator[str]:
    """The result as text."""
    plan, base = result["plan"], result["reference_accuracy"]
    yield (
        f"{len(result['trials'])} trials on {plan['options'].get('dataset', 'digits')}: "
        f"{plan['trials']} of each defence, sampler {plan['sampler']}, seed {plan['seed']}, "
        f"profile {plan['profile']}; all numbers on validation images"
    )
    yield "front: no other trial is as accurate and as private, and better in one"
    yield f"{'acc %':>6} {'leakage':>7} {'MSE':>7} {'attack':<13} trial"
    yield from map(_trial, result["front"])
    at = result["reference_point"]
    yield (
        f"hypervolume {_volume(result['hypervolume'])}: share covered from accuracy "
        f"{at['accuracy']:g}, leakage {at['leakage']:g}; {result['interval']}"
    )
    for name, one in result["defences"].items():
        yield f"  {name}: {_volume(one['hypervolume'])}, {one['failed']} of {one['trials']} failed"
    yield (
        f"best privacy at ≤ {100 * result['allowed_loss']:g} point below "
        f"{100 * base['accuracy']:.2f} %, the most accurate trial of "
        f"{base['defence'] if base['defence'] == 'none' else 'all'}"
    )
    for name, one in result["defences"].items():
        yield f"  {name}: no trial" if one["best"] is None else _trial(one["best"])
    keep = [one["best"] for one in result["defences"].values() if one["best"] is not None]
    if keep:
        run = min(keep, key=lambda r: max(r["leakage"], 0.0))["run"]
        yield f"next: splitveil audit {_near(run)}"


def _near(path: str) -> str:
    """A path from here where that is shorter."""
    here, there = Path.cwd(), Path(path)
    return str(there.relative_to(here)) if there.is_relative_to(here) else path
