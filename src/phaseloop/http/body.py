"""A request's body as a JSON object; request_fields.py reads its fields."""

from typing import cast

import msgspec
from starlette.requests import Request

from .errors import invalid
from .request_fields import Fields, Json, shown


async def fields_of(request: Request) -> Fields:
    """Raises ApiError, also for a body that is too large."""
    return Fields(parse_object(await request.body()))


def parse_object(raw: bytes) -> Json:
    """Raises ApiError for what is no JSON, no object, or has numbers beyond 64-bit floats."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise invalid(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is no JSON that can be read: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {shown(value)}")
    return cast(Json, value)
