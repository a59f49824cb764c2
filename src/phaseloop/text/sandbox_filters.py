"""The filters that a chat template may use: jinja2's own, and those that models' templates expect.

What can blow a value up out of proportion is either not among them, or says first how much it will
make.
"""

import functools
import json
from collections.abc import Callable, Iterable, Sized
from typing import TypeAlias, cast

from jinja2.filters import FILTERS

from .budget import CONTAINERS, Budget, TemplateError, Value
from .sandbox_strings import joined, percent_formatted, replaced

Filter: TypeAlias = Callable[..., Value]

BUILT_IN = cast(dict[str, Filter], FILTERS)

# Take as long as their input has elements, and make about as much.
IN_PROPORTION = (
    *("abs", "capitalize", "count", "d", "default", "first", "float", "int", "items", "last"),
    *("length", "list", "lower", "map", "reject", "rejectattr", "reverse", "select", "selectattr"),
    *("title", "upper", "wordcount"),
)
COMPARING = ("dictsort", "max", "min", "sort")  # look at all that is in the elements
HASHING = ("unique",)  # may have to compare each with each, if somebody wants it so
INDENT_MAX = 1_000
INTEGER_BITS_MAX = 16_384
PAIRS_PER_UNIT = 8


class Filters:
    """All filters, each accounting to one budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def table(self) -> dict[str, Filter]:
        own: dict[str, Filter] = {
            "e": self.escape,
            "escape": self.escape,
            "format": self.format,
            "from_json": self.from_json,
            "indent": self.indent,
            "join": self.join,
            "replace": self.replace,
            "safe": self.string,  # nothing is escaped that would have to be marked
            "string": self.string,
            "tojson": self.to_json,
            "trim": self.trim,
        }
        taken = {name: self._guarded(BUILT_IN[name], self._measured) for name in IN_PROPORTION}
        taken |= {name: self._guarded(BUILT_IN[name], self._weighed) for name in COMPARING}
        taken |= {name: self._guarded(BUILT_IN[name], self._paired) for name in HASHING}
        return taken | own

    def string(self, value: object) -> str:
        self._budget.step()
        return self._budget.text_of(value)

    def escape(self, value: object) -> str:
        text = self.string(value)
        self._budget.make(6 * len(text))
        return str(BUILT_IN["escape"](text))

    def format(self, value: object, *args: object, **kwargs: object) -> str:
        return percent_formatted(self._budget, self.string(value), kwargs or args)

    def from_json(self, value: object) -> Value:
        return json.loads(self.string(value))

    def indent(
        self, value: object, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = self.string(value)
        size = len(width) if isinstance(width, str) else width
        if size > INDENT_MAX:
            raise TemplateError(f"indents by more than {INDENT_MAX} characters")
        self._budget.make(len(text) + size * (1 + len(text.splitlines())))
        return BUILT_IN["indent"](text, width, first, blank)

    def join(self, value: object, d: object = "", attribute: object = None) -> str:
        if attribute is not None:
            raise TemplateError("join with an attribute is not supported: use map before it")
        separator = self.string(d)
        return joined(self._budget, separator, cast(Iterable[object], value))

    def replace(self, value: object, old: object, new: object, count: int | None = None) -> str:
        parts = (self.string(value), self.string(old), self.string(new))
        return replaced(self._budget, *parts, -1 if count is None else count)

    def trim(self, value: object, chars: str | None = None) -> str:
        text = self.string(value)
        self._budget.search(text, chars or "")
        self._budget.make(len(text))
        return text.strip(chars)

    def to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As models' templates expect it: plain characters, and nothing escaped for HTML."""
        self._budget.step()
        if indent is not None and indent > INDENT_MAX:
            raise TemplateError(f"indents by more than {INDENT_MAX} characters")
        self._budget.make(self._budget.length_of(value))
        self._budget.indent(value, indent or 0)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _guarded(self, function: Filter, prepare: Callable[[object], object]) -> Filter:
        """jinja2's filter, with its input prepared and its result accounted for."""
        place = int(hasattr(function, "jinja_pass_arg"))  # behind the context that it wants passed

        @functools.wraps(function)
        def guarded(*args: Value, **kwargs: Value) -> Value:
            self._budget.step()
            prepared = prepare(args[place])
            result = function(*args[:place], prepared, *args[place + 1 :], **kwargs)
            if isinstance(result, Sized):
                self._budget.make(len(result))
            elif isinstance(result, int) and result.bit_length() > INTEGER_BITS_MAX:
                raise TemplateError("makes a number beyond all bounds")
            return result

        return guarded

    def _measured(self, value: object) -> object:
        if isinstance(value, Sized):
            self._budget.make(len(value))
        return value

    def _weighed(self, value: object) -> object:
        if not isinstance(value, (str, *CONTAINERS)) and isinstance(value, Iterable):
            value = list(cast(Iterable[object], value))
        self._budget.weigh(value)
        return value

    def _paired(self, value: object) -> object:
        value = self._weighed(value)
        if isinstance(value, Sized):
            self._budget.make(len(value) ** 2 // PAIRS_PER_UNIT)
        return value
