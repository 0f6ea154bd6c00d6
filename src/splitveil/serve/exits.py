"""When a device answers alone: the exit rule in numpy, and a window that limits what is sent.

The field `exit` of a manifest is null for a client that sends every image, ``{"sends": "nothing"}``
for one that answers alone, and otherwise an exit rule: ``{"sends": "unsure", "kind": "confidence",
…}``. It is the twin of `splitveil.nets.exit.Exit` and decides alike.
"""

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ConfigError, ExportError

Rows = NDArray[np.float32]
Reals = NDArray[np.float64]
Choice = NDArray[np.bool_]
NOTHING: Mapping[str, Any] = {"sends": "nothing"}
KINDS = ("confidence", "margin", "entropy")
NEVER, ALWAYS = -1000.0, 1000.0  # thresholds: sureness lies between −ln(classes) and 1
LEVELS = 101  # 0 %, 1 %, …, 100 %
FINE = 2.0**-40  # of sureness: the last bits differ between libraries and decide nothing
WINDOW = 100  # images over which sends are limited and watched

log = logging.getLogger("splitveil")


@dataclass(frozen=True, kw_only=True)
class ExitRule:
    """An image is sent if its own answer is less sure than the threshold of the class it answers.

    Args:
        kind: What sureness is, see `sureness`.
        temperature: Of the own logits, above 0.
        thresholds: One for each class; `NEVER` sends nothing, `ALWAYS` everything.
        average: Whether the device averages its own answer with the server's.
        send: Share of validation images that this sends; None: not known.
        levels: `LEVELS` sureness values: level i is above that of i % of the validation images.
        changed: Share of the validation images on which the client in eight bits decides otherwise
            than the float client; None for the float client's own rule.
    """

    kind: str
    temperature: float
    thresholds: tuple[float, ...]
    average: bool = False
    send: float | None = None
    levels: tuple[float, ...] | None = None
    changed: float | None = None

    def asks(self, own: Rows) -> Choice:
        """Which images are sent, from the client's own logits (n, classes).

        >>> rule = ExitRule(kind="confidence", temperature=1.0, thresholds=(0.75, 0.5))
        >>> rule.asks(np.array([[1, 0], [0, 1]], np.float32)).tolist()
        [True, False]
        """
        if not np.isfinite(own).all():
            raise ExportError(
                "the client's own head gives numbers that are not finite; nothing is sent. Export "
                "again"
            )
        threshold = np.array(self.thresholds)[own.argmax(1)]
        sure = sureness(own, self.kind, self.temperature)
        found: Choice = threshold - sure > FINE
        return found

    def answers(self, own: Rows, server: Rows, answered: Choice) -> Rows:
        """Logits (n, classes) that the device reports: its own where the server did not answer."""
        mine, theirs = log_softmax(own, self.temperature), log_softmax(server)
        both = (mine + theirs) / 2 if self.average else theirs
        return np.where(answered[:, None], both, mine).astype(np.float32)

    def tightened(self, send: float) -> "ExitRule":
        """The rule with thresholds lowered so that this share of the validation images is sent."""
        if self.send is None or self.levels is None:
            raise ConfigError(
                "this export does not say how sure the client was of its validation images, so no "
                "share can be chosen; limit it with max_share, or export the run again"
            )
        if not 0 <= send <= self.send:
            raise ConfigError(
                f"send must be in 0..{self.send:g}, the share that the exit rule was audited with, "
                f"got {send:g}; train with a larger send= to send more"
            )
        level = np.interp(100 * send, np.arange(LEVELS), self.levels) if send > 0 else NEVER
        lower = tuple(min(own, float(level)) for own in self.thresholds)
        return replace(self, thresholds=lower, send=send)

    def to_json(self, int8: "ExitRule | None" = None) -> dict[str, Any]:
        """The field `exit` of a manifest; `int8` is the rule of the client in eight bits."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: list(v) if type(v) is tuple else v for k, v in own.items()}
        small = None if int8 is None else int8.to_json() | {"int8": None}
        return {"sends": "unsure", **plain, "int8": small}


def read_rule(told: object, num_classes: int, *, int8: bool = False) -> ExitRule | None:
    """The exit rule of a manifest's field `exit`; None for a client without one.

    Args:
        told: The field.
        num_classes: How many logits there are.
        int8: Whether to read the rule of the client in eight bits, which is part of the field.

    Raises:
        ExportError: If this version does not know it, or a number is outside its range.
    """
    if told is None or told == NOTHING:
        return None
    names = {f.name for f in fields(ExitRule)}
    known = {"sends", "int8", *names}
    if not isinstance(told, dict) or set(told) != known or told["sends"] != "unsure":
        raise ExportError(
            f"unknown exit rule {told!r:.200}; a client that does not know it could send more than "
            "was audited. Install the version of splitveil that exported the model"
        )
    levels, send, changed = told["levels"], told["send"], told["changed"]
    small = None if told["int8"] is None else read_rule(told["int8"], num_classes)
    if int8 and small is None:
        raise ExportError(
            "this export has no exit rule for a client in eight bits, whose sureness is another; "
            "export the run again with --int8"
        )
    problems = {
        f"kind must be one of {', '.join(KINDS)}": told["kind"] in KINDS,
        "margin needs two classes": told["kind"] != "margin" or num_classes > 1,
        "temperature must be above 0": _finite([told["temperature"]], 1)
        and told["temperature"] > 0,
        f"thresholds must be {num_classes} finite numbers": _finite(
            told["thresholds"], num_classes
        ),
        "average must be true or false": type(told["average"]) is bool,
        "send must be null or in 0..1": send is None or (_finite([send], 1) and 0 <= send <= 1),
        "changed must be null or in 0..1": changed is None
        or (_finite([changed], 1) and 0 <= changed <= 1),
        f"levels must be null or {LEVELS} rising numbers": levels is None
        or (_finite(levels, LEVELS) and sorted(levels) == levels),
    }
    if found := "; ".join(words for words, fine in problems.items() if not fine):
        raise ExportError(f"exit rule {told!r:.200}: {found}; export the run again")
    own: dict[str, Any] = {name: told[name] for name in names}
    own["thresholds"] = tuple(own["thresholds"])
    own["levels"] = None if levels is None else tuple(levels)
    return small if int8 else ExitRule(**own)


def _finite(values: object, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) in (int, float) and math.isfinite(v) for v in values)
    )


def log_softmax(logits: Rows, temperature: float = 1.0) -> Reals:
    """Log-probabilities (n, classes) in float64."""
    scaled = logits.astype(np.float64) / temperature
    shifted: Reals = scaled - scaled.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


def sureness(logits: Rows, kind: str, temperature: float = 1.0) -> Reals:
    """How sure an answer is (n,): largest probability, lead over the second, or minus entropy.

    >>> sureness(np.zeros((1, 4), np.float32), "margin").tolist()
    [0.0]
    """
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    if kind == "confidence":
        most: Reals = p.max(1)
        return most
    if kind == "margin":
        ordered = np.sort(p, 1)
        lead: Reals = ordered[:, -1] - ordered[:, -2]
        return lead
    negated: Reals = (p * np.log(np.where(p > 0, p, 1))).sum(1)
    return negated


class SendWindow:
    """Limits the images sent among every `WINDOW`, and says when the rule sends unlike expected.

    Args:
        max_share: Largest share of a window that is sent; None: no limit.
        expected: Share that the rule should send; None: not known, nothing is said.
    """

    def __init__(self, max_share: float | None = None, expected: float | None = None) -> None:
        if max_share is not None and not 0 <= max_share <= 1:
            raise ConfigError(f"max_share must be in 0..1, got {max_share:g}")
        self._most = WINDOW if max_share is None else math.floor(max_share * WINDOW + 1e-9)
        self._expected, self._lock = expected, threading.Lock()
        self._seen = self._asked = self._sent = 0

    def admit(self, asked: Choice, wanted: Choice) -> Choice:
        """Which of the wanted images may be sent, in order.

        Args:
            asked: What the exit rule says (n,), which is watched.
            wanted: What is to be sent (n,).

        >>> few = SendWindow(max_share=0.02)
        >>> few.admit(np.ones(3, bool), np.ones(3, bool)).tolist()
        [True, True, False]
        """
        admitted = np.zeros(len(wanted), bool)
        with self._lock:
            for i in range(len(wanted)):
                admitted[i] = wanted[i] and self._sent < self._most
                self._seen += 1
                self._asked += int(asked[i])
                self._sent += int(admitted[i])
                if self._seen == WINDOW:
                    self._close()
        return admitted

    def _close(self) -> None:
        share, self._seen, self._asked, self._sent = self._asked / WINDOW, 0, 0, 0
        if self._expected is None:
            return
        # Three standard deviations of the count, and one image.
        near = 3 * math.sqrt(self._expected * (1 - self._expected) / WINDOW) + 1 / WINDOW
        if abs(share - self._expected) > near:
            log.warning(
                f"of the last {WINDOW} images the exit rule sends {100 * share:.0f} %, expected "
                f"{100 * self._expected:.0f} ± {100 * near:.0f} %; the images differ from those of "
                "the training, or the answers do"
            )
