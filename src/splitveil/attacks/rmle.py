"""The rmle attack: a search for the image whose smashed data would explain what was sent."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor, nn

from splitveil.attacks.base import (
    PROBED,
    PSEUDO_IMAGES,
    QUERIES,
    Count,
    Descent,
    NonNegative,
    Search,
    calibrated,
    draw_seed,
    has_gradient,
    need_aux,
    tenth,
)
from splitveil.attacks.decoder import SMALL
from splitveil.attacks.linear import Linear
from splitveil.errors import AuditError, ConfigError, Range, check_ranges
from splitveil.io import Progress, silent
from splitveil.threat import (
    Access,
    Attack,
    BlackBox,
    Labelled,
    Observation,
    Reconstructor,
    WhiteBox,
)

OFFSET_ROWS = 4096  # sendings averaged for the offset; 1.6 % of the noise stays in it
LEAST_WEIGHT = 1e-3  # of the priors without noise: they decide what z does not show
LEAST_SPREAD = 1e-6  # squared error below which a start counts as exact


def total_variation(x: Tensor) -> Tensor:
    r"""Mean absolute step between neighbouring pixels of each image, down plus across.

    .. math:: TV(x) = \overline{|x_{i+1,j} - x_{i,j}|} + \overline{|x_{i,j+1} - x_{i,j}|}

    x (n, c, h, w) → (n,). A side of one pixel has no steps and adds 0.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 0.5]]]])).tolist()
    [1.0]
    """
    sides = [x.diff(dim=axis).abs().flatten(1) for axis in (2, 3)]
    return torch.stack([d.sum(1) / max(d.shape[1], 1) for d in sides]).sum(0)


@dataclass(frozen=True)
class ChannelFacts:
    """What the attacker measures of the channel on aux.

    Args:
        scale: Variance of z̃ over images, mean over dimensions.
        noise: Share of it that differs between two sendings of an image, in [0, 1].
        offset: E[channel(z)] − z if the channel adds the same to every z, as additive noise does:
            the expectation is then exact without a draw. Else None.
        draws: Realisations that stand for the expectation; 1 if the channel is deterministic.
    """

    scale: Tensor
    noise: Tensor
    offset: Tensor | None
    draws: int


@torch.no_grad()
def measure_channel(
    box: WhiteBox, images: Tensor, generator: Generator, draws: int
) -> ChannelFacts:
    """Send some images (n, c, h, w) a few times and compare what the channel does to them."""
    z = box.encoder(images[:PROBED].to(box.device)).nan_to_num(0.0, 0.0, 0.0)
    state = generator.get_state()
    sent, again = (box.channel(z, generator) for _ in range(2))
    generator.set_state(state)
    added = box.channel(z.flip(0), generator) - z.flip(0)  # the noise of `sent` on other images
    random = not torch.equal(sent, again)
    slack = 1e-5 * max(float(z.abs().max()), float(sent.abs().max()))  # rounding of float32
    offset = None
    if float((added - (sent - z)).abs().max()) <= slack:
        times = math.ceil(OFFSET_ROWS / len(z)) if random else 1
        parts = [(box.channel(z, generator) - z).mean(0) for _ in range(times)]
        offset = torch.stack(parts).mean(0)
    scale = sent.var(0).mean().clamp_min(1e-12 * float(sent.square().mean()) + 1e-30)
    noise = (sent - again).square().mean() / 2 / scale
    return ChannelFacts(scale, noise.clamp_max(1), offset, draws if random else 1)


@dataclass(frozen=True)
class Energy:
    r"""How badly a guess explains what was observed; one number per image, to minimise.

    .. math:: J(\hat x) = \frac{1}{v} E\,\overline{(channel(f(\hat x)) - \tilde z)^2}
              + w \Big(tv\,TV(\hat x) + prior\,\overline{(\hat x - x_0)^2 / \tau^2}\Big)

    v is the variance of z̃ and w = σ²/v · pixels / smashed values, with σ² the variance of the
    channel: the more noise, the less the observation counts. At prior = 1 and tv = 0 this is, up to
    a factor, the negative log posterior under Gaussian noise and a Gaussian prior around x₀.

    Args:
        encoder: f.
        channel: Takes z and a generator.
        facts: What was measured of the channel.
        spread: τ² (c, h, w), the squared error of x₀ on held-out aux images.
        tv: Weight of the total variation.
        prior: Weight of the distance to x₀.
    """

    encoder: nn.Module
    channel: nn.Module
    facts: ChannelFacts
    spread: Tensor
    tv: float
    prior: float

    def __call__(self, x: Tensor, z_sent: Tensor, x0: Tensor, generator: Generator) -> Tensor:
        """J (n,) of images x (n, c, h, w) for observed z_sent (n, …) and prior means x0."""
        z: Tensor = self.encoder(x)
        misfit = self._residual(z, z_sent, generator).square().flatten(2).mean((0, 2))
        pull = ((x - x0).square() / self.spread).flatten(1).mean(1)
        weight = self.facts.noise * (x[0].numel() / z[0].numel()) + LEAST_WEIGHT
        priors = self.tv * total_variation(x) + self.prior * pull
        return misfit / self.facts.scale + weight * priors

    def _residual(self, z: Tensor, z_sent: Tensor, generator: Generator) -> Tensor:
        """channel(z) − z̃ (draws, n, …) of some realisations of the channel."""
        if self.facts.offset is not None:
            return (z + self.facts.offset - z_sent)[None]
        clean = z.detach()
        sent = torch.stack([self.channel(clean, generator) for _ in range(self.facts.draws)])
        # Straight-through gradient: a channel that rounds or selects has no useful one of its own.
        # z − clean is exactly 0, so that a guess that fits to the bit stays where it is.
        return (sent - z_sent).detach() + (z - clean)


def shrunk_spread(errors: Tensor) -> Tensor:
    r"""Mean squared error of each pixel (c, h, w), pulled to that of all pixels if images are few.

    .. math:: \tau^2_p = \frac{\sum_i e_{ip} + k \bar e}{n + k}, \quad k = 10

    >>> shrunk_spread(torch.tensor([0.0, 1.0]).expand(10, 1, 1, 2)).tolist()
    [[[0.25, 0.75]]]
    """
    total = errors.sum(0) + PSEUDO_IMAGES * errors.mean()
    return (total / (len(errors) + PSEUDO_IMAGES)).clamp_min(LEAST_SPREAD)


@dataclass(frozen=True, kw_only=True)
class ImageSearch:
    """Base of the attacks that search for every image on its own.

    Args:
        access: Always white-box.
        start: Attack whose reconstructions are one start; the linear attack's are another.
        steps: Steps of Adam.
        lr: Its peak learning rate.
        draws: Realisations per step of a channel whose randomness is not additive.
        restarts: Random starts besides.
        calibrate: Whether the answer lies a share of the way from start to result, as far as is
            best on held-out aux images; else at the end.
        chunk: Images of 3×32×32 searched for at a time, see `scale_search_budgets`.
        limit: Images of 3×32×32 in all.
        most: Images of any size in all.
        min_aux: Ten images for the linear attack and one held out, or more.
        effort: Share of a progress bar.
    """

    access: Access = Access.WHITE_BOX
    start: Attack = SMALL
    steps: Count = 300
    lr: NonNegative = 0.03
    draws: Count = 4
    restarts: Annotated[int, Range(0)] = 1
    calibrate: bool = True
    chunk: Count = 128
    limit: Count = 256
    most: Count = 10_000
    min_aux: Annotated[int, Range(11)] = 11
    effort: float = 10.0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.start.access == Access.REPEATS:
            raise ConfigError(
                "start must use one sending per image; give the attack inside k-query"
            )

    def guided(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress
    ) -> tuple[WhiteBox, Labelled, Labelled, tuple[Reconstructor, Reconstructor]]:
        """The white-box view, a held-out tenth of aux, the rest, and both starts fitted on it."""
        name = type(self).__name__.lower()
        if not isinstance(victim, WhiteBox):
            kind = type(victim).__name__
            raise AuditError(f"{name} needs a white-box view, got {kind}; use victim.white_box()")
        need_aux(name, aux, self.min_aux)
        rows = tenth(len(aux), generator, aux.images.device)
        held, used = (Labelled(aux.images[some], aux.labels[some]) for some in rows)
        start = self.start.fit(
            victim, used, generator, lambda done, total, note="": progress(done, 2 * total, note)
        )
        return victim, held, used, (start, Linear().fit(victim, used, generator))


@dataclass(frozen=True, kw_only=True)
class Rmle(ImageSearch):
    """Per image, the x̂ in [0, 1] whose smashed data would best explain what was observed.

    Minimises `Energy` by `steps` of Adam from several starts: the reconstructions of `start` and
    of the linear attack, the mean aux image, and `restarts` random aux images. Of the starts and
    the places they lead to, the one with the least energy is kept. The prior mean x₀ is one of the
    two reconstructions, whichever does better on a tenth of aux kept from both; `calibrate` finds
    there too which share of the way from x₀ to x̂ is best, as x₀ has seen the noise already.
    Without a gradient through the encoder the best start is kept.
    """

    tv: NonNegative = 1.0
    prior: NonNegative = 1.0

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Fit the starts on nine tenths of aux; measure them on the rest."""
        box, held, used, guides = self.guided(victim, aux, generator, progress)
        facts = measure_channel(box, used.images, generator, self.draws)
        z = torch.cat([box.send(x, generator) for x in torch.split(held.images, QUERIES)])
        seen, x = Observation(z, held.labels.to(z.device)), held.images.to(z.device)
        errors = [(guide(seen) - x).square() for guide in guides]
        best = int(torch.stack([e.mean() for e in errors]).argmin())
        spread = shrunk_spread(errors[best])
        energy = Energy(box.encoder, box.channel, facts, spread, self.tv, self.prior)
        others = torch.cat([aux.images.mean(0, keepdim=True), used.images[: self.restarts]]).to(x)
        seed = draw_seed(generator)
        steps = self.steps if has_gradient(box.encoder, x[:1]) else 0

        def make_search() -> Search:
            descent = Descent(energy, seed, self.lr, bounded=True)

            def search(seen: Observation) -> tuple[Tensor, Tensor]:
                same = [image.expand(len(seen.z), *image.shape) for image in others]
                starts = torch.stack([*(guide(seen) for guide in guides), *same])
                x0 = starts[best]
                return x0, descent.best(starts, (seen.z, x0), steps)

            return search

        n = self.chunk
        some = x[:n], Observation(seen.z[:n], seen.answer[:n])
        return calibrated(make_search, n, some if self.calibrate else None, progress)
