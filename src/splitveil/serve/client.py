"""The client: images in, noisy smashed data out, logits back. numpy and onnxruntime, no torch."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ConfigError, ServerError, UnreachableError, WireError
from splitveil.io import Json, parse_json
from splitveil.serve.draws import DrawStore
from splitveil.serve.exits import SendWindow
from splitveil.serve.manifest import CLIENT, CLIENT_INT8, load_client, open_export, read_stages
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
from splitveil.serve.wire import HEADER_LENGTH, Rows, decode_answer, encode_request

OK, UNAUTHORISED, MISSING = 200, 401, 404
PATIENCE, OWN_PATIENCE = 60.0, 1.0  # seconds to keep trying; the second with an own answer at hand
DEVICE, SERVED = "device", "server"  # who answered
NOT_REACHED, CAPPED = "device (server not reached)", "device (max_share reached)"

log = logging.getLogger("splitveil")


class Answers(NamedTuple):
    """Logits (n, classes), and for each image who answered.

    Args:
        logits: Of who answered.
        where: "device", "server", "device (server not reached)" or "device (max_share reached)".

    >>> Answers(np.zeros((1, 2), np.float32), ("device",)).where
    ('device',)
    """

    logits: Rows
    where: tuple[str, ...]


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
        server: str | Transport | None = None,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        patience: float | None = None,
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
        always_ask: bool = False,
        never_ask: bool = False,
        send: float | None = None,
        max_share: float | None = None,
        rest: float = 30.0,
        waiting: Callable[[str, float], None] = lambda problem, seconds: None,
    ) -> None:
        """Load the client's half in `folder` and check its hashes.

        Args:
            folder: An export; only its manifest and the client's files are read.
            server: Address of the server, such as http://localhost:8000, or a transport; None for a
                client that answers alone.
            token: Bearer token; None: none.
            timeout: Seconds one attempt may take.
            patience: Seconds to keep trying while the server is busy or away; None: 60, or 1 for a
                client that can answer itself.
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
            always_ask: Whether to send every image, which is more than the exit rule allows.
            never_ask: Whether to send nothing and answer everything on the device.
            send: Share of images to send, below that of the exit rule; None: the rule's.
            max_share: Largest share of every 100 images that is sent; None: no limit. Of the others
                that the exit rule would send, the device's answer is returned.
            rest: Seconds without another try after the server was not reached.
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
        self._network = load_client(place, self.manifest, half, threads)
        self._rule = self.manifest.rule_of(half)
        wishes = {
            "always_ask": always_ask, "never_ask": never_ask, "send": send is not None,
            "max_share": max_share is not None,
        }  # fmt: skip
        self._check_wishes([name for name, wished in wishes.items() if wished])
        self._always, self._never = always_ask, never_ask
        if self._rule is not None:
            if send is not None:
                self._rule = self._rule.tightened(send)
            self._window = SendWindow(max_share, self._rule.send)
        self._draws = DrawStore(None if draws is None else Path(draws), cache, budget)
        self._scope = f"{self.manifest.identity}/{self.manifest.files[half]}"
        if isinstance(server, str):
            server = HttpTransport(server, timeout=timeout, ca_file=ca_file)
        elif server is None:
            if not (self.manifest.silent or never_ask):
                raise ConfigError("this client sends images to a server; give its address")
            server = _no_server
        self._once = server
        if patience is None:
            patience = PATIENCE if self._rule is None else OWN_PATIENCE
        call = RetryingTransport(once=server, patience=patience, waiting=waiting)
        self._call: Transport = call if capture is None else RecordingTransport(call, Path(capture))
        self._batch, self._binary = batch, binary
        self._path = f"/v2/models/{self.manifest.name}"
        self._met = False
        self._rest, self._resting_until = rest, -math.inf

    def _check_wishes(self, wished: list[str]) -> None:
        if wished and self._rule is None:
            does = "answers alone" if self.manifest.silent else "sends every image"
            raise ConfigError(
                f"{wished[0]} is for a client with an exit rule, but this one {does}; leave it "
                "out, or export a run of --defence early-exit"
            )
        if len(wished) > 1 and {"always_ask", "never_ask"} & set(wished):
            raise ConfigError(f"{' and '.join(wished)} contradict each other; give one")

    def send(self, images: NDArray[Any]) -> Rows:
        """What leaves the device for images (n, c, h, w) that are sent.

        Args:
            images: Floats in [0, 1] or bytes 0..255.
        """
        x = check_images(images, self.manifest.image_shape)
        if self.manifest.silent:
            return np.zeros((len(x), 0), np.float32)
        return self._noisy(x, self._outputs(x)[0])

    def _outputs(self, x: Rows) -> list[Rows]:
        """What the client's network gives: z, its own logits, or both."""
        if len(x):
            return self._network(x)
        return [np.zeros((0, *t.shape), np.float32) for t in self.manifest.client_tensors[1:]]

    def _noisy(self, x: Rows, z: Rows) -> Rows:
        rows = np.zeros((len(x), *self.manifest.wire_shape), np.float32)
        if len(x):
            streams = self._draws.streams(self._scope, x)
            for row, clean, entropy in zip(rows, z, streams, strict=True):
                row[:] = apply_stages(clean[None], self._stages, entropy)[0]
        return rows

    def infer(self, images: NDArray[Any]) -> Rows:
        """Logits (n, classes), from whoever answers; see `answer`."""
        return self.answer(images).logits

    def answer(self, images: NDArray[Any]) -> Answers:
        """Logits (n, classes), and who answered.

        A client with an exit rule sends what it is not sure of, and answers the rest. If the server
        cannot be reached it answers everything, and does not try again for `rest` seconds. Other
        clients answer everything, or nothing: then a server that does not answer raises
        `ServerError`, as does one that refuses.

        Args:
            images: (n, c, h, w), floats in [0, 1] or bytes 0..255.

        Example:
            `logits, where = client.answer(images)`
        """
        if self._rule is None and not self.manifest.silent:
            self.meet()
            logits = np.concatenate([self._none, *self._asked_in_parts(self.send(images))])
            return Answers(logits, (SERVED,) * len(logits))
        x = check_images(images, self.manifest.image_shape)
        outputs = self._outputs(x)
        if self._rule is None:
            return Answers(outputs[0], (DEVICE,) * len(x))
        z, own = outputs
        asked = self._rule.asks(own)
        wanted = (asked | self._always) & (not self._never)
        reachable = time.monotonic() >= self._resting_until
        rows = np.flatnonzero(self._window.admit(asked, wanted & reachable))
        found = self._while_reached(x[rows], z[rows])
        where = np.where(wanted, CAPPED if reachable else NOT_REACHED, DEVICE).astype(object)
        where[rows] = NOT_REACHED
        answered, server = np.zeros(len(x), bool), np.zeros_like(own)
        got = rows[: len(found)]
        where[got], answered[got], server[got] = SERVED, True, found
        return Answers(self._rule.answers(own, server, answered), tuple(where.tolist()))

    def _while_reached(self, x: Rows, z: Rows) -> Rows:
        """The server's logits for the first images, up to where it no longer answers."""
        found = [self._none]
        if len(x):
            try:
                self.meet()
                found.extend(self._asked_in_parts(self._noisy(x, z)))
            except UnreachableError as err:
                self._resting_until = time.monotonic() + self._rest
                log.warning(f"{err} The device answers alone for {self._rest:g} s")
        return np.concatenate(found)

    @property
    def _none(self) -> Rows:
        return np.zeros((0, self.manifest.num_classes), np.float32)

    def _asked_in_parts(self, sent: Rows) -> Iterator[Rows]:
        for start in range(0, len(sent), self._batch):
            yield self._ask(sent[start : start + self._batch])

    def classify(self, images: NDArray[Any]) -> list[Json]:
        """For each image the likeliest class, its name, its share, all logits, and who answered."""
        logits, where = self.answer(images)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return [
            {
                "class": int(row.argmax()),
                "name": self.manifest.class_name(int(row.argmax())),
                "share": float(row.max()),
                "logits": line.tolist(),
                "where": place,
            }
            for row, line, place in zip(shares, logits, where, strict=True)
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
        """Check, once, that the server has the other half; a client that answers alone has none."""
        if self._met or self.manifest.silent:
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


def _no_server(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    """The transport of a client that never asks."""
    raise ServerError(f"this client has no server to send {method} {path} to")


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
