"""Attacks of one's own that are not made as one, and those that nearly are."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from audits.made import Spy, a_target
from torch import Generator

from splitveil.audits.suite import run_attacks
from splitveil.errors import AuditError
from splitveil.io import Progress, silent
from splitveil.threat import Access, BlackBox, Labelled


@dataclass(frozen=True)
class Gives:
    """Its fit returns what it was made with."""

    what: Any
    access: Any = Access.BLACK_BOX

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Any:  # noqa: ANN401 - the point of it
        del victim, aux, generator, progress
        return self.what


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (Gives(None), "must return a function from an Observation to images, got NoneType"),
        (Gives(lambda seen: np.zeros((len(seen.z), 1, 8, 8))), "images as ndarray, expected a ten"),
        (Gives(None, "both"), "must be a member of Access, got 'both'; write one of Access.NONE, "),
        (Gives(None, None), "must be a member of Access, got None"),
    ],
)
def test_an_attack_that_is_not_made_as_one_is_told_how(attack: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(AuditError, match=f"attack 'mine'.*{said}"):
        run_attacks(a_target(), {"mine": attack})


@pytest.mark.parametrize("access", list(Access))
def test_an_access_written_as_text_gives_the_same_view(access: Access) -> None:
    views = []
    for given in (access, cast(Access, access.value)):
        spy = Spy(given)
        attempt = run_attacks(a_target(), {"mine": spy})["mine"]
        views.append((type(spy.boxes[0]), attempt.access, attempt.aux_mse is None))
    assert views[0] == views[1]
