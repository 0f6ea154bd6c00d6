"""What the doctor looks at: a run's settings, its log and its record, and how they are read."""

from dataclasses import dataclass
from statistics import fmean

from splitveil.record.schema import number
from splitveil.threat import Json

TAIL = 3  # epochs that stand for "at the end"


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A run on the same data without a penalty: what accuracy could be."""

    name: str
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to mend: what was seen, in numbers, and which knob to turn by how much."""

    name: str
    seen: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run as the doctor sees it.

    `config` is flat, the defence's settings among the run's; `epochs` are the epoch lines of its
    log, at least one.
    """

    name: str
    config: Json
    epochs: tuple[Json, ...]
    num_classes: int
    record: Json | None = None
    plain: Plain | None = None

    def setting(self, key: str, default: float | int = 0) -> float:
        """A numeric setting; the default where the defence has no such knob."""
        found = number(self.config, key)
        return float(default) if found is None else found

    @property
    def penalised(self) -> bool:
        """Whether a penalty was asked for."""
        return self.setting("lambd") > 0

    @property
    def active(self) -> tuple[Json, ...]:
        """The epochs in which the penalty acted, or was shut off by its own rules."""
        return tuple(line for line in self.epochs if number(line, "rob_loss") is not None)

    @property
    def slots(self) -> bool:
        """Whether the penalty is measured over slots."""
        return "num_slots" in self.config

    @property
    def per_class(self) -> float:
        """Samples of one class in a batch when all classes are equally frequent."""
        return self.setting("batch_size") / self.num_classes

    @property
    def chance(self) -> float:
        """Accuracy under which nothing has been learned: a tenth of the way up from guessing."""
        guess = 1 / self.num_classes
        return guess + 0.1 * (1 - guess)

    def series(self, key: str) -> list[float]:
        """What was logged under a key, epoch by epoch; epochs without it are left out.

        >>> lines = ({"epoch": 1}, {"epoch": 2, "rob_loss": 0.5})
        >>> Case(name="x", config={}, epochs=lines, num_classes=2).series("rob_loss")
        [0.5]
        """
        values = (number(line, key) for line in self.epochs)
        return [value for value in values if value is not None]

    def end(self, key: str) -> float | None:
        """Mean of the last three logged values."""
        values = self.series(key)
        return fmean(values[-TAIL:]) if values else None

    @property
    def accuracy(self) -> float | None:
        """Accuracy at the end: validation, else the audit's, else in training."""
        validated = self.end("val_accuracy")
        audited = number(self.record, "accuracy")
        return next(
            (v for v in (validated, audited, self.end("train_accuracy")) if v is not None), None
        )

    @property
    def at_chance(self) -> bool:
        """Whether nothing was learned, on the training images too."""
        ends = [v for v in (self.accuracy, self.end("train_accuracy")) if v is not None]
        return len(self.epochs) >= TAIL and bool(ends) and max(ends) < self.chance

    @property
    def rate(self) -> float | None:
        """Nats per dimension through the deployed channel (audit), else in the last batches."""
        total = number(self.record, "true_rate_nats")
        width = number(self.record, "client", "wire_floats")
        return total / width if total is not None and width else self.end("true_rate")


def turn(case: Case, key: str, to: float | int) -> str:
    """One knob, from where to where.

    >>> turn(Case(name="x", config={"lambd": 16.0}, epochs=(), num_classes=2), "lambd", 8.0)
    'lambd 16 → 8'
    """
    return f"{key} {case.setting(key):g} → {float(f'{to:.3g}'):g}"
