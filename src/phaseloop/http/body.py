"""A request's body: JSON, an object, and fields of the types that a route asks for.

`null` means "as if it were not there" for every field, as it does in llama-server.
"""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar, cast

import msgspec
from starlette.requests import Request

from .errors import invalid, invalid_field

Json: TypeAlias = dict[str, object]

T = TypeVar("T", str, int, bool)
WORDS: dict[type, str] = {str: "a string", int: "an integer", bool: "true or false"}


async def read_object(request: Request) -> Json:
    """The body as a JSON object.  Raises ApiError, also for one that is too large."""
    return parse_object(await request.body())


def parse_object(raw: bytes) -> Json:
    """Raises ApiError."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise invalid(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {kind_of(value)}")
    return cast(Json, value)


def field(body: Mapping[str, object], name: str, kind: type[T], default: T) -> T:
    """Raises ApiError for a value of another type; true and false are no integers."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise invalid_field(name, f"must be {WORDS[kind]}, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """How a JSON value is called in messages to people who write JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
