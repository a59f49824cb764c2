"""A question about a run's figures, such as `gap_max_ms > 500 and failed == 0`, read and answered.

Grammar, loosest first; names are those of the run's summary, numbers are decimal:

    either     = both ("or" both)*
    both       = one ("and" one)*
    one        = "not" one | "(" either ")" | NAME (">" | ">=" | "<" | "<=" | "==" | "!=") NUMBER

Nothing is ever evaluated as Python.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

Figures: TypeAlias = Mapping[str, float]
Predicate: TypeAlias = Callable[[Figures], bool]

WORD = re.compile(r"\d+\.?\d*|\.\d+|[A-Za-z_]\w*|>=|<=|==|!=|\S", re.ASCII)
NUMBER = re.compile(r"\d+\.?\d*|\.\d+", re.ASCII)
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
DEPTH_MAX = 50  # nested brackets and negations; deeper text is refused, not recursed into


class PredicateError(ValueError):
    """The text is no predicate, or names a figure that the summary lacks."""


def parse_predicate(text: str, names: tuple[str, ...]) -> Predicate:
    """Raises PredicateError, which names the column and what may stand there."""
    reader = Reader(text, names)
    predicate = reader.either(0)
    reader.expect_end()
    return predicate


class Reader:
    """Recursive descent over the words of one predicate."""

    __slots__ = ("index", "names", "text", "words")

    def __init__(self, text: str, names: tuple[str, ...]) -> None:
        self.text = text
        self.names = names
        self.words = split(text)
        self.index = 0

    def either(self, depth: int) -> Predicate:
        parts = [self.both(depth)]
        while self.take("or"):
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else lambda f: any(part(f) for part in parts)

    def both(self, depth: int) -> Predicate:
        parts = [self.one(depth)]
        while self.take("and"):
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else lambda f: all(part(f) for part in parts)

    def one(self, depth: int) -> Predicate:
        if depth > DEPTH_MAX:
            raise PredicateError(f"predicate: nested more than {DEPTH_MAX} deep")
        if self.take("not"):
            inner = self.one(depth + 1)
            return lambda f: not inner(f)
        if self.take("("):
            inner = self.either(depth + 1)
            if not self.take(")"):
                raise self.wrong("')'")
            return inner
        return self.comparison()

    def comparison(self) -> Predicate:
        name = self.peek()
        if name not in self.names:
            raise self.wrong("one of " + ", ".join(self.names))
        self.index += 1
        compare = COMPARISONS.get(self.peek())
        if compare is None:
            raise self.wrong("one of " + " ".join(COMPARISONS))
        self.index += 1
        word = self.peek()
        if NUMBER.fullmatch(word) is None:
            raise self.wrong("a number")
        self.index += 1
        bound = float(word)
        return lambda f: compare(f[name], bound)

    def peek(self) -> str:
        return self.words[self.index][0] if self.index < len(self.words) else ""

    def take(self, word: str) -> bool:
        taken = self.peek() == word
        self.index += taken
        return taken

    def expect_end(self) -> None:
        if self.index < len(self.words):
            raise self.wrong("'and', 'or' or the end")

    def wrong(self, wanted: str) -> PredicateError:
        if self.index < len(self.words):
            word, column = self.words[self.index]
            return PredicateError(f"predicate, column {column + 1}: {word!r} is not {wanted}")
        return PredicateError(f"predicate ends where it needs {wanted}")


def split(text: str) -> list[tuple[str, int]]:
    """Words with their columns; a character that belongs to none is one, and will be refused."""
    return [(match.group(), match.start()) for match in WORD.finditer(text)]
