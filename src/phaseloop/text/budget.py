"""What one run of a chat template may cost: operations, amount of data, time.

Every operation of a template takes a step before it runs, and states how much data it will make
before making it.  No single operation can make or look through more than the amount allowed, so the
clock, which is looked at with every step, is never waited for long.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from types import NoneType
from typing import Any, TypeAlias, cast

from jinja2 import Undefined
from msgspec import Struct

Value: TypeAlias = Any  # whatever a template may hold

SEARCHED_PER_UNIT = 64  # comparisons of characters that take about as long as making one
WEIGHED_PER_STEP = 4_096  # elements that are gone through between two looks at the clock
EMPTY: dict[str, str] = {}
VIEWS = (type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items()))
CONTAINERS = cast(tuple[type[Value], ...], (list, tuple, dict, *VIEWS))
PRINTABLE = (*CONTAINERS, int, float, NoneType, Undefined, range)


class TemplateError(ValueError):
    """A chat template that cannot be used, or that cannot be used with these messages."""

    def __init__(self, problem: str, *, refused: bool = False, line: int | None = None) -> None:
        """`refused`: the template itself said that it does not take these messages."""
        place = "chat template" if line is None else f"chat template, line {line}"
        remedy = "" if refused else "; --chat-template and --chat-template-file choose another"
        super().__init__(f"{place}: {problem}{remedy}")
        self.problem = problem
        self.refused = refused


class Limits(Struct, frozen=True, gc=False):
    """For one run.  Volume is characters and elements of all that is made on the way."""

    source_length_max: int = 1 << 20
    steps_max: int = 5_000_000
    volume_max: int = 1 << 26
    literal_elements_max: int = 10_000  # of a list or mapping that a template builds, all levels
    time_ns_max: int = 5_000_000_000


class Budget:
    """What is left of the limits in one run."""

    def __init__(self, limits: Limits, clock_ns: Callable[[], int]) -> None:
        self.limits = limits
        self._clock_ns = clock_ns
        self._steps = limits.steps_max
        self._volume = limits.volume_max
        self._deadline_ns = clock_ns() + limits.time_ns_max

    def step(self) -> None:
        """Account for one operation.  Raises TemplateError."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateError(f"more than {self.limits.steps_max} operations for one prompt")
        if self._clock_ns() > self._deadline_ns:
            seconds = self.limits.time_ns_max / 1e9
            raise TemplateError(f"takes more than {seconds:g} s for one prompt")

    def make(self, amount: int) -> None:
        """Account for characters or elements that are about to be made.  Raises TemplateError."""
        self._volume -= amount
        if self._volume < 0:
            raise TemplateError(f"makes more than {self.limits.volume_max} characters of data")

    def search(self, text: str, part: str) -> None:
        """Account for looking for a part, or for any of its characters, everywhere in a text."""
        self.make(len(text) * len(part) // SEARCHED_PER_UNIT)

    def check_literal(self, value: object) -> None:
        """Bound what a template builds: by nesting, few operations could make it endless."""
        limit = self.limits.literal_elements_max
        count = sum(1 for _ in islice(walk(value), limit + 1))
        if count > limit:
            raise TemplateError(f"builds a list or mapping of more than {limit} elements")
        self.make(count)

    def weigh(self, value: object) -> None:
        """Account for comparing a value, and all that is in it, with another."""
        if not isinstance(value, CONTAINERS):
            return self.make(weight_of(value))
        items = walk(value)
        while weights := [weight_of(item) for _, item in islice(items, WEIGHED_PER_STEP)]:
            self.step()
            self.make(sum(weights))

    def indent(self, value: object, width: int) -> None:
        """Account for the blanks before each line, if a value's elements get lines of their own."""
        items = walk(value)
        while depths := [depth for depth, _ in islice(items, WEIGHED_PER_STEP)]:
            self.step()
            self.make(2 * width * sum(depths))  # a container's end has a line as well

    def text_of(self, value: object) -> str:
        """A value as a template prints it.  Raises TemplateError."""
        if isinstance(value, str):
            return value
        self.make(self.length_of(value))
        return str(value)

    def length_of(self, value: object) -> int:
        """About the length of a value's text; raises TemplateError where there is no such text.

        Functions, iterators and the like have none: what Python prints for them holds addresses.
        """
        total = 0
        for _, item in walk(value):
            total += 2
            if isinstance(item, str):
                total += len(item)
            elif not isinstance(item, PRINTABLE):
                raise TemplateError(f"prints a value of type {type(item).__name__}")
            if total > self.limits.volume_max:
                raise TemplateError(f"prints more than {self.limits.volume_max} characters")
        return total


def weight_of(item: object) -> int:
    """Of one comparison."""
    return 1 + len(item) // SEARCHED_PER_UNIT if isinstance(item, str) else 1


def walk(value: object) -> Iterator[tuple[int, object]]:
    """A value and all that is in it, shared parts each time; how deep, and what."""
    waiting = [iter((value,))]
    while waiting:
        for item in waiting[-1]:
            yield len(waiting) - 1, item
            if isinstance(item, CONTAINERS):
                waiting.append(iter(children(item)))
                break
        else:
            waiting.pop()


def children(value: object) -> Iterable[object]:
    """A container's elements; for a mapping keys and values."""
    if isinstance(value, dict):
        return chain.from_iterable(cast(dict[object, object], value).items())
    return cast(Iterable[object], value)
