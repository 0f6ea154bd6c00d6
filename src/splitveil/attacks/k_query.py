"""The k-query attack: the mean of k sendings has a k-th of the noise's variance."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from splitveil.attacks.base import Count
from splitveil.attacks.decoder import SMALL
from splitveil.errors import AuditError, ConfigError, check_ranges
from splitveil.io import Progress, silent
from splitveil.rng import stream
from splitveil.threat import Access, Attack, BlackBox, FittedAttack, Labelled, Observation, Send


def averaged(send: Send, repeats: int) -> Send:
    r"""A sender that averages `repeats` sendings of the same images, each with fresh randomness.

    .. math:: \bar z = \frac{1}{k} \sum_{i=1}^k \tilde z_i, \qquad
              \mathrm{Var}[\bar z \mid x] = \frac{1}{k} \mathrm{Var}[\tilde z \mid x]

    At most two sendings are held in memory.
    """

    def send_all(x: Tensor, generator: Generator | None = None) -> Tensor:
        total = send(x, generator).clone()  # += must not change what was sent
        for _ in range(repeats - 1):
            total += send(x, generator)
        return total.div_(repeats)

    return send_all


@dataclass(frozen=True, kw_only=True)
class KQuery:
    """Averages `repeats` sendings of the same image, then reconstructs with `inner`.

    `inner` is fitted on averages too, so it meets the noise it will see.

    Args:
        access: Sees several sendings of each image.
        repeats: How often each image is sent, k ≥ 1.
        inner: A black-box attack.
        min_aux: Fewest aux images, ≥ 1.
        effort: Its share of the progress bar, > 0.

    >>> KQuery(repeats=4).repeats
    4
    """

    access: Access = Access.REPEATS
    repeats: Count = 16
    inner: Attack = SMALL
    min_aux: int = 2
    effort: float = 10.0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.inner.access != Access.BLACK_BOX:
            raise ConfigError(
                f"inner must be a black-box attack, got one with access '{self.inner.access}'; "
                "use for example a Decoder"
            )

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        """Fit `inner` on averages; where sendings never differ, one sending is the average."""
        probe = aux.images[:8]
        apart = stream(generator.initial_seed(), "k-query", generator.device)
        same = torch.equal(victim.send(probe, apart), victim.send(probe, apart))
        repeats = 1 if same else self.repeats
        box = BlackBox(
            averaged(victim.send, repeats),
            victim.device,
            prepare=lambda images: averaged(victim.sender(images), repeats),
        )
        inner = self.inner.fit(box, aux, generator, progress)

        def reconstruct(seen: Observation) -> Tensor:
            got = "none" if seen.draws is None else str(len(seen.draws))
            if seen.draws is None or len(seen.draws) != self.repeats:
                raise AuditError(
                    f"the k-query attack was fitted on {self.repeats} sendings of each image, got "
                    f"{got}; send each image {self.repeats} times"
                )
            return inner(Observation(seen.draws.mean(0), seen.answer))

        return FittedAttack(reconstruct, inner.curve if isinstance(inner, FittedAttack) else ())
