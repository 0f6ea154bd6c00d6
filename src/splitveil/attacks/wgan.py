"""The gan attack of the CEM paper: a critic pushes a fitted decoder towards realistic images."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.base import (
    Budget,
    Count,
    NonNegative,
    capturable,
    captured_for,
    fed_steps,
    fit_units,
    fresh_weights,
    minimise,
    need_aux,
    progress_part,
)
from splitveil.attacks.decoder import Decoder
from splitveil.cuda import channels_last, set_rate, to_device
from splitveil.errors import ConfigError, Range, check_ranges
from splitveil.io import Progress, silent
from splitveil.nets.decoder import ResidualDecoder
from splitveil.threat import Access, BlackBox, FittedAttack, Labelled, Observation, Send

START = Decoder(epochs=16, min_steps=3000)
BETAS = (0.5, 0.999)
LAST_SIDE = 4  # pixels; the critic halves its maps as long as they stay this wide
TINY = 1e-12  # added under a square root, whose slope at 0 is infinite


class Critic(nn.Module):
    """Scores images: 5×5 convolutions of `width`, 2·`width`, 4·`width` channels, stride 2, 4×4.

    LeakyReLU 0.2, InstanceNorm from the second layer on. Maps under 8 pixels wide are not halved.
    """

    def __init__(self, image_shape: tuple[int, ...], *, width: int = 64) -> None:
        super().__init__()
        channels, side = image_shape[0], list(image_shape[1:])
        layers: list[nn.Module] = []
        for index, out in enumerate((width, 2 * width, 4 * width)):
            stride = 2 if min(side) >= 2 * LAST_SIDE else 1
            side = [-(-s // stride) for s in side]
            layers.append(nn.Conv2d(channels, out, 5, stride, padding=2))
            if index and math.prod(side) > 1:
                layers.append(nn.InstanceNorm2d(out, affine=True))
            layers.append(nn.LeakyReLU(0.2))
            channels = out
        kernel = (min(LAST_SIDE, side[0]), min(LAST_SIDE, side[1]))
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, 1, kernel))

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n,) of images (n, c, h, w); high is real."""
        scores: Tensor = self.layers(x).flatten(1).mean(1)
        return scores


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    r"""How far the critic's slope between real and drawn images is from 1, to minimise.

    .. math:: E\big(\lVert \nabla_{\hat x} D(\hat x) \rVert_2 - 1\big)^2, \qquad
              \hat x = s\,x + (1 - s)\,G(\tilde z)

    The penalty of Gulrajani et al. (2017).

    Args:
        critic: D.
        real: Images x (n, c, h, w).
        fake: Drawn images G(z̃), same shape.
        share: s (n,), random in [0, 1].
    """
    between = torch.lerp(fake, real, share.view(-1, 1, 1, 1)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    length = (slope.square().flatten(1).sum(1) + TINY).sqrt()
    return (length - 1).square().mean()


def critic_loss(real: Tensor, fake: Tensor) -> Tensor:
    r"""The critic's loss: the negative gap between its scores (n,) of real and drawn images.

    .. math:: -\big(E\,D(x) - E\,D(G(\tilde z))\big)

    >>> float(critic_loss(torch.tensor([3.0, 1.0]), torch.tensor([0.5, 0.5])))
    -1.5
    """
    return fake.mean() - real.mean()


def generator_loss(fake: Tensor, guess: Tensor, x: Tensor, pixel_weight: float) -> Tensor:
    r"""The generator's loss: low scores of its images, and wrong pixels.

    .. math:: -E\,D(G(\tilde z)) + w\,\overline{(G(\tilde z) - x)^2}

    >>> x = torch.zeros(1, 1, 1, 2)
    >>> float(generator_loss(torch.tensor([2.0]), x + 0.5, x, 100.0))
    23.0
    """
    return pixel_weight * F.mse_loss(guess, x) - fake.mean()


@dataclass(frozen=True, kw_only=True)
class Wgan:
    """A decoder fitted on aux, then pushed by a critic of real images (WGAN-GP) and by the MSE.

    The rates follow the published schedule, a cosine that the run leaves half-way down. The last
    weights are used.

    Args:
        access: Sees what is sent, and can send the aux images.
        start: The decoder that is fitted first, with the MSE; its size is the generator's.
        width: Channels of the critic's first layer, ≥ 1.
        epochs: Passes over aux, ≥ 0.
        min_steps: Least number of steps; a small aux set gets more epochs until it is reached.
        batch_size: Images per step, ≥ 2.
        n_critic: Steps of the critic for one of the generator, ≥ 1.
        critic_lr: Adam's learning rate for the critic, ≥ 0.
        generator_lr: Adam's learning rate for the generator, ≥ 0.
        penalty: Weight of the gradient penalty, ≥ 0.
        pixel_weight: Weight of the MSE in the generator's loss, ≥ 0.
        min_aux: Fewest aux images, ≥ 2.
        effort: Its share of the progress bar, > 0.

    >>> Wgan(pixel_weight=10.0).summary
    'Decoder N8C64, then WGAN-GP and 10·MSE, fresh noise.'
    """

    access: Access = Access.BLACK_BOX
    start: Decoder = START
    width: Count = 64
    epochs: Annotated[int, Range(0)] = 150
    min_steps: Annotated[int, Range(0)] = 0
    batch_size: Annotated[int, Range(2)] = 128
    n_critic: Count = 10
    critic_lr: NonNegative = 5e-3
    generator_lr: NonNegative = 5e-4
    penalty: NonNegative = 10.0
    pixel_weight: NonNegative = 1500.0
    min_aux: Annotated[int, Range(2)] = 2  # BatchNorm needs two
    effort: float = 20.0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.start.loss != "mse":
            raise ConfigError(f"start must have loss 'mse', as published, got '{self.start.loss}'")

    @property
    def summary(self) -> str:
        """One line for a catalogue."""
        size = f"N{self.start.blocks}C{self.start.width}"
        return f"Decoder {size}, then WGAN-GP and {self.pixel_weight:g}·MSE, fresh noise."

    def steps(self, n: int) -> int:
        """Steps of the critic for n aux images.

        >>> Wgan(epochs=2, batch_size=4).steps(10)
        4
        """
        return Budget.of(self).steps(n)

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        """Fit the decoder, then train it against the critic, all on aux."""
        need_aux("gan", aux, self.min_aux)
        n = len(aux)
        device, shape = victim.device, tuple(aux.images.shape[1:])
        wire = tuple(victim.send(aux.images[:1], generator).shape[1:])
        first = self.start.budget.steps(n)
        everything = first + self.steps(n)
        told = progress_part(progress, 0, everything, "fitting the decoder")
        contested = progress_part(progress, first, everything, "fitting the GAN")
        with fresh_weights(generator, device):
            net = ResidualDecoder(wire, shape, width=self.start.width, blocks=self.start.blocks)
            critic = Critic(shape, width=self.width)
            for part in (net, critic):
                to_device(part, device)

            reader = nn.Sequential(fit_units(victim, aux.images, generator), net)
            send = victim.sender(aux.images)

            def loss(x: Tensor, rows: Tensor) -> Tensor:
                return F.mse_loss(reader(send(rows, generator)), x)

            data = (aux.images, torch.arange(n, device=aux.images.device))
            curve = minimise(loss, reader, data, self.start.budget, generator, progress=told)
            self._contest(send, aux.images.to(device), (reader, critic), generator, contested)
        reader.eval()

        @torch.no_grad()
        def reconstruct(seen: Observation) -> Tensor:
            return torch.cat([reader(z) for z in torch.split(seen.z, 1000)]).clamp(0, 1)

        return FittedAttack(reconstruct, curve)

    def _contest(
        self,
        send: Send,
        images: Tensor,
        players: tuple[nn.Module, nn.Module],
        generator: Generator,
        progress: Progress,
    ) -> None:
        """Train generator and critic in place; on a GPU both steps are replayed from graphs.

        `send` takes row numbers of `images`.
        """
        net, critic = players
        device, n = images.device, len(images)
        batch, steps = min(self.batch_size, n), self.steps(n)
        x = channels_last(torch.empty_like(images[:batch]))
        rows = torch.zeros(batch, dtype=torch.long, device=device)
        adam = partial(torch.optim.Adam, betas=BETAS)
        judge = capturable(adam, critic, self.critic_lr)
        forge = capturable(adam, net, self.generator_lr)

        def learn_to_judge() -> None:
            judge.zero_grad(set_to_none=True)
            with torch.no_grad():
                fake = net(send(rows, generator))
            share = torch.rand(batch, generator=generator, device=generator.device).to(device)
            value = critic_loss(critic(x), critic(fake))
            value = value + self.penalty * gradient_penalty(critic, x, fake, share)
            value.backward()  # type: ignore[no-untyped-call]
            judge.step()

        def learn_to_draw() -> None:
            forge.zero_grad(set_to_none=True)
            guess = net(send(rows, generator))
            value = generator_loss(critic(guess), guess, x, self.pixel_weight)
            value.backward(inputs=list(net.parameters()))  # type: ignore[no-untyped-call]
            forge.step()

        run_critic, run_generator = (
            captured_for(step, device, generator) for step in (learn_to_judge, learn_to_draw)
        )
        net.train()
        data = (images, torch.arange(n, device=device))
        for index in fed_steps(steps, (x, rows), data, generator, progress):
            fall = half_cosine(index / steps)
            set_rate(judge, self.critic_lr * fall)
            set_rate(forge, self.generator_lr * fall)
            run_critic()
            if (index + 1) % self.n_critic == 0:
                run_generator()
        for optimiser in (judge, forge):  # frees the graphs' memory
            optimiser.zero_grad(set_to_none=True)


def half_cosine(done: float) -> float:
    """Share of the peak rate after a share `done` of a fit that ends half-way down the cosine.

    >>> [round(half_cosine(t), 4) for t in (0.0, 0.5, 1.0)]
    [1.0, 0.8536, 0.5]
    """
    return 0.5 * (1 + math.cos(math.pi * done / 2))
