"""A half of the network as a function of numpy arrays, run by onnxruntime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from splitveil.serve.faults import ExportError
from splitveil.serve.manifest import Manifest, read_verified

Rows = NDArray[np.float32]
Half = Callable[[Rows], Rows]

_ERRORS_ONLY = 3


def load_half(folder: Path, manifest: Manifest, file: str, threads: int = 0) -> Half:
    """One half of an export, its hash checked; `threads` 0 lets onnxruntime choose."""
    return open_half(read_verified(folder, manifest, file), threads, where=str(folder / file))


def open_half(model: bytes, threads: int = 0, *, where: str = "the model") -> Half:
    """An ONNX model with one input and one output as a function of rows."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _ERRORS_ONLY
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as err:  # onnxruntime's own errors have no common parent below this
        raise ExportError(f"{where} cannot be loaded by onnxruntime: {err}; export again") from err
    (name,) = (i.name for i in session.get_inputs())

    def half(rows: Rows) -> Rows:
        found: Rows = session.run(None, {name: rows})[0]
        return found

    return half
