"""The options of paper/headline.py, checked before anything is trained."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from paper.headline_rows import TABLES, Row
from splitveil.attacks.profiles import find_profile
from splitveil.errors import ConfigError, SplitVeilError
from splitveil.io import check_folder

ROOT = Path(__file__).parents[1]
GRACE_S = 20.0  # that a training gets to save its state after the limit
LONGEST_S = 2_000_000.0  # three weeks; subprocess cannot wait much longer


def from_(least: int) -> Callable[[str], int]:
    """A reader of whole numbers of at least `least`."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    read.__name__ = "whole number"  # argparse shows it in its message
    return read


def seconds(text: str) -> float:
    """A time from now on in seconds; `inf` is no limit.

    >>> seconds("560")
    560.0
    """
    value = float(text)
    if not (0 <= value <= LONGEST_S or value == math.inf):
        raise argparse.ArgumentTypeError(
            f"must be from 0 to {LONGEST_S:.0f}, got {text}; leave it out for no limit"
        )
    return value


def parse() -> argparse.Namespace:
    """The options; what is not given comes from the table."""
    parser = argparse.ArgumentParser(
        description="Train and audit the rows of a table, and put their records into results/."
    )
    parser.add_argument("--table", choices=TABLES, default="headline")
    parser.add_argument("--rows", nargs="+", help="default: all of the table")
    parser.add_argument("--seeds", nargs="+", type=from_(0), help="default: the table's")
    parser.add_argument("--jobs", type=from_(1), default=1, help="trainings and audits at once")
    parser.add_argument("--profile", help="default: the table's")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", help="default: the table's folder below results/")
    parser.add_argument(
        "--attacks-first-only", action="store_true", help="only the main audit of each row"
    )
    parser.add_argument("--compile", action="store_true", help="compiled trainings and audits")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--train-only", action="store_true", help="no audits")
    only.add_argument("--audit-only", action="store_true", help="only runs that are trained")
    parser.add_argument(
        "--stop-after", type=seconds, default=math.inf, metavar="SECONDS",
        help=f"interrupt what runs then; it takes up to {GRACE_S:.0f} s more to save",
    )  # fmt: skip
    parser.add_argument(
        "--begin-until", type=seconds, default=math.inf, metavar="SECONDS",
        help="begin no training and no audit later, so that what runs can end in time",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    table = TABLES[options.table]
    names = [row.name for row in table.rows]
    if wrong := [name for name in options.rows or [] if name not in names]:
        parser.error(
            f"no row {', '.join(wrong)} in {options.table}; choose from {', '.join(names)}"
        )
    options.rows = options.rows or names
    options.profile = options.profile or table.profile
    options.seeds = table.seeds if options.seeds is None else options.seeds
    options.out = str(ROOT / "results" / table.folder) if options.out is None else options.out
    try:
        check(options, [row for row in table.rows if row.name in options.rows])
    except SplitVeilError as err:
        parser.error(str(err))
    return options


def check(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Raise on what would do work twice, or fail only after a training."""
    for what in ("rows", "seeds"):
        given = getattr(options, what)
        if twice := sorted({str(one) for one in given if given.count(one) > 1}):
            raise ConfigError(f"--{what} names {', '.join(twice)} more than once; name each once")
    for audit in [audit for row in rows for audit in row.audits]:
        find_profile(options.profile, only=audit.attacks.split(",") if audit.attacks else ())
    for what in ("out", "runs_dir"):
        check_place(f"--{what.replace('_', '-')}", getattr(options, what))


def check_place(option: str, text: str) -> None:
    """Raise on a folder that cannot be written to; it need not exist yet."""
    if not text:
        raise ConfigError(f"{option} must be a folder, got ''; leave it out for the default")
    check_folder(Path(text), f"Choose another folder with {option}")
