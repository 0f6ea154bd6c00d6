"""The prior attack: a search in the latents of a generative prior, then among images near it."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.base import Budget, Count, NonNegative, draw_seed, fresh_weights, minimise
from splitveil.attacks.rmle import (
    LEAST_WEIGHT,
    Descent,
    Energy,
    ImageSearch,
    Search,
    calibrated,
    has_gradient,
    measure_channel,
    shrunk_spread,
)
from splitveil.cuda import to_device
from splitveil.errors import Range
from splitveil.io import Progress, silent
from splitveil.nets.decoder import ResidualDecoder
from splitveil.rng import normal_like
from splitveil.threat import BlackBox, Labelled, Observation, Reconstructor, WhiteBox

# Weight of the overall mean in the mean of a class, in images: a class may have few of them.
CLASS_PSEUDO_IMAGES = 10
FACTORED = 20000  # aux images that the factors are fitted on, at most
WIDE = 4096  # most images if they have more pixels than this: the smaller matrix is n × n
LEAST_SHRINKAGE = 1e-6  # keeps the covariance invertible if images hardly differ


def shrinkage(centred: Tensor, moments: Tensor) -> Tensor:
    r"""How far a covariance of few samples is best pulled towards a multiple of the identity.

    .. math:: \rho = \min\Big(1, \frac{\sum_i \lVert r_i r_i^\top - S \rVert^2}
              {n^2 \lVert S - m I \rVert^2}\Big), \quad m = \overline{S_{jj}}

    The rule of Ledoit and Wolf (2004).

    Args:
        centred: Samples r less their mean, (n, p).
        moments: S = rᵀr/n, or rrᵀ/n, which has the same trace and norm.

    Returns:
        ρ, a scalar in [1e-6, 1].

    >>> r = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(float(shrinkage(r, r.T @ r / 4)), 4)  # (34/4 − 17/4) / 4 over 9/8
    0.9444
    """
    n, p = centred.shape
    norm = moments.square().sum()
    far = norm - moments.trace().square() / p
    fourth = centred.square().sum(1).square().sum() / n
    wobble = (fourth - norm) / n
    return (wobble / far.clamp_min(torch.finfo(far.dtype).tiny)).clamp(LEAST_SHRINKAGE, 1)


@dataclass(frozen=True)
class FactorModel:
    r"""A factor model of images of each class, and a network that may sharpen its drawings.

    .. math:: x = \mu_y + A v, \quad v \sim N(0, I_k), \qquad
              G(v, y) = x + \alpha\,(2\,net(x) - 1)

    Drawings are clamped to [0, 1].

    Args:
        means: μ of each class, then the mean of all images, (classes + 1, p).
        basis: A (p, k) with orthogonal columns.
        shape: Channels, height and width of the images.
        net: Sharpens a drawing; None leaves it as it is.
        blend: Share α of the network.
    """

    means: Tensor
    basis: Tensor
    shape: tuple[int, ...]
    net: nn.Module | None = None
    blend: Tensor | float = 0.0

    def draw(self, v: Tensor, y: Tensor) -> Tensor:
        """Images (n, c, h, w) in [0, 1] of latents v (n, k) and classes y (n,)."""
        plain = torch.addmm(self.means[y], v, self.basis.T).clamp(0, 1).view(-1, *self.shape)
        if self.net is None:
            return plain
        return (plain + self.blend * correction(self.net, plain)).clamp(0, 1)

    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        """Latents (n, k) whose drawings are nearest to images x (n, c, h, w), before the clamp."""
        return (x.flatten(1) - self.means[y]) @ (self.basis / self.basis.square().sum(0))

    def redraw(self, x: Tensor, y: Tensor) -> Tensor:
        """The drawings nearest to images x."""
        return self.draw(self.encode(x, y), y)

    def known(self, y: Tensor) -> Tensor:
        """Rows of `means` for classes y (n,): the last row, of all images, for an unknown class."""
        last = len(self.means) - 1
        return torch.where((y >= 0) & (y < last), y, last)


def correction(net: nn.Module, plain: Tensor) -> Tensor:
    """What a network with outputs in [0, 1] adds to a drawing, in [−1, 1]."""
    added: Tensor = 2 * net(plain) - 1
    return added


def fit_factors(aux: Labelled, factors: int, device: torch.device) -> FactorModel:
    """Fit the model in closed form: shrunk class means, and the largest factors of the rest.

    Args:
        aux: Images and labels.
        factors: Latents, at most half the pixels and fewer than the images.
        device: Where to fit.
    """
    most = FACTORED if aux.images[:1].numel() <= WIDE else WIDE
    x = aux.images[:most].to(device).flatten(1).double()
    y = aux.labels[:most].to(device)
    n, pixels = x.shape
    classes = int(y.max()) + 1
    one_hot = F.one_hot(y, classes).double()
    overall = x.mean(0)
    totals = one_hot.T @ x + CLASS_PSEUDO_IMAGES * overall
    means = totals / (one_hot.sum(0)[:, None] + CLASS_PSEUDO_IMAGES)
    left = x - means[y]
    k = max(1, min(factors, pixels // 2, n - 1))
    # For fewer images than pixels the smaller matrix gives the same: rᵀu for its eigenvectors u.
    moments = left.T @ left / n if n >= pixels else left @ left.T / n
    values, vectors = torch.linalg.eigh(moments)
    values, vectors = values[-k:], vectors[:, -k:]
    if n < pixels:
        turned = left.T @ vectors
        length = turned.norm(dim=0)
        unit = torch.eye(pixels, k, dtype=x.dtype, device=device)  # where nothing varies
        vectors = torch.where(length > 0, turned / length.clamp_min(1e-300), unit)
    # Shrinking changes the eigenvalues of a covariance, not its eigenvectors.
    shrunk = torch.lerp(values, moments.trace() / pixels, shrinkage(left, moments))
    basis = vectors * shrunk.clamp_min(1e-12).sqrt()
    return FactorModel(
        torch.cat([means, overall[None]]).float(), basis.float(), tuple(aux.images.shape[1:])
    )


def sharpened(
    model: FactorModel,
    used: Labelled,
    held: Labelled,
    generator: Generator,
    *,
    steps: int,
    width: int = 32,
    blocks: int = 2,
) -> FactorModel:
    """The model with a network that corrects its drawings.

    Args:
        model: Without a network.
        used: Images to train on.
        held: Images on which the best share α is found; 0 if the network does not help.
        generator: The only source of randomness.
        steps: Steps of the fit.
        width: Channels of the network.
        blocks: Its residual blocks.
    """
    device = model.means.device
    blur = 0.1  # of the latents in the fit, because a search does not find them exactly
    with fresh_weights(generator, device):
        net = ResidualDecoder(model.shape, model.shape, width=width, blocks=blocks)
        to_device(net, device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            v = model.encode(x, y)
            plain = model.draw(v + blur * normal_like(v, generator), y)
            return F.mse_loss(plain + correction(net, plain), x)

        budget = Budget(epochs=0, min_steps=steps, batch_size=128)
        minimise(loss, net, (used.images, used.labels), budget, generator)
    net.eval().requires_grad_(requires_grad=False)
    x, y = held.images.to(device), held.labels.to(device)
    with torch.no_grad():
        plain = model.redraw(x, y)
        way = torch.cat([correction(net, part) for part in torch.split(plain, 1000)])
        share = ((x - plain) * way).sum() / way.square().sum().clamp_min(1e-12)
    return replace(model, net=net, blend=share.clamp(0, 1))


@dataclass(frozen=True)
class Posterior:
    r"""How badly latents explain what was observed; one number per image, to minimise.

    .. math:: J(v) = \frac{1}{s} E\,\overline{(channel(f(G(v, y))) - \tilde z)^2}
              + w \lVert v \rVert^2 / pixels

    Up to a factor this is the negative log posterior of v. s is the variance of z̃ and
    w = (σ² + ε²)/s · pixels / smashed values, with σ² the variance of the channel and ε² the change
    of the smashed data when G redraws aux images.

    Args:
        model: G.
        energy: The misfit, and in `refined` the distance to x₀ = G(v, y).
        slack: ε²/s.
    """

    model: FactorModel
    energy: Energy
    slack: Tensor

    def __call__(self, v: Tensor, y: Tensor, z_sent: Tensor, generator: Generator) -> Tensor:
        """J (n,) of latents v (n, k) and classes y (n,) for observed z_sent (n, …)."""
        x = self.model.draw(v, y)
        misfit = self.energy(x, z_sent, x, generator)
        return misfit + self.length(v, z_sent, self.energy.facts.noise + self.slack)

    def refined(
        self, x: Tensor, v: Tensor, y: Tensor, z_sent: Tensor, generator: Generator
    ) -> Tensor:
        """The same (n,) for images x (n, c, h, w) near the drawings of v."""
        around = self.energy(x, z_sent, self.model.draw(v, y), generator)
        return around + self.length(v, z_sent, self.energy.facts.noise)

    def length(self, v: Tensor, z_sent: Tensor, noise: Tensor) -> Tensor:
        """The weighted ‖v‖² (n,)."""
        pixels, smashed = self.model.basis.shape[0], z_sent[0].numel()
        return (noise / smashed + LEAST_WEIGHT / pixels) * v.square().sum(1)


@dataclass(frozen=True, kw_only=True)
class Prior(ImageSearch):
    """Per image, the likeliest drawing of a generative prior fitted on aux, then refined.

    The prior is a `FactorModel` of each class (the server's answer says which). Adam minimises
    `Posterior` from several latents: those of the reconstructions of `start` and of the linear
    attack, 0, and random draws of the prior. The one with the least value is kept, and the image
    moved from there with a pull back to the prior's range. The answer lies on the way from the
    better of the two reconstructions to what was found, at the share that is best on a tenth of
    aux kept from all fits.

    Args:
        steps: Steps of Adam on the latents, ≥ 1.
        lr: Its learning rate, ≥ 0.
        factors: Latents of a class, ≥ 1.
        net_steps: Steps of a network that sharpens the prior; 0: none.
        refine: Steps on the pixels afterwards, ≥ 0.

    The other arguments are those of `ImageSearch`.

    >>> Prior(factors=16).access
    <Access.WHITE_BOX: 'white-box'>
    """

    steps: Count = 150
    lr: NonNegative = 0.1
    factors: Count = 128
    net_steps: Annotated[int, Range(0)] = 0
    refine: Annotated[int, Range(0)] = 150

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Fit the prior and the starts on nine tenths of aux; measure them on the rest."""
        box, held, used, guides = self.guided(victim, aux, generator, progress)
        model = fit_factors(used, self.factors, box.device)
        if self.net_steps:
            model = sharpened(model, used, held, generator, steps=self.net_steps)
        x, y = (t[: self.chunk].to(box.device) for t in (held.images, held.labels))
        posterior = self._posterior(box, model, used.images, Labelled(x, y), generator)
        seen = Observation(box.send(x, generator), y)
        errors = [(guide(seen) - x).square().mean() for guide in guides]
        better = int(torch.stack(errors).argmin())
        apart = torch.randn(
            self.restarts, model.basis.shape[1], generator=generator, device=generator.device
        ).to(box.device)
        seed = draw_seed(generator)
        moves = has_gradient(box.encoder, x[:1])

        def make_search() -> Search:
            latents = Descent(posterior, seed, self.lr)
            pixels = Descent(posterior.energy, seed, self.lr / 10, bounded=True)

            def search(seen: Observation) -> tuple[Tensor, Tensor]:
                guesses, y = [guide(seen) for guide in guides], model.known(seen.answer)
                fixed = (torch.zeros_like(model.basis[0]), *apart)
                starts = [model.encode(guess, y) for guess in guesses]
                starts += [v.expand(len(y), -1) for v in fixed]
                v = latents.best(torch.stack(starts), (y, seen.z), self.steps if moves else 0)
                with torch.no_grad():
                    drawn = model.draw(v, y)

                def judge(x: Tensor, z_sent: Tensor, _: Tensor, draws: Generator) -> Tensor:
                    return posterior.refined(x, v, y, z_sent, draws)

                steps = self.refine if moves else 0
                return guesses[better], pixels.best(drawn[None], (seen.z, drawn), steps, judge)

            return search

        held_seen = (x, seen) if self.calibrate else None
        return calibrated(make_search, self.chunk, held_seen, progress)

    @torch.no_grad()
    def _posterior(
        self,
        box: WhiteBox,
        model: FactorModel,
        images: Tensor,
        held: Labelled,
        generator: Generator,
    ) -> Posterior:
        """The objective; what the model cannot draw is measured on held-out images."""
        facts = measure_channel(box, images, generator, self.draws)
        x = held.images
        drawn = model.redraw(x, model.known(held.labels))
        spread = shrunk_spread((drawn - x).square())
        missed = (box.encoder(drawn) - box.encoder(x)).square().mean() / facts.scale
        slack = missed.nan_to_num(0.0, 0.0, 0.0).clamp_max(1)
        energy = Energy(box.encoder, box.channel, facts, spread, 0.0, 1.0)
        return Posterior(model, energy, slack)
