"""What is attacked, what each threat model sees of it, and what one attack made of it."""

import base64
import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from splitveil.audits import metrics
from splitveil.audits.certificates import refusals
from splitveil.data.attributes import Attributes
from splitveil.errors import AuditError
from splitveil.io import Json
from splitveil.record.schema import Scores
from splitveil.rng import stream
from splitveil.threat import CHUNK, Access, BlackBox, Labelled, Observation, Send, Victim, opaque

SHOWN = 10
NO_ANSWER = "–"
PER_IMAGE = ("mse", "psnr", "ssim", "ssim_zeropad", "ssim_valid", "lpips")
META = ("access", "scored", "repeats", "curve", "aux_mse", "seconds")


@dataclass(frozen=True)
class Interception(Observation):
    """What the server holds of the scored images; `broken` are those whose z̃ was not finite."""

    broken: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A deployed client under attack, what its attacker knows, and what is known beside it.

    The first fields are all that attacks need; an audit's record needs the others too.

    Args:
        victim: The client.
        head: The server's half, of which the target holds a copy in eval mode; None if nobody
            answers.
        classes: Names of the classes.
        aux: Images the attacker fits on; `knowledge` names them.
        scored: Images that are attacked.
        seed: Seed of the attacks.
        identity: Names model and data by their content; with it, finished attacks can be stored.
        captured: What was really sent for the scored images; None: the victim is asked.
        test: Images of the accuracy; None: the scored ones.
        members: Images that were trained on, or why none are known.
        outsiders: Images that were not trained on.
        certify: Makes the certificates, or says why there are none, and the rate in nats.
        attributes: Attributes from a table, in place of simple ones of the images themselves.
        own_data: Whether the images are a user's own, so that copies among them are counted.
        unfinished: How far a training came that did not end.
        wire: Says what captured requests show, and how the attempts on them compare with the run's
            audit; empty where nothing was captured.
    """

    victim: Victim
    head: nn.Module | None
    classes: Sequence[str]
    aux: Labelled
    scored: Labelled
    seed: int = 0
    identity: str = ""
    captured: Tensor | None = None
    knowledge: str = "train"
    test: Labelled | None = None
    members: Labelled | str = "no images are known to be training data"
    outsiders: Labelled | None = None
    certify: "Callable[[Target], tuple[Json, float | None]]" = lambda target: (
        refusals("nothing is known of the client"),
        None,
    )
    attributes: Attributes | None = None
    own_data: bool = False
    unfinished: str | None = None
    wire: "Callable[[Mapping[str, Attempt]], Json]" = lambda attempts: {}

    def __post_init__(self) -> None:
        if self.head is not None:
            object.__setattr__(self, "head", copy.deepcopy(self.head).eval())

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def device(self) -> torch.device:
        """Where the victim computes."""
        return self.victim.device

    @cached_property
    def sent(self) -> Interception:
        """The one draw of the scored images that every attack is given.

        Values that are not finite are reported and count as 0: the image stays among the scored.
        """
        z = self.captured
        if z is None:
            z = send(self.victim, self.scored.images, self.seed, "wire")
        broken = (~torch.isfinite(z).flatten(1).all(1)).nonzero().flatten().tolist()
        return Interception(finite(z), answer(self.scores, z), broken=tuple(broken))

    def scores(self, z: Tensor) -> Tensor:
        """The server's scores (n, classes) for smashed data z; all 0 if nobody answers."""
        if self.head is None:
            return z.new_zeros(len(z), self.num_classes)
        scores: Tensor = self.head(z)
        return scores

    def allowed(self, access: Access, rows: Tensor, repeats: int) -> Observation:
        """The part of what the server holds that the threat model lets the attack see."""
        label = self.sent.answer[rows]
        if access in (Access.NONE, Access.LABEL):
            blind = torch.zeros_like(label) if access is Access.NONE else label
            return Observation(self.sent.z.new_zeros(len(rows), 0), blind)
        z = self.sent.z[rows].clone()
        if access is not Access.REPEATS:
            return Observation(z, label)
        x = self.scored.images[rows]
        more = [send(self.victim, x, self.seed, f"repeat/{i}") for i in range(1, repeats)]
        checked = [finite(same_shape(each, len(x), z.shape[1:])) for each in more]
        return Observation(z, label, torch.stack([z, *checked]))

    def view(self, access: Access) -> BlackBox:
        """The victim as this threat model meets it; sends finite values of the wire's shape."""
        victim, shape = self.victim, self.sent.z.shape[1:]
        box = victim.white_box() if access is Access.WHITE_BOX else victim.black_box()

        def checked(send: Send) -> Send:
            def query(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
                return finite(same_shape(send(x, generator), len(x), shape))

            return opaque(query)

        def prepare(images: Tensor) -> Send:
            return checked(box.sender(images))

        return replace(box, send=checked(box.send), prepare=opaque(prepare))


@torch.no_grad()
def answer(scores: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The server's predicted classes (n,) for smashed data z."""
    return torch.cat([scores(part).argmax(1) for part in torch.split(z, CHUNK)])


def send(victim: Victim, x: Tensor, seed: int, name: str) -> Tensor:
    """Smashed data of many images, one fresh draw each, from a named stream."""
    generator = stream(seed, name, victim.device)
    sent: list[Tensor] = []
    for part in torch.split(x, CHUNK):
        z = victim.send(part, generator)
        sent.append(same_shape(z, len(part), (sent[0] if sent else z).shape[1:]))
    return torch.cat(sent)


def same_shape(z: Tensor, images: int, shape: torch.Size) -> Tensor:
    """Smashed data as it is; one row of `shape` for each image, or an error."""
    if z.shape != (images, *shape):
        raise AuditError(
            f"the victim changed its output shape: {tuple(z.shape)} for {images} images, "
            f"expected {(images, *shape)}; a client sends one shape per image"
        )
    return z


def finite(z: Tensor) -> Tensor:
    """Smashed data with 0 in place of NaN and infinity."""
    return torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)


def attacked_rows(scored: Labelled, limit: int | None) -> Tensor:
    """Positions of the images an attack is scored on: all, or a fixed subset of `limit`.

    The subset is the gallery's images and then images evenly spread over the rest; it depends on
    the scored images alone.
    """
    every = torch.arange(len(scored), device=scored.labels.device)
    if limit is None or limit >= len(scored):
        return every
    shown = gallery_rows(scored.labels)[:limit]
    rest = every[~torch.isin(every, shown)]
    want = limit - len(shown)
    spread = torch.arange(want, device=every.device) * len(rest) // max(want, 1)
    return torch.cat([shown, rest[spread]])


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one attack made of the images at `rows` of the `scored` ones, and its metrics (m,).

    Args:
        images: Its reconstructions as bytes (m, c, h, w).
        right: Whether the server answers right when they are sent; None if nobody answers.
        curve: Training loss of each epoch.
        aux_mse: Error on images the attack was fitted on.
        repeats: How often each image was sent.
    """

    access: str
    rows: Tensor
    scored: int
    images: Tensor
    mse: Tensor
    psnr: Tensor
    ssim: Tensor | None = None
    ssim_zeropad: Tensor
    ssim_valid: Tensor | None = None
    lpips: Tensor | None = None
    right: Tensor | None = None
    repeats: int = 1
    curve: tuple[float, ...] = ()
    aux_mse: float | None = None
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether every scored image was attacked, not a subset."""
        return len(self.rows) == self.scored

    def scores(self, rows: Tensor | None = None) -> Scores:
        """Means over the images at `rows` of the scored ones, or over all of its own.

        `psnr_pooled` is −10 log10 of the mean MSE.
        """
        at = slice(None) if rows is None else self.place(rows)
        means = {
            name: None if (value := getattr(self, name)) is None else float(value[at].mean())
            for name in PER_IMAGE
        }
        pooled = -10.0 * torch.log10(self.mse[at].mean().clamp_min(metrics.MSE_FLOOR))
        right = None if self.right is None else float(self.right[at].double().mean())
        return Scores(**means, psnr_pooled=float(pooled), accuracy=right)  # type: ignore[arg-type]

    def place(self, rows: Tensor) -> Tensor:
        """Where in its own list the images at `rows` of the scored ones stand."""
        place = torch.full((self.scored,), -1, device=self.rows.device)
        place[self.rows] = torch.arange(len(self.rows), device=self.rows.device)
        return place[rows]

    def to_json(self) -> Json:
        """Its part of a record."""
        said: Json = asdict(self.scores()) | {"access": self.access, "images": len(self.rows)}
        if not self.whole:
            said["subset"] = f"fixed-{len(self.rows)}"
        if self.repeats > 1:
            said["repeats"] = self.repeats
        if self.curve:
            said["curve"] = list(self.curve)
        if self.aux_mse is not None:
            said["aux_mse"] = self.aux_mse
        return said | {"seconds": self.seconds}


def to_bytes(attempt: Attempt) -> bytes:
    """The attempt as a safetensors file with its plain facts in the header."""
    tensors = {
        f.name: value.cpu().contiguous()
        for f in fields(attempt)
        if isinstance(value := getattr(attempt, f.name), Tensor)
    }
    meta = json.dumps({name: getattr(attempt, name) for name in META})
    return save(tensors, {"attempt": meta, "sha256": _digest(tensors, meta)})


def _digest(tensors: Mapping[str, Tensor], meta: str) -> str:
    """Content hash: safetensors notices a broken header, not a broken number."""
    digest = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def from_bytes(blob: bytes, device: torch.device) -> Attempt | None:
    """Read back what `to_bytes` wrote; None for anything else."""
    try:
        tensors = load(blob)
        size = int.from_bytes(blob[:8], "little")
        said = json.loads(blob[8 : 8 + size])["__metadata__"]
        if said["sha256"] != _digest(tensors, said["attempt"]):
            return None
        meta: Json = json.loads(said["attempt"])
        meta |= {name: value.to(device) for name, value in tensors.items()}
        return Attempt(**meta | {"curve": tuple(meta["curve"])})
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None


def levels(images: Tensor) -> Tensor:
    """Images in [0, 1] as bytes."""
    return images.mul(255).round().to(torch.uint8)


def gallery_rows(labels: Tensor, limit: int = SHOWN) -> Tensor:
    """Positions of the first image of each class, at most `limit`, in class order.

    >>> gallery_rows(torch.tensor([1, 0, 1, 2]), limit=2)
    tensor([1, 0])
    """
    rows = first_rows(labels).to(labels.device)
    return rows[labels[rows].argsort()][:limit]


def first_rows(ids: Tensor) -> Tensor:
    """Position of the first row of every value, in order.

    >>> first_rows(torch.tensor([7, 7, 3, 7, 3])).tolist()
    [0, 2]
    """
    first: dict[int, int] = {}
    for position, value in enumerate(ids.tolist()):
        first.setdefault(value, position)
    return torch.tensor(list(first.values()), dtype=torch.int64)


def gallery(target: Target, attempts: Mapping[str, Attempt]) -> Json:
    """Originals and reconstructions of one image per class, as base64 of raw uint8.

    An attack that was not scored on all of these images (a small subset) is left out. Where nobody
    answers, every answer is a class of its own that says so.
    """
    scored, classes = target.scored, list(target.classes)
    rows = gallery_rows(scored.labels)
    answers = target.sent.answer[rows].tolist()
    if target.head is None:
        answers, classes = [len(classes)] * len(rows), [*classes, NO_ANSWER]
    places = {name: attempt.place(rows) for name, attempt in attempts.items()}
    shown = {name: place for name, place in places.items() if bool((place >= 0).all())}
    return {
        "image_shape": list(scored.images.shape[1:]),
        "indices": rows.tolist(),
        "labels": scored.labels[rows].tolist(),
        "answers": answers,
        "classes": classes,
        "original": _pack(levels(scored.images[rows])),
        "reconstructions": {n: _pack(attempts[n].images[at]) for n, at in shown.items()},
        "mse": {n: attempts[n].mse[at].tolist() for n, at in shown.items()},
    }


def _pack(images: Tensor) -> str:
    return base64.b64encode(images.cpu().contiguous().numpy().tobytes()).decode()
