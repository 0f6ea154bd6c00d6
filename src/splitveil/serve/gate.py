"""The door of the server: who may come in, and how many at once."""

import hashlib
import hmac
from collections.abc import Callable, Mapping

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitveil.errors import ConfigError
from splitveil.serve.metrics import ServerMetrics

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")  # for probes, which have no token
RETRY = {"Retry-After": "1"}
BEARER = {"WWW-Authenticate": "Bearer"}
MIN_TOKEN = 16
MAX_VISITORS = 32  # who load the page: they may be slow, and must not keep requests out


def refuse(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer that says no, and why."""
    return JSONResponse({"error": reason}, status, headers)


class Gate:
    """Lets in who has the token, as many as fit, and counts every answer.

    `is_open` says which paths need no token, `is_page` which are of the page: they have a bound of
    their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        max_in_flight: int,
        token: str | None,
        *,
        is_open: Callable[[str], bool] = OPEN_PATHS.__contains__,
        is_page: Callable[[str], bool] = lambda path: False,
    ) -> None:
        if token is not None and not good_token(token):
            raise ConfigError(
                f"a token is at least {MIN_TOKEN} printable ASCII characters without spaces; "
                "make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        self._app, self._metrics, self._max_in_flight = app, metrics, max_in_flight
        self._is_open, self._is_page, self._visitors = is_open, is_page, 0
        self._token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.add(str(message["status"]))
            await send(message)

        if not self._is_open(scope["path"]) and not self._allowed(scope):
            answer = refuse(401, "a valid bearer token is needed", BEARER)
            await answer(scope, receive, counted)
        elif self._is_page(scope["path"]):
            await self._visit(scope, receive, counted)
        elif scope["path"] in OPEN_PATHS:  # a full server is alive: no reason to restart it
            await self._app(scope, receive, counted)
        elif self._metrics.in_flight >= self._max_in_flight:
            answer = refuse(503, "too many requests at once; try again later", RETRY)
            await answer(scope, receive, counted)
        else:
            self._metrics.in_flight += 1
            try:
                await self._app(scope, receive, counted)
            finally:
                self._metrics.in_flight -= 1

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._visitors >= MAX_VISITORS:
            await refuse(503, "too many load the page; try again later", RETRY)(
                scope, receive, send
            )
            return
        self._visitors += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._visitors -= 1

    def _allowed(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, sent = (given[0] if given else b"").partition(b" ")
        # Digests have one length: the comparison takes the same time whatever was sent.
        equal = hmac.compare_digest(_digest(sent), self._token)
        return equal and scheme.lower() == b"bearer"


def good_token(token: str) -> bool:
    """Long enough to resist guessing, and fit for a header."""
    printable = token.isascii() and token.isprintable() and " " not in token
    return printable and len(token) >= MIN_TOKEN


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
