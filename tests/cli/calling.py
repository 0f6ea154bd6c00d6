"""What the tests of the commands share: calling one, its words, attacks that take no time."""

import re
from typing import Any

from typer.testing import CliRunner

from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.rmle import Rmle
from splitveil.cli.app import app

SMALL = Decoder(width=8, blocks=1, epochs=1, min_steps=4, batch_size=32)
TINY = {
    "mean": MeanImage(),
    "class-mean": ClassMean(),
    "nearest": Nearest(),
    "linear": Linear(),
    "decoder": SMALL,
    "rmle": Rmle(start=SMALL, steps=3, restarts=0, chunk=8, limit=8),
    "k-query": KQuery(repeats=3, inner=SMALL),
}


def call(*words: object) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, [str(word) for word in words])


def text(result: Any) -> str:  # noqa: ANN401
    """Everything printed, wrapped lines joined."""
    return re.sub(r"\s+", " ", result.output + result.stderr)
