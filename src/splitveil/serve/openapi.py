"""The OpenAPI document of a server: what may be asked of it, and what it answers."""

from typing import Any

from splitveil.serve.manifest import DATATYPE, LOGITS, WIRE, Manifest
from splitveil.serve.wire import MAX_ID

Json = dict[str, Any]

_REFUSALS = {
    "400": "Not a request for this model; the reason says why.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "422": "The model has no finite answer for these numbers.",
    "429": "Too many rows are waiting; try again later.",
    "503": "Starting, stopping, or too many requests at once; try again later.",
    "504": "The answer took too long; try again later.",
}


def document(manifest: Manifest, version: str, max_rows: int, *, token: bool) -> Json:
    """OpenAPI 3.1 for one model.

    >>> from splitveil.serve.manifest import Manifest
    >>> m = Manifest(name="m", image_shape=(1, 2, 2), wire_shape=(3,), num_classes=2)
    >>> sorted(document(m, "1", 64, token=False)["paths"])[:2]
    ['/metrics', '/v2']
    """
    model = f"/v2/models/{manifest.name}"
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": f"SplitVeil: {manifest.name}", "version": version},
        "paths": {
            "/v2": _read("The server's metadata.", _object("name", "version", "extensions")),
            "/v2/health/live": _read("200 while the process answers.", _object("live"), free=True),
            "/v2/health/ready": _read("200 while it takes requests.", _object("ready"), free=True),
            "/metrics": _read("Counters for Prometheus.", None),
            model: _read("The model's metadata.", _object("name", "inputs", "outputs")),
            f"{model}/ready": _read("200 while the model answers.", _object("ready")),
            f"{model}/infer": {"post": _infer(manifest, max_rows)},
        },
    }
    if token:
        found["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"token": []}]
    return found


def _object(*required: str) -> Json:
    return {"type": "object", "required": list(required)}


def _json(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals(*codes: str) -> Json:
    return {code: _json(_REFUSALS[code], _object("error")) for code in codes} | {
        "401": _json("A valid bearer token is needed.", _object("error"))
    }


def _read(summary: str, schema: Json | None, *, free: bool = False) -> Json:
    text: Json = {"description": summary, "content": {"text/plain": {"schema": {"type": "string"}}}}
    good = text if schema is None else _json(summary, schema)
    found: Json = {"summary": summary, "responses": {"200": good} | _refusals("404", "503")}
    return {"get": found | ({"security": []} if free else {})}


def _tensor(name: str, rows: Json, *shape: int) -> Json:
    sizes = [rows, *({"const": n} for n in shape)]
    return {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"const": name},
            "datatype": {"const": DATATYPE},
            "shape": {
                "type": "array",
                "prefixItems": sizes,
                "minItems": len(sizes),
                "maxItems": len(sizes),
            },
            "data": {"type": "array", "items": {"type": "number"}},
        },
    }


def _infer(manifest: Manifest, max_rows: int) -> Json:
    rows = {"type": "integer", "minimum": 1, "maximum": max_rows}
    given, got = (
        _tensor(WIRE, rows, *manifest.wire_shape),
        _tensor(LOGITS, rows, manifest.num_classes),
    )

    def message(key: str, tensor: Json, **more: Json) -> Json:
        one = {"type": "array", "minItems": 1, "maxItems": 1, "items": tensor}
        return _object(key) | {"properties": {key: one, **more}}

    request = message("inputs", given, id={"type": "string", "maxLength": MAX_ID})
    return {
        "summary": "Logits for smashed data; also with the binary tensor data extension.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {"200": _json("Logits.", message("outputs", got))} | _refusals(*_REFUSALS),
    }
