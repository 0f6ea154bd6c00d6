"""The server's half as a model repository for Triton, and for KServe, which runs Triton."""

import shutil
from pathlib import Path

from splitveil.serve.manifest import LOGITS, SERVER, WIRE, Shape

FOLDER = "repository"
MAX_BATCH, MAX_DELAY_US = 64, 2000


def config_text(name: str, wire_shape: Shape, num_classes: int) -> str:
    """The `config.pbtxt` of the head.

    >>> config_text("first", (8, 8, 8), 10).splitlines()[0]
    'name: "first"'
    """
    dims = ", ".join(str(n) for n in wire_shape)
    return f"""name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: {MAX_BATCH}
input [ {{ name: "{WIRE}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "{LOGITS}" data_type: TYPE_FP32 dims: [ {num_classes} ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: {MAX_DELAY_US} }}
"""


def write(place: Path, name: str, wire_shape: Shape, num_classes: int) -> None:
    """Write `repository/NAME/config.pbtxt` and `repository/NAME/1/model.onnx` below an export."""
    model = place / FOLDER / name
    (model / "1").mkdir(parents=True)
    shutil.copyfile(place / SERVER, model / "1" / "model.onnx")
    text = config_text(name, wire_shape, num_classes)
    (model / "config.pbtxt").write_text(text, encoding="utf-8")
