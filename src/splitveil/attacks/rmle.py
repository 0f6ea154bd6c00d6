"""The rmle attack: a search for the image whose smashed data would explain what was sent.

`prior` shares the objective, the descent and the rules for held-out images. On a GPU every step of
a descent is replayed from a captured graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import torch
from torch import Generator, Tensor, nn

from splitveil.attacks.base import (
    PROBED,
    QUERIES,
    Count,
    NonNegative,
    draw_seed,
    need_aux,
    no_capture_warning,
    tenth,
)
from splitveil.attacks.decoder import SMALL
from splitveil.attacks.linear import Linear
from splitveil.cuda import captured, set_rate
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

Guides = tuple[tuple[Tensor, Tensor], tuple[Reconstructor, Reconstructor]]  # rows, and fits on them
Search = Callable[[Observation], tuple[Tensor, Tensor]]  # prior means and guesses (n, …)
REFERENCE = 3 * 32 * 32  # values of an image for which `limit` and `chunk` are given
LEAST = 8  # images of any size that a search takes on, unless it is given fewer
PSEUDO_IMAGES = 10  # weight of a prior guess against held-out images, in images
GRAIN = 0.05  # of two sendings' difference; the rounding of noise on a grid is at most .044
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
    # Noise on a grid differs between images by its rounding, which is far below the noise.
    slack += GRAIN * float((sent - again).square().mean().sqrt())
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


class Descent:
    """Adam on guesses, from several starts for each of n images at once.

    Args:
        objective: Value (m,) of m guesses, to minimise. It is called with the guesses (m, …), the
            tensors (m, …) that are given for them, and a generator.
        seed: Seed of the objective's draws.
        lr: Peak learning rate; it falls by a cosine to 0.
        bounded: Whether guesses are clamped to [0, 1] after every step, as images are. A sigmoid
            instead could never reach the ends.
    """

    def __init__(
        self, objective: Callable[..., Tensor], seed: int, lr: float, *, bounded: bool = False
    ) -> None:
        self._objective, self._seed, self._peak, self._bounded = objective, seed, lr, bounded
        self._guess: Tensor | None = None

    def best(
        self,
        starts: Tensor,
        given: Sequence[Tensor],
        steps: int,
        judge: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """The best guess for each image (n, …), among the starts and where the steps lead.

        Args:
            starts: k starts for each image, (k, n, …).
            given: Tensors (n, …) for the objective.
            steps: Steps of Adam.
            judge: Picks the best, on the same draws for all guesses; default the objective. It
                never sees the true image.
        """
        candidates = torch.cat([starts, self._run(starts, given, steps)]) if steps else starts
        judge = judge or self._objective
        with torch.no_grad():
            values = [judge(guess, *given, self._draws(starts)) for guess in candidates]
        return least(torch.stack(values), candidates)

    @torch.enable_grad()
    def _run(self, starts: Tensor, given: Sequence[Tensor], steps: int) -> Tensor:
        # The tensors keep their place, so that on a GPU one captured step serves every chunk.
        guess = self._prepare(starts, given) if self._guess is None else self._guess
        guess.detach().copy_(starts.flatten(0, 1))
        for static, value in zip(self._given, given, strict=True):
            static.copy_(value.expand_as(static))
        for value in (v for moments in self._adam.state.values() for v in moments.values()):
            value.zero_()
        with no_capture_warning():
            for step in range(steps):
                fall = 0.5 * (1 + math.cos(math.pi * step / steps))
                set_rate(self._adam, self._peak * fall)
                self._step()
        return guess.detach().view_as(starts).clone()

    def _prepare(self, starts: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Allocate the guesses and the tensors given for them, at the first run."""
        device, on_gpu = starts.device, starts.device.type == "cuda"
        self._guess = guess = torch.empty_like(starts.flatten(0, 1)).requires_grad_()
        self._given = [t.new_empty(len(starts), *t.shape) for t in given]
        rate = torch.full((), self._peak, device=device)
        self._adam = torch.optim.Adam([guess], rate, (0.9, 0.99), fused=on_gpu, capturable=on_gpu)
        draws = self._draws(starts)

        def move() -> None:
            guess.grad = None
            flat = (t.flatten(0, 1) for t in self._given)
            self._objective(guess, *flat, draws).sum().backward()  # type: ignore[no-untyped-call]
            self._adam.step()
            if self._bounded:
                guess.detach().clamp_(0, 1)

        self._step = captured(move, device, [draws])
        return guess

    def _draws(self, like: Tensor) -> Generator:
        return Generator(device=like.device).manual_seed(self._seed)


def least(values: Tensor, of: Tensor) -> Tensor:
    """Of k candidates (k, n, …), the one with the least value (k, n) for each of n images.

    NaN loses against every number.

    >>> least(torch.tensor([[2.0, math.nan], [1.0, 3.0]]), torch.tensor([[5, 6], [7, 8]])).tolist()
    [7, 8]
    """
    best = values.nan_to_num(torch.inf, torch.inf).argmin(0)
    return of[best, torch.arange(of.shape[1], device=of.device)]


def has_gradient(encoder: nn.Module, x: Tensor) -> bool:
    """Whether a gradient reaches images (n, c, h, w) through the encoder."""
    with torch.enable_grad():
        z: Tensor = encoder(x.clone().requires_grad_())
    return z.requires_grad


def in_chunks(
    search: Search, chunk: int, seen: Observation, progress: Progress
) -> tuple[Tensor, Tensor]:
    """Prior means and guesses (n, …) of a search for all n images, `chunk` at a time."""
    n, found = len(seen.z), []
    for first in range(0, n, chunk):
        progress(n + first, 2 * n, "descending")
        # Always `chunk` rows, the last one repeated: one captured step serves all chunks, and the
        # rounding for an image does not depend on how many others there are.
        rows = torch.arange(first, first + chunk, device=seen.z.device).clamp_max(n - 1)
        found.append(search(Observation(seen.z[rows], seen.answer[rows])))
    means, guesses = (torch.cat(parts)[:n] for parts in zip(*found, strict=True))
    return means, guesses


def calibrated(
    make_search: Callable[[], Search],
    chunk: int,
    held: tuple[Tensor, Observation] | None,
    progress: Progress,
) -> Reconstructor:
    """A reconstructor that goes a share of the way from the prior mean to what a search finds.

    Args:
        make_search: Makes a search; all of them draw the same random numbers.
        chunk: Images to search for at a time.
        held: Held-out images (n, c, h, w) and what was observed of them, to pick the best share;
            None goes all the way.
        progress: Called after every chunk.
    """
    share: Tensor | float = 1.0
    if held is not None:
        x, seen = held
        share = best_share(x, *in_chunks(make_search(), min(chunk, len(x)), seen, silent))

    def reconstruct(seen: Observation) -> Tensor:
        x0, found = in_chunks(make_search(), chunk, seen, progress)
        return torch.lerp(x0, found, share).clamp(0, 1)

    return reconstruct


def best_share(x: Tensor, x0: Tensor, found: Tensor) -> Tensor:
    r"""Share of the way from x₀ to x̂ that ends nearest to x; nearer to 1 if images are few.

    .. math:: \alpha = \frac{n a + k}{n + k}, \quad k = 10, \quad
              a = \langle x - x_0, \hat x - x_0 \rangle / \lVert \hat x - x_0 \rVert^2 \in [0, 1.5]

    >>> best_share(torch.full((30, 1), 0.5), torch.zeros(30, 1), torch.ones(30, 1))
    tensor(0.6250)
    """
    way = found - x0
    share = (((x - x0) * way).sum() / way.square().sum().clamp_min(1e-12)).clamp(0, 1.5)
    return (len(x) * share + PSEUDO_IMAGES) / (len(x) + PSEUDO_IMAGES)


def count_for(count: int, values: int) -> int:
    """How many images of `values` numbers cost about as much as `count` of 3×32×32.

    At least 8, unless `count` is less.

    >>> count_for(64, 64), count_for(64, 3072), count_for(64, 3 * 96 * 96), count_for(4, 9999)
    (3072, 64, 8, 4)
    """
    return max(min(count, LEAST), count * REFERENCE // values)


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
        chunk: Images of 3×32×32 searched for at a time, see `scaled`.
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
        """The white-box view, a held-out tenth of aux, the rest, and both starts fitted on it.

        Searches on one target with the same start share this tenth and the fits.
        """
        name = type(self).__name__.lower()
        if not isinstance(victim, WhiteBox):
            kind = type(victim).__name__
            raise AuditError(f"{name} needs a white-box view, got {kind}; use victim.white_box()")
        need_aux(name, aux, self.min_aux)

        alone = replace(victim, fits=None)  # only these searches know the held-out tenth

        def fit(draws: Generator) -> Guides:
            rows = tenth(len(aux), draws, aux.images.device)
            known = Labelled(aux.images[rows[1]], aux.labels[rows[1]])
            start = self.start.fit(
                alone, known, draws, lambda done, total, note="": progress(done, 2 * total, note)
            )
            return rows, (start, Linear().fit(alone, known, draws))

        shared = victim.fits
        rows, guides = (
            fit(generator) if shared is None else shared.once(f"search/{self.start!r}", aux, fit)
        )
        held, used = (Labelled(aux.images[some], aux.labels[some]) for some in rows)
        return victim, held, used, guides


S = TypeVar("S", bound=ImageSearch)


def scaled(search: S, values: int, scored: int) -> S:
    """The search that takes about as long for images of another size.

    Args:
        search: With `chunk` and `limit` for images of 3×32×32.
        values: Numbers in an image: channels · height · width.
        scored: Images that are scored. A search that can afford all of them is ranked with the
            other attacks.
    """
    limit = min(count_for(search.limit, values), search.most, scored)
    return replace(search, limit=limit, chunk=min(count_for(search.chunk, values), limit))


@dataclass(frozen=True, kw_only=True)
class Rmle(ImageSearch):
    """Per image, the x̂ in [0, 1] whose smashed data would best explain what was observed.

    Adam minimises `Energy` from several starts: the reconstructions of `start` and of the linear
    attack, the mean aux image, and random aux images. Of the starts and the places they lead to,
    the one with the least energy is kept. The prior mean x₀ is one of the two reconstructions,
    whichever does better on a tenth of aux kept from both; there `calibrate` also finds which share
    of the way from x₀ to x̂ is best, as x₀ has seen the noise already. Without a gradient through
    the encoder the best start is kept.

    Args:
        tv: Weight of the total variation, ≥ 0.
        prior: Weight of the distance from x₀, ≥ 0.

    The other arguments are those of `ImageSearch`.

    >>> Rmle(steps=10).access
    <Access.WHITE_BOX: 'white-box'>
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
