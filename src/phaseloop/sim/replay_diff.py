"""Where two traces part: the first event, or decision, that is not the same, and what lies behind.

Both are folded with today's reducer, so they differ by what happened, not by who wrote them.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import TypeAlias, cast

from msgspec import Struct
from msgspec.structs import asdict, fields

from phaseloop.core.state import State
from phaseloop.runtime.digest import KV_FIELDS, QUEUE_FIELDS
from phaseloop.runtime.trace import Header

from .replay import Fold, Step
from .replay_text import effect_text, event_text, time_text

LINES_MAX = 12  # per subtree
VALUE_CHARACTERS_MAX = 120
Items: TypeAlias = tuple[object, ...]

PARTS = ("queue", "slots", "kv", "phase")


class Difference(Struct, frozen=True):
    """The first place where two folds differ; a side that has ended there has no step."""

    left: Step | None
    right: Step | None
    same_event: bool  # so it is the decision that differs


def first_difference(left: Fold, right: Fold) -> Difference | None:
    """Fold both until they part.  Raises TraceError."""
    for one, two in zip_longest(left, right):
        if one is None or two is None or one.event != two.event:
            return Difference(one, two, same_event=False)
        if one.effects != two.effects:
            return Difference(one, two, same_event=True)
    return None


def header_lines(left: Header, right: Header) -> list[str]:
    """Fields of the headers that differ, with both values."""
    return [f"header {line}" for line in struct_lines(left, right)]


def difference_lines(difference: Difference) -> list[str]:
    lines: list[str] = []
    for name, step in (("this ", difference.left), ("other", difference.right)):
        if step is None:
            lines.append(f"{name}  has no more events")
            continue
        place = f"event {step.seq}, line {step.line}, {time_text(step.event.at_ns)}"
        lines.append(f"{name}  {place}: {event_text(step.event)}")
        if difference.same_event:
            lines += [f"       -> {effect_text(effect)}" for effect in step.effects] or [
                "       -> nothing"
            ]
    left, right = difference.left, difference.right
    if left is not None and right is not None:
        lines += state_lines(left, right, difference.same_event)
    return lines


def state_lines(left: Step, right: Step, same_event: bool) -> list[str]:
    """The states after the decision that differs, or before the event that does."""
    if same_event:
        one, two, when = left.after, right.after, "after it"
    else:
        one, two, when = left.before, right.before, "before it"
    parts = {part: part_lines(part, one, two) for part in PARTS}
    if not any(parts.values()):
        return [f"the states {when} are equal"]
    lines = [f"the states {when} differ in {' and '.join(p for p in PARTS if parts[p])}"]
    for part, found in parts.items():
        lines += [f"  {part}: {line}" for line in found[:LINES_MAX]]
        if len(found) > LINES_MAX:
            lines.append(f"  {part}: and {len(found) - LINES_MAX} more")
    return lines


def part_of(field: str) -> str:
    if field in QUEUE_FIELDS:
        return "queue"
    if field in KV_FIELDS:
        return "kv"
    return "slots" if field == "slots" else "phase"


def part_lines(part: str, left: State, right: State) -> list[str]:
    """The fields of one part of the state that differ, as deep as they can be told apart."""
    one, two = asdict(left), asdict(right)
    lines: list[str] = []
    for field in fields(State):
        name = field.name
        if part_of(name) != part or one[name] == two[name]:
            continue
        if name == "queue":
            lines += queue_lines(left, right)
        else:
            lines += value_lines(name, one[name], two[name])
    return lines


def queue_lines(left: State, right: State) -> Iterator[str]:
    for request_id in sorted({*left.queue.keys(), *right.queue.keys()}):
        one, two = left.queue.get(request_id), right.queue.get(request_id)
        yield from value_lines(f"request {request_id}", one, two)


def value_lines(name: str, left: object, right: object) -> Iterator[str]:
    if left == right:
        return
    if isinstance(left, Struct) and isinstance(right, Struct) and type(left) is type(right):
        for line in struct_lines(left, right):
            yield f"{name}.{line}"
        return
    if isinstance(left, tuple) and isinstance(right, tuple):
        pairs = list(zip(cast(Items, left), cast(Items, right), strict=False))
        if len(pairs) == len(cast(Items, left)) == len(cast(Items, right)):
            for index, (one, two) in enumerate(pairs):
                yield from value_lines(f"{name}[{index}]", one, two)
            return
    yield f"{name} {shortened(cast(object, left))}, other {shortened(cast(object, right))}"


def struct_lines(left: Struct, right: Struct) -> Iterator[str]:
    one, two = asdict(left), asdict(right)
    for name in one:
        yield from value_lines(name, one[name], two[name])


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[: VALUE_CHARACTERS_MAX - 3] + "..."
