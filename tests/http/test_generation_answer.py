"""Goal: an answer's text, its end, its likelihoods and its figures are right at their edges.

Method: single answers fed by hand, and timings set by hand, against arithmetic.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from storyteller import TOKENIZER

from phaseloop.engine.settings import Likelihood, Sampling
from phaseloop.http.answer import Answer
from phaseloop.http.usage import Work, spans, work_of
from phaseloop.http.wire_logprobs import probabilities
from phaseloop.runtime.gateway import Delivered
from phaseloop.runtime.timing import Timing
from phaseloop.text.stops import StopStrings

MS = 1_000_000


def test_likelihoods_without_a_number_in_json():
    """Minus infinity is the lowest float of 32 bits; after the samplers it is no alternative."""
    never = Likelihood(-math.inf, ((5, 0.0), (6, -math.inf)))

    def shown(*, after: bool) -> Any:
        sampling = Sampling(n_probs=2, post_sampling_probs=after)
        wanted: Any = SimpleNamespace(sampling=sampling, alternatives=2)
        (one,) = probabilities([(6, never)], wanted, TOKENIZER)
        return one

    before, after = shown(after=False), shown(after=True)
    assert before["logprob"] == before["top_logprobs"][1]["logprob"] == -3.4028234663852886e38
    assert after["prob"] == 0
    assert [top["id"] for top in after["top_probs"]] == [5]


def test_a_token_is_reported_once_some_of_its_text_is_shown():
    """Two stops: one holds tokens back that are shown when the other is found."""
    tokens = [TOKENIZER.encode(letter)[0] for letter in "abcYd"]
    answer = Answer(0, 0, TOKENIZER, StopStrings(["abX", "cY"]))
    reported, text = [], ""
    for token in tokens:
        text += answer.take(Delivered(0, 1, (token,), (Likelihood(-1.0),)))
        reported += [entry[0] for entry in answer.take_entries()]
    text += answer.end("length", None)
    assert answer.take_entries() == []
    assert (text, reported) == ("ab", tokens[:2])
    assert (answer.stopping_word, answer.predicted) == ("cY", 4)


@pytest.mark.parametrize(
    ("reason", "limit", "stop_type", "predicted", "truncated"),
    [
        ("stop", None, "eos", 2, False),
        ("length", 1, "limit", 1, False),
        ("length", 5, "limit", 1, True),  # the context was full before
        ("length", None, "limit", 1, True),
        ("no_space", None, "limit", 1, True),
    ],
)
def test_the_end_of_an_answer(reason, limit, stop_type, predicted, truncated):
    answer = Answer(0, 0, TOKENIZER, None)
    answer.take(Delivered(0, 1, TOKENIZER.encode("a")))
    assert answer.end(reason, limit) == ""
    assert (answer.stop_type, answer.predicted) == (stop_type, predicted)
    assert answer.truncated == truncated


def test_timings():
    """20 prompt tokens in 40 ms, 4 of 24 found; 5 and 3 tokens in 60 ms: 4 and 2 steps."""
    timing = Timing()
    timing.cached, timing.processed = 4, 20
    timing.prefill_work_ns, timing.decode_work_ns = 40 * MS, 60 * MS
    assert work_of(timing, [5, 3]).as_timings() == {
        "cache_n": 4,
        "prompt_n": 20,
        "prompt_ms": 40.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 8,
        "predicted_ms": 60.0,
        "predicted_per_token_ms": 10.0,
        "predicted_per_second": 100.0,
    }


@pytest.mark.parametrize("predicted", [[], [0], [1], [1, 0]])
def test_timings_of_nothing_are_zero(predicted):
    timings = work_of(Timing(), predicted).as_timings()
    assert {value for name, value in timings.items() if name != "predicted_n"} == {0}


def test_work_adds_up():
    one, two = Work(1, 2, 3, 4, 5, 6), Work(10, 20, 30, 40, 50, 60)
    assert one + two == Work(11, 22, 33, 44, 55, 66)


def test_spans():
    timing = Timing()
    assert spans(timing, 5 * MS, "mixed", None) == {
        "queue_ms": 0.0,
        "prefill_ms": 0.0,
        "barrier_wait_ms": 0.0,
        "decode_ms": 0.0,
        "cohort": None,
        "policy": "mixed",
    }
    timing.arrived_ns, timing.seated_ns, timing.ready_ns = MS, 3 * MS, 7 * MS
    open_spans = spans(timing, 12 * MS, "barrier-fair", 2)
    assert (open_spans["queue_ms"], open_spans["prefill_ms"]) == (2.0, 4.0)
    assert (open_spans["barrier_wait_ms"], open_spans["decode_ms"]) == (5.0, 0.0)
    timing.opened_ns, timing.ended_ns = 8 * MS, 20 * MS
    closed = spans(timing, 99 * MS, "barrier-fair", 2)
    assert (closed["barrier_wait_ms"], closed["decode_ms"]) == (1.0, 12.0)
