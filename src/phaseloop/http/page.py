"""The page at the root, where a browser lands: chat, and the timeline beside it.

Its files lie in static/ and are served as they are; they need neither a model nor a key, since they
show nothing of the server by themselves.  Nothing on the page comes from anywhere else, which the
browser is told to hold it to.
"""

from hashlib import blake2b
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from .table import get

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",  # another version of the server has other files
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "worker-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Asset(Struct, frozen=True):
    content: bytes
    media_type: str
    tag: str  # of the content, for a browser that has it already

    def response(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def assets() -> dict[str, Asset]:
    """Every file of static/, by its name."""
    return {
        path.name: asset(path) for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA_TYPES
    }


def asset(path: Path) -> Asset:
    content = path.read_bytes()
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return Asset(content, MEDIA_TYPES[path.suffix], tag)


ASSETS = assets()


async def page(request: Request) -> Response:
    return ASSETS[INDEX].response(request)


async def part(request: Request) -> Response:
    return ASSETS[request.url.path.rpartition("/")[2]].response(request)


PARTS = tuple(f"/page/{name}" for name in ASSETS if name != INDEX)
ROWS = (get(page, "/"), get(part, *PARTS))
PATHS = ("/", *PARTS)
