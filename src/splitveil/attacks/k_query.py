"""Repeated queries: the same image sent k times; the mean has a k-th of the noise's variance."""

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
    r"""Sends the same images `repeats` times, with fresh randomness each, and gives the mean.

    .. math:: \bar z = \frac{1}{k} \sum_{i=1}^k \tilde z_i, \qquad
              \mathrm{Var}[\bar z \mid x] = \frac{1}{k} \mathrm{Var}[\tilde z \mid x]

    Sendings are summed one by one: no more than two are held at a time.
    """

    def send_all(x: Tensor, generator: Generator | None = None) -> Tensor:
        total = send(x, generator).clone()  # the sum must not be written into what was sent
        for _ in range(repeats - 1):
            total += send(x, generator)
        return total.div_(repeats)

    return send_all


@dataclass(frozen=True, kw_only=True)
class KQuery:
    """Averages `repeats` sendings of the same image, then reconstructs with `inner`.

    `inner` is fitted on averages too, so it meets the noise it will see.
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
                f"inner must be a black-box attack, got one with access '{self.inner.access}'"
            )

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        """Fit `inner` on the averages of aux; sendings that do not differ are their own average."""
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
                    f"the k-query attack was fitted for {self.repeats} sendings of each image, "
                    f"got {got}; observe the images {self.repeats} times"
                )
            return inner(Observation(seen.draws.mean(0), seen.answer))

        return FittedAttack(reconstruct, inner.curve if isinstance(inner, FittedAttack) else ())
