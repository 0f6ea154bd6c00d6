"""How 0.1.0 read a manifest: the first lines of its `read_manifest`, unchanged but for imports."""

import json
from pathlib import Path
from typing import Any

from splitveil.errors import ExportError

FORMAT = "splitveil-export-1"


def check_format(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """The manifest's JSON, if its format is the one that 0.1.0 knows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["format"] != FORMAT:
        raise ExportError(f"{path} has format {data['format']!r}, expected {FORMAT!r}")
    return data
