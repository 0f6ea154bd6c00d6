"""The page at `/`: the client's half runs in the browser, from files of the export.

The page and its scripts need no token, so that one can be typed; everything about the model does.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from splitveil.serve.faults import ExportError, WireError
from splitveil.serve.manifest import ATTACKER, CLIENT, FILE, Manifest, read_verified, sha256

FOLDER = Path(__file__).parent / "web"
EXPORT = "/export/"
PIECE = 1 << 16  # bytes given to a browser at once: a slow one holds no more in memory
RUNTIME = "ort"  # folder with the files of onnxruntime-web, which `make web` fetches

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".json": "application/json",
}
_OWN = (
    "style.css", "icon.svg", "main.js", "model.js", "noise.js", "picture.js", "show.js",
    "stages.js", "wire.js",
)  # fmt: skip
_RUNTIME_FILES = (
    "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"
)  # fmt: skip
ASSETS: Mapping[str, str] = {
    "/": "index.html",
    **{f"/page/{name}": name for name in _OWN},
    **{f"/page/{RUNTIME}/{name}": f"{RUNTIME}/{name}" for name in _RUNTIME_FILES},
}

# Nothing but this server can be reached from the page, whatever a script would try.
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; "
    "style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_page(path: str) -> bool:
    """Whether a path is of the page: itself, its files, or those of the export."""
    return path in ASSETS or path.startswith(EXPORT)


def has_runtime() -> bool:
    """Whether onnxruntime-web is here: from a wheel, or after `make web`."""
    return all((FOLDER / RUNTIME / name).is_file() for name in _RUNTIME_FILES)


@lru_cache(maxsize=len(ASSETS))
def _asset(name: str) -> tuple[bytes, str]:
    content = (FOLDER / name).read_bytes()
    return content, sha256(content)[:32]


def answer(request: Request, content: bytes, kind: str, tag: str) -> Response:
    """Content that a browser may keep but must ask about."""
    headers = SECURITY | {"ETag": f'"{tag}"', "Cache-Control": "no-cache", "Content-Type": kind}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    length = {"Content-Length": str(len(content))}
    return StreamingResponse(pieces(content), headers=headers | length)


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    """The content bit by bit; the next is made when the last is on its way."""
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


class Page:
    """The page of one export."""

    def __init__(self, manifest: Manifest, folder: Path, *, token: bool) -> None:
        self._manifest, self._folder, self._token = manifest, folder, token
        noise = [s["file"] for s in manifest.stages if s["kind"] == "learned"]
        self._files = (CLIENT, ATTACKER, *noise)  # never the server's half

    def routes(self) -> list[Route]:
        """The page, its files, and the export's that it needs."""
        return [
            *(Route(path, self.asset) for path in ASSETS),
            Route(f"{EXPORT}{{file}}", self.file),
        ]

    async def asset(self, request: Request) -> Response:
        """The page or one of its files."""
        name = ASSETS[request.scope["path"]]
        try:
            content, tag = await asyncio.to_thread(_asset, name)
        except OSError as err:
            raise WireError(f"{name} is not here; fetch it: make web", 404) from err
        if name == "index.html":
            content = self._filled(content)
            tag = sha256(content)[:32]
        return answer(request, content, _TYPES[Path(name).suffix], tag)

    def _filled(self, page: bytes) -> bytes:
        """The page with what the browser must know before it asks for anything."""
        known = {
            b"{{runtime}}": b"here" if has_runtime() else b"missing",
            b"{{token}}": b"needed" if self._token else b"none",
        }
        for mark, value in known.items():
            page = page.replace(mark, value)
        return page

    async def file(self, request: Request) -> Response:
        """The manifest, or a file of the client's half, its hash checked."""
        name = request.path_params["file"]
        if name == FILE:
            content = self._manifest.to_json().encode()
            return answer(request, content, _TYPES[".json"], sha256(content)[:32])
        if name not in self._files or name not in self._manifest.files:
            raise WireError(f"the export has no file {name[:64]!r} for the page", 404)
        try:
            content = await asyncio.to_thread(read_verified, self._folder, self._manifest, name)
        except ExportError as err:
            raise WireError(f"{name} is not on this server; copy the whole export", 404) from err
        tag = self._manifest.files[name][:32]
        return answer(request, content, "application/octet-stream", tag)
