"""The page ledger: what is reserved and what is evicted for it, worked out by hand."""

from typing import Literal

import pytest
from msgspec.structs import replace

from phaseloop.core.memory import (
    output_limit,
    pages_available,
    pages_spare,
    reservation,
    reservation_of_all,
    resume_pages,
    take_pages,
)
from phaseloop.core.policy import PRESETS
from phaseloop.core.rounds import resume_rank
from phaseloop.core.state import Cache, Limits, Saved, Sequence, initial
from phaseloop.core.vocabulary import ReleaseSlot, Request

Cause = Literal["memory", "seat"]
LIMITS = Limits(4, 2048, 4096, 64, page_length=256, output_reserve=512)


@pytest.mark.parametrize(
    ("request_", "pages"),
    [
        (Request(0, 256, output_limit=256), 2),  # 512 tokens
        (Request(0, 256, output_limit=257), 3),
        (Request(0, 256, output_limit=0), 1),
        (Request(0, 256), 3),  # the output reserve: 256 + 512
        (Request(0, 1, output_limit=1), 1),
        (Request(0, 257, kind="embedding"), 2),  # no output at all
        (Request(0, 257, kind="rerank"), 2),
        (Request(0, 4000, output_limit=9999), 16),  # the context is 16 pages
        (Request(0, 4000), 16),
        (Request(0, 4000, shift_keep=0, output_limit=9999), 16),
        (Request(0, 256, shift_keep=0), 3),
    ],
)
def test_reservation(request_: Request, pages: int) -> None:
    assert reservation(LIMITS, request_, 0) == (pages, 0)
    assert reservation_of_all(LIMITS, request_) == pages


def test_every_choice_reserves_its_own_unless_pages_are_shared() -> None:
    request = Request(0, 700, output_limit=100, choices=3)  # 800 tokens: 4 pages each
    assert reservation_of_all(LIMITS, request) == 12
    sharing = replace(LIMITS, shares_pages=True)
    # 2 full pages of the prompt are shared; the third is begun, so each child has its own.
    assert [reservation(sharing, request, choice) for choice in range(3)] == [
        (4, 0),
        (2, 2),
        (2, 2),
    ]
    assert reservation_of_all(sharing, request) == 8


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        (Request(0, 96), 4000),  # what the context leaves
        (Request(0, 96, output_limit=10), 10),
        (Request(0, 4095, output_limit=10), 1),
        (Request(0, 96, shift_keep=4), None),  # nothing bounds it
        (Request(0, 96, shift_keep=4, output_limit=9000), 9000),
        (Request(0, 96, kind="embedding"), 0),
    ],
)
def test_output_limit(request_: Request, limit: int | None) -> None:
    assert output_limit(LIMITS, request_) == limit


def test_idle_caches_are_evicted_oldest_first_and_no_more_than_needed() -> None:
    state = initial(LIMITS, PRESETS["barrier-fair"])
    caches = (Cache(3, 500, 2, 7), Cache(1, 900, 4, 5), Cache(), Cache(8, 256, 1, 9))
    state = replace(state, caches=caches, pages_free=1)
    assert pages_available(state) == 8
    taken = take_pages(state, 4)
    assert taken is not None
    after, effects = taken
    assert effects == (ReleaseSlot(1, 0, 2, "evicted"),)
    assert after.pages_free == 1
    assert after.caches[1] == Cache(2, 0, 0, 5)
    assert [after.caches[i] for i in (0, 2, 3)] == [caches[i] for i in (0, 2, 3)]


def test_all_or_nothing() -> None:
    state = replace(initial(LIMITS, PRESETS["barrier-fair"]), pages_free=3)
    assert take_pages(state, 4) is None
    taken = take_pages(state, 3)
    assert taken is not None
    assert taken[0].pages_free == 0
    assert taken[1] == ()


def saved_sequence(ticket: int, priority: int = 0) -> Sequence:
    request = Request(ticket, 256, priority=priority)
    return Sequence(request, 0, ticket, 0, 0, (0, "completion"), "swapping", 300, 0, 20, None, 2)


def test_who_comes_back_first() -> None:
    """R9: who made room for memory first, by admission; then by priority and time in host RAM."""

    def saved(ticket: int, cause: Cause, since: int, priority: int = 0) -> Saved:
        return Saved(saved_sequence(ticket, priority), since, cause)

    line = [
        saved(3, "memory", 90),
        saved(7, "memory", 10),
        saved(5, "seat", 80, priority=1),
        saved(2, "seat", 20),
        saved(1, "seat", 30),
        saved(6, "seat", 30),
    ]
    shuffled = [line[i] for i in (4, 1, 5, 2, 0, 3)]
    assert sorted(shuffled, key=resume_rank) == line


@pytest.mark.parametrize(
    ("alone", "length", "produced", "limit", "pages"),
    [
        # Room for the output reserve of 512: 300 + 512 tokens are 4 pages; alone, what it holds.
        (False, 300, 20, None, 4),
        (True, 300, 20, None, 2),
        (False, 300, 20, 30, 2),  # 10 tokens are still to come
        (False, 300, 20, 2000, 4),
        (False, 300, 30, 30, 2),
        (False, 10, 0, None, 3),  # a prompt of 256 that was not complete: all of it, and 512
        (True, 10, 0, None, 1),
        (False, 4090, 20, None, 16),  # no further than the context
        (False, 700, 20, 3000, 5),
    ],
)
def test_what_a_saved_sequence_wants_back(
    alone: bool, length: int, produced: int, limit: int | None, pages: int
) -> None:
    seated = replace(saved_sequence(1), role="generating")
    s = replace(saved_sequence(0), length=length, produced=produced, output_limit=limit)
    state = initial(LIMITS, PRESETS["barrier-fair"])
    if not alone:
        state = replace(state, slots=(seated, None, None, None))
    assert resume_pages(state, s) == pages


def test_no_more_pages_are_wanted_back_than_there_are() -> None:
    state = initial(replace(LIMITS, page_count=3), PRESETS["barrier-fair"])
    state = replace(state, slots=(saved_sequence(1), None, None, None))
    assert resume_pages(state, replace(saved_sequence(0), length=700)) == 3


def test_pages_that_a_held_sequence_waits_for_are_not_spare() -> None:
    held = replace(saved_sequence(0), role="generating", length=256, pages=1)
    roomy = replace(saved_sequence(1), role="generating", length=100, pages=3)
    prompt = replace(saved_sequence(2), role="prefilling", length=256, pages=1)
    lender = replace(saved_sequence(3), role="generating", length=600, pages=1, borrowed=2)
    state = replace(initial(LIMITS, PRESETS["barrier-fair"]), pages_free=5)
    for seats, spare in (
        ((None, None, None, None), 5),
        ((held, None, None, None), 4),  # its next row begins a page
        ((roomy, prompt, lender, None), 5),
        ((held, roomy, held, lender), 3),
    ):
        assert pages_spare(replace(state, slots=seats)) == spare
    cached = replace(state, slots=(held, None, None, None), caches=(Cache(), Cache(1, 9, 1, 1)) * 2)
    assert pages_spare(cached) == 6
