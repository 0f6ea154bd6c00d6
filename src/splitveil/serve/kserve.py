"""What the server says of itself: metadata, configuration, statistics, index, OpenAPI document.

The KServe v2 protocol with Triton's extensions `model_configuration` and `statistics`, the index of
`model_repository`, and of `schedule_policy` the timeout of a request.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from splitveil.errors import WireError
from splitveil.io import Json
from splitveil.serve.admission import Limits
from splitveil.serve.batching import Statistics
from splitveil.serve.manifest import Manifest
from splitveil.serve.wire import FLOATS, TensorSpec

VERSION = "1"  # an export holds one version of its model
PLATFORM = "onnxruntime_onnx"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
MICROSECONDS = 1_000_000
ONE_MODEL = "this server holds one model from its start to its end; start another server"


def metadata() -> Json:
    """The server's own."""
    return {"name": "splitveil", "version": version("splitveil"), "extensions": EXTENSIONS}


def model_metadata(manifest: Manifest) -> Json:
    """The model's; `grid` is what the server multiplies the integers of its input by."""
    step = manifest.wire.step
    grid = {} if step is None else {"grid": step}
    return {
        "name": manifest.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [manifest.wire.metadata()],
        "outputs": [manifest.logits.metadata()],
        "parameters": {"export": manifest.identity} | grid,
    }


def model_config(manifest: Manifest, limits: Limits) -> Json:
    """Triton's description of a model: tensors without the dimension of the rows, and batching."""

    def tensor(spec: TensorSpec) -> Json:
        return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.shape)}

    return {
        "name": manifest.name,
        "platform": PLATFORM,
        "backend": "onnxruntime",
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        "max_batch_size": limits.max_batch,
        "input": [tensor(manifest.wire)],
        "output": [tensor(manifest.logits)],
        "dynamic_batching": {
            "max_queue_delay_microseconds": round(limits.max_delay * MICROSECONDS)
        },
        "parameters": {"export": {"string_value": manifest.identity}},
    }


def statistics(manifest: Manifest, found: Statistics) -> Json:
    """Counts and times since the server started, as Triton writes them."""
    return {"model_stats": [{"name": manifest.name, "version": VERSION, **found.to_dict()}]}


def index(manifest: Manifest, body: bytes, *, ready: bool) -> list[Json]:
    """The one model; nothing where only models that are ready are asked for, and it is not."""
    try:
        asked = json.loads(body or b"{}")
        only = asked.get("ready", False)
    except (ValueError, RecursionError, AttributeError):
        only = None
    if type(only) is not bool:
        raise WireError('the body must be empty, or JSON such as {"ready": true}')
    state, reason = ("READY", "") if ready else ("UNAVAILABLE", "starting, stopping or failed")
    model = {"name": manifest.name, "version": VERSION, "state": state, "reason": reason}
    return [] if only and not ready else [model]


def asked_seconds(parameters: Mapping[str, Any], most: float) -> float:
    """Seconds a request gives its answer: its `timeout` in microseconds; 0 or none is `most`.

    >>> asked_seconds({"timeout": 250_000}, 30.0), asked_seconds({}, 30.0)
    (0.25, 30.0)
    """
    if unknown := parameters.keys() - {"timeout"}:
        raise WireError(
            f"request parameter {min(unknown)[:40]!r} is not supported; known are "
            "'binary_data_output' and 'timeout'"
        )
    asked = parameters.get("timeout", 0)
    if type(asked) is not int or asked < 0:
        raise WireError(f"timeout must be whole microseconds ≥ 0, got {asked!r:.40}")
    return most if asked == 0 else min(most, min(asked, 2**53) / MICROSECONDS)


def document(manifest: Manifest, release: str, max_rows: int, *, token: bool) -> Json:
    """The OpenAPI 3.1 document of one model's server.

    >>> from splitveil.serve.manifest import Manifest
    >>> m = Manifest(name="m", image_shape=(1, 2, 2), wire_shape=(3,), num_classes=2)
    >>> sorted(document(m, "1", 64, token=False)["paths"])[:2]
    ['/metrics', '/v2']
    """
    text = Path(__file__).with_name("openapi.json").read_text(encoding="utf-8")
    found: Json = json.loads(
        text.replace("{{name}}", manifest.name)
        .replace("{{version}}", release)
        .replace("{{datatype}}", manifest.datatype)
        .replace("{{number}}", "number" if manifest.datatype == FLOATS else "integer")
        .replace('"{{wire_shape}}"', _shape_schema(max_rows, manifest.wire_shape))
        .replace('"{{logits_shape}}"', _shape_schema(max_rows, (manifest.num_classes,)))
    )
    if token:
        found["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"token": []}]
    return found


def _shape_schema(max_rows: int, shape: tuple[int, ...]) -> str:
    """JSON schema of a tensor's shape: 1 to `max_rows` rows of exactly this shape."""
    rows = {"type": "integer", "minimum": 1, "maximum": max_rows}
    sizes = [rows, *({"const": n} for n in shape)]
    n = len(sizes)
    return json.dumps({"type": "array", "prefixItems": sizes, "minItems": n, "maxItems": n})
