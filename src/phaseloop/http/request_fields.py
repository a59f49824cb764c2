"""Fields of a JSON object, read with their defaults: each of the right type, or an error by name.

`null` means the default, as does a field that is not there.  A field may have other names; the
first that holds a value counts.  What a number may be is one of two things, as in llama-server:
*held* within its limits without a word, or *bounded* by them, which refuses what lies outside.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from .errors import ApiError, invalid_field, not_supported

Json: TypeAlias = dict[str, Any]
T = TypeVar("T")

INT_MAX = (1 << 31) - 1
FLOAT_MAX = 3.4028234663852886e38  # of 32 bits, in which samplers compute
SHOWN = 40  # characters of a wrong value that an error repeats


class Fields:
    """An object of a request.  `place` is put before the names in errors."""

    def __init__(self, raw: Mapping[str, Any], place: str = "") -> None:
        self.raw = raw
        self._place = place

    def found(self, *names: str) -> tuple[str, Any]:
        """The first of the names that holds a value, and the value; else the first, and None."""
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                return self._place + name, value
        return self._place + names[0], None

    def flag(self, name: str, default: bool) -> bool:
        place, value = self.found(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(place, "true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        place, value = self.found(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(place, "a string", value)
        return value

    def bounded(self, *names: str, default: int, low: int, high: int = INT_MAX) -> int:
        """An integer; refused outside [low, high]."""
        place, value = self.found(*names)
        if value is None:
            return default
        number = whole(place, value)
        if not low <= number <= high:
            raise invalid_field(place, f"must be between {low} and {high}, not {shown(value)}")
        return number

    def held(self, name: str, *, default: int, low: int = -INT_MAX - 1, high: int = INT_MAX) -> int:
        """An integer; the nearest within [low, high] is taken."""
        place, value = self.found(name)
        return default if value is None else max(low, min(high, whole(place, value)))

    def real(self, name: str, *, default: float, low: float = -FLOAT_MAX) -> float:
        """A number; refused below `low`, or beyond what 32 bits hold."""
        place, value = self.found(name)
        if value is None:
            return default
        number = real(place, value)
        if number < low:
            raise invalid_field(place, f"must be at least {low:g}, not {shown(value)}")
        return number

    def held_real(
        self, name: str, *, default: float, low: float = -FLOAT_MAX, high: float = FLOAT_MAX
    ) -> float:
        """A number; the nearest within [low, high] is taken."""
        place, value = self.found(name)
        return default if value is None else max(low, min(high, real(place, value)))

    def nested(self, name: str) -> "Fields":
        """The fields of an object within; none if it is not there."""
        place, value = self.found(name)
        if value is None:
            return Fields({}, f"{place}.")
        if not isinstance(value, dict):
            raise wrong(place, "an object", value)
        return Fields(cast(Json, value), f"{place}.")

    def texts(self, name: str, *, count_max: int, characters_max: int) -> tuple[str, ...] | None:
        """A list of strings, bounded in number and in what they hold together; None without."""
        place, value = self.found(name)
        if value is None:
            return None
        return texts(place, value, count_max=count_max, characters_max=characters_max)

    def refuse(self, name: str, is_harmless: Callable[[Any], bool]) -> None:
        """For what is not built yet: an error, unless the value asks for nothing."""
        place, value = self.found(name)
        if value is not None and not is_harmless(value):
            raise not_supported(f"{place}: not supported yet; leave it out")


def wrong(place: str, wanted: str, value: object) -> ApiError:
    return invalid_field(place, f"must be {wanted}, not {shown(value)}")


def shown(value: object) -> str:
    """A value as an error repeats it: cut short, and what is inside left out."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"  # whose digits would take long to print
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def whole(place: str, value: object) -> int:
    """An integer, also one that was written as 8.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(place, "an integer", value)
    return value


def real(place: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(place, "a number", value)
    if abs(value) > FLOAT_MAX:
        raise invalid_field(place, f"must be a number of 32 bits, not {shown(value)}")
    return float(value)


def texts(place: str, value: object, *, count_max: int, characters_max: int) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise wrong(place, "a list of strings", value)
    entries = cast(list[object], value)
    if len(entries) > count_max:
        raise invalid_field(place, f"{len(entries)} entries, at most {count_max} are allowed")
    found: list[str] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise wrong(f"{place}[{index}]", "a string", entry)
        found.append(entry)
    if sum(map(len, found)) > characters_max:
        raise invalid_field(place, f"more than {characters_max} characters together")
    return tuple(found)


def choice(place: str, value: str, known: Mapping[str, T]) -> T:
    """What a name stands for.  An error lists the names."""
    if value not in known:
        raise invalid_field(place, f"{shown(value)} is unknown; known are {listed(known)}")
    return known[value]


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def is_empty(value: object) -> bool:
    """Whether a list, an object or a text asks for nothing; `false` and 0 do, too."""
    return not value if isinstance(value, Sequence | Mapping | int | float) else False
