"""Export, wire, client and server: both halves of a split network in service.

Names are imported when they are first used: a client must not wait for torch, a device may not even
have it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitveil.errors import ExportError as ExportError
    from splitveil.errors import ServerError as ServerError
    from splitveil.errors import WireError as WireError
    from splitveil.serve.admission import Limits as Limits
    from splitveil.serve.client import Client as Client
    from splitveil.serve.export import export_model as export_model
    from splitveil.serve.manifest import Manifest as Manifest
    from splitveil.serve.manifest import read_manifest as read_manifest
    from splitveil.serve.server import make_app as make_app
    from splitveil.serve.server import running as running
    from splitveil.serve.server import serve as serve

_HOME = {
    "Client": "splitveil.serve.client",
    "ExportError": "splitveil.errors",
    "Limits": "splitveil.serve.admission",
    "Manifest": "splitveil.serve.manifest",
    "ServerError": "splitveil.errors",
    "WireError": "splitveil.errors",
    "export_model": "splitveil.serve.export",
    "make_app": "splitveil.serve.server",
    "read_manifest": "splitveil.serve.manifest",
    "running": "splitveil.serve.server",
    "serve": "splitveil.serve.server",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - one table


def __getattr__(name: str) -> object:
    """Find a public name in its module (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'splitveil.serve' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
