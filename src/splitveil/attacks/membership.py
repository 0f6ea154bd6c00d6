"""The membership attack: was the model trained on this image?

The attacker knows for half of the images whether they are members, and answers for the other half.
Every score is high for members. No score is fitted on the images asked about.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from splitveil.attacks.attribute import Probe, fit_probe
from splitveil.attacks.base import QUERIES, Budget, Count, fresh_weights, minimise
from splitveil.errors import AuditError, check_ranges
from splitveil.threat import Access, BlackBox, Labelled

OUTPUTS = ("loss", "confidence", "lrt", "reference")
WIRE = ("distance", "classifier")
_PRIOR = 10.0  # weight of the statistics over all classes in those of a class, in images
Serve = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Trace:
    """What the server sees of some images, each the mean over several sendings.

    Args:
        z: Smashed data (n, d).
        margin: Logit of the probability of the true class (n,).
        loss: Cross-entropy (n,).
        confidence: The largest probability (n,).
        labels: The true classes (n,).
    """

    z: Tensor
    margin: Tensor
    loss: Tensor
    confidence: Tensor
    labels: Tensor

    def at(self, rows: Tensor) -> "Trace":
        """The images at `rows`."""
        return Trace(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True)
class Verdict:
    """One score of the images asked about.

    Args:
        scores: Scores (n,), high for members.
        threshold: The score from which on an image is called a member, from known images.
        known_auc: Area under the curve on known images.
    """

    scores: Tensor
    threshold: float
    known_auc: float


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Logit-scaled confidence in the true class, (n,) from logits (n, C).

    .. math:: \phi = \log \frac{p_y}{1 - p_y} = l_y - \log \sum_{c \ne y} e^{l_c}

    >>> margin(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])).item()  # 2 − log 2
    1.3068528175354004
    """
    own = logits.gather(1, labels[:, None])
    rest = logits.scatter(1, labels[:, None], -torch.inf)
    return (own - rest.logsumexp(1, keepdim=True)).squeeze(1)


def placements(scores: Tensor, others: Tensor) -> Tensor:
    """Share of `others` (m,) below each score (n,); equal ones count half."""
    ranked = others.sort().values
    sides = [torch.searchsorted(ranked, scores.contiguous(), right=r) for r in (False, True)]
    return torch.stack(sides).double().mean(0) / len(others)


def auc(members: Tensor, others: Tensor) -> float:
    """Chance that a member scores above a non-member; ties count half.

    >>> auc(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0]))
    0.625
    """
    return float(placements(members, others).mean())


def best_threshold(members: Tensor, others: Tensor) -> float:
    """The score from which on "member" gives the highest balanced accuracy.

    >>> best_threshold(torch.tensor([3.0, 2.0, 0.0]), torch.tensor([1.0, 0.5, 0.0]))
    1.5
    """
    ranked = torch.cat([members, others]).sort().values
    cuts = (ranked[1:] + ranked[:-1]) / 2
    hits, alarms = (
        1 - torch.searchsorted(part.sort().values, cuts).double() / len(part)
        for part in (members, others)
    )
    return float(cuts[(hits - alarms).argmax()])


def class_llr(
    values: Tensor, labels: Tensor, known: Tensor, classes: Tensor, member: Tensor
) -> Tensor:
    r"""Log-likelihood ratio member : non-member (n,) of a Gaussian for each class and side.

    .. math:: \log N(v; \mu_{y1}, s_{y1}^2) - \log N(v; \mu_{y0}, s_{y0}^2)

    Mean and variance of a class are mixed with those of its side over all classes, which count as
    ten images.

    Args:
        values: Values v (n,) of the images asked about.
        labels: Their classes y (n,).
        known: Values (m,) that the Gaussians are fitted to.
        classes: Their classes (m,).
        member: Whether they are members, bool (m,).
    """
    size = int(torch.cat([labels, classes]).max()) + 1
    sides = []
    for side in (True, False):
        mine, kind = known[member == side], classes[member == side]
        count = kind.bincount(minlength=size).double() + _PRIOR
        mean = _sums(mine, kind, size).add(_PRIOR * mine.mean()) / count
        within = _sums((mine - mean[kind]).square(), kind, size)
        var = (within + _PRIOR * mine.var(correction=0).clamp_min(1e-12)) / count
        sides.append(-0.5 * ((values - mean[labels]).square() / var[labels] + var[labels].log()))
    return sides[0] - sides[1]


def crossed_llr(known: Tensor, classes: Tensor, member: Tensor) -> Tensor:
    """`class_llr` of the known values, each half under Gaussians fitted to the other half."""
    # Every second image of either side, so that both halves have members and non-members.
    turn = torch.where(member, member.cumsum(0), (~member).cumsum(0)) % 2 == 0
    ratio = torch.empty_like(known)
    for half in (turn, ~turn):
        others = (known[~half], classes[~half], member[~half])
        ratio[half] = class_llr(known[half], classes[half], *others)
    return ratio


def _sums(values: Tensor, kind: Tensor, size: int) -> Tensor:
    """Sum of the values (n, …) of each kind: (size, …)."""
    empty = torch.zeros(size, *values.shape[1:], dtype=values.dtype, device=values.device)
    return empty.index_add(0, kind, values)


def class_residuals(trace: Trace, known: Trace, member: Tensor) -> tuple[Tensor, Tensor]:
    """z̃ less the mean of its class over the known members, in units of each feature's spread.

    A known member does not count in its own mean. The mean of all members counts as one more image
    of each class.

    Returns:
        Residuals of the images asked about (n, d) and of the known ones (m, d).
    """
    spread = known.z.std(0, correction=0)
    scale = 1 / spread.clamp_min(1e-3 * spread.mean() + 1e-12)
    size = int(torch.cat([trace.labels, known.labels]).max()) + 1
    z, kind, weight = known.z * scale, known.labels, member.to(known.z)
    sums = _sums(z * weight[:, None], kind, size) + z[member].mean(0)
    count = _sums(weight, kind, size)[:, None] + 1
    own = (sums[kind] - z * weight[:, None]) / (count[kind] - weight[:, None])
    asked = trace.z * scale - (sums / count)[trace.labels]
    return asked, z - own


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Scores for images that may have been trained on, from z̃ and from the server's outputs.

    Outputs: `loss` (minus the cross-entropy), `confidence`, `lrt` (Gaussian likelihood ratio of
    the margin for each class) and `reference` (the margin above what `references` linear heads,
    fitted on z̃ of other known images, let expect of an image as hard as this). z̃: `distance` to
    the mean of the class's known members, and a `classifier` of z̃ and of how far each of its
    features lies from that mean.
    """

    draws: Count = 4
    references: Count = 4
    limit: int | None = None
    min_steps: int = 300
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def access(self) -> Access:
        """Repeats, unless each image is sent once."""
        return Access.REPEATS if self.draws > 1 else Access.BLACK_BOX

    @property
    def budget(self) -> Budget:
        """Steps and learning rate of the heads."""
        return Budget(epochs=4, min_steps=self.min_steps, batch_size=self.batch_size, lr=1e-2)

    @torch.no_grad()
    def observe(
        self, victim: BlackBox, serve: Serve, data: Labelled, generator: Generator
    ) -> Trace:
        """Send every image `draws` times; `serve` turns smashed data into logits."""
        sums: list[list[Tensor]] = []
        labels = data.labels.to(victim.device)
        batches = (torch.split(t, QUERIES) for t in (data.images, labels))
        for x, y in zip(*batches, strict=True):
            draws = []
            send, rows = victim.sender(x), torch.arange(len(x), device=victim.device)
            for _ in range(self.draws):
                z = send(rows, generator)
                logits = serve(z).double()
                loss = F.cross_entropy(logits, y, reduction="none")
                top = logits.softmax(1).amax(1)
                draws.append((z.flatten(1).float(), margin(logits, y), loss, top))
            sums.append([torch.stack(each).mean(0) for each in zip(*draws, strict=True)])
        z, lean, loss, top = (torch.cat(each) for each in zip(*sums, strict=True))
        if not bool(torch.stack([lean, loss, top]).isfinite().all() & z.isfinite().all()):
            raise AuditError(
                "the server's outputs are NaN or infinite for some images; train the model again, "
                "with a lower lr"
            )
        return Trace(z, lean, loss, top, labels)

    def judge(
        self, asked: Trace, known: Trace, member: Tensor, generator: Generator
    ) -> dict[str, Verdict]:
        """All scores of the images asked about.

        Args:
            asked: What the server sees of them.
            known: What it sees of the known images.
            member: Whether the known images are members, bool (m,).
            generator: The only source of randomness.
        """
        given = (known.margin, known.labels, member)
        rest = class_residuals(asked, known, member)
        far, away = (-r.double().norm(dim=1) for r in rest)
        scores: dict[str, tuple[Tensor, Tensor]] = {
            "loss": (-asked.loss, -known.loss),
            "confidence": (asked.confidence, known.confidence),
            "lrt": (class_llr(asked.margin, asked.labels, *given), crossed_llr(*given)),
            "reference": self._reference(asked, known, member, generator),
            "distance": (far, away),
        }
        found = {name: _verdict(*pair, member) for name, pair in scores.items()}
        theirs = torch.cat([asked.z, rest[0].abs()], 1)
        ours = torch.cat([known.z, rest[1].abs()], 1)
        return found | {"classifier": self._classifier(theirs, ours, member, generator)}

    def _reference(
        self, asked: Trace, known: Trace, member: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor]:
        """Margins above those expected from reference heads, on the line of known non-members."""
        m, heads = len(known.z), 2 * self.references
        lots = torch.rand(self.references, m, generator=generator, device=generator.device)
        low = lots.argsort(1).argsort(1) < m // 2
        inside = torch.cat([low, ~low]).T.to(
            known.z.device
        )  # (m, heads): which heads are fitted on an image
        size = int(torch.cat([asked.labels, known.labels]).max()) + 1
        net = _fit_heads(known, inside, max(size, 2), self.budget, generator)
        ours, theirs = (_head_margins(net, t, heads) for t in (known, asked))
        hard = (ours * ~inside).sum(1) / (~inside).sum(1)
        x, y = hard[~member], known.margin[~member]
        x, y = x - x.mean(), y - y.mean()
        slope = (x * y).sum() / x.square().sum().clamp_min(1e-12)
        return asked.margin - slope * theirs.mean(1), known.margin - slope * hard

    def _classifier(
        self, asked: Tensor, known: Tensor, member: Tensor, generator: Generator
    ) -> Verdict:
        """Scores of a linear head or a small network, whichever is better on a held-out fifth."""
        probed = fit_probe(
            lambda z: z,
            known,
            {"member": member.long()},
            budget=self.budget,
            generator=generator,
        )
        theirs, ours = (probed(z)["member"].double().diff(dim=1).squeeze(1) for z in (asked, known))
        held = probed.held
        if bool(member[held].all() | ~member[held].any()):  # no members, or nobody else
            held = torch.arange(len(member), device=known.device)
        return _verdict(theirs, ours[held], member[held])


def _verdict(asked: Tensor, known: Tensor, member: Tensor) -> Verdict:
    """Scores with the sign under which known members score higher, and the best threshold."""
    sign = 1.0 if auc(known[member], known[~member]) >= 0.5 else -1.0  # noqa: PLR2004 - chance
    inside, outside = sign * known[member], sign * known[~member]
    return Verdict(sign * asked, best_threshold(inside, outside), auc(inside, outside))


def _fit_heads(
    known: Trace, inside: Tensor, classes: int, budget: Budget, generator: Generator
) -> Probe:
    """One linear classifier of z̃ for each column of `inside` (m, heads), fitted on its rows."""
    heads, device = inside.shape[1], known.z.device
    with fresh_weights(generator, device):
        net = Probe(known.z, heads * classes, 1).to(device)

        def loss(z: Tensor, y: Tensor, part: Tensor) -> Tensor:
            logits = net.linear(net.standard(z)).view(-1, classes)
            each = F.cross_entropy(logits, y.repeat_interleave(heads), reduction="none")
            return (each * part.flatten()).mean()

        minimise(loss, net, (known.z, known.labels, inside.float()), budget, generator)
    return net.eval().requires_grad_(requires_grad=False)


def _head_margins(net: Probe, trace: Trace, heads: int) -> Tensor:
    """Margin of the true class under every head, (n, heads)."""
    parts = torch.split(trace.z, QUERIES)
    logits = torch.cat([net.linear(net.standard(z)).double() for z in parts])
    wide = logits.view(len(logits) * heads, -1)
    return margin(wide, trace.labels.repeat_interleave(heads)).view(-1, heads)
