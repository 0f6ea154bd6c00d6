"""The threat model: `Victim`, the sealed views of it, what an attack is given and returns."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from splitveil.errors import AuditError
from splitveil.io import Progress, silent


def check_images(x: Tensor, what: str) -> None:
    """Refuse images that are not finite floats in [0, 1]."""
    if not x.is_floating_point():
        raise AuditError(f"{what} must be floats in [0, 1], got {x.dtype}; divide uint8 by 255")
    low, high = (float(v) for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    if not (low >= 0.0 and high <= 1.0):
        raise AuditError(
            f"{what} must lie in [0, 1], got values from {low:.4g} to {high:.4g}; "
            "scale the images before they enter an attack or a metric"
        )


F = TypeVar("F", bound=Callable[..., object])
Send = Callable[[Tensor, Generator | None], Tensor]
Prepare = Callable[[Tensor], Send]  # images → a function of their row numbers
KEPT_BYTES = 2 << 30  # of clean z that a victim keeps behind `prepare`
CHUNK = 1000
CPU_VALUES = 128 * 3 * 32 * 32  # beyond, a CPU spends its time on fetching memory


def chunk_for(images: Tensor) -> int:
    """How many of these images go through a network at a time; of large ones on a CPU fewer.

    >>> chunk_for(torch.empty(1, 3, 32, 32)), chunk_for(torch.empty(1, 1, 8, 8))
    (128, 1000)
    """
    if images.device.type != "cpu":
        return CHUNK
    return max(1, min(CHUNK, CPU_VALUES // max(1, images[:1].numel())))


def by_rows(send: Send, images: Tensor) -> Send:
    """Sends the images at the rows it is given."""

    def send_rows(rows: Tensor, generator: Generator | None = None) -> Tensor:
        return send(images[rows], generator)

    return send_rows


class _Sealed:
    """One call; no attribute leads to the function behind it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: object, **options: object) -> object:
        return object.__getattribute__(self, "_function")(*args, **options)

    def __getattribute__(self, name: str) -> object:
        if name == "__class__":
            return _Sealed
        raise AttributeError(f"a sealed function has no attribute '{name}'")


def opaque(function: F) -> F:
    """The same function behind a handle from which no attribute or closure leads to it."""
    return cast(F, _Sealed(function))


class Clean(NamedTuple):
    """z without the channel, and what it was made of."""

    images: "weakref.ref[Tensor]"
    written: tuple[int, ...]
    z: Tensor


class Victim:
    """The deployed client: encoder in eval mode and channel, behind one call `send`.

    Holds its own frozen copy of both, so no attack can train the model, move its BatchNorm
    statistics or see z without the channel.
    """

    def __init__(self, encoder: nn.Module, channel: nn.Module) -> None:
        self.encoder = copy.deepcopy(encoder).eval().requires_grad_(requires_grad=False)
        self._channel = copy.deepcopy(channel).eval().requires_grad_(requires_grad=False)
        first = next(self.encoder.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._clean: dict[int, Clean] = {}  # by id of the images, while they live

    @torch.no_grad()
    def send(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """What leaves the client for images x (n, c, h, w) in [0, 1], channel included."""
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            check_images(x, "images given to the victim")  # looking at values stops a capture
        sent: Tensor = self._channel(self.encoder(x.to(self.device)), generator)
        return sent

    @torch.no_grad()
    def prepare(self, images: Tensor) -> Send:
        """Many sendings of the same images: they are encoded once, and sent anew at every call.

        What it gives takes row numbers, and draws from the channel for each call, as `send` does.
        An encoder that draws by itself, or a wire too wide to keep, is asked every time.
        """
        z = self._encoded(images)
        if z is None:
            return by_rows(self.send, images.to(self.device))
        kept = z

        @torch.no_grad()
        def send_rows(rows: Tensor, generator: Generator | None = None) -> Tensor:
            sent: Tensor = self._channel(kept[rows], generator)
            return sent

        return send_rows

    def _encoded(self, images: Tensor) -> Tensor | None:
        """Clean z of all images, or None where it cannot be kept.

        It stays while the images do, as the attacks of an audit share theirs.
        """
        known, written = self._clean.get(id(images)), self._written(images)
        if known is not None and known.images() is images and known.written == written:
            return known.z
        check_images(images, "images given to the victim")
        there = images.to(self.device)
        first, *rest = torch.split(there, chunk_for(there))
        z = self.encoder(first)
        fits = z.shape[:1] == first.shape[:1] and z[:1].nbytes * len(there) <= KEPT_BYTES
        if not fits or not torch.equal(z, self.encoder(first)):
            return None
        others = [self.encoder(x) for x in rest]
        if any(o.shape != (len(x), *z.shape[1:]) for o, x in zip(others, rest, strict=True)):
            return None  # who asks for them is told
        z = torch.cat([z, *others])
        if written is not None:
            self._keep(images, written, z)
        return z

    def _keep(self, images: Tensor, written: tuple[int, ...], z: Tensor) -> None:
        """Until the images are gone, or others need the room."""
        held, key = self._clean, id(images)
        held.pop(key, None)
        while held and z.nbytes + sum(known.z.nbytes for known in held.values()) > KEPT_BYTES:
            held.pop(next(iter(held)))
        held[key] = Clean(weakref.ref(images, lambda _: held.pop(key, None)), written, z)

    def _written(self, images: Tensor) -> tuple[int, ...] | None:
        """What changes when the images or the encoder are written to; None where torch cannot say.

        Inference tensors do not count what is written to them.
        """
        held = (images, *self.encoder.parameters(), *self.encoder.buffers())
        if any(t.is_inference() for t in held):
            return None
        return id(self.encoder), *(n for t in held for n in (t.data_ptr(), t._version))

    def black_box(self) -> "BlackBox":
        """The view a black-box attack is given: queries, nothing else."""

        def send(x: Tensor, generator: Generator | None = None) -> Tensor:
            return self.send(x, generator)

        def prepare(images: Tensor) -> Send:
            return opaque(self.prepare(images))

        return BlackBox(opaque(send), self.device, prepare=opaque(prepare))

    def white_box(self) -> "WhiteBox":
        """The view a white-box attack is given: queries, and copies of encoder and channel."""
        encoder, channel = copy.deepcopy((self.encoder, self._channel))
        if self.device.type == "cuda":  # a search goes through it thousands of times
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        box = self.black_box()
        return WhiteBox(box.send, self.device, encoder, channel, prepare=box.prepare)


@dataclass(frozen=True)
class BlackBox:
    """Queries to a victim. There is no encoder here to reach for.

    `prepare`, where there is one, makes many queries for the same images cheap.
    """

    send: Send
    device: torch.device
    prepare: Prepare | None = field(default=None, kw_only=True)

    def sender(self, images: Tensor) -> Send:
        """Sends images by their row numbers, with fresh randomness at every call."""
        if self.prepare is None:
            return by_rows(self.send, images.to(self.device))
        return self.prepare(images)


@dataclass(frozen=True)
class WhiteBox(BlackBox):
    """Queries, and the client's own networks: `channel(z, generator)` follows `encoder(x)`."""

    encoder: nn.Module
    channel: nn.Module


@dataclass(frozen=True)
class Labelled:
    """Images (n, c, h, w) as floats in [0, 1] and their labels (n,), on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Access(StrEnum):
    """What an attack may touch."""

    NONE = "none"
    LABEL = "label"
    BLACK_BOX = "black-box"
    REPEATS = "repeats"
    WHITE_BOX = "white-box"


@dataclass(frozen=True)
class Observation:
    """What the server holds for some images: smashed data z and its own answer (n,).

    `draws` (k, n, …) are the k sendings of the same images, for an attack that asks for repeats.
    """

    z: Tensor
    answer: Tensor
    draws: Tensor | None = None


Reconstructor = Callable[[Observation], Tensor]


@dataclass(frozen=True)
class FittedAttack:
    """A reconstructor, the training loss of each epoch it was fitted for, and its one network."""

    reconstruct: Reconstructor
    curve: tuple[float, ...] = ()
    net: nn.Module | None = None

    def __call__(self, seen: Observation) -> Tensor:
        """Images for what was observed."""
        return self.reconstruct(seen)


@runtime_checkable
class Attack(Protocol):
    """Fits on aux and queries, then turns observations into images. Success is not its business.

    It may also carry `min_aux` (fewer aux images are refused), `limit` (it is expensive: score it
    on that many images), `repeats` (how often each image is sent), `effort` (its share of a
    progress bar) and `keeps_aux` (it answers with aux images, so that it is perfect on them);
    1, none, 1, 1 and False unless said.
    """

    @property
    def access(self) -> Access:
        """The threat model."""
        ...

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Learn to reconstruct; `generator` is the only source of randomness."""
        ...
