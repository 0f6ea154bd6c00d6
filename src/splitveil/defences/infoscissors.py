"""InfoScissors: the encoder pays for an upper bound on the information in z about the image."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitveil.defences.base import NoiseOnly, NonNegative, Positive, Shape, TrainedBeside
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.split import SplitModel

# Bounds of log v, for images in [0, 1]: v near 0 would make the bound explode.
LOG_VARIANCE = (-7.0, 0.0)


def squared_error(guess: Tensor, x: Tensor) -> Tensor:
    """Mean square difference of matching images (n, c, h, w)."""
    return (guess - x).square().mean()


def squared_error_of_strangers(guess: Tensor, x: Tensor) -> Tensor:
    r"""Mean square difference of every guess to every image, n² pairs, in one pass.

    .. math:: \frac1{n^2}\sum_{ij} \|g_i - x_j\|^2 =
        \frac1n \sum_i \|g_i - \bar x\|^2 + \frac1n \sum_j \|x_j - \bar x\|^2

    >>> x = torch.tensor([0.0, 1.0])
    >>> squared_error_of_strangers(x, x).item()
    0.5
    """
    middle = x.mean(0)
    return (guess - middle).square().mean() + (x - middle).square().mean()


class ScissorsBound(nn.Module):
    r"""A variational q(x|z) = N(D(z), v·I), and CLUB's bound on I(x; z) through it.

    .. math:: L_q = -\tfrac1n \sum_i \log q(x_i | z_i), \qquad
        L_{enc} = \alpha \max\Big(0, \tfrac1n \sum_i \log q(x_i | z_i)
        - \tfrac1{n^2} \sum_{ij} \log q(x_j | z_i)\Big)

    Both in nats per pixel. D is a decoder N2C64, v one learned number, z (n, …) is clean. In L_enc
    q is frozen and in eval mode, as it would be after training.
    """

    def __init__(
        self, wire_shape: Shape, image_shape: Shape, *, strength: float, lr: float
    ) -> None:
        super().__init__()
        self.decoder = ResidualDecoder(wire_shape, image_shape, width=64, blocks=2)
        self.log_variance = nn.Parameter(torch.full((), -3.0))
        self.strength, self.lr = strength, lr

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """−log q of the matching pairs, without its constant."""
        self.decoder.train()
        guess = self.decoder(z.detach())
        log_variance = self.log_variance.clamp(*LOG_VARIANCE)
        error = squared_error(guess.float(), x.float())
        return 0.5 * (error * torch.exp(-log_variance) + log_variance)

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """L_enc; call it after `own_loss`. A bound below 0 says nothing, so it costs nothing."""
        self.decoder.eval()
        # Detached copies, not requires_grad_(False): `own_loss` of this step needs their gradient.
        frozen = {k: v.detach() for k, v in self.decoder.named_parameters()}
        guess = functional_call(self.decoder, frozen, (z,)).float()
        found = squared_error_of_strangers(guess, x.float()) - squared_error(guess, x.float())
        variance = self.log_variance.detach().clamp(*LOG_VARIANCE).exp()
        return self.strength * torch.relu(found) / (2 * variance)


@dataclass(frozen=True, kw_only=True)
class InfoScissors(NoiseOnly):
    """Noise on the wire and CLUB's bound on I(x; z) in the loss: InfoScissors (NeurIPS 2024).

    The published term that hides the answer from the server is left out: here the server answers.

    Args:
        scissors_strength: α ≥ 0, weight of the bound; 0 is training with noise alone.
        scissors_lr: Adam's rate for q, > 0.
    """

    scissors_strength: NonNegative = 0.1
    scissors_lr: Positive = 1e-3

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The variational net; none at strength 0."""
        if self.scissors_strength == 0:
            return None
        return ScissorsBound(
            model.wire_shape(image_shape),
            image_shape,
            strength=self.scissors_strength,
            lr=self.scissors_lr,
        )
