"""How much a server takes on before it says no."""

from dataclasses import dataclass

from splitveil.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a server takes on before it says no.

    Args:
        max_batch: Rows the model runs at once, and the most one request may have.
        max_delay: Seconds a row may wait for others to share its batch.
        max_waiting: Rows that may wait; beyond, requests are answered 429.
        max_in_flight: Requests that may be read or answered at once; beyond, 503.
        read_seconds: How long a body may take to arrive; beyond, 408.
        answer_seconds: How long an answer may take; beyond, 504.
    """

    max_batch: int = 64
    max_delay: float = 0.002
    max_waiting: int = 1024
    max_in_flight: int = 256
    read_seconds: float = 10.0
    answer_seconds: float = 30.0

    def __post_init__(self) -> None:
        if min(self.max_batch, self.max_in_flight) < 1 or self.max_waiting < self.max_batch:
            raise ConfigError(
                "max_batch and max_in_flight must be at least 1, max_waiting at least max_batch, "
                f"got {self.max_batch}, {self.max_in_flight} and {self.max_waiting}"
            )
        if not 0 <= self.max_delay < min(self.read_seconds, self.answer_seconds):
            raise ConfigError(
                f"max_delay must be in [0, read_seconds and answer_seconds), got {self.max_delay}, "
                f"{self.read_seconds} and {self.answer_seconds}"
            )
