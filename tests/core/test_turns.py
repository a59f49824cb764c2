"""When a seat is lent on (R11): the case in which it is, and whatever stands against it."""

from typing import Any

import pytest
from msgspec.structs import replace

from phaseloop.core.admission import enqueue
from phaseloop.core.policy import PRESETS, outlook
from phaseloop.core.state import Limits, Sequence, State, initial
from phaseloop.core.turns import lend_seat
from phaseloop.core.vocabulary import Request

MS = 1_000_000
LIMITS = Limits(2, 16, 64, 64, page_length=4, can_save=True)
POLICY = replace(PRESETS["quantum"], decode_quantum_ns=20 * MS, seat_quantum_ns=30 * MS)
GROUP = (0, "completion")


def sitting(ticket: int, **fields: Any) -> Sequence:
    made = Sequence(Request(ticket, 8), 0, ticket, 0, 0, GROUP, "generating", 12, 0, 5, None, 4)
    return replace(made, **fields)


def decoding(*seats: Sequence, waiting: bool = True, **fields: Any) -> State:
    state = initial(LIMITS, POLICY)
    state = replace(
        state, slots=seats, phase="decode", phase_rounds=3, phase_groups=(GROUP,), request_id_last=9
    )
    state = enqueue(state, Request(9, 8), 10 * MS) if waiting else state
    return replace(state, **fields)


def lent(state: State, now_ns: int = 30 * MS, *, seatable: bool = False) -> list[int]:
    """The slots that are to be given up."""
    after = lend_seat(state, outlook(state), now_ns, seatable)
    return [
        slot
        for slot, (s, was) in enumerate(zip(after.slots, state.slots, strict=True))
        if s is not None and s.role == "swapping" and s != was
    ]


def test_whoever_sat_longest_makes_way() -> None:
    assert lent(decoding(sitting(3), sitting(1))) == [1]
    assert lent(decoding(sitting(1), sitting(3))) == [0]
    assert lent(decoding(sitting(1, seated_ns=1), sitting(3))) == [1], "not for its whole quantum"
    assert lent(decoding(sitting(1, request=Request(1, 8, choices=2)), sitting(3))) == [1]
    assert lent(decoding(sitting(1, role="ready"), sitting(3))) == [1]
    after = lend_seat(decoding(sitting(3), sitting(1)), outlook(decoding()), 30 * MS, False)
    moved = after.slots[1]
    assert moved is not None
    assert (moved.role, moved.resume, moved.swap_for) == ("swapping", "generating", "seat")


PAIR = (sitting(3), sitting(1))


@pytest.mark.parametrize(
    ("state", "now_ms", "seatable"),
    [
        (decoding(*PAIR, policy=replace(POLICY, seat_quantum_ns=0)), 30, False),
        (decoding(*PAIR, policy=replace(POLICY, switch="barrier")), 30, False),
        (decoding(*PAIR, limits=replace(LIMITS, can_save=False)), 30, False),
        (decoding(*PAIR, phase="prefill"), 30, False),
        (decoding(*PAIR, waiting=False), 30, False),
        (decoding(*PAIR), 30, True),  # who waits would fit as it is
        (decoding(*PAIR), 29, False),  # nobody has sat that long
        (decoding(*PAIR, phase_since_ns=11 * MS), 30, False),  # the slice is not over
        (decoding(*PAIR, phase_groups=()), 30, False),  # nor had everybody a round in it
        (decoding(sitting(3), sitting(1, role="swapping", resume="generating")), 30, False),
    ],
)
def test_no_seat_is_lent(state: State, now_ms: int, seatable: bool) -> None:
    assert lent(state, now_ms * MS, seatable=seatable) == []
