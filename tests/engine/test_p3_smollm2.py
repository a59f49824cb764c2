"""Goal: what test_p3.py shows of synthetic models holds for a real one and over 128 tokens.

Method: SmolLM2-135M-Instruct, whose Q4_1 weights the synthetic ones lack.  One factor at a time
over 128 greedy and 128 sampled tokens with their likelihoods; every pairing of factors over 16
tokens of each, to keep `make test` short; a grid of all factors in `make test-all`.
"""

from functools import cache

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, Job, serve
from p3 import LEVELS, SLOTS, Subject, alone, grid, name_of, one_at_a_time, pairwise, together

from phaseloop.engine.cpu_load import CpuOptions, load_cpu_engine
from phaseloop.engine.sampling import ChainSampler
from phaseloop.model.weights import open_weights
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

TEXTS = (
    "<|im_start|>user\nWrite a short story about a lighthouse keeper who finds a map in a bottle,"
    " and about the three islands that are drawn on it but on no other map. Say what he packs, whom"
    " he asks to mind the lamp, and what the weather is like when he leaves.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>user\nExplain step by step how bread rises: what yeast eats, what gluten does, why"
    " salt slows it down, what happens in the first ten minutes in a hot oven, and how a baker can"
    " tell that the loaf is done without cutting it open. Keep it under two hundred words."
    "<|im_end|>\n<|im_start|>assistant\n",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if",
    "The first ten prime numbers are 2, 3, 5, 7,",
    "Translate into French: The train to the coast leaves at half past six, from platform nine.",
    "Dear Sir or Madam, I am writing to complain about",
    "List five uses of an old tin can.",
    "In the year 1911 two expeditions set out for the South Pole. One of them",
    "Once upon a time, in a village at the foot of a very tall mountain, there lived a clockmaker",
)
CHUNK_S_MAX = 1800  # of a grid


class Engines:
    """The model, loaded once per number of threads, and the two answers alone."""

    def __init__(self, path):
        self._path = path
        self.at = cache(self._load)
        weights = open_weights(path)
        encode = Tokenizer(vocabulary_of(weights.metadata)).encode
        greedy, sampled, *others = (tuple(encode(text)) for text in TEXTS)
        self.whole = Subject(greedy, sampled, tuple(others), 128)
        self.short = Subject(greedy, sampled, tuple(others), 16)
        self.expected = [answer.bits for answer in alone(self.at(1), self.whole)]

    def _load(self, threads):
        options = CpuOptions(slot_count=SLOTS, context_length=1024, threads=threads)
        return load_cpu_engine(self._path, ChainSampler(), options, end_tokens=frozenset())[0]

    def check(self, setting, subject):
        answers = together(self.at(setting.threads), subject, setting)
        for answer, (ids, likelihoods) in zip(answers, self.expected, strict=True):
            (own_ids,), (own_likelihoods,) = answer.bits
            assert own_ids == ids[0][: subject.tokens]
            assert own_likelihoods == likelihoods[0][: subject.tokens]


@pytest.fixture(scope="module")
def engines(smollm2):
    return Engines(smollm2)


def test_the_standard_is_what_the_model_says(engines):
    """128 tokens each, three alternatives beside every one, and a sampler that is one."""
    for (ids,), (likelihoods,) in engines.expected:
        assert len(ids) == len(likelihoods) == 128
        assert {len(one.top) for one in likelihoods} == {3}
    (_, (greedy,)), (_, (sampled,)) = engines.expected
    assert all(one.chosen == one.top[0][1] for one in greedy)
    assert not all(one.chosen == one.top[0][1] for one in sampled)


@pytest.mark.parametrize("setting", one_at_a_time(), ids=name_of)
def test_no_factor_shows(engines, setting):
    engines.check(setting, engines.whole)


@pytest.mark.parametrize("setting", pairwise(seed=5, cohort=(2, 3, 5, 8)), ids=name_of)
def test_no_two_factors_show(engines, setting):
    engines.check(setting, engines.short)


def test_a_long_prompt_in_one_pass_or_in_twenty(engines):
    """600 tokens: more than a pass takes, and than a tile of attention many times."""
    prompt = (engines.whole.greedy * 12)[:600]
    job = Job(prompt, 8, GREEDY)
    (whole,) = serve(engines.at(2), [job])
    (pieces,) = serve(engines.at(2), [job], batch_tokens=32)
    assert pieces.bits == whole.bits


@pytest.mark.grid
@pytest.mark.timeout(CHUNK_S_MAX)
@pytest.mark.parametrize("policy", LEVELS["policy"])
@pytest.mark.parametrize("cohort", [2, 4, 8])
def test_nothing_shows(engines, policy, cohort):
    levels = {"batch_tokens": (32, 2048), "leaver": ("nobody", "generating")}
    for setting in grid(cohort=(cohort,), policy=(policy,), **levels):
        engines.check(setting, engines.short)
