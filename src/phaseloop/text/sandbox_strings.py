"""Operations on strings that say how long their result will be before they make it."""

import re
from collections.abc import Iterable, Mapping
from typing import cast

from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from .budget import CONTAINERS, Budget, TemplateError, Value

WIDTH = (
    r"[-+ 0#]*\d{0,3}(?:\.\d{1,3})?"  # so a field is at most 999 characters wider than its value
)
PERCENT_FIELD = re.compile(rf"%(?:\(\w*\))?{WIDTH}[sdiufFeEgGxXoc%]")
BRACES_FIELD = re.compile(r"(?:.?[<>=^])?[-+ ]?#?0?\d{0,3}[,_]?(?:\.\d{1,3})?[sdfFeEgGxXobcn%]?")
FIELD_WIDTH_MAX = 999


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    places = text.count(old) if count < 0 else min(count, text.count(old))
    budget.make(len(text) + places * max(0, len(new) - len(old)))
    return text.replace(old, new, count)


def joined(budget: Budget, separator: str, items: Iterable[object]) -> str:
    texts = [budget.text_of(item) for item in items]
    budget.make(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def percent_formatted(budget: Budget, text: str, values: object) -> str:
    """`text % values`, where values are a tuple, a mapping or just one value."""
    fields = PERCENT_FIELD.findall(text)
    if text.count("%") != sum(field.count("%") for field in fields):
        raise TemplateError("formats a text in a way that is not supported")
    budget.make(len(text) + FIELD_WIDTH_MAX * len(fields))
    rows = cast(tuple[object, ...], values) if isinstance(values, tuple) else (values,)
    for value in rows:
        # A mapping's entries may each be used by every field.
        weight = len(fields) if isinstance(value, CONTAINERS) else 1
        budget.make(weight * budget.length_of(value))
    return text % values


class Formatter(SandboxedFormatter):
    """`str.format` with its results accounted for field by field."""

    def __init__(self, environment: SandboxedEnvironment, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget

    def apply(self, text: str, /, *args: Value, **kwargs: Value) -> str:
        return self.vformat(text, args, kwargs)

    def apply_map(self, text: str, values: Mapping[str, Value], /) -> str:
        return self.vformat(text, (), values)

    def format_field(self, value: Value, format_spec: str) -> str:
        if not BRACES_FIELD.fullmatch(format_spec):
            raise TemplateError(
                f"formats a text in a way that is not supported: {format_spec[:40]!r}"
            )
        self._budget.make(FIELD_WIDTH_MAX + self._budget.length_of(value))
        return format(value, format_spec)

    def convert_field(self, value: Value, conversion: str | None) -> Value:
        if conversion is not None:
            self._budget.make(self._budget.length_of(value))
        return super().convert_field(value, conversion)
