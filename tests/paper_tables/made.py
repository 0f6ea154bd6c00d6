"""Commands that paper/headline.py plans, and where it lies."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from splitveil.config.settings import parse_pair

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "paper" / "headline.py"
COMMAND = [sys.executable, "-m", "paper.headline"]
PATHS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS.rstrip(os.pathsep)}  # from any folder
Planned = Callable[..., list[list[str]]]


def settings_of(command: list[str]) -> dict[str, object]:
    words = [w for w in command[2:] if w != "--final"]
    pairs = [(k, v) for k, v in zip(words[::2], words[1::2], strict=True) if "-dir" not in k]
    return dict(parse_pair(v if k == "--set" else f"{k[2:]}={v}") for k, v in pairs)
