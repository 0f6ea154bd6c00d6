"""Settings of runs short enough for a test."""

from pathlib import Path
from typing import Any

import splitveil as sv


def config(folder: Path, defence: str = "veil", **kwargs: Any) -> sv.RunConfig:  # noqa: ANN401
    settings: dict[str, Any] = {"dataset": "digits", "epochs": 2, "runs_dir": str(folder)} | kwargs
    return sv.RunConfig(defence=defence, **settings)
