"""The threat model: `Victim`, the sealed views of it, and the protocol of an attack.

An attack never holds a `Victim`. It gets a `BlackBox`, whose queries all go through the channel, so
that no attack can bypass the defence. A `WhiteBox` adds copies of the client's networks.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from splitveil.errors import AuditError
from splitveil.io import Progress, silent
from splitveil.rng import stream


def check_images(x: Tensor, what: str) -> None:
    """Raise AuditError unless images are finite floats in [0, 1]; `what` names them."""
    if not x.is_floating_point():
        raise AuditError(f"{what} must be floats in [0, 1], got {x.dtype}; divide uint8 by 255")
    low, high = (float(v) for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    if not (low >= 0.0 and high <= 1.0):
        raise AuditError(
            f"{what} must lie in [0, 1], got values from {low:.4g} to {high:.4g}; "
            "scale the images before they enter an attack or a metric"
        )


F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
Send = Callable[[Tensor, Generator | None], Tensor]
Prepare = Callable[[Tensor], Send]  # takes images, returns a function of their row numbers
KEPT_BYTES = 2 << 30  # clean z that a victim keeps for `prepare`
CHUNK = 1000
CPU_VALUES = 128 * 3 * 32 * 32  # more per batch, and a CPU mostly waits for its memory


def chunk_for(images: Tensor) -> int:
    """How many of these images to send through a network at a time; fewer large ones on a CPU.

    >>> chunk_for(torch.empty(1, 3, 32, 32)), chunk_for(torch.empty(1, 1, 8, 8))
    (128, 1000)
    """
    if images.device.type != "cpu":
        return CHUNK
    return max(1, min(CHUNK, CPU_VALUES // max(1, images[:1].numel())))


def by_rows(send: Send, images: Tensor) -> Send:
    """A function that sends the images at the row numbers it is given."""

    def send_rows(rows: Tensor, generator: Generator | None = None) -> Tensor:
        return send(images[rows], generator)

    return send_rows


class _Sealed:
    """A callable without attributes, so that nothing leads to the function behind it."""

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
    """The same function behind a handle whose attributes and closure do not lead to it."""
    return cast(F, _Sealed(function))


class KeptFeatures(NamedTuple):
    """z before the channel, and the images and versions of tensors that it was computed from."""

    images: "weakref.ref[Tensor]"
    written: tuple[int, ...]
    z: Tensor


class Victim:
    """The deployed client: encoder and channel in eval mode, behind one call `send`.

    It holds its own frozen copy of both. So no attack can train the model, move its BatchNorm
    statistics or see z without the channel.

    Args:
        encoder: From images (n, c, h, w) to z (n, …).
        channel: Called as `channel(z, generator)`, gives what is sent, of the shape of z.

    >>> from splitveil.nets.channel import Channel
    >>> Victim(nn.Flatten(), Channel()).send(torch.full((1, 1, 1, 2), 0.5))
    tensor([[0.5000, 0.5000]])
    """

    def __init__(self, encoder: nn.Module, channel: nn.Module) -> None:
        self.encoder = copy.deepcopy(encoder).eval().requires_grad_(requires_grad=False)
        self._channel = copy.deepcopy(channel).eval().requires_grad_(requires_grad=False)
        first = next(self.encoder.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._clean: dict[int, KeptFeatures] = {}  # by id of the images, while they live

    @torch.no_grad()
    def send(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Smashed data after the channel.

        Args:
            x: Images (n, c, h, w), floats in [0, 1].
            generator: Randomness of the channel; None uses torch's global stream.

        Returns:
            What the server receives, (n, …), on the device of the client.
        """
        # A check reads values on the host, which would break a CUDA capture.
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            check_images(x, "images given to the victim")
        there = x.to(self.device)
        made = [self.encoder(part) for part in torch.split(there, chunk_for(x))]
        z = made[0]
        if len(made) > 1:  # other shapes than one are for the audit to report, as they stand
            alike = z.dim() > 0 and len({part.shape[1:] for part in made}) == 1
            z = torch.cat(made) if alike else self.encoder(there)
        sent: Tensor = self._channel(z, generator)
        return sent

    @torch.no_grad()
    def prepare(self, images: Tensor) -> Send:
        """Encode images once, for many sendings of them.

        Args:
            images: (n, c, h, w), floats in [0, 1].

        Returns:
            A function of row numbers and a generator that draws from the channel at each call, as
            `send` does. A random encoder, or z too large to keep, is computed anew at each call.
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
        """Clean z of all images, before the channel, or None if it cannot be kept.

        It is kept as long as the images live: the attacks of one audit share their images.
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
            return None  # the audit reports other shapes when it sends those images
        z = torch.cat([z, *others])
        if written is not None:
            self._keep(images, written, z)
        return z

    def _keep(self, images: Tensor, written: tuple[int, ...], z: Tensor) -> None:
        """Keep z until the images are gone or others need the memory; the oldest goes first."""
        held, key = self._clean, id(images)
        held.pop(key, None)
        while held and z.nbytes + sum(known.z.nbytes for known in held.values()) > KEPT_BYTES:
            held.pop(next(iter(held)))
        held[key] = KeptFeatures(weakref.ref(images, lambda _: held.pop(key, None)), written, z)

    def _written(self, images: Tensor) -> tuple[int, ...] | None:
        """Versions of images and encoder, which change when anything is written to them.

        None if torch cannot tell: inference tensors have no version counter.
        """
        held = (images, *self.encoder.parameters(), *self.encoder.buffers())
        if any(t.is_inference() for t in held):
            return None
        return id(self.encoder), *(n for t in held for n in (t.data_ptr(), t._version))

    def black_box(self) -> "BlackBox":
        """The view for a black-box attack: queries only."""

        def send(x: Tensor, generator: Generator | None = None) -> Tensor:
            return self.send(x, generator)

        def prepare(images: Tensor) -> Send:
            return opaque(self.prepare(images))

        return BlackBox(opaque(send), self.device, prepare=opaque(prepare))

    def white_box(self) -> "WhiteBox":
        """The view for a white-box attack: queries, and copies of encoder and channel."""
        encoder, channel = copy.deepcopy((self.encoder, self._channel))
        box = self.black_box()
        return WhiteBox(box.send, self.device, encoder, channel, prepare=box.prepare)


class SharedFits:
    """What several attacks on one target need, fitted once.

    Args:
        seed: Seed of the attacks. Each fit draws from a stream of its own, so that nothing depends
            on which attack asks first.
        device: Where the streams draw.

    >>> fits, aux = SharedFits(0, torch.device("cpu")), Labelled(torch.rand(2), torch.zeros(2))
    >>> first = fits.once("start", aux, lambda draws: torch.rand(1, generator=draws))
    >>> fits.once("start", aux, lambda draws: torch.rand(1, generator=draws)) is first
    True
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._made: dict[tuple[str, int], tuple[Tensor, object]] = {}

    def once(
        self, name: str, aux: "Labelled", make: Callable[[Generator], T], draws: str = ""
    ) -> T:
        """What `make` gives; it is called at most once for a name and these very images.

        Args:
            name: Says all that the fit depends on besides the images.
            draws: Name of its stream, if that is not `name`: what rounds differently draws alike.
            aux: What it is fitted on; kept, so that no other images get their identity.
            make: Fits, with all its randomness from the generator it is given.
        """
        key = (name, id(aux.images))
        if key not in self._made:
            generator = stream(self._seed, f"shared/{draws or name}", self._device)
            self._made[key] = (aux.images, make(generator))
        return cast(T, self._made[key][1])


@dataclass(frozen=True)
class BlackBox:
    """Queries to a victim; nothing in here leads to its encoder.

    `prepare`, if given, makes many queries for the same images cheap; `fits` are those of the
    attacks on one target.
    """

    send: Send
    device: torch.device
    prepare: Prepare | None = field(default=None, kw_only=True)
    fits: SharedFits | None = field(default=None, kw_only=True)

    def sender(self, images: Tensor) -> Send:
        """A function that sends images by row numbers, with fresh randomness at each call."""
        if self.prepare is None:
            return by_rows(self.send, images.to(self.device))
        return self.prepare(images)


@dataclass(frozen=True)
class WhiteBox(BlackBox):
    """Queries, and copies of the client's networks: `channel(encoder(x), generator)` is sent."""

    encoder: nn.Module
    channel: nn.Module


def checked(box: BlackBox, shape: torch.Size) -> BlackBox:
    """The view with answers of one shape per image, in which values that are not finite are 0."""

    def guarded(send: Send) -> Send:
        def query(x: Tensor, generator: Generator | None = None) -> Tensor:
            return without_nan(same_shape(send(x, generator), len(x), shape))

        return opaque(query)

    def prepare(images: Tensor) -> Send:
        return guarded(box.sender(images))

    return replace(box, send=guarded(box.send), prepare=opaque(prepare))


def same_shape(z: Tensor, images: int, shape: torch.Size) -> Tensor:
    """Smashed data z unchanged; an error if it is not one row of `shape` for each image."""
    if z.shape != (images, *shape):
        raise AuditError(
            f"the victim changed its output shape: {tuple(z.shape)} for {images} images, "
            f"expected {(images, *shape)}; a client sends one shape per image"
        )
    return z


def without_nan(z: Tensor) -> Tensor:
    """Smashed data with 0 in place of NaN and infinity."""
    return torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Labelled:
    """Images (n, c, h, w) as floats in [0, 1] and their labels (n,), on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Access(StrEnum):
    """What an attack may use, from least to most."""

    NONE = "none"
    LABEL = "label"
    BLACK_BOX = "black-box"
    REPEATS = "repeats"
    WHITE_BOX = "white-box"


@dataclass(frozen=True)
class Observation:
    """What the server holds for some images: smashed data z (n, …) and its answers (n,).

    `draws` (k, n, …) are k sendings of the same images, for attacks on repeated sendings.
    """

    z: Tensor
    answer: Tensor
    draws: Tensor | None = None


Reconstructor = Callable[[Observation], Tensor]


@dataclass(frozen=True)
class FittedAttack:
    """A reconstructor, its training loss by epoch, and its network if it has one."""

    reconstruct: Reconstructor
    curve: tuple[float, ...] = ()
    net: nn.Module | None = None

    def __call__(self, seen: Observation) -> Tensor:
        """Reconstructed images for what was observed."""
        return self.reconstruct(seen)


@runtime_checkable
class Attack(Protocol):
    """Fits on aux and queries, then turns observations into images. The audit measures success.

    An attack may have more attributes: `min_aux`, the fewest aux images it accepts (default 1);
    `limit`, on how many images it is scored because it is expensive (default all); `repeats`, how
    often each image is sent (default 1); `effort`, its share of the progress bar (default 1);
    `keeps_aux`, whether it answers with aux images, so that it is perfect on them (default False).
    """

    @property
    def access(self) -> Access:
        """The threat model."""
        ...

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Learn to reconstruct.

        Args:
            victim: Queries; a `WhiteBox` if `access` says so.
            aux: The images and labels that the attacker knows.
            generator: The only source of randomness.
            progress: Called as the fit advances.

        Returns:
            A function from an `Observation` to images (n, c, h, w) in [0, 1].
        """
        ...
