"""`Target`: what is attacked, and what each attack may see of it. `Attempt`: an attack's result."""

import base64
import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Generator, Tensor, nn

from splitveil.audits import metrics
from splitveil.data.attributes import attributes_of, read_table
from splitveil.data.dataset import Attributes
from splitveil.io import Json, parse_json
from splitveil.record.schema import Scores
from splitveil.rng import stream
from splitveil.threat import (
    CHUNK,
    Access,
    BlackBox,
    Labelled,
    Observation,
    Send,
    SharedFits,
    Victim,
    checked,
    chunk_for,
    same_shape,
    without_nan,
)

SHOWN = 10
NO_ANSWER = "–"  # the class that stands for every answer where there is no server
META = ("access", "scored", "repeats", "curve", "aux_mse", "keeps_aux", "seconds")


@dataclass(frozen=True)
class Interception(Observation):
    """What the server got for the scored images; `broken` are those whose z̃ was not finite."""

    broken: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceAnswers:
    """What a device that exits early does with the scored images, and with the attacker's.

    Args:
        asked: Whether each scored image is sent (n,).
        aux_asked: The same of the aux images (a,): the attacker has the client and computes it.
        asks: Whether each of some images (m, c, h, w) is sent, bool (m,).
        aux_sure: How sure the client is of each aux image (a,); None if it is not known.
        sure: How sure it is of each scored image (n,); None if it is not known.
        own: The class that the device itself answers for each scored image (n,); None if it is
            not known.
        reports: Classes (n,) that it reports for the scored images if it asks about all of them,
            from the server's scores (n, classes); None if it reports the server's.
    """

    asked: Tensor
    aux_asked: Tensor
    asks: Callable[[Tensor], Tensor]
    aux_sure: Tensor | None = None
    sure: Tensor | None = None
    own: Tensor | None = None
    reports: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A deployed client under attack, what its attacker knows, and what an audit needs besides.

    Attacks need the fields up to `seed`; the others are for the record of an audit.

    Args:
        victim: The client.
        head: The server's half, from z̃ to logits (n, classes); None if there is no server. The
            target holds a copy in eval mode.
        classes: Names of the classes.
        aux: Images the attacker fits on, floats in [0, 1].
        scored: Images that are attacked.
        seed: Seed of the attacks.
        identity: Names model and data by their content. Finished attacks can be stored under it.
        captured: What was really sent for the scored images; None to send them through the victim.
        knowledge: What the attacker knows, which names `aux`: train, held-out, test90 or val.
        test: Images on which the accuracy is measured; None for the scored ones.
        members: Images that were trained on, or why none are known.
        outsiders: Images that were not trained on.
        certify: Makes the certificates and the rate in nats, or says why there are none.
        attributes: Attributes from a table; None for simple ones of the images themselves.
        own_data: Whether the images are a user's own, so that copies among them are counted.
        unfinished: How far the training came, if it did not end.
        wire: Makes the part of the record on captured requests from the attempts on them; empty
            where nothing was captured.
        answers: What the device reports for images: logits, and which it asked the server for;
            None where the server's answers are the device's.
        exit: Which images it sends; None sends all.
        silent: Whether it sends none. The attacker is then granted the true label.

    Example:
        `Target(victim=model.victim(), head=model.head, classes=("a", "b"), aux=aux, scored=scored)`
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
    certify: "Callable[[Target], tuple[Json, float | None]] | str" = (
        "nothing is known of the client"
    )
    attributes: Attributes | None = None
    own_data: bool = False
    unfinished: str | None = None
    wire: "Callable[[Mapping[str, Attempt]], Json]" = lambda attempts: {}
    answers: "Callable[[Tensor, Generator], tuple[Tensor, Tensor]] | None" = None
    exit: DeviceAnswers | None = None
    silent: bool = False

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

    @property
    def keeps(self) -> DeviceAnswers | None:
        """`exit` if it keeps scored images on the device; a rule that sends all of them is none."""
        return self.exit if self.exit is not None and not bool(self.exit.asked.all()) else None

    @torch.no_grad()
    def reported(self, rows: Tensor) -> Tensor:
        """Classes (m,) that the device reports for the scored images at `rows`."""
        if self.answers is None:
            return self.sent.answer[rows]
        generator = stream(self.seed, "reported", self.device)
        return self.answers(self.scored.images[rows].to(self.device), generator)[0].argmax(1)

    @cached_property
    @torch.no_grad()
    def if_asked(self) -> Tensor:
        """Classes (n,) that the device reports for the scored images if it asks about all."""
        if self.exit is None or self.exit.reports is None:
            return self.sent.answer
        return self.exit.reports(self.scores(self.sent.z))

    @cached_property
    def sent(self) -> Interception:
        """What was sent once for the scored images; every attack gets the same draw.

        Values that are not finite become 0. Their images stay among the scored: leaving them out
        would favour the client.
        """
        z = self.captured
        if z is None:
            z = send(self.victim, self.scored.images, self.seed, "wire")
        broken = (~torch.isfinite(z).flatten(1).all(1)).nonzero().flatten().tolist()
        told = self.scored.labels if self.silent else answer(self.scores, z)
        return Interception(without_nan(z), told, broken=tuple(broken))

    def scores(self, z: Tensor) -> Tensor:
        """The server's scores (n, classes) for smashed data z; all 0 without a server."""
        if self.head is None:
            return z.new_zeros(len(z), self.num_classes)
        return torch.cat([*map(self.head, torch.split(z, chunk_for(self.scored.images)))])

    def allowed(self, access: Access, rows: Tensor, repeats: int) -> Observation:
        """What an attack with this access sees of the scored images at `rows`.

        `repeats` is how often each image is sent to an attack that averages over sendings.
        """
        label = self.sent.answer[rows]
        if access in (Access.NONE, Access.LABEL):
            blind = torch.zeros_like(label) if access is Access.NONE else label
            return Observation(self.sent.z.new_zeros(len(rows), 0), blind)
        z = self.sent.z[rows].clone()
        if access is not Access.REPEATS:
            return Observation(z, label)
        x = self.scored.images[rows]
        again = sender(self.victim, x)
        more = [again(self.seed, f"repeat/{i}") for i in range(1, repeats)]
        repeated = [without_nan(same_shape(each, len(x), z.shape[1:])) for each in more]
        return Observation(z, label, torch.stack([z, *repeated]))

    def view(self, access: Access) -> BlackBox:
        """The victim as an attack with this access meets it.

        What it sends is checked for its shape, and values that are not finite are 0.
        """
        white = access is Access.WHITE_BOX
        box = self.victim.white_box() if white else self.victim.black_box()
        return replace(checked(box, self.sent.z.shape[1:]), fits=self._fits)

    @cached_property
    def _fits(self) -> SharedFits:
        return SharedFits(self.seed, self.device)


def read_attributes(
    path: Path | None,
    images: int,
    aux: Tensor,
    scored: Tensor,
    names: Callable[[], Sequence[str] | None] = lambda: None,
) -> Attributes | None:
    """Attributes of the aux and the scored images from a CSV table; None without a table.

    Args:
        path: The table.
        images: How many images it must have rows for.
        aux: Row numbers of the attacker's images.
        scored: Row numbers of the scored images.
        names: Gives the images' file names, if they have any; only asked when there is a table.
    """
    if path is None:
        return None
    return attributes_of(path, read_table(path, images, names()), aux, scored)


@torch.no_grad()
def answer(scores: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The server's predicted classes (n,) for smashed data z."""
    return torch.cat([scores(part).argmax(1) for part in torch.split(z, CHUNK)])


def send(victim: Victim, x: Tensor, seed: int, name: str) -> Tensor:
    """Smashed data of images x (n, c, h, w), with fresh noise for each from the named stream."""
    return _in_parts(victim.send, x, stream(seed, name, victim.device))


def sender(victim: Victim, x: Tensor) -> Callable[[int, str], Tensor]:
    """`send` for some images as a function of seed and name, for many sendings of them."""
    rows, prepared = torch.arange(len(x), device=victim.device), victim.prepare(x)
    return lambda seed, name: _in_parts(prepared, rows, stream(seed, name, victim.device))


def _in_parts(send: Send, x: Tensor, generator: Generator) -> Tensor:
    """What is sent for x, some rows at a time."""
    sent: list[Tensor] = []
    for part in torch.split(x, CHUNK):
        z = send(part, generator)
        sent.append(same_shape(z, len(part), (sent[0] if sent else z).shape[1:]))
    return torch.cat(sent)


def attacked_rows(scored: Labelled, limit: int | None) -> Tensor:
    """Positions of the images an attack is scored on: all, or a fixed subset of `limit`.

    The subset depends on the scored images alone: first the gallery's images, then others, evenly
    spread.
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
    """One attack's result on m of the scored images: reconstructions and metrics, each (m,).

    Args:
        access: What the attack could see, a value of `Access`.
        rows: Positions of the m images among the scored ones.
        scored: How many scored images there are.
        images: The reconstructions, uint8 (m, c, h, w).
        mse: Squared error per pixel of images in [0, 1].
        psnr: −10 log10 of it, dB.
        ssim: Structural similarity in [−1, 1], reflected borders; None for images under 6 pixels.
        ssim_zeropad: The same with borders of zeros.
        ssim_valid: The same without borders; None for images under 11 pixels.
        lpips: Perceptual distance, ≥ 0; None where the library is not installed.
        right: Whether the server's answer is right when they are sent; None without a server.
        repeats: How often each image was sent.
        curve: Training loss of each epoch.
        aux_mse: Error on images that the attack was fitted on.
        keeps_aux: Whether the attack answers with images that it keeps from aux; then `aux_mse`
            says nothing about overfitting.
        seconds: How long it took.

    Example:
        `run_attacks(target, {"linear": Linear()})["linear"].scores().mse`
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
    keeps_aux: bool = False
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether every scored image was attacked, not only a subset."""
        return len(self.rows) == self.scored

    def scores(self, rows: Tensor | None = None) -> Scores:
        """Mean scores over the scored images at `rows`; None for all that were attacked.

        `psnr_pooled` is −10 log10 of the mean MSE.
        """
        at = slice(None) if rows is None else self.place(rows)
        means = {
            name: None if (value := getattr(self, name)) is None else float(value[at].mean())
            for name in metrics.PER_IMAGE
        }
        pooled = -10.0 * torch.log10(self.mse[at].mean().clamp_min(metrics.MSE_FLOOR))
        right = None if self.right is None else float(self.right[at].double().mean())
        return Scores(**means, psnr_pooled=float(pooled), accuracy=right)  # type: ignore[arg-type]

    def place(self, rows: Tensor) -> Tensor:
        """Positions, within its own m images, of the scored images at `rows`; −1 if not there."""
        place = torch.full((self.scored,), -1, device=self.rows.device)
        place[self.rows] = torch.arange(len(self.rows), device=self.rows.device)
        return place[rows]

    def to_json(self) -> Json:
        """Its entry in a record."""
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
    """The attempt as a safetensors file, its other facts and a content hash in the header."""
    tensors = {
        f.name: value.cpu().contiguous()
        for f in fields(attempt)
        if isinstance(value := getattr(attempt, f.name), Tensor)
    }
    meta = json.dumps({name: getattr(attempt, name) for name in META})
    return save(tensors, {"attempt": meta, "sha256": _digest(tensors, meta)})


def _digest(tensors: dict[str, Tensor], meta: str) -> str:
    """Content hash: safetensors notices a broken header, but not a broken number."""
    return hashlib.sha256(save(tensors, {"attempt": meta})).hexdigest()


def from_bytes(blob: bytes, device: torch.device) -> Attempt | None:
    """Read back what `to_bytes` wrote; None for anything else."""
    try:
        tensors = load(blob)
        size = int.from_bytes(blob[:8], "little")
        header = parse_json(blob[8 : 8 + size])["__metadata__"]
        if header["sha256"] != _digest(tensors, header["attempt"]):
            return None
        meta: Json = parse_json(header["attempt"])
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
    _, first = np.unique(labels.cpu().numpy(), return_index=True)
    return torch.from_numpy(first[:limit]).to(labels.device)


def gallery(target: Target, attempts: Mapping[str, Attempt]) -> Json:
    """Originals and reconstructions of one image per class, as base64 of raw uint8.

    An attack on a subset that lacks one of these images is left out. Without a server every answer
    is a class of its own, `NO_ANSWER`.
    """
    scored, classes = target.scored, list(target.classes)
    rows = gallery_rows(scored.labels)
    answers = target.reported(rows).tolist()
    if target.head is None and target.answers is None:
        answers, classes = [len(classes)] * len(rows), [*classes, NO_ANSWER]
    places = ((name, attempt.place(rows)) for name, attempt in attempts.items())
    shown = {name: place for name, place in places if bool((place >= 0).all())}
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
