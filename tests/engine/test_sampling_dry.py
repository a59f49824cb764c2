"""Goal: DRY punishes what would go on with a repetition, as long as the repetition is.

Method: llama.cpp's own examples (tests/test-sampling.cpp, build 11434), cases by hand, and
hypothesis against comparing the end of the window with every place of it, token by token.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloop.engine.sampler import Draw
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.sampling_dry import (
    TABLES,
    BreakerTables,
    common_prefixes,
    continuations,
    reach,
)
from phaseloop.engine.settings import Breaker, Sampling

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def penalties(vocabulary, tokens, **fields):
    """What DRY subtracts from each token's logit; the last token of the vocabulary has none."""
    sampling = Sampling(samplers=("dry",), n_probs=vocabulary, post_sampling_probs=True, **fields)
    row = np.zeros((1, vocabulary), np.float32)
    (sampled,) = ChainSampler().sample(row, [Draw(1, 0, 0, len(tokens), tokens, sampling)])
    logs = dict(sampled.likelihood.top)
    return [logs[vocabulary - 1] - logs.get(token, -math.inf) for token in range(vocabulary)]


LLAMA_CPP = [
    ([0, 1], [0.25] * 4, 1.0, 2, 4, ()),
    ([0, 1, 2, 0, 1], [0.296923, 0.296923, 0.109232, 0.296923], 1.0, 2, 5, ()),
    ([0, 1, 3, 4, 0, 1], [0.2] * 5, 1.0, 2, 6, (Breaker(3),)),
    ([0, 1, 2, 0, 1], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818], 2.0, 2, 5, ()),
    ([0, 1, 2, 3, 4, 0, 1], [0.2] * 5, 1.0, 4, 7, ()),
]


@pytest.mark.parametrize(
    ("tokens", "after", "multiplier", "allowed", "last_n", "breakers"), LLAMA_CPP
)
def test_llama_cpp_examples(tokens, after, multiplier, allowed, last_n, breakers):
    found = penalties(
        len(after),
        tokens,
        dry_multiplier=multiplier,
        dry_base=1.1,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_breakers=breakers,
    )
    weights = [math.exp(-penalty) for penalty in found]
    assert [weight / sum(weights) for weight in weights] == pytest.approx(after, abs=1e-5)


def test_the_longest_repetition_counts():
    """`1 2` was followed by 3, `0 1 2` by 4: lengths 2 and 3 beyond an allowed length of 2."""
    tokens = [0, 1, 2, 4, 5, 1, 2, 3, 0, 1, 2]
    found = penalties(7, tokens, dry_multiplier=0.5, dry_base=3.0)
    assert found == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.5, 0.0, 0.0])


@pytest.mark.parametrize(("last_n", "penalty"), [(0, 0.0), (5, 0.0), (6, 1.0), (-1, 1.0)])
def test_only_the_last_tokens_count(last_n, penalty):
    found = penalties(
        4, [0, 1, 2, 0, 0, 1], dry_multiplier=1.0, dry_base=2.0, dry_penalty_last_n=last_n
    )
    assert found == pytest.approx([0.0, 0.0, penalty, 0.0])


@pytest.mark.parametrize("fields", [{"dry_multiplier": 0.0}, {"dry_base": 0.9}])
def test_switched_off(fields):
    fields = {"dry_multiplier": 1.0} | fields
    assert penalties(4, [0, 1, 2, 0, 1], **fields) == [0.0] * 4


def test_a_breaker_itself_is_never_punished():
    tokens = [0, 1, 2, 0, 1]
    found = penalties(4, tokens, dry_multiplier=1.0, dry_breakers=(Breaker(2, (3,)),))
    assert found[2] == pytest.approx(1.0)
    found = penalties(4, tokens, dry_multiplier=1.0, dry_breakers=(Breaker(2, (3,)), Breaker(2)))
    assert found[2] == 0.0


def test_a_very_long_repetition_does_not_overflow():
    """llama.cpp's bound: no power beyond what float32 can hold, 88.7228 / log(2) = 127 here."""
    found = penalties(3, [1] * 500, dry_multiplier=1e-38, dry_base=2.0, dry_penalty_last_n=-1)
    assert found[1] == pytest.approx(2.0**127 * 1e-38)
    assert found[0] == 0.0


def test_absurd_settings_forbid_at_most():
    fields = {"dry_multiplier": 1e308, "dry_base": 1e300, "dry_penalty_last_n": -1}
    assert penalties(3, [1] * 500, **fields) == [0.0, math.inf, 0.0]


def test_a_token_outside_the_vocabulary_is_passed_over():
    assert penalties(3, [0, 1, 99, 0, 1], dry_multiplier=1.0) == [0.0] * 3


# --- its parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "tails", "tokens"),
    [
        ([5, 6, 7], {}, 3),
        ([5, 6, 7], {7: [()]}, 0),
        ([5, 6, 7], {5: [()]}, 2),
        ([5, 6, 7], {5: [(6,)]}, 1),
        ([5, 6, 7], {5: [(6, 7)]}, 0),
        ([5, 6, 7], {5: [(7,)]}, 3),
        ([5, 6, 7], {5: [(6, 7, 8)]}, 3),  # the window ends before the breaker does
        ([5, 6, 7], {5: [(), (6,), (9, 9)]}, 1),  # the longest that fits
        ([5, 6, 5, 7], {5: [()]}, 1),  # the last one
        ([5, 6, 5, 7], {5: [(6,)]}, 2),
    ],
)
def test_reach(window, tails, tokens):
    assert reach(window, tails) == tokens


@given(TOKENS)
def test_common_prefixes(tokens):
    def shared(start):
        length = 0
        while start + length < len(tokens) and tokens[length] == tokens[start + length]:
            length += 1
        return length

    assert common_prefixes(tokens) == [shared(start) for start in range(len(tokens))]


@given(TOKENS, st.integers(0, 12), st.integers(0, 4))
def test_continuations(window, limit, allowed):
    expected = {}
    for end in range(1, len(window)):  # the token at `end` followed upon window[:end]
        length = 0
        while length < end and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if min(length, limit) >= allowed:
            token = window[end]
            expected[token] = max(min(length, limit), expected.get(token, 0))
    assert continuations(window, limit, allowed) == expected


def test_tables_are_made_once_and_forgotten_in_turn():
    tables = BreakerTables()
    breakers = [(Breaker(n), Breaker(n, (1,)), Breaker(n + 1)) for n in range(TABLES + 1)]
    first = tables(breakers[0])
    assert first == {0: [(), (1,)], 1: [()]}
    others = [tables(one) for one in breakers[1:TABLES]]
    assert tables(breakers[0]) is first
    tables(breakers[TABLES])  # one too many: the one that was not asked for longest goes
    assert tables(breakers[0]) is first
    assert tables(breakers[1]) is not others[0]
    assert tables(breakers[1]) == others[0]
