"""The server: the head behind the KServe v2 protocol. Uvicorn and onnxruntime, no torch."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from splitveil.serve.app import make_app
from splitveil.serve.faults import ServerError
from splitveil.serve.limits import Limits
from splitveil.serve.manifest import SERVER, read_manifest
from splitveil.serve.session import load_half

__all__ = ["Limits", "Tls", "load_app", "make_app", "running", "serve"]

BACKLOG = 1024  # connections the system holds before they are accepted
DRAIN_SECONDS = 30  # for what was accepted, when told to stop


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files of a certificate (with its chain) and its private key."""

    certificate: Path
    key: Path


def load_app(
    folder: str | Path, *, limits: Limits | None = None, token: str | None = None, threads: int = 0
) -> ASGIApp:
    """The ASGI application of an export, for any ASGI server; the head's hash is checked."""
    place = Path(folder)
    manifest = read_manifest(place)
    head = load_half(place, manifest, SERVER, threads)
    return make_app(manifest, head, limits or Limits(), token, folder=place)


def make_server(app: ASGIApp, tls: Tls | None = None) -> uvicorn.Server:
    """Uvicorn around an application, quiet, draining when it is told to stop."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once only on sockets that say TCP; without, every answer waits some 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except (OSError, OverflowError, UnicodeError) as err:  # the last two: no port, no host's name
        listening.close()
        reason = getattr(err, "strerror", None) or err
        raise ServerError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from err


def address(listening: socket.socket, tls: Tls | None) -> str:
    """The address clients use."""
    host, port = listening.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tls: Tls | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what was accepted and return.

    `ready` is told the address once connections are accepted by the system.
    """
    server = _checked_server(app, tls)
    with listen(host, port) as listening:
        ready(address(listening, tls))
        # Uvicorn drains on Ctrl-C and then raises it again; here it is the ordinary way to stop.
        with suppress(KeyboardInterrupt):
            asyncio.run(server.serve(sockets=[listening]))


@contextmanager
def running(
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, tls: Tls | None = None
) -> Iterator[str]:
    """Serve from a thread while the block runs; gives the address. For tests and notebooks."""
    server = _checked_server(app, tls)
    with listen(host, port) as listening:
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True
        )
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        try:
            yield address(listening, tls)
        finally:
            server.should_exit = True
            thread.join()


def _checked_server(app: ASGIApp, tls: Tls | None) -> uvicorn.Server:
    server = make_server(app, tls)
    try:
        server.config.load()
    except OSError as err:  # ssl.SSLError is one
        raise ServerError(
            f"cannot use the certificate or its key: {err}; give PEM files that belong together"
        ) from err
    return server
