"""The page at `/`: runs the client's half in the browser, from files of the export.

The page and its scripts need no token, so that a user can enter one; files of the model need it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from splitveil.errors import ExportError, WireError
from splitveil.grid import KINDS, cell_ends
from splitveil.serve.manifest import ATTACKER, CLIENT, FILE, Manifest, read_verified, sha256

FOLDER = Path(__file__).parent / "web"
OWN, EXPORT = "/page/", "/export/"
PIECE = 1 << 16  # bytes sent at once, so that slow browsers hold little of the server's memory
TABLES = "tables.js"  # made from the tables of the client
RUNTIME = "ort"  # folder with the files of onnxruntime-web, which `make web` fetches
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
# Browsers run scripts of these types only, and operating systems' own tables of types differ.
JAVASCRIPT = "text/javascript; charset=utf-8"
TYPES = {
    ".js": JAVASCRIPT,
    ".mjs": JAVASCRIPT,
    ".wasm": "application/wasm",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts of the page can reach this server alone. A browser may keep a file, but must ask whether
# it has changed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; "
    "style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def is_own(path: str) -> bool:
    """Whether a path is the page or one of its scripts, which need no token."""
    return path == "/" or path.startswith(OWN)


def is_page(path: str) -> bool:
    """Whether a path is the page, one of its files, or a file of the export."""
    return is_own(path) or path.startswith(EXPORT)


def has_runtime() -> bool:
    """Whether onnxruntime-web is installed: from a wheel, or by `make web`."""
    return all((FOLDER / RUNTIME / name).is_file() for name in RUNTIME_FILES)


def file_response(request: Request, content: bytes, kind: str, digest: str) -> Response:
    """Content in pieces, or 304 if the browser has it already."""
    headers = HEADERS | {"ETag": f'"{digest[:32]}"', "Content-Type": kind}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    length = {"Content-Length": str(len(content))}
    return StreamingResponse(pieces(content), headers=headers | length)


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    """The content in pieces; each is made when the one before has been sent."""
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


def tables_script() -> str:
    """The tables of the noise, as the page's script reads them: the first half, in hexadecimal."""
    halves = {kind: cell_ends(kind)[: len(cell_ends(kind)) // 2] for kind in KINDS}
    words = {kind: [f"{int(word):016x}" for word in half] for kind, half in halves.items()}
    return f"export const TABLES = {json.dumps(words)};\n"


def own_file(name: str) -> tuple[bytes, str, str]:
    """Content, type and hash of one of the page's scripts, styles, or files of the runtime."""
    if name == TABLES:
        content = tables_script().encode()
        return content, JAVASCRIPT, sha256(content)
    known = {path.name: path for path in FOLDER.glob("*.*")}
    known |= {f"{RUNTIME}/{file}": FOLDER / RUNTIME / file for file in RUNTIME_FILES}
    if name not in known or not known[name].is_file():
        missing = name.startswith(RUNTIME) and not has_runtime()
        told = f"{name[:64]} is not installed; fetch it: make web" if missing else "Not Found"
        raise WireError(told, 404)
    content = known[name].read_bytes()
    kind = TYPES.get(known[name].suffix, "application/octet-stream")
    return content, kind, sha256(content)


def routes(manifest: Manifest, folder: Path, *, token: bool) -> list[BaseRoute]:
    """The page, its files, and those of the export in `folder` that it needs.

    What was asked for once stays in memory, so that a slow browser costs one piece of it.
    """
    noise = [s["file"] for s in manifest.stages if s["kind"] == "learned"]
    # Not the server's half: it stays on the server.
    given = {CLIENT, ATTACKER, *noise} & manifest.files.keys()
    kept: dict[str, tuple[bytes, str, str]] = {}  # by path: content, type, hash

    async def index(request: Request) -> Response:
        page = (FOLDER / "index.html").read_text(encoding="utf-8")
        # What the browser must know before its first request.
        page = page.replace("{{runtime}}", "here" if has_runtime() else "missing")
        page = page.replace("{{token}}", "needed" if token else "none")
        content = page.encode()
        return file_response(request, content, "text/html; charset=utf-8", sha256(content))

    async def own(request: Request) -> Response:
        name = request.path_params["file"]
        if OWN + name not in kept:
            kept[OWN + name] = await asyncio.to_thread(own_file, name)
        return file_response(request, *kept[OWN + name])

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name == FILE:
            content = manifest.to_json().encode()
            return file_response(request, content, "application/json", sha256(content))
        if name not in given:
            raise WireError(f"the page may not read the file {name[:64]!r} of the export", 404)
        if EXPORT + name not in kept:
            try:
                content = await asyncio.to_thread(read_verified, folder, manifest, name)
            except ExportError as err:
                raise WireError(
                    f"{name} is not on this server; copy the whole export", 404
                ) from err
            kept[EXPORT + name] = content, "application/octet-stream", manifest.files[name]
        return file_response(request, *kept[EXPORT + name])

    return [
        Route("/", index), Route(f"{OWN}{{file:path}}", own), Route(f"{EXPORT}{{file}}", file)
    ]  # fmt: skip
