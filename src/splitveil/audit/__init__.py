"""The audit: attacks a deployed client and says what they got.

The room is also the function: ``splitveil.audit(run, profile="quick")`` audits a run.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from splitveil.audit.access import Case, Wire, intercept
from splitveil.audit.attempt import Attempt
from splitveil.audit.flags import FLAGS, Evidence, Flag, raise_flags
from splitveil.audit.gallery import gallery
from splitveil.audit.suite import Store, accuracy, run_attacks
from splitveil.audit.summary import (
    by_attack,
    ceiling_mse,
    floor_mse,
    per_image,
    strongest,
    strongest_blackbox,
    worst_case,
)
from splitveil.types import Progress, Record, silent


@runtime_checkable
class Auditable(Protocol):
    """Anything that knows how to be audited, as `splitveil.Run` does."""

    def audit(
        self,
        profile: str = "quick",
        *,
        aux: str = "train",
        seed: int = 0,
        progress: Progress,
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
        fresh: bool = False,
        only: Sequence[str] = (),
        compile: bool = False,
    ) -> Record:
        """Audit a run: attacks of `profile`, an attacker who knows `aux`, attack seed `seed`.

        `fresh` also runs attacks that were finished before, `only` some of the profile, `compile`
        with decoders that torch compiles on a GPU.
        """
        asked = {"fresh": fresh, "only": only, "compile": compile}
        more: dict[str, Any] = {key: value for key, value in asked.items() if value}
        return run.audit(profile, aux=aux, seed=seed, progress=progress, **more)


sys.modules[__name__].__class__ = _CallableRoom

__all__ = [
    "FLAGS",
    "Attempt",
    "Case",
    "Evidence",
    "Flag",
    "Store",
    "Wire",
    "accuracy",
    "by_attack",
    "ceiling_mse",
    "floor_mse",
    "gallery",
    "intercept",
    "per_image",
    "raise_flags",
    "run_attacks",
    "strongest",
    "strongest_blackbox",
    "worst_case",
]
