"""Manifests, models, captures and requests of strangers: refused with a reason, never a hang."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from serve.made import manifest

from splitveil.errors import ExportError, ServerError, SplitVeilError, WireError
from splitveil.serve.manifest import open_half, read_manifest
from splitveil.serve.stages import check_stages
from splitveil.serve.transport import RecordingTransport, Reply, RetryingTransport, read_capture


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"kind": "quantise", "bits": -3}, r"bits must be in \[1, 16\], got -3"),
        ({"kind": "quantise", "bits": 2.5}, "bits must be a whole number"),
        ({"kind": "quantise", "bits": 1e9}, r"bits must be in \[1, 16\]"),
        ({"kind": "dropout", "p": 5}, r"p must be in \[0, 1\), got 5"),
        ({"kind": "dropout", "p": -0.1}, "p must be in"),
        ({"kind": "topk", "prune": 7}, r"prune must be in \[0, 1\), got 7"),
        ({"kind": "clip", "low": 1.0, "high": 0.0}, "low must be less than high"),
        ({"kind": "clip", "low": -1e300, "high": 0.0}, "low must be in"),
        ({"kind": "gaussian", "std": -0.1}, r"std must be in \[0, 1e\+30\], got -0.1"),
        ({"kind": "gaussian", "std": 1e300}, r"std must be in \[0, 1e\+30\], got 1e\+300"),
        ({"kind": "gaussian", "std": 1e-300}, "std must be 0 or at least 1e-30, got 1e-300"),
    ],
)
def test_a_stage_outside_its_range_is_refused(stage: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        check_stages([stage])


def test_stages_at_the_ends_of_their_ranges_are_read() -> None:
    ends: list[dict[str, Any]] = [
        {"kind": "quantise", "bits": 1}, {"kind": "quantise", "bits": 16},
        {"kind": "dropout", "p": 0}, {"kind": "topk", "prune": 0.99},
        {"kind": "clip", "low": -1, "high": 1}, {"kind": "gaussian", "std": 0},
    ]  # fmt: skip
    check_stages(ends)


def add_model() -> bytes:
    """Two inputs, their sum."""
    a, b, c = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "abc")
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "g", [a, b], [c])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def test_a_model_with_two_inputs_is_refused() -> None:
    with pytest.raises(ExportError, match="has 2 inputs and 1 outputs, expected one of each"):
        open_half(add_model())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 200_000, "nested too deep"),
        ('{"format": ' + "[" * 200 + "]" * 200 + "}", "nested too deep, more than 64 levels"),
        ("null", "must hold a JSON object, got NoneType"),
        ("7", "must hold a JSON object, got int"),
        ('{"format": "splitveil-export-1", "format": "splitveil-export-1"}', "given twice"),
    ],
)
def test_an_odd_manifest_is_an_export_error(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(ExportError, match=words):
        read_manifest(tmp_path)


def test_a_manifest_that_is_a_pipe_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ExportError):
        read_manifest(tmp_path)


def test_a_key_given_twice_hides_no_noise(tmp_path: Path) -> None:
    text = manifest().to_json().replace('"stages":', '"stages": [], "stages":', 1)
    assert text != manifest().to_json()
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(ExportError, match="given twice"):
        read_manifest(tmp_path)


def test_a_full_disk_ends_a_capture_at_once_and_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    def once(method: str, path: str, body: bytes, headers: Any) -> Reply:  # noqa: ANN401
        sent.append(body)
        return Reply(200, b"{}")

    file = tmp_path / "sent.jsonl"
    call = RetryingTransport(
        once=RecordingTransport(once, file), sleep=lambda _: pytest.fail("retried")
    )
    call("POST", "/v2/models/m/infer", b"{}", {})
    real = Path.open

    def full(self: Path, mode: str = "r", *more: Any, **words: Any) -> Any:  # noqa: ANN401
        if self == file and "a" in mode:
            with real(self, mode, *more, **words) as half:
                half.write(b'{"pa')
            raise OSError(28, "No space left on device", str(self))
        return real(self, mode, *more, **words)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ServerError, match=r"No space left.*was not sent"):
        call("POST", "/v2/models/m/infer", b"[]", {})
    monkeypatch.undo()
    assert [c.body for c in read_capture(file)] == sent == [b"{}"]


def test_a_capture_that_is_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found: list[BaseException] = []

    def reads() -> None:
        try:
            list(read_capture(tmp_path / "pipe"))
        except SplitVeilError as err:
            found.append(err)

    reader = threading.Thread(target=reads, daemon=True)
    reader.start()
    reader.join(20)
    assert isinstance(found[0], WireError)
    assert "pipe or a device" in str(found[0])


def test_numbers_of_a_json_request_may_not_be_hidden_by_a_second_key() -> None:
    from splitveil.serve.wire import TensorSpec, decode_request

    tensor = {"name": "z", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 0.5]}
    body = json.dumps({"inputs": [tensor]}).replace("[0.5, 0.5]", '[0.5, 0.5], "data": [9, 9]')
    spec = TensorSpec(name="z", shape=(2,))
    with pytest.raises(WireError, match="'data' is given twice"):
        decode_request(body.encode(), None, spec, "logits", 4)
    twice: list[str] = []
    rows = decode_request(body.encode(), None, spec, "logits", 4, twice=twice).rows
    assert twice == ["data"]
    assert np.array_equal(rows, [[9, 9]])
