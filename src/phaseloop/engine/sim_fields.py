"""Reads a TOML file field by field, and says exactly what is wrong with it.

Every message names the file, the key, the value and what is allowed.  Tables in arrays are counted
from 1, as a reader of the file counts them.
"""

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias, cast

NS = 1_000_000_000
FILE_BYTES_MAX = 1 << 24
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SECONDS_MAX = 1e9  # some 30 years; in nanoseconds it fits 64 bits with room to spare

Content: TypeAlias = dict[str, object]


class SettingError(Exception):
    """Something the user wrote cannot be used.  The message is complete."""


def read_toml(path: Path) -> "Table":
    """The file's root table.  Raises SettingError if there is no such file or it is no TOML."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror or error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise SettingError(f"{path}: {len(content)} bytes, at most {FILE_BYTES_MAX} are read")
    if content.startswith(BYTE_ORDER_MARK):
        raise SettingError(
            f"{path}: begins with a byte order mark, which some editors add; save it without one"
        )
    try:
        return Table(path, "", tomllib.loads(content.decode()))
    except UnicodeDecodeError as error:
        raise SettingError(f"{path}: not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        last = content.count(b"\n") + 1
        where = str(error).replace("at end of document", f"at the file's end, line {last}")
        raise SettingError(f"{path}: not TOML: {where}") from None
    except RecursionError:
        raise SettingError(f"{path}: nested too deeply") from None


class Table:
    """One table.  Ask for each key it may have, then call `done`: any other key is an error."""

    def __init__(self, path: Path, at: str, content: Content) -> None:
        self.path = path
        self.at = at  # where in the file, such as "stream[2].prompt"; empty for the root
        self._content = content
        self._asked: list[str] = []

    def __contains__(self, key: str) -> bool:
        """Whether the file has it; asking makes it a key that the table may have."""
        self._know(key)
        return key in self._content

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """`default=None` means that the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, f"must be an integer from {low} to {high}")
        if not low <= value <= high:
            raise self.error(key, value, f"must be from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._value(key, default)
        return self._number(key, value, low, high)

    def numbers(self, key: str, low: float, high: float) -> list[float]:
        """A list of at least one number."""
        return [self._number(key, value, low, high) for value in self._list(key)]

    def integers(self, key: str, low: int, high: int) -> list[int]:
        """A list of at least one integer."""
        values = self._list(key)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise self.error(key, value, f"must hold integers from {low} to {high}")
        return cast(list[int], values)

    def seconds(self, key: str, low: float, high: float, default: float | None = None) -> int:
        """Given in seconds, returned in nanoseconds."""
        return nanoseconds(self.number(key, low, high, default))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None, among: Iterable[str] = ()) -> str:
        """Any text of 1 to 200 characters, or one of those in `among`."""
        value = self._value(key, default)
        allowed = list(among)
        if allowed and value not in allowed:
            hint = nearest(str(value), allowed)
            raise self.error(key, value, f"must be one of {', '.join(allowed)}{hint}")
        if not isinstance(value, str) or not 1 <= len(value) <= 200:
            raise self.error(key, value, "must be a text of 1 to 200 characters")
        return value

    def table(self, key: str) -> "Table":
        value = self._value(key, None)
        if not isinstance(value, dict):
            raise self.error(key, value, "must be a table")
        return Table(self.path, self.key_at(key), cast(Content, value))

    def tables(self, key: str) -> list["Table"]:
        """An array of tables; empty if the key is absent."""
        self._know(key)
        value: object = self._content.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, value, f"must be an array of tables, written [[{key}]]")
        tables: list[Table] = []
        for number, content in enumerate(cast(list[object], value), start=1):
            if not isinstance(content, dict):
                raise self.error(key, content, f"must be an array of tables, written [[{key}]]")
            tables.append(Table(self.path, self.key_at(f"{key}[{number}]"), cast(Content, content)))
        return tables

    def value(self, key: str) -> object:
        """As it stands in the file; the key must be there."""
        return self._value(key, None)

    def done(self) -> None:
        """Raises SettingError if the table has a key that nobody asked for."""
        for key in self._content:
            if key not in self._asked:
                allowed = ", ".join(self._asked)
                hint = nearest(key, self._asked)
                at = f"table {self.at}: " if self.at else ""
                message = f"{self.path}: {at}unknown key {key!r}{hint} (known: {allowed})"
                raise SettingError(message)

    def error(self, key: str, value: object, must: str) -> SettingError:
        return SettingError(f"{self.path}: {self.key_at(key)} = {shown(value)}: {must}")

    def missing(self, key: str, why: str = "") -> SettingError:
        return SettingError(f"{self.path}: {self.key_at(key)} is missing{why and f': {why}'}")

    def key_at(self, key: str) -> str:
        return f"{self.at}.{key}" if self.at else key

    def _know(self, key: str) -> None:
        if key not in self._asked:
            self._asked.append(key)

    def _value(self, key: str, default: object) -> object:
        self._know(key)
        value = self._content.get(key, default)
        if value is None:
            raise self.missing(key)
        return value

    def _list(self, key: str) -> list[object]:
        value = self._value(key, None)
        if isinstance(value, list) and value:
            return cast(list[object], value)
        raise self.error(key, cast(object, value), "must be a list of at least one value")

    def _number(self, key: str, value: object, low: float, high: float) -> float:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if number is not None and low <= number <= high:  # no NaN is, nor is infinity
            return float(number)
        raise self.error(key, value, f"must be a number from {low:g} to {high:g}")


def nanoseconds(seconds: float) -> int:
    return round(seconds * NS)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a message, empty where nothing is near."""
    found = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def shown(value: object) -> str:
    """A value as the file has it, cut to a readable length."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
