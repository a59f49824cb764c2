"""Goal: each step of the chain does what llama.cpp's sampler of that name does.

Method: what a chain leaves over is read from the likelihoods after sampling, and compared with
(1) the inputs and outputs that llama.cpp's own test states (tests/test-sampling.cpp, build 11434),
(2) arithmetic by hand, (3) a slow float64 twin of the chain, over random settings and rows.
"""

import math

import numpy as np
import pytest

from phaseloop.engine.sampler import Draw
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.sampling_random import uniform
from phaseloop.engine.settings import SAMPLERS, Sampling

FAIR = [0.2] * 5
RISING = [0.1, 0.2, 0.3, 0.4]
FALLING = [0.4, 0.3, 0.2, 0.1]


def left_over(logits, sampling, tokens=(), seed=0):
    """Probability by token, in the order reported, of what the chain leaves to the draw."""
    row = np.array(logits, np.float32)
    wanted = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    wanted |= {"n_probs": len(row), "post_sampling_probs": True}
    draw = Draw(1, 0, seed, len(tokens), tokens, Sampling(**wanted))
    (sampled,) = ChainSampler().sample(row[None], [draw])
    assert sampled.token in dict(sampled.likelihood.top)
    assert sampled.likelihood.chosen == dict(sampled.likelihood.top)[sampled.token]
    return {token: math.exp(log) for token, log in sampled.likelihood.top}


def log(probabilities):
    return [math.log(p) if p else -math.inf for p in probabilities]


# --- llama.cpp's own examples ---------------------------------------------------------------------

EXAMPLES = [
    ("temperature", {"temperature": 1.0}, RISING, RISING),
    ("temperature", {"temperature": 0.0}, RISING, [0, 0, 0, 1]),
    ("top_k", {"top_k": 1}, RISING, [0, 0, 0, 1]),
    ("top_k", {"top_k": 3}, RISING, [0, 0.22222, 0.33333, 0.44444]),
    ("top_k", {"top_k": 4}, RISING, RISING),
    ("top_k", {"top_k": 0}, RISING, RISING),
    ("top_p", {"top_p": 0.0}, RISING, [0, 0, 0, 1]),
    # There 0.7 and 0.8, exactly what the likeliest have: which side that falls on is rounding's.
    ("top_p", {"top_p": 0.699999}, RISING, [0, 0, 0.428571, 0.571429]),
    ("top_p", {"top_p": 0.8}, RISING, [0, 0.22222, 0.33333, 0.44444]),
    ("top_p", {"top_p": 1.0}, RISING, RISING),
    ("min_p", {"min_p": 0.0}, RISING, RISING),
    ("min_p", {"min_p": 0.24}, RISING, RISING),
    ("min_p", {"min_p": 0.26}, RISING, [0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]),
    ("min_p", {"min_p": 0.49}, RISING, [0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]),
    ("min_p", {"min_p": 0.51}, RISING, [0, 0, 0.3 / 0.7, 0.4 / 0.7]),
    ("min_p", {"min_p": 0.74}, RISING, [0, 0, 0.3 / 0.7, 0.4 / 0.7]),
    ("min_p", {"min_p": 0.76}, RISING, [0, 0, 0, 1]),
    ("min_p", {"min_p": 1.0}, RISING, [0, 0, 0, 1]),
    ("min_p", {"min_p": 1.05}, RISING, [0, 0, 0, 1]),
    # There without the last softmax, and by a coin of 0.99.
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.09}, FALLING, [0, 0, 0, 1]),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.19}, FALLING, [0, 0, 2 / 3, 1 / 3]),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.29}, FALLING, [0, 3 / 6, 2 / 6, 1 / 6]),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.39}, FALLING, FALLING),
    ("typ_p", {"typical_p": 0.5}, [0.97, 0.01, 0.01, 0.01], [1, 0, 0, 0]),
    ("typ_p", {"typical_p": 0.5}, [0.4, 0.2, 0.2, 0.2], [0, 1 / 3, 1 / 3, 1 / 3]),
    ("top_n_sigma", {"top_n_sigma": 1.0}, RISING, [0, 0, 0.428571, 0.571429]),
    ("top_n_sigma", {"top_n_sigma": 0.0}, RISING, RISING),
    ("top_n_sigma", {"top_n_sigma": 3.0}, RISING, RISING),
]


@pytest.mark.parametrize(("name", "fields", "before", "after"), EXAMPLES)
def test_llama_cpp_examples(name, fields, before, after):
    found = left_over(log(before), Sampling(samplers=(name,), **fields))
    expected = {token: p for token, p in enumerate(after) if p}
    assert found == pytest.approx(expected, abs=1e-5)


PENALTIES = [
    ([0], (50.0, 0.0, 0.0), [0, 0.25, 0.25, 0.25, 0.25]),
    ([0, 1, 2], (50.0, 0.0, 0.0), [0, 0, 0, 0.5, 0.5]),
    ([0, 1, 2, 0, 0], (50.0, 0.0, 0.0), [0, 0, 0, 0.5, 0.5]),
    ([0], (1.0, 5.0, 5.0), [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
    ([0, 1, 2], (1.0, 5.0, 5.0), [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
    ([0, 1, 2, 0, 0], (1.0, 5.0, 5.0), [0.0, 0.000023, 0.000023, 0.499977, 0.499977]),
]


@pytest.mark.parametrize(("tokens", "penalties", "after"), PENALTIES)
def test_llama_cpp_penalties(tokens, penalties, after):
    repeat, frequency, presence = penalties
    sampling = Sampling(
        samplers=("penalties",),
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    found = left_over(log(FAIR), sampling, tokens)
    assert [found.get(token, 0.0) for token in range(5)] == pytest.approx(after, abs=1e-5)


# A vocabulary of 10,000 whose token i has i shares: sums are integers.
SHARES = 10_000
QUEUES = [
    ("k", 10_000, 1.0, 1.0),
    ("k", 1, 1.0, 1.0),
    ("p", 10_000, 0.0, 1.0),
    ("m", 10_000, 1.0, 1.0),
    ("k", 100, 1.0, 1.0),
    ("p", 10_000, 0.0003, 1.0),
    ("p", 10_000, 0.8, 1.0),
    ("m", 10_000, 1.0, 9997.9 / 9999.0),
    ("m", 10_000, 1.0, 0.1),
    *((order, 100, 0.8, 0.1) for order in ("kp", "km", "pk", "pm", "mk", "mp")),
    *((order, 100, 0.8, 0.1) for order in ("kpm", "kmp", "pkm", "pmk", "mkp", "mpk")),
    ("mp", 100, 0.8, 9997.9 / 9999.0),
]


@pytest.mark.parametrize(("order", "k", "p", "m"), QUEUES)
def test_llama_cpp_queues(order, k, p, m):
    lowest = 1  # token 0 has no share; what is left is always lowest .. SHARES - 1
    for step in order:
        if step == "k":
            lowest = max(lowest, SHARES - k)
        elif step == "m":
            lowest = max(lowest, math.ceil(m * (SHARES - 1)))
        else:
            wanted, total = p * sum(range(lowest, SHARES)), 0
            for token in range(SHARES - 1, lowest - 1, -1):
                total += token
                if total >= wanted:
                    lowest = token
                    break
    names = {"k": "top_k", "p": "top_p", "m": "min_p"}
    samplers = tuple(names[step] for step in order)
    sampling = Sampling(samplers=samplers, top_k=k, top_p=p, min_p=m)
    found = left_over(log(range(SHARES)), sampling)
    assert list(found) == list(range(SHARES - 1, lowest - 1, -1))


# --- by hand --------------------------------------------------------------------------------------


def logits_after(logits, sampling, tokens=()):
    """Differences to the last token's logit, which the chain must leave alone."""
    found = left_over(logits, sampling, tokens)
    end = math.log(found[len(logits) - 1])
    return [math.log(found[token]) - end + logits[-1] for token in range(len(logits))]


def test_repeat_penalty_lowers_either_sign():
    sampling = Sampling(samplers=("penalties",), repeat_penalty=2.0)
    assert logits_after([3.0, -3.0, 1.0, 0.0], sampling, [0, 1, 0]) == pytest.approx(
        [1.5, -6.0, 1.0, 0.0]
    )


def test_frequency_counts_and_presence_does_not():
    sampling = Sampling(samplers=("penalties",), frequency_penalty=0.5, presence_penalty=0.25)
    found = logits_after([1.0, 1.0, 1.0, 0.0], sampling, [0, 1, 0, 0])
    assert found == pytest.approx([1.0 - 3 * 0.5 - 0.25, 1.0 - 0.5 - 0.25, 1.0, 0.0])


def test_negative_penalties_raise():
    sampling = Sampling(samplers=("penalties",), frequency_penalty=-1.0, presence_penalty=-2.0)
    assert logits_after([0.0, 0.0], sampling, [0, 0]) == pytest.approx([4.0, 0.0])


@pytest.mark.parametrize(
    ("last_n", "seen"), [(0, ""), (1, "3"), (2, "23"), (64, "023"), (-1, "023")]
)
def test_penalties_look_at_the_last_tokens(last_n, seen):
    sampling = Sampling(samplers=("penalties",), repeat_last_n=last_n, presence_penalty=1.0)
    found = logits_after([0.0] * 5, sampling, [0, 0, 2, 3])
    assert found == pytest.approx([-1.0 if str(token) in seen else 0.0 for token in range(5)])


def test_penalties_pass_over_what_is_no_token():
    sampling = Sampling(samplers=("penalties",), presence_penalty=1.0)
    assert logits_after([0.0] * 3, sampling, [-1, 3, 10**9, 1]) == pytest.approx([0.0, -1.0, 0.0])


def test_order_matters():
    """Doubled first, 4 / 2 is above 3 / 1; penalized after the temperature, the same is not."""
    fields = {"presence_penalty": 2.0, "temperature": 0.5, "top_k": 1}
    first = Sampling(samplers=("penalties", "temperature", "top_k"), **fields)
    last = Sampling(samplers=("temperature", "penalties", "top_k"), **fields)
    assert list(left_over([4.0, 2.5], first, [0])) == [1]
    assert list(left_over([4.0, 2.5], last, [0])) == [0]


def test_penalties_after_a_truncation_may_change_who_leads():
    sampling = Sampling(
        samplers=("top_k", "penalties", "top_p"), top_k=3, top_p=0.4, presence_penalty=5.0
    )
    assert list(left_over([0.0, 1.0, 2.0, 3.0], sampling, [3])) == [2]


def test_a_sampler_may_come_twice_or_not_at_all():
    twice = Sampling(samplers=("temperature", "temperature"), temperature=2.0)
    assert left_over([4.0, 0.0], twice)[0] == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert left_over([4.0, 0.0], Sampling(samplers=(), temperature=0.0)) == pytest.approx(
        {0: 1 / (1 + math.exp(-4.0)), 1: 1 / (1 + math.exp(4.0))}
    )


def test_top_p_is_reached_and_typical_p_is_passed():
    equal = log([0.25] * 4)
    assert list(left_over(equal, Sampling(samplers=("top_p",), top_p=0.5))) == [0, 1]
    assert list(left_over(equal, Sampling(samplers=("typ_p",), typical_p=0.5))) == [0, 1, 2]


MIN_KEEP = [
    ("top_p", {"top_p": 0.1}, 3),
    ("min_p", {"min_p": 0.99}, 3),
    ("min_p", {"min_p": 2.0}, 3),
    ("typ_p", {"typical_p": 0.01}, 3),
    ("top_p", {"top_p": 0.1}, 9),
    ("min_p", {"min_p": 0.99}, 9),
    ("typ_p", {"typical_p": 0.01}, 9),
]


@pytest.mark.parametrize(("name", "fields", "min_keep"), MIN_KEEP)
def test_min_keep(name, fields, min_keep):
    assert len(left_over(log(RISING), Sampling(samplers=(name,), **fields))) == 1
    kept = left_over(log(RISING), Sampling(samplers=(name,), min_keep=min_keep, **fields))
    assert len(kept) == min(min_keep, 4)


def test_top_k_has_no_min_keep():
    assert len(left_over(log(RISING), Sampling(samplers=("top_k",), top_k=2, min_keep=3))) == 2


@pytest.mark.parametrize(("min_keep", "left"), [(0, [2, 3]), (2, [2, 3]), (3, [0, 1, 2, 3])])
def test_xtc_leaves_all_if_it_would_leave_too_few(min_keep, left):
    fields = {"xtc_probability": 1.0, "xtc_threshold": 0.19, "min_keep": min_keep}
    assert list(left_over(log(FALLING), Sampling(samplers=("xtc",), **fields))) == left


def test_xtc_of_equals_keeps_the_last():
    fields = {"xtc_probability": 1.0, "xtc_threshold": 0.2}
    found = left_over(log([0.3, 0.3, 0.3, 0.1]), Sampling(samplers=("xtc",), **fields))
    assert found == pytest.approx({2: 0.75, 3: 0.25})


def test_xtc_at_its_highest_threshold():
    fields = {"xtc_probability": 1.0, "xtc_threshold": 0.5}
    assert left_over(log([0.5, 0.5]), Sampling(samplers=("xtc",), **fields)) == {1: 1.0}


@pytest.mark.parametrize("fields", [{"xtc_probability": 0.0}, {"xtc_threshold": 0.51}])
def test_xtc_switched_off(fields):
    fields = {"xtc_probability": 1.0, "xtc_threshold": 0.1} | fields
    assert len(left_over(log(FALLING), Sampling(samplers=("xtc",), **fields))) == 4


def test_xtc_tosses_a_coin_of_its_own():
    """It excludes where the coin of its place in the chain is at most its probability."""
    sampling = Sampling(samplers=("top_k", "xtc"), top_k=4, xtc_probability=0.3, xtc_threshold=0.19)
    excluded = 0
    for seed in range(300):
        coin = uniform(seed, 0, 0, 2)
        assert len(left_over(log(FALLING), sampling, seed=seed)) == (2 if coin <= 0.3 else 4)
        excluded += coin <= 0.3
    assert 60 < excluded < 120


@pytest.mark.parametrize(("ruled_out", "part"), [(0, 0.468996), (2, 0.234498)])
def test_dynamic_temperature_by_hand(ruled_out, part):
    """The entropy of 0.9 and 0.1 is 0.325083 nats, of two equals 0.693147, of four 1.386294.

    What was ruled out counts among the candidates.
    """
    sampling = Sampling(
        samplers=("temperature",), temperature=1.0, dynatemp_range=0.8, dynatemp_exponent=2.0
    )
    odds = 9 ** (1 / (0.2 + 1.6 * part**2))
    found = left_over(log([0.9, 0.1] + [0.0] * ruled_out), sampling)
    assert found == pytest.approx({0: odds / (1 + odds), 1: 1 / (1 + odds)}, rel=1e-5)


def test_a_biased_out_token_counts_as_well():
    fields = {"samplers": ("temperature",), "temperature": 1.0, "dynatemp_range": 0.8}
    biased = Sampling(logit_bias=((2, -math.inf),), **fields)
    found = left_over(log([0.8, 0.1, 0.1]), biased)
    assert found == left_over(log([0.8, 0.1, 0.0]), Sampling(**fields))
    assert found != left_over(log([0.8, 0.1]), Sampling(**fields))


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-38, 5e-324])
def test_no_temperature_is_the_likeliest_token(temperature):
    sampling = Sampling(samplers=("temperature",), temperature=temperature)
    assert left_over([-2.0, -1.0, -1.0], sampling) == {1: 1.0}


def test_a_bias_is_added_before_everything():
    sampling = Sampling(samplers=("top_k",), top_k=2, logit_bias=((0, 3.0), (0, 2.0), (9, 1.0)))
    found = left_over([0.0, 1.0, 2.0], sampling)
    assert found == pytest.approx({0: 1 / (1 + math.exp(-3)), 2: 1 / (1 + math.exp(3))})


def test_a_bias_forbids():
    sampling = Sampling(samplers=(), logit_bias=((2, -math.inf), (1, 5.0), (1, -math.inf)))
    assert left_over([0.0, 1.0, 2.0], sampling) == {0: 1.0}


def test_absurd_biases_do_not_forbid_and_what_is_forbidden_stays_so():
    biases = ((1, 1e308), (1, 1e308), (1, -math.inf), (0, -1e308), (0, -1e308))
    chain = Sampling(samplers=("top_k",), logit_bias=biases)
    assert left_over([0.0, 1.0, -math.inf], chain) == {0: 1.0}


def test_absurd_penalties_stay_numbers():
    """Infinities would meet in the differences of typical_p and of the penalties themselves."""
    sampling = Sampling(
        samplers=("penalties", "typ_p"),
        typical_p=0.9,
        repeat_penalty=1e-300,
        frequency_penalty=1.7e308,
        presence_penalty=1.7e308,
    )
    assert left_over([1e9, 1.0, -1e9, -1e9], sampling, [0, 0, 2]) == {1: 1.0}


def test_a_temperature_that_overflows_for_others_only():
    sampling = Sampling(samplers=("temperature", "typ_p"), temperature=1e-308, typical_p=0.9)
    assert left_over([0.0, -5.0], sampling) == {0: 1.0}


# --- the twin -------------------------------------------------------------------------------------
# Pairs (token, logit), all of them to the end, minus infinity for what is ruled out: the form that
# llama.cpp has, and none of phaseloop's shortcuts.


def softmax(pairs):
    top = max(logit for _, logit in pairs)
    weights = [math.exp(logit - top) for _, logit in pairs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def ranked(pairs):
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def twin_penalties(pairs, s, tokens, _):
    if s.repeat_last_n == 0:
        return pairs
    window = tokens if s.repeat_last_n < 0 else tokens[-s.repeat_last_n :]
    result = []
    for token, logit in pairs:
        count = window.count(token)
        repeated = logit * s.repeat_penalty if logit <= 0 else logit / s.repeat_penalty
        repeated -= count * s.frequency_penalty + s.presence_penalty
        result.append((token, repeated if count else logit))
    return result


def twin_dry(pairs, s, tokens, _):
    window = tokens[-s.dry_penalty_last_n :] if s.dry_penalty_last_n > 0 else tokens
    if s.dry_multiplier == 0 or s.dry_penalty_last_n == 0 or len(window) <= s.dry_allowed_length:
        return pairs
    longest = {}
    for end in range(1, len(window)):
        length = 0
        while length < end and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if length >= s.dry_allowed_length:
            longest[window[end]] = max(length, longest.get(window[end], 0))
    return [
        (token, logit - s.dry_multiplier * s.dry_base ** (longest[token] - s.dry_allowed_length))
        if token in longest
        else (token, logit)
        for token, logit in pairs
    ]


def twin_top_n_sigma(pairs, s, *_):
    possible = [logit for _, logit in pairs if logit > -math.inf]
    if s.top_n_sigma <= 0:
        return pairs
    mean = math.fsum(possible) / len(possible)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in possible) / len(possible))
    bound = max(possible) - s.top_n_sigma * sigma
    return [(token, logit if logit >= bound else -math.inf) for token, logit in pairs]


def twin_top_k(pairs, s, *_):
    return ranked(pairs)[: s.top_k] if s.top_k > 0 else pairs


def twin_until(pairs, enough, min_keep):
    total = 0.0
    for count, p in enumerate(softmax(pairs), start=1):
        total += p
        if enough(total) and count >= min_keep:
            return pairs[:count]
    return pairs


def twin_top_p(pairs, s, *_):
    if s.top_p >= 1.0:
        return pairs
    return twin_until(ranked(pairs), lambda total: total >= s.top_p, s.min_keep)


def twin_min_p(pairs, s, *_):
    if s.min_p <= 0.0:
        return pairs
    pairs = ranked(pairs)
    bound = pairs[0][1] + math.log(s.min_p)
    count = sum(logit >= bound for _, logit in pairs)
    return pairs[: max(1, count, s.min_keep)]


def twin_typ_p(pairs, s, *_):
    if s.typical_p >= 1.0:
        return pairs
    pairs = ranked(pairs)
    probabilities = softmax(pairs)
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p)
    off = [abs(-math.log(p) - entropy) if p else math.inf for p in probabilities]
    order = sorted(range(len(pairs)), key=off.__getitem__)
    total = 0.0
    for count, place in enumerate(order, start=1):
        total += probabilities[place]
        if total > s.typical_p and count >= s.min_keep:
            return [pairs[place] for place in order[:count]]
    return pairs


def twin_xtc(pairs, s, _, coin):
    if s.xtc_probability <= 0 or s.xtc_threshold > 0.5 or coin > s.xtc_probability:
        return pairs
    pairs = ranked(pairs)
    reaching = sum(p >= s.xtc_threshold for p in softmax(pairs))
    if reaching < 2 or len(pairs) - (reaching - 1) < s.min_keep:
        return pairs
    return pairs[reaching - 1 :]


def twin_temperature(pairs, s, *_):
    temperature = s.temperature
    if s.dynatemp_range > 0 and len(pairs) > 1:
        entropy = -math.fsum(p * math.log(p) for p in softmax(pairs) if p)
        part = entropy / math.log(len(pairs))
        low = max(0.0, temperature - s.dynatemp_range)
        high = temperature + s.dynatemp_range
        temperature = low + (high - low) * part**s.dynatemp_exponent
    if temperature <= 0:
        best = ranked(pairs)[0][0]
        return [(token, logit if token == best else -math.inf) for token, logit in pairs]
    return [(token, logit / temperature) for token, logit in pairs]


TWINS = {
    "penalties": twin_penalties,
    "dry": twin_dry,
    "top_n_sigma": twin_top_n_sigma,
    "top_k": twin_top_k,
    "typ_p": twin_typ_p,
    "top_p": twin_top_p,
    "min_p": twin_min_p,
    "xtc": twin_xtc,
    "temperature": twin_temperature,
}


def twin(row, s, tokens, seed):
    pairs = [(token, float(logit)) for token, logit in enumerate(row)]
    for token, added in s.logit_bias:
        pairs[token] = (token, pairs[token][1] + added)
    for number, name in enumerate(s.samplers, start=1):
        pairs = TWINS[name](pairs, s, tokens, uniform(seed, 0, len(tokens), number))
    probabilities = softmax(pairs)
    return {token: p for (token, _), p in zip(pairs, probabilities, strict=True) if p > 0}


def random_sampling(random, vocabulary):
    """Settings with each sampler on half of the time, in any order, some twice, some missing."""

    def maybe(on, off):
        return on if random.random() < 0.5 else off

    order = tuple(SAMPLERS[i] for i in random.integers(0, len(SAMPLERS), random.integers(1, 12)))
    biased = random.integers(0, vocabulary, 3).tolist()
    return Sampling(
        samplers=maybe(order, SAMPLERS),
        temperature=maybe(random.uniform(0.1, 3.0), 0.0 if random.random() < 0.2 else 1.0),
        dynatemp_range=maybe(random.uniform(0.01, 2.0), 0.0),
        dynatemp_exponent=random.uniform(0.5, 2.0),
        top_k=maybe(int(random.integers(1, vocabulary + 2)), 0),
        top_p=maybe(random.uniform(0.05, 1.0), 1.0),
        min_p=maybe(random.uniform(0.0, 0.3), 0.0),
        typical_p=maybe(random.uniform(0.05, 1.0), 1.0),
        top_n_sigma=maybe(random.uniform(0.1, 4.0), -1.0),
        xtc_probability=maybe(0.5, 0.0),
        xtc_threshold=random.uniform(0.001, 0.4),
        min_keep=maybe(int(random.integers(0, 6)), 0),
        repeat_penalty=maybe(random.uniform(0.5, 2.0), 1.0),
        repeat_last_n=int(random.choice([-1, 0, 4, 64])),
        presence_penalty=maybe(random.uniform(-1.0, 2.0), 0.0),
        frequency_penalty=maybe(random.uniform(-1.0, 1.0), 0.0),
        dry_multiplier=maybe(random.uniform(0.1, 2.0), 0.0),
        dry_allowed_length=int(random.integers(0, 4)),
        dry_penalty_last_n=int(random.choice([-1, 0, 8, 64])),
        logit_bias=maybe(tuple((t, random.choice([-math.inf, -2.0, 2.5])) for t in biased), ()),
    )


@pytest.mark.parametrize(("vocabulary", "rows"), [(12, 1500), (700, 150), (7000, 25)])
def test_the_chain_equals_its_twin(vocabulary, rows):
    """Random numbers keep sums off the thresholds, where the order of a sum would decide."""
    random = np.random.default_rng(vocabulary)
    for seed in range(rows):
        row = (random.standard_normal(vocabulary) * random.uniform(0.1, 5.0)).astype(np.float32)
        row[random.integers(0, vocabulary, 2)] = -np.inf
        tokens = random.integers(0, min(vocabulary, 6), random.integers(0, 40)).tolist()
        sampling = random_sampling(random, vocabulary)
        expected = twin(row, sampling, tokens, seed)
        found = left_over(row, sampling, tokens, seed)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12), sampling
