"""Export, wire, client and server: both halves of a split network in service.

Names are imported when they are first used: a client must not wait for torch, a device may not even
have it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitveil.serve.client import Client
    from splitveil.serve.export import export_model
    from splitveil.serve.faults import ExportError, ServerError, WireError
    from splitveil.serve.manifest import Manifest, read_manifest
    from splitveil.serve.server import Limits, make_app, running, serve

__all__ = [
    "Client",
    "ExportError",
    "Limits",
    "Manifest",
    "ServerError",
    "WireError",
    "export_model",
    "make_app",
    "read_manifest",
    "running",
    "serve",
]


def __getattr__(name: str) -> object:
    """Find a public name in its module (PEP 562)."""
    if name == "Client":
        from splitveil.serve import client as home
    elif name in ("ExportError", "ServerError", "WireError"):
        from splitveil.serve import faults as home  # type: ignore[no-redef]
    elif name in ("Manifest", "read_manifest"):
        from splitveil.serve import manifest as home  # type: ignore[no-redef]
    elif name == "export_model":
        from splitveil.serve import export as home  # type: ignore[no-redef]
    elif name in __all__:
        from splitveil.serve import server as home  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'splitveil.serve' has no attribute '{name}'")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
