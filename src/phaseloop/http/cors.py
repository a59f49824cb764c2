"""Which pages of other origins may use the server, told as llama-server tells browsers."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANY = "*"
LOCALHOST = "localhost"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
PREFLIGHT = {
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}


class Cors:
    """Echoes the origins that may, and answers OPTIONS on any path, before keys are asked for.

    `origins` is "*" for any, "localhost" for those on this machine, else a comma-separated list.
    """

    def __init__(self, app: ASGIApp, origins: str) -> None:
        self.app = app
        self._origins = [origin.strip() for origin in origins.split(",")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        origin = Headers(scope=scope).get("origin", "")
        allowed = bool(origin) and self._allows(origin)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.add_vary_header("Origin")
                if allowed:
                    headers["Access-Control-Allow-Origin"] = origin
            await send(message)

        if scope["method"] == "OPTIONS":
            await Response(b"", 200, PREFLIGHT, media_type="text/html")(scope, receive, send_marked)
        else:
            await self.app(scope, receive, send_marked)

    def _allows(self, origin: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        return LOCALHOST in self._origins and is_loopback(origin)


def is_loopback(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in LOOPBACK_HOSTS
    except ValueError:  # not an origin at all
        return False
