"""Decoding JSON that came from a file, and saying where it is not what it should be."""

import re
from typing import TypeVar

import msgspec

Decoded = TypeVar("Decoded")

NAMED_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Malformed(Exception):
    """`field` is a dotted path, empty for the whole."""

    def __init__(self, field: str, message: str) -> None:
        self.field, self.message = field, message
        super().__init__(message)


def decode(decoder: msgspec.json.Decoder[Decoded], content: bytes) -> Decoded:
    """Raises Malformed."""
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        if content.startswith(BYTE_ORDER_MARK):
            what = "begins with a byte order mark, which some editors add; save it without one"
            raise Malformed("", what) from None
        raise Malformed(*explain_decode_error(str(error))) from None
    except RecursionError:
        raise Malformed("", "nested too deeply") from None


def explain_decode_error(error: str) -> tuple[str, str]:
    """Split a message of msgspec's into (dotted field or "", what is wrong with it)."""
    message, _, path = error.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if missing := NAMED_FIELD.fullmatch(message):
        fault, name = missing.groups()
        return ".".join(filter(None, (field, name))), fault.lower()
    return field, message if message[1].isupper() else message[0].lower() + message[1:]
