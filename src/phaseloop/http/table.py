"""The form in which each module names its routes, for app.py to put together."""

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from msgspec import Struct
from starlette.requests import Request
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
