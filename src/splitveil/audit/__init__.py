"""The audit: attacks a deployed client and says what they got.

The room is also the function: ``splitveil.audit(run, profile="quick")`` audits a run.
"""

import sys
from types import ModuleType
from typing import Protocol, runtime_checkable

from splitveil.audit.gallery import gallery
from splitveil.audit.suite import (
    Attempt,
    Case,
    accuracy,
    ceiling_mse,
    floor_mse,
    run_attacks,
    strongest,
    worst_case,
)
from splitveil.types import Progress, Record, silent


@runtime_checkable
class Auditable(Protocol):
    """Anything that knows how to be audited, as `splitveil.Run` does."""

    def audit(
        self, profile: str = "quick", *, aux: str = "train", seed: int = 0, progress: Progress
    ) -> Record:
        """Attack it and return the record."""
        ...


class _CallableRoom(ModuleType):
    """`splitveil.audit` names both this package and the public function; it is both."""

    def __call__(
        self,
        run: Auditable,
        profile: str = "quick",
        *,
        aux: str = "train",
        seed: int = 0,
        progress: Progress = silent,
    ) -> Record:
        """Audit a run: attacks of `profile`, an attacker who knows `aux`, attack seed `seed`."""
        return run.audit(profile, aux=aux, seed=seed, progress=progress)


sys.modules[__name__].__class__ = _CallableRoom

__all__ = [
    "Attempt",
    "Case",
    "accuracy",
    "ceiling_mse",
    "floor_mse",
    "gallery",
    "run_attacks",
    "strongest",
    "worst_case",
]
