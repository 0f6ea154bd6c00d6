"""The page at `/` as the server gives it: what is open, what is not, and that all is there."""

import asyncio
import json
import mimetypes
import re
import tomllib
from collections.abc import Coroutine
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.made import NOISY, Answer, call, head, manifest, started, write_export

from splitveil.serve import page
from splitveil.serve.admission import Limits
from splitveil.serve.manifest import ATTACKER, CLIENT, SERVER, read_manifest, sha256
from splitveil.serve.page import FOLDER, RUNTIME, RUNTIME_FILES, pieces
from splitveil.serve.server import load_app, make_app
from splitveil.serve.stages import pack_noise

ROOT = Path(__file__).resolve().parents[2]
CROWD = 300  # more than requests may be in flight
TOKEN = "0123456789abcdef"  # noqa: S105
BEARER = {"Authorization": f"Bearer {TOKEN}"}
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {f"/page/{p.name}": p for p in sorted(FOLDER.glob("*.*")) if p.name != "index.html"}
OWN = {"/": FOLDER / "index.html", **FILES}


def run(what: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(what)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return write_export(tmp_path / "e")


@pytest.mark.parametrize("path", OWN)
def test_the_page_and_its_files_need_no_token(export: Path, path: str) -> None:
    found = run(call(load_app(export, token=TOKEN), "GET", path))
    assert found.status == 200
    rules = dict(
        part.strip().split(" ", 1) for part in found.headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert set(rules.values()) == {"'none'", "'self'", "'self' 'wasm-unsafe-eval'"}
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["cross-origin-opener-policy"] == "same-origin"
    assert found.headers["cross-origin-resource-policy"] == "same-origin"
    assert found.headers["permissions-policy"] == "camera=(), geolocation=(), microphone=()"
    assert found.headers["content-type"] == TYPES[OWN[path].suffix]


def test_files_of_the_export_need_the_token(export: Path) -> None:
    app = load_app(export, token=TOKEN)
    for file in ("manifest.json", CLIENT, SERVER):
        assert run(call(app, "GET", f"/export/{file}")).status == 401
    told = run(call(app, "GET", "/export/manifest.json", b"", BEARER))
    assert told.json == json.loads(read_manifest(export).to_json())
    client = run(call(app, "GET", f"/export/{CLIENT}", b"", BEARER))
    assert client.body == (export / CLIENT).read_bytes()
    for file in (SERVER, ATTACKER, "noise-0.f32", "..%2Fmanifest.json", "x"):
        refused = run(call(app, "GET", f"/export/{file}", b"", BEARER))
        assert refused.status == 404, file
        assert "may not read the file" in refused.json["error"]


def test_a_file_that_was_changed_or_is_not_here_is_not_given(export: Path) -> None:
    app = load_app(export)
    (export / CLIENT).write_bytes(b"other")
    for _ in range(2):
        found = run(call(app, "GET", f"/export/{CLIENT}"))
        assert (found.status, found.json) == (
            404, {"error": "client.onnx is not on this server; copy the whole export"},
        )  # fmt: skip
        (export / CLIENT).unlink(missing_ok=True)


def test_the_noise_of_a_learned_stage_is_given(tmp_path: Path) -> None:
    content = pack_noise(np.full((1, 2, 3), 0.5), np.zeros((1, 2, 3)))
    stage = {"kind": "learned", "noise": "gaussian", "file": "noise-0.f32", "std": 0.5}
    (tmp_path / "noise-0.f32").write_bytes(content)
    made = manifest(stages=(stage,), files={"noise-0.f32": sha256(content)})
    found = run(call(make_app(made, head, folder=tmp_path), "GET", "/export/noise-0.f32"))
    assert found.body == content


def test_a_browser_that_has_the_file_is_told_so(export: Path) -> None:
    app = load_app(export)
    for path in ("/", "/page/main.js", f"/export/{CLIENT}"):
        first = run(call(app, "GET", path))
        again = run(call(app, "GET", path, b"", {"If-None-Match": first.headers["etag"]}))
        assert (again.status, again.body) == (304, b"")
        assert first.headers["cache-control"] == "no-cache"
        for name in ("cache-control", "content-security-policy", "etag", "x-content-type-options"):
            assert again.headers[name] == first.headers[name]


def test_the_files_are_those_of_the_folder_and_nothing_beside_it(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a system that has no table of types of its own.
    own_table = mimetypes.MimeTypes(())
    monkeypatch.setattr("starlette.responses.guess_type", own_table.guess_type)
    app = load_app(export, token=TOKEN)
    for path, file in FILES.items():
        assert run(call(app, "GET", path)).headers["content-type"] == TYPES[file.suffix]
        assert run(call(app, "GET", path)).body == file.read_bytes()
    for path in ("/page/../server.py", "/page/%2e%2e/server.py", "/page//etc/passwd", "/page/x.js",
                 "/page/", "/page/ort/../../server.py"):  # fmt: skip
        refused = run(call(app, "GET", path))
        assert (refused.status, set(refused.json)) == (404, {"error"}), path
    assert run(call(app, "POST", "/page/main.js")).status == 405


def test_without_the_runtime_the_page_says_so(
    export: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = load_app(export, token=TOKEN)
    monkeypatch.setattr(page, "has_runtime", lambda: False)
    text = run(call(app, "GET", "/")).body.decode()
    assert '<body data-runtime="missing" data-token="needed">' in text
    assert "make web" in text
    monkeypatch.setattr(page, "has_runtime", lambda: True)
    here = run(call(load_app(export), "GET", "/")).body.decode()
    assert '<body data-runtime="here" data-token="none">' in here
    monkeypatch.undo()
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    without = load_app(export, token=TOKEN)
    runtime = run(call(without, "GET", f"/page/{RUNTIME}/ort.wasm.min.mjs"))
    assert (runtime.status, runtime.json["error"][-18:]) == (404, "fetch it: make web")
    (tmp_path / RUNTIME).mkdir()
    for name in RUNTIME_FILES:
        (tmp_path / RUNTIME / name).write_bytes(name.encode())
        fetched = run(call(without, "GET", f"/page/{RUNTIME}/{name}"))
        assert (fetched.status, fetched.body) == (200, name.encode())
        kind = "application/wasm" if name.endswith(".wasm") else "text/javascript; charset=utf-8"
        assert fetched.headers["content-type"] == kind
        assert fetched.headers["cross-origin-resource-policy"] == "same-origin"


def test_an_application_without_a_folder_has_no_page() -> None:
    app = make_app(manifest(stages=NOISY), head, None, TOKEN)
    assert run(call(app, "GET", "/")).status == 401
    assert run(call(app, "GET", "/", b"", BEARER)).status == 404


def test_the_page_leaves_the_service_as_it_is(export: Path) -> None:
    async def asked() -> int:
        async with started(load_app(export)) as app:
            await call(app, "GET", "/")
            return (await call(app, "GET", "/v2/health/ready")).status

    assert asyncio.run(asked()) == 200


def test_visitors_who_load_slowly_keep_no_request_out(export: Path) -> None:
    async def crowd() -> tuple[int, ...]:
        async with started(load_app(export, limits=Limits(max_in_flight=1))) as app:
            waiting = asyncio.Event()

            async def slow() -> int:
                sent: list[Any] = []

                async def send(message: Any) -> None:  # noqa: ANN401
                    sent.append(message)
                    await waiting.wait()

                async def receive() -> Any:  # noqa: ANN401
                    await asyncio.sleep(60)

                scope = {
                    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
                    "method": "GET", "scheme": "http", "path": "/", "raw_path": b"/",
                    "query_string": b"", "root_path": "", "headers": [],
                }  # fmt: skip
                await app(scope, receive, send)
                status: int = sent[0]["status"]
                return status

            slow_ones = [asyncio.ensure_future(slow()) for _ in range(CROWD)]
            await asyncio.sleep(0.1)
            page_then = (await call(app, "GET", f"/export/{CLIENT}")).status
            health = (await call(app, "GET", "/v2")).status
            waiting.set()
            served = {await one for one in slow_ones}
            return page_then, health, *served, (await call(app, "GET", "/")).status

    assert asyncio.run(crowd()) == (200, 200, 200, 200)


def test_large_files_go_out_in_pieces() -> None:
    async def collected(content: bytes) -> list[bytes]:
        return [piece async for piece in pieces(content)]

    content = bytes(range(256)) * 600
    found = asyncio.run(collected(content))
    assert b"".join(found) == content
    assert [len(p) for p in found] == [65536, 65536, 600 * 256 - 2 * 65536]
    assert asyncio.run(collected(b"")) == []


class Elements(HTMLParser):
    """Start tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_has_no_inline_code_and_every_control_a_name() -> None:
    elements = Elements((FOLDER / "index.html").read_text(encoding="utf-8")).found
    ids = {a["id"] for _, a in elements if "id" in a}
    labelled = {a["for"] for tag, a in elements if tag == "label"}
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        if tag == "script":
            assert attributes.get("src")
        if tag == "input":
            assert attributes["id"] in labelled
        if tag == "canvas" and attributes["id"] != "ramp":  # its legend is hidden from readers
            assert attributes["aria-label"]
            assert attributes["role"] == "img"
    used = set(re.findall(r'at\("([a-z-]+)"\)', (FOLDER / "main.js").read_text(encoding="utf-8")))
    assert used <= ids


def test_scripts_reach_for_nothing_outside() -> None:
    for path in FOLDER.glob("*.*"):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)//\s.*$", "", text), path.name
        for word in ("innerHTML", "eval(", "localStorage", "sessionStorage", "document.cookie"):
            assert word not in text, path.name


def test_every_file_is_served_and_packed() -> None:
    runtime = [f"{RUNTIME}/{name}" for name in RUNTIME_FILES]
    names = [*(p.name for p in OWN.values()), *runtime]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["splitveil"]
    for name in names:
        assert any(fnmatch(f"serve/web/{name}", pattern) for pattern in patterns), name
    assert "serve/openapi.json" in patterns


def test_the_lock_file_names_no_host_and_has_every_hash() -> None:
    text = (ROOT / "web" / "package-lock.json").read_text(encoding="utf-8")
    assert "resolved" not in text
    assert "://" not in text
    packages = json.loads(text)["packages"]
    wanted = json.loads((ROOT / "web" / "package.json").read_text(encoding="utf-8"))
    assert packages[""]["dependencies"] == wanted["dependencies"]
    assert all(p["integrity"].startswith("sha512-") for name, p in packages.items() if name)
    assert "npm ci" in (ROOT / "Makefile").read_text(encoding="utf-8")
