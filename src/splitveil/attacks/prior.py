"""Search in the latent space of a generative prior, then in the images around its range."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from splitveil.attacks.generators import (
    Factors,
    LatentDescent,
    Posterior,
    fit_factors,
    least,
    sharpened,
)
from splitveil.attacks.linear import Linear
from splitveil.attacks.rmle import (
    START,
    Descent,
    Energy,
    best_share,
    measure_channel,
    shrunk_spread,
)
from splitveil.attacks.searching import check_search, held_out, opened
from splitveil.types import (
    Access,
    Attack,
    BlackBox,
    Fitted,
    Labelled,
    Observation,
    Progress,
    WhiteBox,
    silent,
)

Guides = Callable[[Observation], Tensor]  # (2, n, c, h, w): what the start and the linear map say


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Per image, the likeliest drawing of a generative prior fitted on aux, then refined.

    The prior is `Factors`: a factor model of each class (the server's answer says which), in
    closed form with `factors` latents, sharpened by a network if `net_steps` > 0. Adam minimises
    `Posterior` for `steps` from several latents: those of the reconstructions of `start` and of
    the linear attack, 0, and `restarts` draws of the prior. The one with the least value is kept,
    and the image moved from there for `refine` steps with a pull back to the prior's range. The
    answer lies on the way from the better of the two reconstructions to what was found, at the
    share that is best on a tenth of aux kept from all fits (`calibrate`; else at its end).
    `draws` realisations per step stand for a channel whose randomness is not additive.
    """

    access: Access = Access.WHITE_BOX
    start: Attack = START
    factors: int = 128
    net_steps: int = 0
    steps: int = 150
    refine: int = 150
    lr: float = 0.1
    draws: int = 4
    restarts: int = 1
    calibrate: bool = True
    chunk: int = 128
    limit: int = 256
    most: int = 10_000
    min_aux: int = 11  # ten for the linear attack, one held out
    effort: float = 10.0

    def __post_init__(self) -> None:
        counts = {"factors": 1, "net_steps": 0, "steps": 1, "refine": 0, "draws": 1, "restarts": 0}
        more = {"chunk": 1, "limit": 1, "most": 1, "min_aux": 11, "lr": 0}
        check_search(self, self.start, counts | more)

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Fitted:
        """Fit the prior and the starts on nine tenths of aux and measure them on the rest."""
        victim = opened(victim, "prior")
        held, used = held_out(aux, self.min_aux, "prior", generator)
        fits = (
            self.start.fit(
                victim,
                used,
                generator,
                lambda done, total, note="": progress(done, 2 * total, note),
            ),
            Linear().fit(victim, used, generator),
        )
        model = fit_factors(used, self.factors, victim.device)
        if self.net_steps:
            model = sharpened(model, used, held, generator, steps=self.net_steps)
        x = held.images[: self.chunk].to(victim.device)
        y = held.labels[: self.chunk].to(victim.device)
        posterior = self._posterior(victim, model, used.images, (x, y), generator)
        seen = Observation(victim.send(x, generator), y)
        better = int(torch.stack([(fit(seen) - x).square().mean() for fit in fits]).argmin())
        search = Search(
            attack=self,
            posterior=posterior,
            guides=lambda seen: torch.stack([fit(seen) for fit in fits]),
            apart=torch.randn(
                self.restarts, model.basis.shape[1], generator=generator, device=generator.device
            ).to(victim.device),
            seed=int(torch.randint(2**62, (), generator=generator, device=generator.device)),
        )
        share: Tensor | float = 1.0
        if self.calibrate:
            said, found = search(seen, silent)
            share = best_share(x, said[better], found)

        def reconstruct(seen: Observation) -> Tensor:
            said, found = search(seen, progress)
            return torch.lerp(said[better], found, share).clamp(0, 1)

        return Fitted(reconstruct)

    @torch.no_grad()
    def _posterior(
        self,
        victim: WhiteBox,
        model: Factors,
        images: Tensor,
        held: tuple[Tensor, Tensor],
        generator: Generator,
    ) -> Posterior:
        """The objective; what the model misses is measured on held-out images and labels."""
        facts = measure_channel(victim, images, generator, self.draws)
        x, y = held
        drawn = model.redraw(x, model.known(y))
        spread = shrunk_spread((drawn - x).square())
        missed = (victim.encoder(drawn) - victim.encoder(x)).square().mean() / facts.scale
        slack = missed.nan_to_num(0.0, 0.0, 0.0).clamp_max(1)
        energy = Energy(victim.encoder, victim.channel, facts, spread, 0.0, 1.0)
        return Posterior(model, energy, slack)


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search of a fitted prior; what is random in it is the same for every image."""

    attack: Prior
    posterior: Posterior
    guides: Guides
    apart: Tensor
    seed: int

    def __call__(self, seen: Observation, progress: Progress) -> tuple[Tensor, Tensor]:
        """What the guides say (2, n, c, h, w), and the images found (n, c, h, w)."""
        n, chunk, model = len(seen.z), self.attack.chunk, self.posterior.model
        said, found = [], []
        latents: LatentDescent | None = None
        pixels: Descent | None = None
        for first in range(0, n, chunk):
            progress(n + first, 2 * n, "descending")
            # Always `chunk` rows: one captured step serves all of them, and the arithmetic of an
            # image does not depend on how many others are asked for.
            rows = torch.arange(first, first + chunk, device=seen.z.device).clamp_max(n - 1)
            z_sent, y = seen.z[rows], model.known(seen.answer[rows])
            guesses = self.guides(Observation(z_sent, seen.answer[rows]))
            starts = self._starts(guesses, y)
            moves = self._has_gradient(guesses[0, :1])
            candidates = starts
            if moves:
                latents = latents or LatentDescent(
                    self.posterior, starts, z_sent, self._stream(), self.attack.lr
                )
                moved = latents.run(starts, y, z_sent, self.attack.steps)
                candidates = torch.cat([starts, moved])
            v, images = self._best_latents(candidates, y, z_sent)
            if moves and self.attack.refine:
                pixels = pixels or Descent(
                    self.posterior.energy, images, z_sent, self._stream(), self.attack.lr / 10
                )
                moved = pixels.run(images, z_sent, images[0], self.attack.refine)
                images = torch.cat([images, moved])
            found.append(self._best_image(images, v, y, z_sent))
            said.append(guesses)
        return torch.cat(said, 1)[:, :n], torch.cat(found)[:n]

    def _stream(self) -> Generator:
        """The draws of the channel, from their beginning: the same for every candidate."""
        return Generator(device=self.posterior.model.means.device).manual_seed(self.seed)

    def _starts(self, guesses: Tensor, y: Tensor) -> Tensor:
        """Latents (k, n, d) to start from."""
        model = self.posterior.model
        fixed = (torch.zeros_like(model.basis[0]), *self.apart)
        return torch.stack(
            [model.encode(x, y) for x in guesses] + [v.expand(len(y), -1) for v in fixed]
        )

    def _has_gradient(self, x: Tensor) -> bool:
        with torch.enable_grad():
            z: Tensor = self.posterior.energy.encoder(x.clone().requires_grad_())
        return z.requires_grad

    @torch.no_grad()
    def _best_latents(self, candidates: Tensor, y: Tensor, z_sent: Tensor) -> tuple[Tensor, Tensor]:
        """Of latents (k, n, d) those of least value (n, d), and their drawings (1, n, c, h, w)."""
        values = [self.posterior(v, y, z_sent, self._stream()) for v in candidates]
        v = least(torch.stack(values), candidates)
        return v, self.posterior.model.draw(v, y)[None]

    @torch.no_grad()
    def _best_image(self, images: Tensor, v: Tensor, y: Tensor, z_sent: Tensor) -> Tensor:
        """Of images (k, n, c, h, w) around the drawings of v those of least value."""
        values = [self.posterior.refined(x, v, y, z_sent, self._stream()) for x in images]
        return least(torch.stack(values), images)
