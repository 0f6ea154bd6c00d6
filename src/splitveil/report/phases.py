"""When a penalty did not act: warm-up, early shut-off, and the epoch of its full weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from splitveil.record.schema import number, text
from splitveil.report.files import RunFiles

Kind = Literal["warm-up", "shut off", "full weight"]


SHUT = 0.5  # share of an epoch's steps from which it counts as shut off


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Epochs `first` to `last`, both included; `full weight` is one epoch."""

    kind: Kind
    first: float
    last: float


def phases(run: RunFiles) -> list[Phase]:
    """What the log and the settings of a run say about its penalty, in order of epochs."""
    return [*_warm_up(run), *_full_weight(run), *_shut_off(run)]


def _warm_up(run: RunFiles) -> Iterator[Phase]:
    """The first epochs with weight 0, if the run has a penalty at all."""
    weights = [(_epoch(run, at), number(e, "weight")) for at, e in enumerate(run.metrics)]
    penalised = (number(run.record, "config", "lambd") or 0.0) > 0 or any(w for _, w in weights)
    still = 0
    while still < len(weights) and weights[still][1] == 0:
        still += 1
    if penalised and still:
        yield Phase(kind="warm-up", first=weights[0][0], last=weights[still - 1][0])


def _full_weight(run: RunFiles) -> Iterator[Phase]:
    """The epoch in which a weight that grows over the share `ramp` of the run is full."""
    ramp, epochs = (number(run.record, "config", key) for key in ("ramp", "epochs"))
    grows = text(run.record, "config", "lambd") not in (None, "0", "0.0")
    if ramp and epochs and grows and run.metrics:
        when = ramp * epochs
        if when < _epoch(run, len(run.metrics) - 1):
            yield Phase(kind="full weight", first=when, last=when)


def _shut_off(run: RunFiles) -> Iterator[Phase]:
    """Stretches of epochs in which the penalty's own rules held it at 0."""
    shares = [(_epoch(run, at), number(e, "shut")) for at, e in enumerate(run.metrics)]
    for held, stretch in groupby(shares, lambda pair: pair[1] is not None and pair[1] >= SHUT):
        if held:
            epochs = [epoch for epoch, _ in stretch]
            yield Phase(kind="shut off", first=epochs[0], last=epochs[-1])


def _epoch(run: RunFiles, at: int) -> float:
    epoch = number(run.metrics[at], "epoch")
    return float(at) if epoch is None else epoch
