"""Export, wire, client and server: both halves of a split network in service.

Names are imported at their first use, because a device with a client need not have torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Answers": "serve.client",
    "Client": "serve.client",
    "ExportError": "errors",
    "Limits": "serve.admission",
    "Manifest": "serve.manifest",
    "ServerError": "errors",
    "UnreachableError": "errors",
    "WireError": "errors",
    "export_model": "serve.export",
    "make_app": "serve.server",
    "read_manifest": "serve.manifest",
    "running": "serve.server",
    "serve": "serve.server",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - one table


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
    """Find a public name in its module (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'splitveil.serve' has no attribute '{name}'")
    return getattr(import_module(f"splitveil.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
