"""What the server's answers are held against: the labels, and the answers of a teacher."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

Logits = Float[Tensor, "n k"]


def divergence(own: Logits, taught: Logits, temperature: float) -> Float[Tensor, ""]:
    r"""How far answers are from a teacher's, both softened (Hinton, Vinyals and Dean, 2015).

    .. math:: T^2\,\mathrm{KL}(\mathrm{softmax}(t/T)\,\|\,\mathrm{softmax}(s/T))

    Logits s of its own and t taught, both (n, k); the mean over n. T² keeps gradients as large.

    >>> even, sure = torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log()
    >>> round(float(divergence(even, sure, 1.0)), 6)
    0.130812
    """
    softened = F.log_softmax(_wide(taught) / temperature, 1)
    answers = F.log_softmax(_wide(own) / temperature, 1)
    return temperature**2 * F.kl_div(answers, softened, reduction="batchmean", log_target=True)


def _wide(logits: Tensor) -> Tensor:
    """In float32 at least: differences of logarithms are small."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class Task:
    r"""The loss of the answers to a batch.

    .. math:: L = (1 - w)\,\mathrm{CE}_\varepsilon(s, y)
        + w\,T^2\,\mathrm{KL}(\mathrm{softmax}(t/T)\,\|\,\mathrm{softmax}(s/T))

    CE_ε is the cross entropy against labels of which the share ε = `smoothing` is spread over all
    classes; t are the answers of the `teacher`, w is its `share` and T its `temperature`. Without
    a teacher w is 0.

    >>> Task().loss(torch.zeros(1, 2), torch.tensor([0]), None).item()  # log 2
    0.6931471824645996
    """

    smoothing: float = 0.0
    teacher: Callable[[Tensor], Tensor] | None = None
    share: float = 0.5
    temperature: float = 1.0

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor | None:
        """The teacher's answers to images x; None without one."""
        return None if self.teacher is None else self.teacher(x)

    def loss(self, own: Logits, y: Int64[Tensor, " n"], taught: Logits | None) -> Float[Tensor, ""]:
        """Of the logits `own` for images with labels y."""
        labels = F.cross_entropy(own, y, label_smoothing=self.smoothing)
        if taught is None:
            return labels
        return (1 - self.share) * labels + self.share * divergence(own, taught, self.temperature)


LABELS = Task()  # the labels as they are, and nobody's answers
