"""Count how often a reader who follows the code must change files, on four walks.

The walks: ``train`` from the command line to the first step; one later step of a training;
``audit`` to the record; ``report`` from the command line to the page. All are on digits with the
defence veil and the smoke profile, the page is of two runs (none and veil).

The rule: a reader opens every function once, where it is first called. The call is a *hop* if the
caller is in another file of the package; several hops between the same two files count once. The
caller is the nearest frame of the package, even if torch is in between. Comprehensions, lambdas,
generated methods (such as those of dataclasses) and code that runs during an import do not count.
*Files* are all files of these functions and their callers.

The script uses only the public names of the package, so it still works after files have moved.
Below the table it says how many files the package has, and how many lines of code: those with
anything but blanks, comments and docstrings.

Example: `python scripts/walk.py`
"""

import argparse
import ast
import io
import json
import os
import sys
import tempfile
import tokenize
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import splitveil as sv

PACKAGE = f"{Path(sv.__file__).parent}{os.sep}"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
STEADY = 6  # a step after the first ones, which also build what later steps find
EPOCHS = 2


class Arrived(BaseException):
    """The walk is at its end; a BaseException, so that no `except Exception` catches it."""


class Walk:
    """Watches calls between files of the package while it is switched on."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.hops: dict[tuple[str, str], list[str]] = {}  # from file to file, with the calls
        self.files: set[str] = set()

    def start(self) -> None:
        """Start watching."""
        sys.setprofile(self._watch)

    @staticmethod
    def stop() -> None:
        """Stop watching."""
        sys.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        function = (code.co_filename, code.co_qualname)
        if code.co_name.startswith("<") or function in self.seen:
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_name == "<module>":
            return
        self.seen.add(function)
        self.files |= {caller.f_code.co_filename, code.co_filename}
        if caller.f_code.co_filename != code.co_filename:
            hop = (caller.f_code.co_filename, code.co_filename)
            call = f"{caller.f_code.co_qualname} → {code.co_qualname}"
            self.hops.setdefault(hop, []).append(call)

    def numbers(self) -> dict[str, Any]:
        """How many hops and files, and the calls of every hop."""
        named = {
            " → ".join(file.removeprefix(PACKAGE) for file in hop): calls
            for hop, calls in sorted(self.hops.items())
        }
        return {"hops": len(named), "files": len(self.files), "calls": named}


def command(*words: object) -> None:
    """Run the console script in this process, and drop what it prints."""
    scripts = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["splitveil"].partition(":")
    entry = getattr(import_module(module), function)
    before, sys.argv = sys.argv, ["splitveil", *map(str, words)]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            entry()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{words} ended with {end.code}: {printed.getvalue()}") from end
    finally:
        sys.argv = before


def steps_of_training(folder: Path, first: int, last: int) -> Walk:
    """Watch a training from the end of step `first` (0: the command) to that of step `last`."""
    walk, steps = Walk(), 0
    leader: list[
        torch.optim.Optimizer
    ] = []  # the first to step; a step of another one is not counted

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps
        walk.stop()
        leader[:] = leader or [optimizer]
        steps += optimizer is leader[0]
        if steps == last:
            raise Arrived
        if steps >= first:
            walk.start()

    hook = register_optimizer_step_post_hook(after_step)
    if first == 0:
        walk.start()
    try:
        command(*training(folder, "veil", f"walk-{first}"))
    except Arrived:
        return walk
    finally:
        walk.stop()
        hook.remove()
    raise RuntimeError(f"the training ended after {steps} steps, before step {last}")


def training(folder: Path, defence: str, name: str) -> list[str]:
    """The command of a training that takes seconds."""
    return [
        "train", "--dataset", "digits", "--defence", defence, "--epochs", str(EPOCHS), "--device",
        "cpu", "--runs-dir", str(folder), "--name", name,
    ]  # fmt: skip


def whole(work: Callable[[], object]) -> Walk:
    """Watch all of some work."""
    walk = Walk()
    walk.start()
    try:
        work()
    finally:
        walk.stop()
    return walk


def walks(folder: Path) -> dict[str, dict[str, Any]]:
    """All four, in a folder for their runs."""
    runs = [folder / "none", folder / "veil"]
    for run in runs:
        command(*training(folder, run.name, run.name))
    sv.load_run(runs[0]).audit("smoke")
    found = {
        "train → first step": steps_of_training(folder, 0, 1),
        "one step": steps_of_training(folder, STEADY - 1, STEADY),
        "audit → record": whole(lambda: sv.load_run(runs[1]).audit("smoke")),
        "report → page": whole(lambda: command("report", *runs, "--out", folder / "page")),
    }
    return {name: walk.numbers() for name, walk in found.items()}


NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def code_lines(source: str) -> int:
    r"""Lines of a module without blanks, comments and docstrings.

    >>> code_lines("'About it.'\n\n# why\nx = 1\n")
    1
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if ast.get_docstring(node) is not None else None
            if first is not None:
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print the table, or with --json also every call from file to file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print JSON with the calls of every hop"
    )
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = walks(Path(folder))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print("| walk | hops | files |\n|---|--:|--:|")
    for name, walk in found.items():
        print(f"| {name} | {walk['hops']} | {walk['files']} |")
    files = list(Path(PACKAGE).rglob("*.py"))
    lines = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
    print(f"\n{lines} lines of code in {len(files)} files")


if __name__ == "__main__":
    main()
