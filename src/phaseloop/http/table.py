"""The form in which each module names its routes, for app.py to put together."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, TypeAlias

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]  # a Response is an ASGIApp


class Row(Struct, frozen=True):
    """One endpoint and the paths that lead to it; the first is the one to document."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    paths: tuple[str, ...]
    endpoint: Endpoint


def get(endpoint: Endpoint, *paths: str) -> Row:
    return Row("GET", paths, endpoint)


def post(endpoint: Endpoint, *paths: str) -> Row:
    return Row("POST", paths, endpoint)


def put(endpoint: Endpoint, *paths: str) -> Row:
    return Row("PUT", paths, endpoint)


def delete(endpoint: Endpoint, *paths: str) -> Row:
    return Row("DELETE", paths, endpoint)


def routes_of(rows: Iterable[Row], prefix: str) -> list[Route]:
    """One route per path, so that whoever uses a wrong method is told all of the right ones."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for row in rows:
        for path in row.paths:
            by_method = by_path.setdefault(path, {})
            assert row.method not in by_method, f"{row.method} {path} is listed twice"
            by_method[row.method] = row.endpoint
    return [
        Route(prefix + path, dispatch(by_method), methods=list(by_method))
        for path, by_method in by_path.items()
    ]


def dispatch(by_method: dict[str, Endpoint]) -> Endpoint:
    async def endpoint(request: Request) -> ASGIApp:
        # Whoever has GET has HEAD: the server beneath leaves the body out.
        method = "GET" if request.method == "HEAD" else request.method
        return await by_method[method](request)

    return endpoint
