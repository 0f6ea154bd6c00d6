"""The attribute attack: what z̃ says about an image besides its class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.base import QUERIES, Budget, fresh_weights, minimise, need_aux
from splitveil.data.attributes import MAX_VALUES
from splitveil.errors import AuditError
from splitveil.threat import Access, BlackBox, Labelled

SHOWN = 5000  # images whose features give mean and spread
HEADS = ("linear", "mlp")
_HELD = 5  # one image in five is held out to choose between the heads
_COLOURS = 3
_HIDDEN = 128  # width of the hidden layer


def image_attributes(images: Tensor, aux: Tensor) -> dict[str, Tensor]:
    """Simple attributes (n,) of images (n, c, h, w); every threshold is fixed on `aux` images.

    Args:
        images: Images to describe, in [0, 1].
        aux: The attacker's images (m, c, h, w).

    Returns:
        By name: `brightness` and `edges`, the third of aux (0, 1, 2) that the mean brightness or
        the mean step between neighbouring pixels falls into; `side`, 1 if the right half is
        brighter; `colour`, the channel furthest above its aux mean (three channels only).

    >>> aux = torch.linspace(0, 1, 9).view(9, 1, 1, 1).expand(9, 1, 2, 2)
    >>> image_attributes(aux, aux)["brightness"].tolist()
    [0, 0, 0, 1, 1, 1, 2, 2, 2]
    """
    found = {"brightness": _third(_brightness(images), _brightness(aux))}
    half = images.shape[3] // 2
    if half:
        left, right = images[..., :half], images[..., -half:]
        found["side"] = (_brightness(right) > _brightness(left)).long()
    if min(images.shape[2:]) > 1:
        found["edges"] = _third(_edges(images), _edges(aux))
    if images.shape[1] == _COLOURS:
        usual = aux.mean((0, 2, 3)).to(images.device)
        found["colour"] = (images.mean((2, 3)) - usual).argmax(1)
    return found


def _brightness(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3))


def _edges(images: Tensor) -> Tensor:
    """Mean absolute difference to the pixel below and to the right."""
    mean = (1, 2, 3)
    parts = [
        x.diff(dim=2).abs().mean(mean) + x.diff(dim=3).abs().mean(mean)
        for x in torch.split(images, QUERIES)
    ]
    return torch.cat(parts)


def _third(values: Tensor, aux: Tensor) -> Tensor:
    """The third of the sorted aux values that each value falls into: 0, 1 or 2."""
    ranked = aux.sort().values.to(values)
    cuts = ranked[[len(ranked) // 3, 2 * len(ranked) // 3]]
    return torch.bucketize(values, cuts, right=True)


class Probe(nn.Module):
    """A linear head and one with a hidden layer on standardised z (n, d): logits (2, n, classes).

    The heads share batches but no weights, so each is trained as if it were alone.

    Args:
        z: Features that give mean and spread.
        classes: Logits of each head.
        hidden: Width of the hidden layer.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, z: Tensor, classes: int, hidden: int) -> None:
        super().__init__()
        width = z.shape[1]
        # One step of Adam moves a logit by about its size times the length of the input.
        shrink = min(1.0, 8.0 / width**0.5)
        spread = z.std(0, correction=0)
        self.register_buffer("mean", z.mean(0))
        self.register_buffer("scale", shrink / spread.clamp_min(1e-3 * spread.mean() + 1e-12))
        self.linear = nn.Linear(width, classes)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        nn.init.zeros_(self.linear.weight)  # a short fit would keep much of a random start

    def standard(self, z: Tensor) -> Tensor:
        """Standardised features (n, d) of z (n, …)."""
        return (z.flatten(1).float() - self.mean) * self.scale

    def forward(self, z: Tensor) -> Tensor:
        """Logits of the linear head and of the one with a hidden layer, (2, n, classes)."""
        x = self.standard(z)
        return torch.stack([self.linear(x), self.mlp(x)])


@dataclass(frozen=True)
class Probed:
    """A fitted probe.

    Args:
        net: Both heads, with the logits of all targets side by side.
        sizes: Values of each target.
        picked: For each target the head that was right more often on the held-out rows.
        held: Numbers of the held-out rows.
    """

    net: Probe
    sizes: Mapping[str, int]
    picked: Mapping[str, str]
    held: Tensor

    @torch.no_grad()
    def __call__(self, z: Tensor) -> dict[str, Tensor]:
        """Logits (n, size) for each target, from z (n, …)."""
        both = torch.cat([self.net(part) for part in torch.split(z, QUERIES)], 1)
        parts = zip(self.sizes, torch.split(both, [*self.sizes.values()], dim=2), strict=True)
        return {name: part[HEADS.index(self.picked[name])] for name, part in parts}


def fit_probe(
    send: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Mapping[str, Tensor],
    *,
    budget: Budget,
    generator: Generator,
) -> Probed:
    """Fit heads that predict every target from what is sent.

    Args:
        send: Smashed data of some inputs; called anew at every step, so that its noise is fresh.
        inputs: One row for each image.
        targets: By name, integers (n,) from 0 on.
        budget: How long to train.
        generator: The only source of randomness.
    """
    n, sizes = len(inputs), {name: int(values.max()) + 1 for name, values in targets.items()}
    columns, widths = torch.stack([*targets.values()], 1), [*sizes.values()]
    order = torch.randperm(n, generator=generator, device=generator.device).to(inputs.device)
    held, used = order[: n // _HELD], order[n // _HELD :]
    some = torch.split(inputs[used[:SHOWN]], QUERIES)
    z = torch.cat([send(x).flatten(1).float() for x in some])
    with fresh_weights(generator, z.device):
        net = Probe(z, sum(widths), _HIDDEN).to(z.device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            parts = torch.split(net(send(x)), widths, dim=2)
            pairs = [(head, y[:, i]) for i, part in enumerate(parts) for head in part]
            return torch.stack([F.cross_entropy(*pair) for pair in pairs]).sum()

        data = (inputs[used], columns.to(inputs.device)[used])
        minimise(loss, net, data, budget, generator)
    net.eval().requires_grad_(requires_grad=False)
    both = torch.cat([net(send(x)) for x in torch.split(inputs[held], QUERIES)], 1)
    picked = {}
    for name, part in zip(sizes, torch.split(both, widths, dim=2), strict=True):
        right = part.argmax(2) == targets[name].to(z.device)[held.to(z.device)]
        picked[name] = HEADS[int(right.double().mean(1).argmax())]
    return Probed(net, sizes, picked, held)


@dataclass(frozen=True, kw_only=True)
class AttributeHead:
    """Heads on z̃ fitted on aux, fresh channel noise at every step, all attributes at once."""

    access: Access = Access.BLACK_BOX
    epochs: int = 4
    min_steps: int = 300
    batch_size: int = 128
    lr: float = 1e-2
    min_aux: int = 10

    def fit(
        self, victim: BlackBox, aux: Labelled, targets: Mapping[str, Tensor], generator: Generator
    ) -> Probed:
        """Fit the heads on the aux images and their attributes, integers (n,) from 0 on."""
        need_aux("attribute", aux, self.min_aux)
        for name, target in targets.items():
            check_values(name, target, len(aux))
        if not targets:
            raise AuditError("the attribute attack needs at least one attribute, got none; add one")
        send = victim.sender(aux.images)
        return fit_probe(
            lambda rows: send(rows, generator),
            torch.arange(len(aux), device=aux.images.device),
            {name: target.to(aux.images.device) for name, target in targets.items()},
            budget=Budget.of(self),
            generator=generator,
        )


def check_values(name: str, target: Tensor, n: int) -> None:
    """Validate an attribute of n aux images: integers, at least two values, not too many."""
    if target.shape != (n,) or target.is_floating_point():
        got = f"got {tuple(target.shape)} of {target.dtype}"
        raise AuditError(f"attribute '{name}' must be {n} integers, one for each aux image, {got}")
    low, high = (int(v) for v in target.aminmax())
    if low == high:
        raise AuditError(
            f"attribute '{name}' has one value only ({low}) on the aux images, so there is nothing "
            "to guess; leave it out"
        )
    if low < 0 or high >= MAX_VALUES:
        raise AuditError(
            f"attribute '{name}' has values from {low} to {high}; allowed are 0 to "
            f"{MAX_VALUES - 1}; sort a measured quantity into a few classes first"
        )
