"""SplitVeil trains split networks, attacks what their clients send, and says what leaks.

    >>> import splitveil as sv
    >>> run = sv.fit(sv.RunConfig(dataset="digits", epochs=2))  # doctest: +SKIP
    >>> sv.audit(run, profile="smoke").strongest.mse  # doctest: +SKIP

Names are imported when they are first used, so that ``import splitveil`` and ``splitveil --help``
do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitveil import attacks, data, defences, errors, nets, report, surrogates, train
    from splitveil.audits.trained_run import audit
    from splitveil.config import RunConfig
    from splitveil.record.groups import records
    from splitveil.record.schema import Record
    from splitveil.runs import Run, fit, load_run
    from splitveil.threat import Victim

__version__ = "0.1.0"

__all__ = [
    "Record",
    "Run",
    "RunConfig",
    "Victim",
    "__version__",
    "attacks",
    "audit",
    "data",
    "defences",
    "errors",
    "fit",
    "load_run",
    "nets",
    "records",
    "report",
    "serve",
    "surrogates",
    "train",
]

_HOME = {
    "Record": "record.schema",
    "Run": "runs",
    "RunConfig": "config",
    "Victim": "threat",
    "audit": "audits.trained_run",
    "fit": "runs",
    "load_run": "runs",
    "records": "record.groups",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it (PEP 562)."""
    if name in _HOME:
        return getattr(import_module(f"splitveil.{_HOME[name]}"), name)
    if name in __all__:
        return import_module(f"splitveil.{name}")
    raise AttributeError(f"module 'splitveil' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
