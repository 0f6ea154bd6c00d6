"""A network is checked against the manifest before it answers anybody."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from serve.made import CLASSES, SHAPE, WEIGHT, write_export

from splitveil.errors import ExportError
from splitveil.serve.client import Client
from splitveil.serve.manifest import FILE, SERVER, load_half, read_manifest, sha256
from splitveil.serve.server import load_app

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_export(tmp_path / "e")


def rewrite(folder: Path, **changes: Any) -> None:  # noqa: ANN401
    text = replace(read_manifest(folder), **changes).to_json()
    (folder / FILE).write_text(text, encoding="utf-8")


def replace_head(
    folder: Path,
    inputs: list[tuple[str, int, list[Any]]],
    outputs: list[tuple[str, int, list[Any]]],
    nodes: list[Any] | None = None,
) -> None:
    """Another server half, whose hash the manifest knows."""
    kind = inputs[0][1]
    nodes = nodes or [
        helper.make_node("Flatten", [inputs[0][0]], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], [outputs[0][0]]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "head", [helper.make_tensor_value_info(*t) for t in inputs],
        [helper.make_tensor_value_info(*t) for t in outputs],
        [helper.make_tensor("w", kind, WEIGHT.shape, WEIGHT.ravel())],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    (folder / SERVER).write_bytes(model.SerializeToString())
    files = read_manifest(folder).files
    rewrite(folder, files={**files, SERVER: sha256((folder / SERVER).read_bytes())})


GOOD_IN, GOOD_OUT = ("z", FLOAT, ["n", *SHAPE]), ("logits", FLOAT, ["n", CLASSES])
Tensors = list[tuple[str, int, list[Any]]]
BAD: dict[str, tuple[Tensors, Tensors]] = {
    "doubles": ([("z", DOUBLE, ["n", *SHAPE])], [("logits", DOUBLE, ["n", CLASSES])]),
    "another shape": ([("z", FLOAT, ["n", 6])], [GOOD_OUT]),
    "one row only": ([("z", FLOAT, [1, *SHAPE])], [("logits", FLOAT, [1, CLASSES])]),
}


@pytest.mark.parametrize("which", BAD)
def test_a_head_that_takes_something_else_is_refused(folder: Path, which: str) -> None:
    replace_head(folder, *BAD[which])
    with pytest.raises(
        ExportError, match=r"server\.onnx takes tensor.*the manifest says FP32 \[rows, 1, 2, 3\]"
    ):
        load_app(folder)


def test_a_head_with_other_classes_is_refused(folder: Path) -> None:
    rewrite(folder, num_classes=5)
    with pytest.raises(
        ExportError, match=r"gives tensor\(float\) \['n', 4\], but .* \[rows, 5\] for 'logits'"
    ):
        load_app(folder)


def test_sizes_that_only_show_when_it_runs_are_tried_out(folder: Path) -> None:
    nodes = [helper.make_node("Flatten", ["z"], ["flat"]),
             helper.make_node("Unique", ["flat"], ["logits"], axis=1)]  # fmt: skip
    replace_head(folder, [GOOD_IN], [("logits", FLOAT, ["n", "classes"])], nodes)
    with pytest.raises(ExportError, match=r"answers one row with shape \(1, 1\), expected \(1, 4"):
        load_app(folder)


def test_a_client_that_takes_other_images_is_refused(folder: Path) -> None:
    rewrite(folder, image_shape=(1, 3, 2))
    with pytest.raises(ExportError, match=r"client\.onnx takes .* \[rows, 1, 3, 2\] for 'image'"):
        Client(folder, "http://localhost:1")


def test_sizes_that_are_left_open_fit(folder: Path) -> None:
    replace_head(folder, [("z", FLOAT, ["n", "c", "h", "w"])], [("logits", FLOAT, ["n", "k"])])
    half = load_half(folder, read_manifest(folder), SERVER, 1)
    assert half(np.zeros((3, *SHAPE), np.float32)).shape == (3, CLASSES)
    load_app(folder)
