"""Goal: no bit of an answer depends on its company, the policy, chunks, threads, caches or leavers.

Method: synthetic models with every kind of weights that people run, and both kinds of KV cache,
behind the whole service.  The standard is each request alone; one factor is changed at a time, then
all of them in every pairing; `make test-all` tries every choice.  Tokens and likelihoods must be
equal, not close.
"""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, SAMPLED, Job, serve
from hybrid_files import hybrid_file
from p3 import LEVELS, SLOTS, Subject, alone, grid, one_at_a_time, pairwise, together
from synthetic import VOCABULARY, decoder_file, gemma_file

from phaseloop.engine.cpu_load import CpuOptions, load_cpu_engine
from phaseloop.engine.sampling import ChainSampler

RANDOM = np.random.default_rng(3)
KINDS = {
    "token_embd": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q5_K",
    "attn_v": "Q6_K",
    "attn_output": "IQ4_XS",
    "ffn_gate": "IQ4_NL",
    "ffn_up": "Q4_K",
    "ffn_down": "Q6_K",
    "output": "Q5_K",
}
CHUNK_S_MAX = 1800  # of a grid

pytestmark = pytest.mark.timeout(300)  # each test is some thirty runs


def prompt(length: int) -> tuple[int, ...]:
    return tuple(RANDOM.integers(0, VOCABULARY, length).tolist())


SUBJECT = Subject(prompt(150), prompt(131), tuple(map(prompt, (64, 33, 7, 90, 65, 40, 70))), 24)


def mixed_file():
    """As the usual mixes are: each tensor has the kind that suits it."""
    file = decoder_file("llama")
    for name, (values, kind) in file.tensors.items():
        part = name.split(".")[-2]
        file.tensors[name] = values, KINDS.get(part, kind)
    assert set(KINDS.values()) <= {kind for _, kind in file.tensors.values()}
    return file


MODELS = {
    "mixed-F16": (mixed_file, "F16"),
    "mixed-Q8_0": (mixed_file, "Q8_0"),
    "windows-F16": (lambda: gemma_file("Q4_K"), "F16"),
    "hybrid-F16": (lambda: hybrid_file("Q4_K"), "F16"),
    "hybrid-mixture-Q8_0": (lambda: hybrid_file("Q5_K", mixture=True, fused=True), "Q8_0"),
}


class Engines:
    """One model, loaded once per number of threads, and the two answers alone."""

    def __init__(self, path, kv, attention="tiled"):
        self._path, self._kv, self._attention = path, kv, attention
        self.at = cache(self._load)
        self.expected = [answer.bits for answer in alone(self.at(1), SUBJECT)]

    def _load(self, threads):
        options = CpuOptions(
            slot_count=SLOTS,
            context_length=512,
            threads=threads,
            cache=self._kv,
            attention=self._attention,
            ubatch_tokens=256,
        )
        return load_cpu_engine(self._path, ChainSampler(), options, end_tokens=frozenset())[0]

    def differing(self, settings):
        """The settings in which an answer is another one."""
        return [
            (setting, index)
            for setting in settings
            for index, answer in enumerate(together(self.at(setting.threads), SUBJECT, setting))
            if answer.bits != self.expected[index]
        ]


@pytest.fixture(scope="module", params=MODELS)
def engines(request, tmp_path_factory):
    make, kv = MODELS[request.param]
    return Engines(make().write(tmp_path_factory.mktemp("p3") / "tiny.gguf"), kv)


def test_the_standard_has_answers_that_could_differ(engines):
    (greedy,), _ = engines.expected[0]
    (sampled,), ((first, *_),) = engines.expected[1]
    assert len(greedy) == len(sampled) == 24 and len(set(sampled)) > 2
    assert len(first.top) == 3 and first.chosen < 0


def test_another_prompt_shows(engines):
    """The comparison notices: one other token of 150 makes other likelihoods."""
    changed = (*SUBJECT.greedy[:20], (SUBJECT.greedy[20] + 1) % VOCABULARY, *SUBJECT.greedy[21:])
    (answer,) = serve(engines.at(1), [Job(changed, 24, GREEDY)])
    assert answer.bits != engines.expected[0]


def test_the_fast_attention_shows(tmp_path):
    """Which promises nothing, and says so: the settings do reach what could go wrong."""
    engines = Engines(mixed_file().write(tmp_path / "tiny.gguf"), "F16", "fast")
    assert engines.differing(one_at_a_time()) != []
    assert engines.at(1).describe().unstable == ("fast attention",)


def test_no_factor_shows(engines):
    assert engines.differing(one_at_a_time()) == []


def test_no_two_factors_show(engines):
    rows = pairwise(seed=5, cohort=(2, 3, 5, 8))
    assert len(rows) <= 30
    assert engines.differing(rows) == []


def test_a_beginning_that_another_computes_does_not_show(engines):
    """R18: of two prompts that share 90 tokens, the second forks where the first stands."""
    other = Job((*SUBJECT.greedy[:90], *SUBJECT.others[3]), 24, SAMPLED, reuse=True)
    first = Job(SUBJECT.greedy, 24, GREEDY, reuse=True)
    (apart,) = serve(engines.at(2), [other])
    leader, follower = serve(engines.at(2), [first, other], share_length_min=50, batch_tokens=64)
    assert (leader.cached, follower.cached) == (0, 90)
    assert leader.bits == engines.expected[0]
    assert follower.bits == apart.bits


def test_company_does_not_show_in_any_choice(engines):
    """The first of three is the one that a request for one has; the others are others."""
    wanted = Job(SUBJECT.sampled, 24, SAMPLED, choices=3)
    (apart,) = serve(engines.at(2), [wanted])
    joined = serve(engines.at(2), [*SUBJECT.jobs(), wanted], batch_tokens=100)
    assert joined[2].bits == apart.bits
    assert apart.ids[0] == engines.expected[1][0][0]
    assert len(set(apart.ids)) == 3


@pytest.mark.grid
@pytest.mark.timeout(CHUNK_S_MAX)
@pytest.mark.parametrize("policy", LEVELS["policy"])
def test_nothing_shows(engines, policy):
    assert engines.differing(grid(policy=(policy,))) == []
