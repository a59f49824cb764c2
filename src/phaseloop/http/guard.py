"""What every request passes before it reaches a route, from the outside in.

    Envelope    names the request, marks the answer, tells the log how it went
    Cors        (cors.py)
    Faults      an exception of ours becomes a plain 500; its traceback goes to the log alone
    Gate        503 while there is nothing to serve
    ApiKeys     (auth.py)
    BodyLimit   no more bytes than the operator allows

All are plain ASGI: they neither buffer answers nor hide that a client has left.
"""

import secrets
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

import structlog
from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response, invalid, unavailable
from .served import Serving

SERVER = "phaseloop"
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID_LENGTH_MAX = 128
RETRY_LOADING_S = 1

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Exchange(Struct):
    """One request and its answer, for the log.  `status` stays None if there was no answer."""

    request_id: str
    method: str
    path: str
    client: str
    status: int | None = None
    duration_ns: int = 0


Observe = Callable[[Exchange], None]


class Envelope:
    def __init__(
        self, app: ASGIApp, observe: Observe, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.app = app
        self._observe = observe
        self._clock_ns = clock_ns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = exchange_of(scope)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["Server"] = SERVER
                headers[REQUEST_ID_HEADER] = exchange.request_id
            await send(message)

        with self._observed(exchange):
            await self.app(scope, receive, send_marked)

    @contextmanager
    def _observed(self, exchange: Exchange) -> Generator[None]:
        start_ns = self._clock_ns()
        try:
            with structlog.contextvars.bound_contextvars(http_request=exchange.request_id):
                yield
        finally:
            exchange.duration_ns = self._clock_ns() - start_ns
            self._observe(exchange)


def exchange_of(scope: Scope) -> Exchange:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    usable = 0 < len(given) <= REQUEST_ID_LENGTH_MAX and given.isascii() and given.isprintable()
    client = scope.get("client")
    return Exchange(
        request_id=given if usable else f"req_{secrets.token_hex(16)}",
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "",
    )


class Faults:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def send_watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_watched)
        except ClientDisconnect:
            log.debug("the client left before its request was complete", path=scope["path"])
        except Exception:
            log.exception("a request failed", method=scope["method"], path=scope["path"])
            if begun:  # the server cuts the connection: nobody takes the part for the whole
                raise
            fault = ApiError("server_error", "Internal error; the server's log says more")
            await error_response(fault)(scope, receive, send)


class Gate:
    """`open_paths` are those that have an answer without a model."""

    def __init__(self, app: ASGIApp, serving: Serving, open_paths: Collection[str]) -> None:
        self.app = app
        self._serving = serving
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._serving
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if serving.served is None and not is_open:
            refusal = unavailable(serving.excuse(), retry_after_s=RETRY_LOADING_S)
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)


class BodyLimit:
    """Whoever reads a body that is too large, or whose length is none, gets the refusal instead."""

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self.app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length")
        read = 0

        async def receive_limited() -> Message:
            nonlocal read
            if stated is not None:
                self._check(stated_bytes(stated))
            message = await receive()
            read += len(message.get("body", b""))
            self._check(read)
            return message

        await self.app(scope, receive_limited, send)

    def _check(self, count: int) -> None:
        if count > self._bytes_max:
            problem = f"the body has more than the {self._bytes_max} bytes that this server takes"
            raise ApiError("invalid_request_error", problem, status=413)


def stated_bytes(content_length: str) -> int:
    if not (content_length.isascii() and content_length.isdigit() and len(content_length) < 20):
        raise invalid(f"Content-Length: {content_length[:40]!r} is no number of bytes")
    return int(content_length)
