"""Keys: who may use the server."""

from collections.abc import Collection
from hmac import compare_digest

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, error_response

BEARER = "bearer "

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class ApiKeys:
    """Asks for a key, in `Authorization: Bearer` or in `X-Api-Key`, except on the open paths."""

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths
        if asks and not self._may(Headers(scope=scope)):
            log.warning("refused: no key, or a wrong one", path=scope["path"])
            refusal = ApiError("authentication_error", "Invalid API Key")
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _may(self, headers: Headers) -> bool:
        shown = [headers.get("x-api-key", ""), without_bearer(headers.get("authorization", ""))]
        # Every pair is compared, each in constant time, so the time tells nothing of the keys.
        # Headers are bytes that were read as Latin-1.
        equal = [
            compare_digest(one.encode("latin-1"), key) for one in shown if one for key in self._keys
        ]
        return any(equal)


def without_bearer(value: str) -> str:
    return value[len(BEARER) :] if value.lower().startswith(BEARER) else value
