"""How much of a known beginning a prompt can keep, and where states are kept so that it can.

Keys and values can be cut anywhere.  A recurrent state cannot: what a prompt keeps ends where a
state was kept.  So a prompt leaves states at multiples of a step, where it says that it may be
continued otherwise (its stop points, the beginning of its last message), just before its end, where
the next prompt of a chat often parts from it, and at its end.
"""

from typing import TypeAlias

Positions: TypeAlias = tuple[int, ...] | None  # ascending; None: anywhere

STEP = 2048  # tokens
END_MARGIN = 16  # tokens; what chat templates put after the last message, and rewrite later
MARGIN_WORTH = 64  # a shorter prompt is computed as fast as what its margin would save


def states_per_slot(state_bytes: int, slot_count: int, budget_bytes: int, most: int) -> int:
    """How many states a slot keeps: all of them together as much as prefixes may take in host RAM.

    `state_bytes` is what one takes, 0 where the model has none.
    """
    return min(most, budget_bytes // (slot_count * state_bytes)) if state_bytes else 0


def reachable(length: int, positions: Positions) -> int:
    """The longest state of at most `length` tokens; 0 if there is none."""
    if positions is None:
        return length
    return max((position for position in positions if position <= length), default=0)


def reusable(common: int, prompt_length: int, positions: Positions) -> int:
    """How much of a common beginning a prompt keeps.

    At least its last token is computed in any case: its logits are wanted.
    """
    return reachable(min(common, prompt_length - 1), positions)


def marks_of(prompt_length: int, stop_points: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Where a prompt's states are kept, ascending."""
    marks = set(range(step, prompt_length, step)) | {prompt_length}
    marks.update(point for point in stop_points if 0 < point < prompt_length)
    if prompt_length >= MARGIN_WORTH:
        marks.add(prompt_length - END_MARGIN)
    return tuple(sorted(marks))
