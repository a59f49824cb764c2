"""The page ledger: what is reserved and what is evicted for it, worked out by hand."""

from typing import Literal

import pytest
from msgspec.structs import replace

from phaseloop.core.memory import (
    output_limit,
    pages_available,
    reservation,
    reservation_of_all,
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


def test_who_comes_back_first() -> None:
    """R9: who made room for memory first, by admission; then by priority and time in host RAM."""

    def saved(ticket: int, cause: Cause, since: int, priority: int = 0) -> Saved:
        request = Request(ticket, 8, priority=priority)
        s = Sequence(request, 0, ticket, 0, 0, (0, "completion"), "swapping", 8, 0, 1, None, 1)
        return Saved(s, since, cause)

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
