"""Counters, gauges and histograms in Prometheus' text format."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """A number that only grows, for each value of one label.

    >>> counter = Counter("calls_total", "Calls.", "code")
    >>> counter.add("200"); counter.add("200"); list(counter.lines())[2:]
    ['calls_total{code="200"} 2']
    """

    def __init__(self, name: str, help_text: str, label: str) -> None:
        self.name, self.help, self.label = name, help_text, label
        self._counts: dict[str, int] = {}

    def add(self, value: str, count: int = 1) -> None:
        """Count; `value` must come from a small fixed set, never from a request."""
        self._counts[value] = self._counts.get(value, 0) + count

    def lines(self) -> Iterator[str]:
        """The text format."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} counter"
        for value, count in sorted(self._counts.items()):
            yield f'{self.name}{{{self.label}="{value}"}} {count}'


class Gauge:
    """A number that is read when it is asked for."""

    def __init__(self, name: str, help_text: str, read: Callable[[], int]) -> None:
        self.name, self.help, self.read = name, help_text, read

    def lines(self) -> Iterator[str]:
        """The text format."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} gauge"
        yield f"{self.name} {self.read()}"


class Histogram:
    """How many observations were at most each bound.

    >>> histogram = Histogram("wait", "Wait.", (1.0, 2.0))
    >>> histogram.observe(1.5); histogram.observe(9.0); list(histogram.lines())[2:5]
    ['wait_bucket{le="1"} 0', 'wait_bucket{le="2"} 1', 'wait_bucket{le="+Inf"} 2']
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help_text, tuple(bounds)
        self._counts, self._sum = [0] * (len(self.bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """The text format; buckets are cumulative."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*map("{:g}".format, self.bounds), "+Inf"), self._counts,
                                strict=True):  # fmt: skip
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self._sum:.6f}"
        yield f"{self.name}_count {total}"


class ServerMetrics:
    """What a server counts; nothing in it depends on the content of a request."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.in_flight = 0
        self.requests = Counter("splitveil_requests_total", "Answers by HTTP status.", "code")
        self.refusals = Counter(
            "splitveil_refused_total", "Requests refused before the model, by reason.", "reason"
        )
        self.seconds = Histogram(
            "splitveil_infer_seconds", "From an infer call's headers to its answer.", SECONDS
        )
        self.batch_rows = Histogram("splitveil_batch_rows", "Rows the model ran at once.", ROWS)
        self.batch_seconds = Histogram(
            "splitveil_batch_seconds", "Seconds of the model for a batch.", SECONDS
        )
        self._gauges = (
            Gauge("splitveil_rows_waiting", "Rows that wait for the model.", waiting),
            Gauge(
                "splitveil_requests_in_flight", "Requests being answered.", lambda: self.in_flight
            ),
        )

    def batch(self, rows: int, seconds: float) -> None:
        """Count one batch."""
        self.batch_rows.observe(float(rows))
        self.batch_seconds.observe(seconds)

    def text(self) -> str:
        """Everything, as Prometheus scrapes it."""
        counted = (self.requests, self.refusals, self.seconds, self.batch_rows, self.batch_seconds)
        every = [line for m in (*counted, *self._gauges) for line in m.lines()]
        return "\n".join(every) + "\n"
