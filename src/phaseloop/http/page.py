"""The page at the root, where a browser lands: chat, and the timeline beside it.

Its files need neither a model nor a key, since they show nothing of the server by themselves.
Nothing on the page comes from anywhere else, which the browser is told to hold it to.
"""

from starlette.requests import Request
from starlette.responses import Response

from .page_files import ASSETS, INDEX
from .table import get

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
PARTS = tuple(f"/page/{name}" for name in ASSETS if name != INDEX)
PATHS = ("/", *PARTS)


async def page(request: Request) -> Response:
    return answer(request, INDEX)


async def part(request: Request) -> Response:
    return answer(request, request.url.path.rpartition("/")[2])


def answer(request: Request, name: str) -> Response:
    """Raises KeyError for a name that no route leads to."""
    asset = ASSETS[name]
    headers = HEADERS | {"ETag": asset.tag}
    if asset.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


ROWS = (get(page, "/"), get(part, *PARTS))
