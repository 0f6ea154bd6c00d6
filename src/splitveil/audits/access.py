"""What each threat model is given: the wire, a view of the victim, a subset of the images."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from splitveil.audits.gallery import gallery_rows
from splitveil.errors import AuditError
from splitveil.rng import stream
from splitveil.types import Access, BlackBox, Labelled, Observation, Victim
from splitveil.victim import CHUNK, Send, sealed


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is audited: a deployed client, the server's half, aux, and the scored images.

    `identity` names model and data by their content; with it, finished attacks can be stored.
    """

    victim: Victim
    head: nn.Module
    num_classes: int
    aux: Labelled
    scored: Labelled
    identity: str = ""


@dataclass(frozen=True)
class Wire:
    """What the server holds of the scored images, drawn from streams of `seed`.

    `broken` are the positions of images whose sending was not finite.
    """

    seen: Observation
    seed: int
    broken: tuple[int, ...] = ()


@torch.no_grad()
def answer(head: nn.Module, z: Tensor) -> Tensor:
    """The server's predicted classes (n,) for smashed data z."""
    return torch.cat([head(part).argmax(1) for part in torch.split(z, CHUNK)])


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


def intercept(case: Case, seed: int) -> Wire:
    """The one draw of the scored images that every attack is given.

    Values that are not finite are reported and count as 0: the image stays among the scored ones.
    """
    z = send(case.victim, case.scored.images, seed, "wire")
    broken = (~torch.isfinite(z).flatten(1).all(1)).nonzero().flatten().tolist()
    return Wire(Observation(finite(z), answer(case.head, z)), seed, tuple(broken))


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


def allowed(case: Case, access: Access, wire: Wire, rows: Tensor, repeats: int) -> Observation:
    """The part of what the server holds that the threat model lets the attack see."""
    label = wire.seen.answer[rows]
    if access in (Access.NONE, Access.LABEL):
        blind = torch.zeros_like(label) if access is Access.NONE else label
        return Observation(wire.seen.z.new_zeros(len(rows), 0), blind)
    z = wire.seen.z[rows].clone()
    if access is not Access.REPEATS:
        return Observation(z, label)
    x = case.scored.images[rows]
    more = [send(case.victim, x, wire.seed, f"repeat/{i}") for i in range(1, repeats)]
    checked = [finite(same_shape(each, len(x), z.shape[1:])) for each in more]
    return Observation(z, label, torch.stack([z, *checked]))


def view(case: Case, access: Access, wire: Wire) -> BlackBox:
    """The victim as this threat model meets it; sends finite values of the wire's shape."""
    victim = case.victim
    box = victim.white_box() if access is Access.WHITE_BOX else victim.black_box()
    shape = wire.seen.z.shape[1:]

    def checked(send: Send) -> Send:
        def query(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return finite(same_shape(send(x, generator), len(x), shape))

        return sealed(query)

    def prepare(images: Tensor) -> Send:
        return checked(box.sender(images))

    return replace(box, send=checked(box.send), prepare=sealed(prepare))


def finite(z: Tensor) -> Tensor:
    """Smashed data with 0 in place of NaN and infinity."""
    return torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)
