r"""Early exit: a client with a head of its own, and the rule that decides what is sent.

    images ─▶ body ──────────────────▶ own head ─▶ own answer ─▶ rule: sure? ─▶ answered here
                └─ tap ─▶ projection ─▶ z ─▶ channel ─▶ server ◀─ sent only if not sure

The own head reads the end of the body, without noise. The wire may be taken from any layer of the
body (`tap`), so that a device can answer late and send early.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.nets.blocks import is_plain

Kind = Literal["confidence", "margin", "entropy"]
Pooling = Literal["mean", "flatten"]
Logits = Float[Tensor, "n k"]
SMALLEST_MAP = 8  # a projection from a tap halves larger maps down to this side
FINE = 2.0**-40  # of sureness: the last bits differ between libraries and decide nothing
LEAST_PER_CLASS = 50  # validation images that a threshold of its own needs
_TEMPERATURES = (0.05, 20.0)


class TappedClient(nn.Module):
    """A client's body and its projection to the wire, which may start in the middle of the body.

    Args:
        body: The client's layers up to where its own head reads.
        projection: From the layer after `tap` children of the body to z.
        tap: 1..len(body); len(body) takes the wire from the end.
    """

    def __init__(self, body: nn.Sequential, projection: nn.Module, tap: int) -> None:
        super().__init__()
        self.body, self.projection, self.tap = body, projection, tap

    def forward(self, x: Tensor) -> Tensor:
        """Clean smashed data z (n, …) of images x; layers after the tap are not computed."""
        z: Tensor = self.projection(self.body[: self.tap](x))
        return z

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smashed data z (n, …), and the features at the end of the body (n, …), in one pass."""
        at: Tensor = self.body[: self.tap](x)
        return self.projection(at), self.body[self.tap :](at)


def unwrapped(client: nn.Module) -> nn.Module:
    """A client without Sequentials of one child around it, such as `cut` makes."""
    while is_plain(client) and len(client) == 1:
        client = client[0]
    return client


def body_and_projection(client: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """A client in two parts: what an own head can read, and what leads from there to the wire.

    The projection is the convolution and the sigmoid at the end of this package's clients and
    bottlenecks. A client without them is all body, and its projection does nothing.

    >>> end = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Sigmoid())
    >>> [len(part) for part in body_and_projection(end)]
    [1, 2]
    """
    client = unwrapped(client)
    if isinstance(client, TappedClient):
        return client.body, nn.Sequential(client.projection)
    layers = _flat(client)
    squashed = len(layers) > 1 and isinstance(layers[-1], nn.Sigmoid)
    # A defence may have put a layer between the convolution and the sigmoid.
    for ends in (2, 3) if squashed else ():
        if len(layers) > ends and isinstance(layers[-ends], nn.Conv2d):
            return nn.Sequential(*layers[:-ends]), nn.Sequential(*layers[-ends:])
    return nn.Sequential(*layers), nn.Sequential()


def _flat(module: nn.Module) -> list[nn.Module]:
    """The layers of a module; where its last one is a plain Sequential, those of that instead."""
    if not is_plain(module):
        return [module]
    layers = list(module)
    return [*layers[:-1], *_flat(layers[-1])] if layers and is_plain(layers[-1]) else layers


def tapped(client: nn.Module, tap: int, image_shape: tuple[int, ...]) -> TappedClient:
    """The client with its wire taken after `tap` layers of its body.

    The new projection is a 3×3 convolution and a sigmoid. It halves maps down to sides of at most
    8, and sends at most as many numbers as the client did.

    Args:
        client: A client whose body is a Sequential of maps.
        tap: 1..layers of the body − 1.
        image_shape: (c, h, w) of the images.
    """
    body, projection = body_and_projection(client)
    if not 1 <= tap < len(body):
        raise ConfigError(
            f"the tap must be in 1..{len(body) - 1}, because this client's body has {len(body)} "
            f"layers, got {tap}"
        )
    with torch.no_grad():
        probe = torch.zeros(1, *image_shape)
        was = client.training
        client.eval()
        at = body[:tap](probe)
        floats = int(projection(body[tap:](at)).numel())
        client.train(was)
    if at.ndim != 4:  # noqa: PLR2004 - n, c, h, w
        raise ConfigError(
            f"the wire can be tapped where the client has a map, but after layer {tap} it has "
            f"shape {tuple(at.shape[1:])}; give a smaller tap"
        )
    _, channels, height, width = at.shape
    stride = max(1, math.ceil(max(height, width) / SMALLEST_MAP))
    places = -(-height // stride) * -(-width // stride)
    if floats < places:
        raise ConfigError(
            f"{floats} numbers on the wire are fewer than the {places} places of a map at tap "
            f"{tap}; give a larger tap, or a client that sends more"
        )
    enter = nn.Conv2d(channels, floats // places, 3, stride, padding=1)
    return TappedClient(body, nn.Sequential(enter, nn.Sigmoid()), tap)


def own_head(
    body: nn.Module, image_shape: tuple[int, ...], num_classes: int, pooling: Pooling = "mean"
) -> nn.Sequential:
    """One linear layer on the pooled or flattened features of a body.

    Args:
        body: From images to features (n, …).
        image_shape: (c, h, w) of the images.
        num_classes: Number of logits, ≥ 1.
        pooling: "mean" over a map's places, or "flatten" for all of its numbers.

    >>> own_head(nn.Conv2d(3, 5, 3), (3, 8, 8), 10)[-1]
    Linear(in_features=5, out_features=10, bias=True)
    """
    was = body.training
    with torch.no_grad():
        features = body.eval()(torch.zeros(1, *image_shape))
    body.train(was)
    maps = features.ndim == 4 and pooling == "mean"  # noqa: PLR2004 - n, c, h, w
    pool = [nn.AdaptiveAvgPool2d(1)] if maps else []
    width = features.shape[1] if maps else features[0].numel()
    return nn.Sequential(*pool, nn.Flatten(), nn.Linear(width, num_classes))


def sureness(logits: Logits, kind: Kind, temperature: float | Tensor = 1.0) -> Float[Tensor, " n"]:
    r"""How sure an answer is, where p = softmax(logits / T).

    .. math:: \max_k p_k, \qquad p_{(1)} - p_{(2)}, \qquad -H(p) = \sum_k p_k \log p_k

    Args:
        logits: (n, classes).
        kind: "confidence", "margin" or "entropy"; all three grow with sureness.
        temperature: T > 0.

    Returns:
        (n,) in float64, so that numpy and a browser can decide alike.

    >>> sureness(torch.tensor([[0.0, 0.0]]), "confidence").tolist()
    [0.5]
    """
    p = F.softmax(logits.double() / temperature, 1)
    if kind == "confidence":
        return p.amax(1)
    if kind == "margin":
        first, second = p.topk(2, 1).values.unbind(1)
        return first - second
    negated: Tensor = torch.special.xlogy(p, p).sum(1)
    return negated


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the threshold is chosen on validation images.

    Args:
        send: Share of the images to send, in [0, 1]; not used where `accuracy` is given.
        accuracy: Least accuracy of the whole to reach with as few sent as possible; or None.
        per_class: Whether each class that the client answers gets a threshold of its own.
    """

    send: float = 0.3
    accuracy: float | None = None
    per_class: bool = False


@dataclass(frozen=True)
class Settled:
    """What a settled exit rule does with the validation images, as shares in [0, 1].

    Args:
        sent: Of the images, those that are sent.
        rule_accuracy: Right answers of device and server together.
        own_accuracy: Right answers of the device if nothing is sent.
    """

    sent: float
    rule_accuracy: float
    own_accuracy: float


class Exit(nn.Module):
    """The own head of a client and its exit rule: an image is sent if sureness < threshold.

    Temperature and thresholds are buffers: they belong to the checkpoint and to the model's hash.
    Before they are set, everything is sent.

    Args:
        head: From the features at the end of the body to logits (n, classes).
        num_classes: Number of classes.
        kind: What sureness is, see `sureness`.
        weight: Of its loss in training, beside the server's.
        policy: How the thresholds are chosen.
        average: Whether the device averages its own answer with the server's.
        focus: How much a penalty leans on images that would be sent, see `row_weights`.

    `unsettled` says why the rule could not be set by the last validation images; "" if it was.
    """

    temperature: Tensor
    thresholds: Tensor

    def __init__(
        self,
        head: nn.Module,
        num_classes: int,
        *,
        kind: Kind = "confidence",
        weight: float = 1.0,
        policy: Policy | None = None,
        average: bool = False,
        focus: float = 0.0,
    ) -> None:
        super().__init__()
        self.head, self.kind, self.weight, self.average = head, kind, weight, average
        self.focus, self.unsettled = focus, ""
        self.policy = Policy() if policy is None else policy
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        sent_all = torch.full((num_classes,), math.inf, dtype=torch.float64)
        self.register_buffer("thresholds", sent_all)

    def asks(self, own: Logits) -> Bool[Tensor, " n"]:
        """Which images are sent, from the client's own logits (n, classes)."""
        sure = sureness(own, self.kind, self.temperature)
        return self.thresholds[own.argmax(1)] - sure > FINE

    def answers(self, own: Logits, server: Logits, asked: Bool[Tensor, " n"]) -> Logits:
        """The logits (n, classes) that the device reports.

        Its own at its temperature where it did not ask; the server's where it did, or the mean of
        both log-probabilities if it averages.
        """
        mine = F.log_softmax(own.double() / self.temperature, 1)
        theirs = F.log_softmax(server.double(), 1)
        asked_for = (mine + theirs) / 2 if self.average else theirs
        return torch.where(asked[:, None], asked_for, mine).to(own.dtype)

    @torch.no_grad()
    def row_weights(self, own: Logits) -> Float[Tensor, " n"]:
        r"""Weights of images in the penalty's gradient, with mean 1: more for unsure ones.

        .. math:: w_i = (1 - f) + f\, u_i / \bar u, \qquad u_i = 1 - \max_k p_k

        It is a weight and no filter, because what is sent is only settled after the training.
        """
        unsure = 1 - F.softmax(own.float(), 1).amax(1)
        mean = unsure.mean()
        share = torch.where(mean > 0, unsure / mean.clamp_min(1e-12), torch.ones_like(unsure))
        return (1 - self.focus) + self.focus * share

    def check_images(self, count: int) -> None:
        """Refuse a number of validation images by which the rule cannot be settled."""
        if count == 0:
            raise ConfigError(
                "early exit chooses its threshold on validation images, and there are none; "
                "train without --final"
            )
        least = LEAST_PER_CLASS * len(self.thresholds)
        if self.policy.per_class and count < least:
            raise ConfigError(
                f"a threshold for each class needs at least {LEAST_PER_CLASS} validation images "
                f"per class, {least} in all, got {count}; leave per_class out"
            )

    @torch.no_grad()
    def settle(self, own: Logits, server: Logits, labels: Int64[Tensor, " n"]) -> Settled:
        """Set temperature and thresholds by validation images.

        Args:
            own: The client's own logits (n, classes).
            server: The server's logits for the same images, all sent.
            labels: Their classes (n,).

        Returns:
            What the rule does with these images.

        Raises:
            ConfigError: No images, too few per class, or an accuracy that cannot be reached. Then
                every image is sent.
        """
        self.unsettled = ""
        self.thresholds.fill_(math.inf)
        self.check_images(len(labels))
        self._choose(own, server, labels)
        asked = self.asks(own)
        right = self.answers(own, server, asked).argmax(1) == labels
        shares = (asked, right, own.argmax(1) == labels)
        return Settled(*(float(share.double().mean()) for share in shares))

    def _choose(self, own: Logits, server: Logits, labels: Int64[Tensor, " n"]) -> None:
        """Set temperature and thresholds."""
        self.temperature.fill_(fitted_temperature(own, labels))
        sure = sureness(own, self.kind, self.temperature)
        everything = torch.ones_like(labels, dtype=torch.bool)
        right_there = self.answers(own, server, everything).argmax(1) == labels
        right_here = own.argmax(1) == labels
        if self.policy.accuracy is not None:
            share = least_share(sure, right_here, right_there, self.policy.accuracy)
        else:
            share = self.policy.send
        if not self.policy.per_class:
            self.thresholds.fill_(threshold_for(sure, share))
            return
        answered = own.argmax(1)
        counts = answered.bincount(minlength=len(self.thresholds))
        if (few := int(counts.min())) < LEAST_PER_CLASS:
            raise ConfigError(
                f"a threshold for each class needs at least {LEAST_PER_CLASS} validation images "
                f"that the client answers with it, but one class has {few}; leave per_class out"
            )
        for k in range(len(counts)):
            self.thresholds[k] = threshold_for(sure[answered == k], share)


def threshold_for(sure: Float[Tensor, " n"], share: float) -> float:
    """The threshold at which the round(share·n) least sure images are sent; of ties, none is.

    It lies midway between two images, so that rounding elsewhere decides alike.

    >>> threshold_for(torch.tensor([0.0, 0.25, 0.5, 0.75]).double(), 0.5)
    0.375
    """
    count = round(share * len(sure))
    if count == 0:
        return -math.inf
    ordered = sure.sort().values
    if count >= len(sure):
        return math.inf
    return (float(ordered[count - 1]) + float(ordered[count])) / 2


def least_share(
    sure: Float[Tensor, " n"],
    right_here: Bool[Tensor, " n"],
    right_there: Bool[Tensor, " n"],
    accuracy: float,
) -> float:
    """The smallest share of images to send, least sure first, that reaches an accuracy.

    >>> sure = torch.tensor([0.9, 0.5]).double()
    >>> least_share(sure, torch.tensor([True, False]), torch.tensor([True, True]), 1.0)
    0.5
    """
    order = sure.argsort(stable=True)
    here, there = right_here[order].long(), right_there[order].long()
    zero = here.new_zeros(1)
    right = torch.cat([zero, there.cumsum(0)]) + here.sum() - torch.cat([zero, here.cumsum(0)])
    reached = (right >= accuracy * len(sure) - 1e-9).nonzero()
    if len(reached) == 0:
        best = float(right.max()) / len(sure)
        raise ConfigError(
            f"target accuracy {accuracy:g} cannot be reached: the best on the validation images is "
            f"{best:.4f}; give a lower target, or a share with send="
        )
    return int(reached[0]) / len(sure)


def fitted_temperature(logits: Logits, labels: Int64[Tensor, " n"]) -> float:
    """The temperature in [0.05, 20] with the least cross-entropy: golden-section search in log T.

    >>> z = torch.tensor([[math.log(3.0), 0.0]]).repeat(4, 1)  # says 3/4, and is right in 3 of 4
    >>> round(fitted_temperature(2 * z, torch.tensor([0, 0, 0, 1])), 4)
    2.0
    """
    low, high = (math.log(t) for t in _TEMPERATURES)
    ratio = (math.sqrt(5) - 1) / 2
    logits = logits.double()

    def loss(log_t: float) -> float:
        return float(F.cross_entropy(logits / math.exp(log_t), labels))

    while high - low > 1e-6:  # noqa: PLR2004
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)
