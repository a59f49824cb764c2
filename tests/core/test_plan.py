"""What a round carries: fill by time, draft widths, stops, who sits out, whose turn it is.

States are built by hand, values are worked out from the rules beside them.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloop.core.plan import (
    decode_width,
    fill_limit,
    next_group,
    next_stop,
    rows_that_fit,
    take_turn,
)
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Group, Limits, Pace, Sequence, Turn, initial
from phaseloop.core.vocabulary import Request

MS = 1_000_000
LIMITS = Limits(4, 2048, 4096, 1024, round_ns_max=500 * MS)
PLAIN: Group = (0, "completion")


def sequence(ticket: int = 0, group: Group = PLAIN, **fields: Any) -> Sequence:
    made = Sequence(
        request=Request(ticket, 100),
        choice=0,
        ticket=ticket,
        arrived_ns=0,
        seated_ns=0,
        group=group,
        role="generating",
        length=100,
        cached=0,
        produced=1,
        output_limit=None,
        pages=8,
    )
    return replace(made, **fields)


# --- R10: the fill --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "round_ms", "pace", "fill"),
    [
        (2048, 0, None, 2048),  # bounded by tokens alone
        (2048, 500, None, 32),  # nothing known yet
        (2048, 500, (32, 32), 256),  # 1 ms a token: 256 fit into 500 ms, 512 do not
        (2048, 512, (32, 32), 512),  # just so
        (2048, 511, (32, 32), 256),
        (2048, 500, (256, 64), 1024),  # 0.25 ms a token: 2,000 would fit, the grid has 1,024
        (2048, 512, (256, 64), 2048),
        (2048, 500, (2048, 10), 2048),
        (2048, 500, (32, 9999), 32),  # however slow, at least 32
        (1000, 500, (32, 1), 1000),  # the grid ends at B, whatever B is
        (1000, 500, (1000, 500), 1000),
        (1000, 499, (1000, 500), 512),
        (20, 500, None, 20),  # B may be smaller than the least fill
        (20, 500, (20, 9999), 20),
    ],
)
def test_fill_is_the_largest_on_the_grid_that_fits(
    batch: int, round_ms: int, pace: tuple[int, int] | None, fill: int
) -> None:
    limits = replace(LIMITS, batch_tokens=batch, round_ns_max=round_ms * MS)
    paces = () if pace is None else (Pace("prefill", pace[0], pace[1] * MS),)
    assert fill_limit(limits, paces, "prefill") == fill


def test_each_kind_of_round_has_its_own_pace() -> None:
    paces = (Pace("encode", 32, 320 * MS), Pace("prefill", 32, 32 * MS))
    assert fill_limit(LIMITS, paces, "prefill") == 256
    assert fill_limit(LIMITS, paces, "encode") == 32
    assert fill_limit(LIMITS, paces, "mixed") == 32


@given(st.integers(1, 4096), st.integers(1, 2000), st.integers(1, 4096), st.integers(1, 5000))
def test_fill_keeps_to_the_time(batch: int, round_ms: int, tokens: int, took_ms: int) -> None:
    limits = replace(LIMITS, batch_tokens=batch, round_ns_max=round_ms * MS)
    fill = fill_limit(limits, (Pace("prefill", tokens, took_ms * MS),), "prefill")
    assert min(32, batch) <= fill <= batch
    grid = {min(32 * 2**k, batch) for k in range(8)}
    assert fill in grid
    if fill > 32:
        assert fill * took_ms <= round_ms * tokens
    wider = [one for one in grid if one > fill]
    if wider:
        assert min(wider) * took_ms > round_ms * tokens


# --- R14: draft widths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "lanes", "width"),
    [
        ({}, 1, 4),  # k = 3 drafts and the pending token
        ({"output_limit": 100}, 1, 4),
        ({"output_limit": 4, "produced": 1}, 1, 3),  # 4 - 1 - 1 = 2 drafts
        ({"output_limit": 2, "produced": 1}, 1, 1),
        ({"length": 4092}, 1, 4),  # 4096 - 4092 - 1 = 3 positions left
        ({"length": 4093}, 1, 3),
        ({"length": 4095}, 1, 1),
        ({}, 2, 4),  # B = 8: (8 - 2) / 2 = 3
        ({}, 3, 2),  # (8 - 3) / 3 = 1
        ({}, 8, 1),
    ],
)
def test_draft_width(fields: dict[str, Any], lanes: int, width: int) -> None:
    limits = replace(LIMITS, batch_tokens=8, draft_tokens=3)
    assert decode_width(limits, sequence(**fields), lanes) == width


@given(st.integers(1, 64), st.integers(0, 16), st.integers(1, 64))
def test_all_lanes_fit_the_round(batch: int, drafts: int, lanes: int) -> None:
    limits = replace(LIMITS, batch_tokens=batch, draft_tokens=drafts)
    if lanes <= batch:
        assert lanes * decode_width(limits, sequence(), lanes) <= batch


@given(st.integers(1, 12), st.integers(1, 16), st.integers(1, 40))
def test_who_sits_out_rotates(batch: int, members: int, rounds: int) -> None:
    """More lanes than rows: after any number of rounds nobody is two tokens behind."""
    limits = replace(LIMITS, batch_tokens=batch)
    seats = [(i, sequence(i)) for i in range(members)]
    rows = [0] * members
    for _ in range(rounds):
        carried = rows_that_fit(limits, seats, sum(rows))
        assert len(carried) == min(batch, members)
        assert carried == sorted(carried, key=lambda seat: seat[0])
        for slot, _ in carried:
            rows[slot] += 1
        assert max(rows) - min(rows) <= 1


# --- R7: groups -----------------------------------------------------------------------------------


def test_turns_go_round() -> None:
    """New groups first, in planning order; then whoever had its turn longest ago."""
    groups: list[Group] = [PLAIN, (1, "completion"), (0, "embedding")]
    seats = [(i, sequence(i, group)) for i, group in enumerate(groups)]
    state = initial(LIMITS, PRESETS["barrier-fair"])
    state = replace(state, slots=(*(s for _, s in seats), None))
    turns: tuple[Turn, ...] = ()
    served: list[Group] = []
    for tokens in (8, 2, 5, 8, 2, 5, 8):
        served.append(next_group(turns, seats))
        turns = take_turn(state, turns, served[-1], tokens)
    assert served == [*groups, *groups, PLAIN]
    assert turns[-1] == Turn(PLAIN, 24)


def test_a_group_that_left_is_forgotten() -> None:
    state = initial(LIMITS, PRESETS["barrier-fair"])
    state = replace(state, slots=(sequence(0, (1, "completion")), None, None, None))
    turns = take_turn(state, (Turn(PLAIN, 40), Turn((1, "completion"), 7)), (2, "completion"), 3)
    assert turns == (Turn((1, "completion"), 7), Turn((2, "completion"), 3))


# --- stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "stops", "followers", "end"),
    [
        (0, (), (), 100),
        (0, (30, 60), (), 30),
        (30, (30, 60), (), 60),  # standing on a stop, the next one counts
        (60, (30, 60), (), 100),
        (0, (30,), ((1, 20),), 30),  # another slot's follower
        (0, (30,), ((0, 20),), 20),
        (20, (30,), ((0, 20),), 30),
        (0, (), ((0, 50), (0, 40)), 40),
        (0, (100, 120), (), 100),
    ],
)
def test_a_chunk_ends_at_the_next_stop(
    length: int, stops: tuple[int, ...], followers: tuple[tuple[int, int], ...], end: int
) -> None:
    s = sequence(request=Request(0, 100, stop_points=stops), length=length, role="prefilling")
    assert next_stop(0, s, followers) == end
