"""Goal: a prompt keeps as much of a known beginning as can be taken up, and never its last token.

Method: the cases of the reuse plan by hand, for caches that can be cut anywhere and for recurrent
ones; then where a prompt's states are kept.
"""

import pytest

from phaseloop.engine.reuse import END_MARGIN, marks_of, reachable, reusable

ANYWHERE = None
CASES = {
    "a dense cache is kept as far as it is common": (700, 1100, ANYWHERE, 700),
    "the last token is computed again": (1000, 1000, ANYWHERE, 999),
    "nothing in common": (0, 1000, ANYWHERE, 0),
    "no state at all": (700, 1100, (), 0),
    "a state of 1,000 tokens and no other": (700, 1100, (1000,), 0),
    "the newest state within what is common": (700, 1100, (600, 900, 1000), 600),
    "the common part ends before every state": (500, 1100, (600, 900, 1000), 0),
    "the common part ends at a state": (600, 1100, (600, 900, 1000), 600),
    "an append-only chat goes on where it was": (1000, 1100, (600, 900, 1000), 1000),
    "the same prompt again needs the logits of its last token": (1000, 1000, (900, 1000), 900),
    "nothing but the last token is common": (1, 1, (1,), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_prompt_keeps(case):
    common, prompt_length, positions, kept = CASES[case]
    assert reusable(common, prompt_length, positions) == kept


def test_a_length_is_reached_where_there_is_a_state():
    assert reachable(5, None) == 5
    assert [reachable(length, (2, 4)) for length in range(6)] == [0, 0, 2, 2, 4, 4]


def test_states_are_kept_at_steps_before_the_end_and_at_it():
    assert marks_of(5000, (), 2048) == (2048, 4096, 5000 - END_MARGIN, 5000)
    assert marks_of(4096, (), 2048) == (2048, 4096 - END_MARGIN, 4096)


def test_a_short_prompt_is_not_cut_for_its_margin():
    assert marks_of(40, (), 2048) == (40,)


def test_states_are_kept_at_stop_points_inside_the_prompt():
    assert marks_of(300, (0, 120, 300, 500), 2048) == (120, 284, 300)
    assert marks_of(300, (284,), 2048) == (284, 300)
