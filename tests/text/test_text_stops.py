"""Goal: stops are found across all borders, and nothing is held back that need not be.

Method: an oracle that looks at the whole text up to each character, with stops that overlap,
contain and begin like each other; the same text in all portions.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phaseloop.text.stops import StopMatcher, StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)
PORTIONS = st.lists(st.text("abc", max_size=4), max_size=12)


def completed(text, stops):
    """The text before the stop that is complete first, and that stop, or None."""
    for end in range(len(text) + 1):
        fits = [stop for stop in stops if text[:end].endswith(stop)]
        if fits:
            stop = max(fits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def beginning(text, stops):
    """The longest ending of the text that some stop begins with."""
    return next(
        text[start:]
        for start in range(len(text) + 1)
        if any(stop.startswith(text[start:]) for stop in [*stops, ""])
    )


@settings(max_examples=400)
@given(STOPS, PORTIONS)
@example(["abaa", "c"], ["abac"])  # two steps back before the last character fits
def test_like_looking_at_the_whole_text(stops, portions):
    matcher = StopMatcher(StopStrings(stops))
    shown = "".join(map(matcher.push, portions))
    text, stop = completed("".join(portions), stops)
    assert matcher.matched == stop
    assert shown + matcher.finish() == text


@given(STOPS, PORTIONS)
def test_exactly_what_may_begin_a_stop_is_held(stops, portions):
    matcher = StopMatcher(StopStrings(stops))
    text = shown = ""
    for portion in portions:
        text += portion
        shown += matcher.push(portion)
        if matcher.matched is not None:
            break
        assert shown + beginning(text, stops) == text


CASES = {
    "across a border": (["</s>"], ["a<", "/", "s>b"], "a", "</s>"),
    "within one part": (["b"], ["abc"], "a", "b"),
    "two that end together": (["END", "\nEND"], ["x\nEND"], "x", "\nEND"),
    "the first to be complete": (["abc", "b"], ["abc"], "a", "b"),
    "a false beginning": (["aab"], ["aa", "aab"], "aa", "aab"),
    "none": (["xyz"], ["x", "y", "a"], "xya", None),
    "a beginning at the end": (["xyz"], ["axy"], "axy", None),
    "no stops": ([], ["a", "b"], "ab", None),
    "an empty string is no stop": ([""], ["a"], "a", None),
    "not only ASCII": (["。終"], ["はい。", "終わり"], "はい", "。終"),
}


@pytest.mark.parametrize(("stops", "portions", "text", "stop"), CASES.values(), ids=CASES)
def test_cases(stops, portions, text, stop):
    matcher = StopMatcher(StopStrings(stops))
    assert "".join(map(matcher.push, portions)) + matcher.finish() == text
    assert matcher.matched == stop


def test_nothing_comes_after_a_stop():
    matcher = StopMatcher(StopStrings(["b"]))
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_what_was_held_is_given_once():
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.push("a") == ""
    assert matcher.finish() == "a"
    assert matcher.finish() == ""


def test_answers_of_a_request_do_not_meet():
    stops = StopStrings(["ab"])
    one, other = StopMatcher(stops), StopMatcher(stops)
    assert one.push("a") == ""
    assert other.push("b") == "b"
    assert one.push("b") == ""
    assert one.matched == "ab"
    assert other.matched is None


class CountedSteps(StopStrings):
    steps = 0

    def step(self, state, character):
        type(self).steps += 1
        return super().step(state, character)


def test_a_stop_that_almost_matches_everywhere_costs_no_more():
    stops = CountedSteps(["a" * 500 + "b"])
    built, text = CountedSteps.steps, "a" * 20_000
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(text[place : place + 7]) for place in range(0, len(text), 7))
    assert len(shown) == len(text) - 500
    assert CountedSteps.steps - built == len(text)
