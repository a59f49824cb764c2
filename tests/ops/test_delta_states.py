"""Goal: a region goes back to just those states that it still has; failed rounds change none.

Method: states whose values say which tokens went into them, written by hand where a pass would, in
the cases that matter and in sequences of steps that Hypothesis draws.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloop.ops.delta_states import MARKS_MAX, NEWEST_KEPT, States, thinned
from phaseloop.ops.interface import BackendError, Recurrence, Span, State
from phaseloop.ops.passes import cut

SHAPE = Recurrence(layer_count=2, key_heads=1, value_heads=2, width=3, kernel=3)


def states(regions=2, **options):
    return States(SHAPE, np.float32, region_count=regions, **options)


def pass_(held, leg, piece):
    """What a pass does: read a cell, take in every token, write the other cell."""
    for plane in (*held.matrices, *held.histories):
        plane[leg.write] = folded(piece.tokens, plane[leg.read])


def folded(tokens, state=0.0):
    """A state that every token, and their order, changes; exact in float32."""
    for token in tokens:
        state = (state * 3 + token) % 1009
    return state


def forward(held, *spans):
    legs = held.begin(spans)
    for one in cut(spans, 1 << 20, apart=False):
        for piece in one.pieces:
            pass_(held, legs[piece.region], piece)
        held.passed(legs, one.pieces)
    held.commit(legs)


def span(region, start, tokens, *marks):
    return Span(region, start, tokens, 0, False, marks)


def value(held, region, length):
    """The state after `length` tokens, as a fork would see it."""
    found = [state for state in held.save(region, length) if state.position == length]
    assert found, f"no state after {length} tokens"
    values = {float(v) for part in found[0].parts for v in part.view(np.float32)}
    assert len(values) == 1, "all layers and parts are of one state"
    return values.pop()


MIB = 1 << 20
KNOWN = {  # MiB per sequence, as published for these models
    (48, 16, 48): 149.625,  # 27B: 48 layers that recur, key heads, value heads
    (24, 16, 32): 50.25,  # 9B
    (30, 16, 32): 62.8125,  # 35B-A3B
}


@pytest.mark.parametrize("sizes", KNOWN)
def test_states_are_as_large_as_is_known(sizes):
    shape = Recurrence(*sizes, width=128, kernel=4)
    assert 4 * shape.state_size == KNOWN[sizes] * MIB


def test_a_states_size_is_what_its_copies_take():
    held = states()
    forward(held, span(0, 0, [1]))
    assert held.save(0, 1)[0].size_bytes == held.state_bytes == 4 * SHAPE.state_size


def test_a_round_leaves_its_state_and_the_one_before():
    held = states()
    forward(held, span(0, 0, [1, 2]))
    forward(held, span(0, 2, [5]))
    assert held.positions(0) == (2, 3) and held.positions(1) == ()
    assert (value(held, 0, 2), value(held, 0, 3)) == (folded([1, 2]), folded([1, 2, 5]))


def test_a_round_that_is_not_committed_changes_nothing():
    held = states()
    forward(held, span(0, 0, [1, 2]))
    legs = held.begin([span(0, 2, [9], 3)])
    pass_(held, legs[0], span(0, 2, [9]))
    held.passed(legs, [span(0, 2, [9], 3)])
    assert held.positions(0) == (2,) and value(held, 0, 2) == folded([1, 2])
    forward(held, span(0, 2, [5]))
    assert value(held, 0, 3) == folded([1, 2, 5])


def test_a_committed_round_can_be_taken_back():
    held = states()
    forward(held, span(0, 0, [1, 2]))
    forward(held, span(0, 2, [9]))
    held.truncate(0, 2)
    assert held.positions(0) == (2,)
    forward(held, span(0, 2, [5]))
    assert value(held, 0, 3) == folded([1, 2, 5])


def test_no_round_goes_on_from_a_state_that_is_not_there():
    held = states()
    forward(held, span(0, 0, [1, 2, 3, 4], 2))
    held.truncate(0, 3)
    with pytest.raises(BackendError, match=r"no recurrent state after 3 tokens, only after \(2,\)"):
        held.begin([span(0, 3, [1])])
    held.truncate(0, 2)
    forward(held, span(0, 2, [5]))


def test_marks_are_kept_inside_a_span_and_at_its_end():
    held = states()
    forward(held, span(0, 0, [1, 2, 3, 4], 1, 4))
    forward(held, span(0, 4, [5, 6, 7]))
    assert held.positions(0) == (1, 4, 7)
    assert value(held, 0, 1) == folded([1]) and value(held, 0, 4) == folded([1, 2, 3, 4])


def test_the_beginning_is_always_there():
    held = states()
    forward(held, span(0, 0, [1, 2]))
    held.truncate(0, 0)
    assert held.positions(0) == ()
    forward(held, span(0, 0, [5]))
    assert value(held, 0, 1) == folded([5])


def test_a_fork_shares_marks_and_goes_its_own_way():
    held = states()
    forward(held, span(0, 0, [1, 2, 3], 1))
    held.restore(1, held.save(0, 3), 3)
    forward(held, span(1, 3, [7]))
    assert held.positions(1) == (1, 3, 4) and held.positions(0) == (1, 3)
    assert value(held, 0, 3) == value(held, 1, 3)
    assert held.save(0, 1)[0] is held.save(1, 1)[0]


def test_what_was_saved_does_not_change_with_its_region():
    held = states()
    forward(held, span(0, 0, [1, 2]))
    saved = held.save(0, 2)
    before = saved[0].parts[0].tobytes()
    forward(held, span(0, 2, [8]))
    forward(held, span(0, 3, [8]))
    assert saved[0].parts[0].tobytes() == before
    held.restore(0, saved, 2)
    assert held.positions(0) == (2,) and value(held, 0, 2) == folded([1, 2])


def at(*positions):
    return tuple(State(position, ()) for position in positions)


def test_thinning_spares_the_newest_and_evens_out_the_others():
    newest = (990, 995, 1000)
    assert thinned(at(100, 110, 500, *newest), 6) == at(100, 110, 500, *newest)
    assert thinned(at(100, 110, 500, *newest), 5) == at(110, 500, *newest)
    assert thinned(at(100, 300, 310, *newest), 5) == at(100, 310, *newest)
    assert thinned(at(100, 110, 500, *newest), 3) == at(*newest)


def test_a_long_prompt_keeps_no_more_states_than_it_may():
    held = states(marks_max=8)
    step = range(1, 101)
    forward(held, span(0, 0, [1] * 100, *step))
    positions = held.positions(0)
    assert len(positions) == 8 and positions[-NEWEST_KEPT:] == (98, 99, 100)
    assert max(np.diff((0, *positions))) <= 40, "wherever a prompt parts, a state is near"
    assert MARKS_MAX > 8


# --- any sequence of steps ------------------------------------------------------------------------

STEPS = st.tuples(
    st.sampled_from(("go", "go", "fail", "cut", "fork")),
    st.integers(0, 1),
    st.integers(0, 9),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_every_state_is_that_of_its_tokens(steps):
    """Whatever was done before, a state that a region has is the one its first tokens lead to."""
    held = states()
    tokens: tuple[list[int], list[int]] = ([], [])
    for number, (what, region, count, has_mark) in enumerate(steps):
        own = tokens[region]
        is_there = len(own) in (0, *held.positions(region))
        if what in ("go", "fail") and is_there and count:
            held.truncate(region, len(own))
            end = len(own) + count
            new = span(region, len(own), [number] * count, *([end] if has_mark else []))
            legs = held.begin([new])
            pass_(held, legs[region], new)
            held.passed(legs, [new])
            if what == "go":
                held.commit(legs)
                own += new.tokens
        elif what == "cut":
            held.truncate(region, count)
            del own[count:]
        elif what == "fork" and count in (0, *held.positions(region)):
            held.restore(1 - region, held.save(region, count), count)
            tokens[1 - region][:] = own[:count]
        for each in (0, 1):
            for position in held.positions(each):
                assert position <= len(tokens[each])
                assert value(held, each, position) == folded(tokens[each][:position])
