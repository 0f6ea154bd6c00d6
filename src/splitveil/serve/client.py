"""The client: images in, noisy smashed data out, logits back. numpy and onnxruntime, no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ServerError, WireError
from splitveil.serve.draws import DrawStore
from splitveil.serve.manifest import CLIENT, CLIENT_INT8, load_half, open_export, read_stages
from splitveil.serve.stages import apply_stages
from splitveil.serve.transport import (
    HttpTransport,
    RecordingTransport,
    Reply,
    RetryingTransport,
    Transport,
    header_safe,
    safe_text,
)
from splitveil.serve.wire import HEADER_LENGTH, Json, Rows, decode_answer, encode_request
from splitveil.untrusted import parse_json

OK, UNAUTHORISED, MISSING = 200, 401, 404


class Client:
    """The device's half of an export, connected to a server.

    Every image gets fresh noise from the operating system's generator; there is no seed to set and
    no way to switch it off. An image that is among the last `cache` ones sent gets its earlier draw
    again, because repeating a draw tells an eavesdropper nothing new. With `draws` this holds after
    a restart too.

    Example:
        `logits = Client("runs/first/export", "http://localhost:8000").infer(images)`
    """

    def __init__(
        self,
        folder: str | Path,
        server: str | Transport,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        patience: float = 60.0,
        ca_file: Path | None = None,
        int8: bool = False,
        threads: int = 0,
        cache: int = 10_000,
        draws: str | Path | None = None,
        budget: int = 1,
        batch: int = 32,
        binary: bool = True,
        capture: str | Path | None = None,
        allow_no_noise: bool = False,
        verify: str | Path | None = None,
        waiting: Callable[[str, float], None] = lambda problem, seconds: None,
    ) -> None:
        """Load the client's half in `folder` and check its hashes.

        Args:
            folder: An export; only its manifest and the client's files are read.
            server: Address of the server, such as http://localhost:8000, or a transport.
            token: Bearer token; None: none.
            timeout: Seconds one attempt may take.
            patience: Seconds to keep trying while the server is busy or away.
            ca_file: Certificates to trust instead of the system's.
            int8: Whether to use the quantised client.
            threads: Threads of onnxruntime; 0 lets it choose.
            cache: Draws to keep, ≥ 1.
            draws: Folder that keeps them for the next start too; None: in memory, for this client.
            budget: Different draws that one image may be sent with, ≥ 1; see `DrawStore`.
            batch: Images sent in one request, at most the server's `max_batch`.
            binary: Whether to send raw bytes instead of JSON numbers.
            capture: New file for everything that is sent, for `audit-wire`.
            allow_no_noise: Whether the export may send features without noise.
            verify: Public key (PEM) that must have signed the export; None: no signature is needed.
            waiting: Called before each retry with the problem and the seconds spent so far.
        """
        if token is not None and not (token and header_safe(token)):
            raise ServerError("a token must be printable ASCII without spaces; use the server's")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        place = Path(folder)
        self.manifest = open_export(
            place, allow_no_noise=allow_no_noise, verify=None if verify is None else Path(verify)
        )
        self._stages = read_stages(place, self.manifest)
        half = CLIENT_INT8 if int8 else CLIENT
        self._encoder = load_half(place, self.manifest, half, threads)
        self._draws = DrawStore(None if draws is None else Path(draws), cache, budget)
        self._scope = f"{self.manifest.identity}/{self.manifest.files[half]}"
        if isinstance(server, str):
            server = HttpTransport(server, timeout=timeout, ca_file=ca_file)
        self._once = server
        call = RetryingTransport(once=server, patience=patience, waiting=waiting)
        self._call: Transport = call if capture is None else RecordingTransport(call, Path(capture))
        self._batch, self._binary = batch, binary
        self._path = f"/v2/models/{self.manifest.name}"
        self._met = False

    def send(self, images: NDArray[Any]) -> Rows:
        """What leaves the device for images (n, c, h, w), floats in [0, 1] or bytes 0..255."""
        x = check_images(images, self.manifest.image_shape)
        rows = np.zeros((len(x), *self.manifest.wire_shape), np.float32)
        if len(x):
            streams = self._draws.streams(self._scope, x)
            for row, z, entropy in zip(rows, self._encoder(x), streams, strict=True):
                row[:] = apply_stages(z[None], self._stages, entropy)[0]
        return rows

    def infer(self, images: NDArray[Any]) -> Rows:
        """Logits (n, classes) from the server; raises `ServerError` if it does not answer."""
        self.meet()
        sent = self.send(images)
        parts = [sent[i : i + self._batch] for i in range(0, len(sent), self._batch)]
        answers = [self._ask(part) for part in parts]
        return np.concatenate([np.zeros((0, self.manifest.num_classes), np.float32), *answers])

    def classify(self, images: NDArray[Any]) -> list[Json]:
        """For each image the likeliest class, its name, its softmax share, and all logits."""
        logits = self.infer(images)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return [
            {
                "class": int(row.argmax()),
                "name": self.manifest.class_name(int(row.argmax())),
                "share": float(row.max()),
                "logits": line.tolist(),
            }
            for row, line in zip(shares, logits, strict=True)
        ]

    def close(self) -> None:
        """Close the connections; the client can be used again."""
        if isinstance(self._once, HttpTransport):
            self._once.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def meet(self) -> None:
        """Check, once, that the server has the other half of the same export."""
        if self._met:
            return
        reply = self._checked(self._call("GET", self._path, b"", self._headers))
        try:
            told = parse_json(reply.body)
            inputs = [(t["name"], t["datatype"], t["shape"]) for t in told["inputs"]]
            other = told.get("parameters", {}).get("export", self.manifest.identity)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise ServerError(f"cannot read the server's model description: {err!r}") from err
        expected = [tuple(self.manifest.wire.metadata().values())]
        if inputs != expected or other != self.manifest.identity:
            raise ServerError(
                f"the server has a half of another export: it takes {safe_text(str(inputs))}, "
                f"export {safe_text(str(other))}; this client sends {expected}, export "
                f"{self.manifest.identity}. Deploy both halves of one export"
            )
        self._met = True

    def _ask(self, rows: Rows) -> Rows:
        wire, logits = self.manifest.wire, self.manifest.logits
        message = encode_request(rows, wire, logits.name, binary=self._binary)
        headers = {**self._headers, **message.headers}
        reply = self._checked(self._call("POST", f"{self._path}/infer", message.body, headers))
        try:
            length = reply.headers.get(HEADER_LENGTH.lower())
            return decode_answer(reply.body, length, logits, len(rows))
        except WireError as err:
            raise ServerError(f"the server's answer cannot be read: {err}") from err

    def _checked(self, reply: Reply) -> Reply:
        if reply.status == OK:
            return reply
        advice = {
            UNAUTHORISED: "; give the server's token",
            MISSING: f"; is '{self.manifest.name}' the model it serves?",
        }
        raise ServerError(
            f"the server refused with {reply.status}: {reason(reply)}{advice.get(reply.status, '')}"
        )


def reason(reply: Reply) -> str:
    """The reason that the server gives, shortened.

    >>> reason(Reply(400, b'{"error": "shape must be [rows, 4]"}'))
    'shape must be [rows, 4]'
    """
    try:
        told = parse_json(reply.body)
    except ValueError:
        told = None
    words = told.get("error") if isinstance(told, Mapping) else None
    return safe_text(str(words)) if words else "no reason given"


def check_images(images: NDArray[Any], shape: tuple[int, ...]) -> Rows:
    """Images (n, *shape) as float32 in [0, 1]; bytes are divided by 255.

    >>> check_images(np.full((1, 1, 1, 1), 51, np.uint8), (1, 1, 1)).tolist() == [
    ...     [[[float(np.float32(0.2))]]]
    ... ]
    True
    """
    if images.shape[1:] != shape or images.ndim != 1 + len(shape):
        raise ServerError(f"images must be (n, {', '.join(map(str, shape))}), got {images.shape}")
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    if images.dtype.kind != "f":
        raise ServerError(f"images must be uint8 or floats in [0, 1], got {images.dtype}")
    x = images.astype(np.float32)
    if x.size and not (x.min() >= 0 and x.max() <= 1):  # also refuses NaN
        raise ServerError(
            f"images must lie in [0, 1], got values from {x.min():.4g} to {x.max():.4g}; divide "
            "bytes by 255"
        )
    return x
