"""Who is refused, who is first in line, which slot is chosen: tables of cases for R2, R3 and R9."""

from typing import Any

import pytest
from msgspec.structs import replace

from phaseloop.core.admission import choose_slot, enqueue, first_in_line, refusal
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Cache, Limits, Pending, Saved, Sequence, State, initial
from phaseloop.core.vocabulary import Candidate, Request

LIMITS = Limits(3, 64, 64, 16, page_length=8, queue_length_max=2)


def idle(**fields: Any) -> State:
    return replace(initial(LIMITS, PRESETS["barrier-fair"]), **fields)


def sitting(ticket: int = 0, priority: int = 0) -> Sequence:
    request = Request(ticket, 8, priority=priority)
    return Sequence(request, 0, ticket, 0, 0, (0, "completion"), "generating", 8, 0, 1, None, 2)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(0, 8), None),
        (Request(0, 0), "invalid"),
        (Request(0, -3), "invalid"),
        (Request(0, 1, output_limit=1), None),
        (Request(0, 8, output_limit=-1), "invalid"),
        (Request(0, 8, output_limit=0), None),
        (Request(0, 8, choices=0), "invalid"),
        (Request(0, 8, output_limit=1, choices=3), None),
        (Request(0, 8, output_limit=1, choices=4), "exceeds_slots"),
        (Request(0, 8, kind="embedding", choices=2), "invalid"),
        (Request(0, 8, kind="rerank"), None),
        (Request(0, 63, output_limit=1), None),  # one position is left for a token
        (Request(0, 64, output_limit=1), "exceeds_context"),
        (Request(0, 64, output_limit=0), None),  # no token, no position
        (Request(0, 65, output_limit=0), "exceeds_context"),
        (Request(0, 64, kind="embedding"), None),
        (Request(0, 65, kind="embedding"), "exceeds_context"),
        (Request(0, 40, output_limit=24, choices=2), None),  # 2 x 8 pages are all there are
        (Request(0, 40, output_limit=24, choices=3), "exceeds_memory"),
    ],
)
def test_what_never_fits_is_refused(request_: Request, reason: str | None) -> None:
    assert refusal(idle(), (request_,)) == reason
    fine = Request(9, 8, output_limit=1)
    assert refusal(idle(), (fine, request_)) == reason, "one refused refuses its call"


@pytest.mark.parametrize(
    ("state", "count", "reason"),
    [
        (idle(), 2, None),
        (idle(), 3, None),  # all find seats, nobody waits
        (idle(), 4, "queue_full"),
        (idle(phase="prefill"), 3, None),
        (idle(phase="prefill", sealed=True), 2, None),
        (idle(phase="prefill", sealed=True), 3, "queue_full"),
        (idle(phase="decode", sealed=True), 3, "queue_full"),
        (idle(policy_pending=PRESETS["quantum"]), 3, "queue_full"),  # the phase may change at once
        (idle(slots=(sitting(), None, None)), 2, None),
        (idle(slots=(sitting(), None, None)), 3, "queue_full"),
        (idle(pages_free=5), 3, "queue_full"),  # two pages each
        (idle(pages_free=6), 3, None),
        (idle(pages_free=4, caches=(Cache(1, 8, 2, 3), Cache(), Cache())), 3, None),
        (idle(saved=(Saved(sitting(), 0, "seat"),)), 3, "queue_full"),
        (idle(shutdown_at_ns=5), 1, "shutdown"),
        (idle(stopped=True), 1, "shutdown"),
        (enqueue(idle(), Request(0, 8), 0), 1, None),
        (enqueue(idle(), Request(0, 8), 0), 2, "queue_full"),
    ],
)
def test_the_queue_bounds_who_waits(state: State, count: int, reason: str | None) -> None:
    call = tuple(Request(10 + i, 8, output_limit=8) for i in range(count))
    assert refusal(state, call) == reason


# --- the line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "since", "cause", "queued", "arrived", "saved_first"),
    [
        (0, 50, "memory", 9, 10, True),  # who made room for memory comes before everybody
        (0, 50, "seat", 0, 60, True),
        (0, 50, "seat", 0, 50, True),
        (0, 50, "seat", 0, 40, False),  # has waited longer
        (0, 50, "seat", 1, 60, False),  # is more important
        (1, 50, "seat", 0, 40, True),
    ],
)
def test_first_in_line(
    saved: int, since: int, cause: Any, queued: int, arrived: int, saved_first: bool
) -> None:
    waiting = Saved(sitting(priority=saved), since, cause)
    state = enqueue(idle(saved=(waiting,)), Request(7, 8, priority=queued), arrived)
    assert first_in_line(state) == (waiting if saved_first else state.queue[7])
    assert first_in_line(replace(state, saved=())) == Pending(
        Request(7, 8, priority=queued), arrived
    )
    assert first_in_line(idle(saved=(waiting,))) == waiting
    assert first_in_line(idle()) is None


# --- slots ----------------------------------------------------------------------------------------

# Slot 0 was released last, slot 2 first; slot 1 is taken.
CACHES = (Cache(4, 20, 3, 9), Cache(2), Cache(7, 12, 2, 5))
HERE, THERE = Candidate("slot", 0, 4, 16), Candidate("slot", 2, 7, 12)
STORED = Candidate("snapshot", 0, 1, 18)


@pytest.mark.parametrize(
    ("hint", "candidates", "slot", "source", "reason"),
    [
        (None, (), 2, None, "oldest"),
        (None, (HERE, THERE), 0, HERE, "cache"),
        (None, (THERE, HERE), 0, HERE, "cache"),
        (None, (THERE,), 2, THERE, "cache"),
        (None, (HERE, STORED), 2, STORED, "cache"),  # the longer one, into the oldest slot
        (None, (HERE, replace(STORED, length=16)), 0, HERE, "cache"),  # in place is cheaper
        (None, (replace(HERE, version=3),), 2, None, "oldest"),  # moved since
        (None, (replace(HERE, length=21),), 2, None, "oldest"),  # more than is there
        (None, (Candidate("slot", 1, 2, 5),), 2, None, "oldest"),  # somebody sits there
        (0, (), 0, None, "hint"),
        (2, (HERE, THERE), 2, THERE, "hint"),
        (2, (HERE,), 2, None, "hint"),  # the hint decides the slot; what lies elsewhere is no use
        (2, (HERE, THERE, STORED), 2, STORED, "hint"),
        (2, (THERE, replace(STORED, length=12)), 2, THERE, "hint"),
        (1, (HERE,), 0, HERE, "cache"),  # a taken slot is not waited for
        (1, (), 2, None, "oldest"),
        (99, (), 2, None, "oldest"),
    ],
)
def test_choice_of_slot(
    hint: int | None,
    candidates: tuple[Candidate, ...],
    slot: int,
    source: Candidate | None,
    reason: str,
) -> None:
    state = idle(slots=(None, sitting(), None), caches=CACHES)
    request = Request(5, 30, slot_hint=hint, candidates=candidates)
    assert choose_slot(state, request, resumed=False) == (slot, source, reason)
    assert choose_slot(state, request, resumed=True) == (2, None, "resume")
