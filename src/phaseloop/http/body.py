"""A request's body as a JSON object; request_fields.py reads its fields.

Making values of JSON holds up everybody, in whatever thread it is done.  So a body is only checked
as a whole, which is fast, and a member becomes values when it is asked for: what nobody knows costs
next to nothing.  What can be asked for is bounded by the number of containers.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from starlette.requests import Request

from .errors import invalid, invalid_field
from .request_fields import Fields

CONTAINERS_MAX = 500_000  # objects and arrays; brackets in texts count, too
KINDS = {
    b"{": "an object",
    b"[": "a list",
    b'"': "a string",
    b"n": "null",
    b"t": "true",
    b"f": "false",
}
members_decoder = msgspec.json.Decoder(dict[str, Raw])
entries_decoder = msgspec.json.Decoder(list[Raw])
T = TypeVar("T")


class Members(Mapping[str, Any]):
    """The members of an object, each read when it is first asked for.  Raises ApiError then."""

    def __init__(self, raw: Mapping[str, Raw]) -> None:
        self._raw = raw
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  whatever JSON has
        if name not in self._read:
            self._read[name] = value_of(name, self._raw[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


async def fields_of(request: Request) -> Fields:
    """Raises ApiError, also for a body that is too large."""
    return Fields(parse_object(await request.body()))


def parse_object(raw: bytes) -> Members:
    """Raises ApiError for what is no JSON, no object, or has more parts than a request needs."""
    return Members(decoded(raw, members_decoder, "a JSON object"))


def parse_list(raw: bytes) -> list[Any]:
    """As parse_object, of a body that is a list."""
    entries = decoded(raw, entries_decoder, "a JSON list")
    return [value_of(f"[{index}]", entry) for index, entry in enumerate(entries)]


def decoded(raw: bytes, decoder: "msgspec.json.Decoder[T]", wanted: str) -> T:
    if raw.count(b"{") + raw.count(b"[") > CONTAINERS_MAX:
        raise invalid(f"the body has more than {CONTAINERS_MAX:,} objects and lists")
    try:
        raw.decode()  # also what nobody will ask for
        return decoder.decode(raw)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 (byte {error.start})") from error
    except msgspec.ValidationError as error:
        kind = KINDS.get(raw.lstrip()[:1], "a number")
        raise invalid(f"the body must be {wanted}, not {kind}") from error
    except msgspec.DecodeError as error:
        raise invalid(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is no JSON that can be read: it is nested too deeply") from error


def value_of(name: str, raw: Raw) -> Any:  # noqa: ANN401
    """Raises ApiError, for numbers beyond 64-bit floats among others."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise invalid_field(name, f"{error}") from error
    except RecursionError as error:
        raise invalid_field(name, "is nested too deeply") from error
