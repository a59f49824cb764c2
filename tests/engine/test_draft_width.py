"""Goal: a sequence verifies as many drafts as pays, and finds out how many that is.

Method: the rate, expected tokens over relative time, is computed here for every width; records are
fed with drafts that always, never, or sometimes hold.
"""

import pytest

from phaseloop.engine.draft_width import REST, Width, best_width


def rate(chance, width, cost):
    return sum(chance**held for held in range(width + 1)) / (1 + width * cost)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.35, 0.6, 1.0])
def test_no_other_width_has_a_higher_rate(chance, cost):
    rates = [rate(chance, width, cost) for width in range(49)]
    assert rates[best_width(chance, 48, cost)] == pytest.approx(max(rates))


def test_known_widths():
    # 0.9: 1.267, 1.355, 1.376, 1.365 for one to four drafts at half a pass each.
    assert best_width(0.9, 48, 0.5) == 3
    assert best_width(0.9, 2, 0.5) == 2
    assert best_width(0.5, 48, 0.5) == 0  # one draft: 1.5 tokens in 1.5 passes
    assert best_width(1.0, 48, 0.5) == 48
    assert best_width(0.99, 0, 0.01) == 0


def fed(width, drafted, accepted, rounds=20):
    for _ in range(rounds):
        width = width.after(drafted, accepted)
    return width


def test_a_new_text_is_given_credit():
    assert Width().chance == 0.75
    assert Width().drafts(8, 0.1) > 0


def test_drafts_that_hold_make_it_wider_and_wrong_ones_narrower():
    right, wrong = fed(Width(), 3, 3), fed(Width(), 3, 0)
    assert right.chance > 0.99 and wrong.chance < 0.15
    assert right.drafts(48, 0.1) > Width().drafts(48, 0.1) > wrong.drafts(48, 0.1) == 0


def test_what_stands_behind_a_wrong_draft_is_no_evidence():
    assert Width().after(8, 2) == Width().after(3, 2)


def test_the_latest_drafts_count_most():
    turned = fed(fed(Width(), 3, 0, rounds=200), 3, 3, rounds=8)
    assert turned.chance > 0.9


def test_where_drafts_do_not_pay_one_is_tried_now_and_then():
    width = fed(Width(), 3, 0)
    widths = []
    for _ in range(2 * REST + 2):
        widths.append(width.drafts(8, 0.3))
        width = width.after(widths[-1], 0) if widths[-1] else width.without()
    assert [index for index, count in enumerate(widths) if count] == [REST, 2 * REST + 1]
    assert max(widths) == 1


def test_drafts_that_cost_nothing_are_always_made():
    assert fed(Width(), 3, 0).drafts(7, 0.0) == 7


def test_none_are_tried_where_none_are_allowed():
    assert Width(1.0, 0.0, REST).drafts(0, 0.3) == 0
