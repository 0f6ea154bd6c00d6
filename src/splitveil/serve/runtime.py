"""The one place that imports onnxruntime: its telemetry is switched off before it is loaded.

From 1.31 on it writes a device id and an event store into the user's cache folder and looks up
hosts of its maker, unless the environment tells it not to when it is loaded. Its function
`disable_telemetry_events` comes too late for the files. A program that imports onnxruntime before
SplitVeil must set the variable itself.
"""

import os
from typing import Any

SWITCH = "ORT_DISABLE_TELEMETRY"


def onnxruntime() -> Any:  # noqa: ANN401 - it has no types
    """The library, quiet."""
    os.environ[SWITCH] = "1"
    import onnxruntime as found  # type: ignore[import-untyped]

    return found


def onnxruntime_quantisation() -> Any:  # noqa: ANN401
    """Its tools for 8-bit networks, quiet."""
    os.environ[SWITCH] = "1"
    from onnxruntime import quantization as found

    return found
