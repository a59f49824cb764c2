"""Goal: a token is drawn as its own request's settings say, and never by its neighbours.

Method: draws against the inverse of the distribution by hand; chi-square over fixed seeds;
likelihoods by arithmetic; every row compared bit for bit alone and in company; hypothesis over
settings that no sane client sends.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloop.engine.sampler import Draw
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.sampling_random import uniform
from phaseloop.engine.settings import GREEDY, SAMPLERS, Breaker, Likelihood, Sampling

CHI_SQUARE_999 = {4: 18.47, 7: 24.32}  # by degrees of freedom: exceeded once in a thousand
PLAIN = Sampling(samplers=())
EIGHT = [0.3, 0.05, 0.2, 0.1, 0.05, 0.15, 0.05, 0.1]


def one(row, sampling, *, seed=0, choice=0, position=0, tokens=()):
    rows = np.array(row, np.float32)[None]
    (sampled,) = ChainSampler().sample(rows, [Draw(1, choice, seed, position, tokens, sampling)])
    return sampled


def log(probabilities):
    return [math.log(p) if p else -math.inf for p in probabilities]


# --- the draw -------------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id():
    assert one([0.0, 3.0, 1.0, 3.0], GREEDY).token == 1
    biased = Sampling(temperature=0.0, logit_bias=((2, 2.0),))
    assert one([0.0, 3.0, 1.0, 3.0], biased).token == 1
    assert one([0.0, 3.0, 1.5, 3.0], biased).token == 2


def test_greedy_still_minds_what_comes_before_it():
    row = log([0.5, 0.3, 0.2])
    excluding = Sampling(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.25, top_k=0)
    assert one(row, excluding).token == 1
    assert one(row, Sampling(temperature=0.0, presence_penalty=1.0), tokens=[0]).token == 1
    repeating = Sampling(temperature=0.0, dry_multiplier=5.0)
    assert one(row, repeating, tokens=[1, 2, 0, 1, 2]).token == 1
    assert one(log([0.4, 0.2, 0.2, 0.2]), Sampling(temperature=0.0, typical_p=0.5)).token == 1


def test_a_temperature_outside_the_chain_does_nothing():
    chain = Sampling(samplers=("top_k",), temperature=0.0)
    tokens = {one(log(EIGHT), chain, seed=seed).token for seed in range(200)}
    assert tokens == set(range(8))


def test_the_draw_inverts_the_distribution():
    """Parts of [0, 1) from the highest probability down, equals by id."""
    order = sorted(range(8), key=lambda token: (-EIGHT[token], token))
    for seed in range(300):
        number, end = uniform(seed, 3, 17, 0), 0.0
        for expected in order:
            end += EIGHT[expected]
            if number <= end:
                break
        assert one(log(EIGHT), PLAIN, seed=seed, choice=3, position=17).token == expected


@pytest.mark.parametrize("over", ["seed", "choice", "position"])
def test_draws_follow_the_distribution(over):
    counts = [0] * 8
    for value in range(6000):
        counts[one(log(EIGHT), PLAIN, **({"seed": 5} | {over: value})).token] += 1
    expected = [6000 * p for p in EIGHT]
    distance = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert distance < CHI_SQUARE_999[7]


def test_draws_of_the_default_chain_follow_what_it_leaves_over():
    """0.9 and less of 0.95 are reached by the first five, min_p drops none of them.

    Temperature 0.8 makes of p a weight of p ** 1.25.
    """
    row = log([0.4, 0.25, 0.15, 0.1, 0.06, 0.02, 0.01, 0.01])
    weights = [p**1.25 for p in (0.4, 0.25, 0.15, 0.1, 0.06)]
    counts = [0] * 8
    for seed in range(6000):
        counts[one(row, Sampling(), seed=seed).token] += 1
    assert counts[5:] == [0, 0, 0]
    expected = [6000 * weight / sum(weights) for weight in weights]
    distance = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=False))
    assert distance < CHI_SQUARE_999[4]


def test_the_coin_of_xtc_says_nothing_about_the_draw():
    """Where the coin spares the top token, it is drawn as often as its probability says."""
    sampling = Sampling(samplers=("xtc",), xtc_probability=0.5, xtc_threshold=0.2)
    spared = [seed for seed in range(4000) if uniform(seed, 0, 0, 1) > 0.5]
    drawn = sum(one(log([0.6, 0.4]), sampling, seed=seed).token == 0 for seed in spared)
    assert drawn / len(spared) == pytest.approx(0.6, abs=0.035)  # over three deviations


# --- rows that allow no token ---------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(n_probs=3), PLAIN])
@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [2.0, 1.0, math.nan], [1.0, math.inf, 2.0]])
def test_a_broken_row_yields_no_token(sampling, bad):
    assert one(bad, sampling).token is None


def test_a_row_without_a_possible_token_yields_none():
    assert one([-math.inf] * 3, Sampling()).token is None
    forbidden = Sampling(logit_bias=tuple((token, -math.inf) for token in range(3)))
    assert one([1.0, 2.0, 3.0], forbidden).token is None


def test_a_broken_row_harms_no_other():
    rows = np.array([[0.0, 1.0], [math.nan, 1.0], [-math.inf, -math.inf], [1.0, 0.0]], np.float32)
    draws = [Draw(n, 0, n, 0, (), GREEDY) for n in range(4)]
    tokens = [sampled.token for sampled in ChainSampler().sample(rows, draws)]
    assert tokens == [1, None, None, 0]


def test_no_rows_no_tokens():
    assert ChainSampler().sample(np.zeros((0, 8), np.float32), []) == []


# --- likelihoods ----------------------------------------------------------------------------------


def exact(likelihood):
    return likelihood.chosen, [token for token, _ in likelihood.top], [p for _, p in likelihood.top]


def test_before_the_samplers_it_is_the_models_distribution():
    """Softmax of 2, 1, 0 is 0.66524, 0.24473, 0.09003; neither bias nor temperature count."""
    sampling = Sampling(temperature=0.0, n_probs=2, logit_bias=((2, 9.0),), top_k=1)
    sampled = one([1.0, 2.0, 0.0], sampling)
    chosen, tokens, logs = exact(sampled.likelihood)
    assert sampled.token == 2
    assert chosen == pytest.approx(math.log(0.09003), abs=1e-4)
    assert tokens == [1, 0]
    assert logs == pytest.approx([math.log(0.66524), math.log(0.24473)], abs=1e-4)


def test_after_the_samplers_it_is_what_they_left_over():
    """top_k leaves 2 and 1; twice the temperature makes the odds exp(0.5) = 1.64872."""
    sampling = Sampling(
        samplers=("top_k", "temperature"),
        top_k=2,
        temperature=2.0,
        n_probs=5,
        post_sampling_probs=True,
    )
    sampled = one([1.0, 2.0, 0.0], sampling)
    chosen, tokens, logs = exact(sampled.likelihood)
    assert tokens == [1, 0]
    assert [math.exp(p) for p in logs] == pytest.approx([1.64872 / 2.64872, 1 / 2.64872], abs=1e-5)
    assert chosen == logs[tokens.index(sampled.token)]


@pytest.mark.parametrize("bias", [(), ((0, 0.5),)])  # by the shortcut and by the whole chain
def test_a_greedy_token_is_certain_after_the_samplers(bias):
    sampling = Sampling(temperature=0.0, n_probs=3, post_sampling_probs=True, logit_bias=bias)
    assert one([1.0, 2.0, 0.0], sampling).likelihood == Likelihood(0.0, ((1, 0.0),))


def test_more_alternatives_than_there_are():
    row = [1.0, 1.0, -math.inf, 0.0]
    likelihood = one(row, Sampling(n_probs=99, temperature=0.0)).likelihood
    assert [token for token, _ in likelihood.top] == [0, 1, 3]
    assert math.fsum(math.exp(p) for _, p in likelihood.top) == pytest.approx(1.0)


@pytest.mark.parametrize("post", [False, True])
def test_none_are_reported_unasked(post):
    assert one([1.0, 2.0], Sampling(post_sampling_probs=post)).likelihood is None


# --- rows do not know of each other ---------------------------------------------------------------

BREAKERS = tuple(Breaker(token) for token in range(0, 1000, 7))
COMPANY = [
    GREEDY,
    Sampling(),
    Sampling(n_probs=5),
    Sampling(temperature=0.0, n_probs=5),
    Sampling(n_probs=4, post_sampling_probs=True),
    Sampling(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, n_probs=3),
    Sampling(top_k=0, top_p=0.9, n_probs=3, post_sampling_probs=True),
    Sampling(typical_p=0.6, top_k=0, n_probs=3, post_sampling_probs=True),
    Sampling(repeat_penalty=1.3, frequency_penalty=0.2, repeat_last_n=-1, n_probs=2),
    Sampling(dry_multiplier=1.0, dry_penalty_last_n=-1, dry_breakers=BREAKERS, n_probs=2),
    Sampling(top_n_sigma=1.5, n_probs=2, post_sampling_probs=True),
    Sampling(xtc_probability=0.6, xtc_threshold=0.01, n_probs=2, post_sampling_probs=True),
    Sampling(dynatemp_range=0.7, n_probs=2, post_sampling_probs=True),
    Sampling(logit_bias=((3, 4.0), (5, -math.inf)), n_probs=2),
    Sampling(samplers=("temperature", "min_p", "top_k"), n_probs=2, post_sampling_probs=True),
]


@dataclass
class Rows:
    logits: np.ndarray
    draws: list

    @classmethod
    def random(cls, count, vocabulary):
        random = np.random.default_rng(count + vocabulary)
        logits = (random.standard_normal((count, vocabulary)) * 4).astype(np.float32)
        draws = [
            Draw(
                n,
                n % 3,
                int(random.integers(0, 2**63)),
                int(random.integers(0, 9999)),
                random.integers(0, 30, 50).tolist(),
                COMPANY[n % len(COMPANY)],
            )
            for n in range(count)
        ]
        return cls(logits, draws)

    def sample(self, *numbers):
        return ChainSampler().sample(self.logits[list(numbers)], [self.draws[n] for n in numbers])


@pytest.mark.parametrize("vocabulary", [1001, 49_152])  # rows of the first are not aligned
def test_company_changes_no_bit(vocabulary):
    rows = Rows.random(64, vocabulary)
    alone = [rows.sample(n)[0] for n in range(64)]
    assert len({sampled.token for sampled in alone}) > 30
    assert rows.sample(*range(64)) == alone
    assert rows.sample(*reversed(range(64))) == alone[::-1]
    random = np.random.default_rng(1)
    for count in (2, 3, 7, 8, 9, 31, 33):
        chosen = random.permutation(64)[:count].tolist()
        assert rows.sample(*chosen) == [alone[n] for n in chosen]


def test_one_sampler_keeps_nothing_of_a_round():
    rows, sampler = Rows.random(30, 1001), ChainSampler()
    first = sampler.sample(rows.logits, rows.draws)
    assert sampler.sample(rows.logits, rows.draws) == first


def test_where_a_row_lies_in_memory_changes_no_bit():
    rows = Rows.random(15, 1001)
    alone = rows.sample(*range(15))
    for shift in range(1, 17):
        space = np.zeros(rows.logits.size + shift, np.float32)
        moved = space[shift:].reshape(rows.logits.shape)
        moved[:] = rows.logits
        assert ChainSampler().sample(moved, rows.draws) == alone


def test_logits_are_only_read():
    rows = Rows.random(30, 1001)
    before = rows.logits.copy()
    ChainSampler().sample(rows.logits, rows.draws)
    assert (rows.logits == before).all()


# --- whatever is asked ----------------------------------------------------------------------------

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=1e-300, allow_infinity=False)
ANY_FLOAT32 = st.floats(width=32, allow_nan=False, max_value=3.4028234663852886e38)
TOKENS = st.lists(st.integers(-2, 20), max_size=30)
BIASES = st.tuples(st.integers(-1, 20), st.one_of(FINITE, st.just(-math.inf)))
ANY_SAMPLING = st.builds(
    Sampling,
    samplers=st.lists(st.sampled_from(SAMPLERS), max_size=14).map(tuple),
    temperature=FINITE,
    dynatemp_range=FINITE,
    dynatemp_exponent=FINITE,
    top_k=st.integers(-1, 30),
    top_p=FINITE,
    min_p=FINITE,
    typical_p=FINITE,
    top_n_sigma=FINITE,
    xtc_probability=FINITE,
    xtc_threshold=FINITE,
    min_keep=st.integers(0, 30),
    repeat_penalty=POSITIVE,
    repeat_last_n=st.integers(-1, 40),
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    dry_multiplier=FINITE,
    dry_base=FINITE,
    dry_allowed_length=st.integers(0, 5),
    dry_penalty_last_n=st.integers(-1, 40),
    dry_breakers=st.lists(
        st.builds(Breaker, st.integers(0, 20), st.lists(st.integers(0, 20), max_size=2).map(tuple)),
        max_size=3,
    ).map(tuple),
    logit_bias=st.lists(BIASES, max_size=4).map(tuple),
    n_probs=st.just(30),
    post_sampling_probs=st.booleans(),
)


def allowed(row, sampling):
    forbidden = {token for token, added in sampling.logit_bias if added == -math.inf}
    return {t for t, logit in enumerate(row) if logit > -math.inf and t not in forbidden}


@settings(max_examples=400)
@given(
    st.lists(st.one_of(ANY_FLOAT32, st.just(-math.inf), st.floats(-9, 9)), min_size=1, max_size=20),
    ANY_SAMPLING,
    TOKENS,
    st.integers(0, 2**64 - 1),
)
def test_a_token_that_is_possible_is_always_found(row, sampling, tokens, seed):
    possible = allowed(row, sampling)
    sampled = one(row, sampling, seed=seed, tokens=tokens)
    if not possible:
        assert sampled.token is None
        return
    assert sampled.token in possible
    if sampling.post_sampling_probs:
        logs = dict(sampled.likelihood.top)
        assert logs[sampled.token] == sampled.likelihood.chosen
        assert math.exp(sampled.likelihood.chosen) > 0.0
        assert math.fsum(math.exp(p) for p in logs.values()) == pytest.approx(1.0)


@given(st.integers(0, 19), st.integers(1, 20), ANY_SAMPLING, TOKENS, st.integers(0, 2**64 - 1))
def test_the_only_possible_token_is_always_taken(only, count, sampling, tokens, seed):
    only %= count
    row = [-math.inf] * count
    row[only] = -7.0
    if only in allowed(row, sampling):
        assert one(row, sampling, seed=seed, tokens=tokens).token == only
