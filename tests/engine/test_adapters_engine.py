"""Goal: requests with different adapters keep each other company and never each other's state.

Method: tiny models with two adapters behind the whole service.  The standard is each request alone
on an engine that has nothing cached; what is found in slots, in host RAM and with a neighbour must
give the same bits, and must not be found at all where it was computed under another list.
"""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from adapter_files import AdapterFile
from answers import GREEDY, SAMPLED, Job, serve
from hybrid_files import hybrid_file
from synthetic import VOCABULARY, decoder_file

from phaseloop.core.policy import PRESETS
from phaseloop.engine.cpu_load import CpuOptions, engine_over
from phaseloop.engine.sampling import ChainSampler
from phaseloop.model.adapter import open_adapter
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

RANDOM = np.random.default_rng(5)
A, B, C = (tuple(RANDOM.integers(0, VOCABULARY, 100).tolist()) for _ in range(3))
BASE, ONE, HALF, BOTH = (), ((0, 1.0),), ((0, 0.5),), ((0, 1.0), (1, -0.7))
LISTS = (BASE, ONE, HALF, BOTH)
FILES = {
    "llama": lambda: decoder_file("llama", "Q4_K"),
    "hybrid": lambda: hybrid_file("Q4_K"),
}


class Engines:
    def __init__(self, make, folder):
        file = make()
        matrices = [name for name, (values, _) in file.tensors.items() if values.ndim > 1]
        matrices = [name for name in matrices if "conv1d" not in name]
        self._weights = open_weights(file.write(folder / "base.gguf"))
        self._model = load_model(self._weights)
        self._adapters = [
            open_adapter(
                AdapterFile(file, matrices, rank=rank, seed=rank).write(folder / f"{rank}.gguf"),
                self._weights,
                self._model,
            )
            for rank in (3, 8)
        ]
        self.at = cache(self.load)

    def load(self, threads=1, slots=4, adapters=True):
        options = CpuOptions(
            slot_count=slots,
            context_length=512,
            threads=threads,
            ubatch_tokens=256,
            cache_ram_bytes=1 << 28,  # also what recurrent states may take
        )
        return engine_over(
            self._weights,
            self._model,
            ChainSampler(),
            options,
            end_tokens=frozenset(),
            adapters=self._adapters if adapters else (),
        )


@pytest.fixture(scope="module", params=FILES)
def engines(request, tmp_path_factory):
    return Engines(FILES[request.param], tmp_path_factory.mktemp("adapters"))


def job(prompt, adapters, sampling=GREEDY, **fields):
    return Job(prompt, 12, sampling, adapters=adapters, **fields)


@pytest.fixture(scope="module")
def cold(engines):
    """The bits of a prompt under a list, alone and with nothing cached."""

    @cache
    def bits(prompt, adapters, sampling=GREEDY):
        (answer,) = serve(engines.at(), [job(prompt, adapters, sampling)])
        assert answer.outcome == "length"
        return answer.bits

    return bits


def test_each_list_has_answers_of_its_own(cold):
    assert len({cold(A, adapters) for adapters in LISTS}) == len(LISTS)


def test_adapters_that_are_loaded_and_not_asked_for_change_no_bit(engines, cold):
    (answer,) = serve(engines.load(adapters=False), [job(A, BASE)])
    assert answer.bits == cold(A, BASE)


def test_what_is_loaded_is_stable_to_the_bit(engines):
    assert engines.at().describe().unstable == ()
    assert len(set(engines.at().describe().adapters)) == 2


@pytest.mark.parametrize("policy", PRESETS)
def test_lists_do_not_show_in_each_other(engines, cold, policy):
    jobs = [job(prompt, adapters) for prompt, adapters in zip((A, B, C, A), LISTS, strict=True)]
    for threads, batch in ((1, 64), (2, 2048)):
        answers = serve(engines.at(threads), jobs, policy=policy, batch_tokens=batch)
        assert [answer.bits for answer in answers] == [
            cold(one.prompt, one.adapters) for one in jobs
        ]


def test_sampled_answers_and_more_requests_than_slots(engines, cold):
    jobs = [job(prompt, adapters, SAMPLED) for prompt in (A, B) for adapters in LISTS]
    for answer, one in zip(serve(engines.at(), jobs), jobs, strict=True):
        assert answer.bits == cold(one.prompt, one.adapters, SAMPLED)


@pytest.mark.parametrize(("first", "second"), [(BASE, ONE), (ONE, BASE), (ONE, HALF), (ONE, BOTH)])
def test_a_slot_serves_no_other_list(engines, cold, first, second):
    before = job(A, first, reuse=True, slot=0)
    # A hybrid's states are kept at few places; the last of them before the end is 16 tokens away.
    found = 84 if engines.at().describe().forks_anywhere is False else 99
    for adapters, cached in ((second, 0), (first, found)):
        (answer,) = serve(engines.at(), [before], [job(A, adapters, reuse=True, slot=0)])
        assert (answer.cached, answer.bits) == (cached, cold(A, adapters))


def test_another_slot_lends_to_its_own_list_alone(engines, cold):
    """A prompt that must sit elsewhere has its beginning copied, if the list is the same."""
    before = job(A[:90] + B, ONE, reuse=True, slot=0, stop_points=(90,))
    for adapters, cached in ((HALF, 0), (ONE, 90)):
        (answer,) = serve(engines.at(), [before], [job(A[:90] + C, adapters, reuse=True, slot=1)])
        assert (answer.cached, answer.bits) == (cached, cold(A[:90] + C, adapters))


def test_a_snapshot_serves_its_own_list_alone(engines, cold):
    engine = engines.load(slots=1)
    stages = [[job(A, ONE, reuse=True)], [job(B, BASE, reuse=True)]]
    for adapters in (HALF, BASE, ONE):
        (answer,) = serve(engine, *stages, [job(A, adapters, reuse=True)])
        assert answer.bits == cold(A, adapters)
        assert (answer.cached > 0) == (adapters == ONE)


def test_a_snapshot_of_one_list_does_not_displace_that_of_another(engines, cold):
    """The longer prompt covers the shorter one only under the same adapters."""
    engine = engines.load(slots=1)
    stages = [
        [job(A, ONE, reuse=True)],
        [job(A + B, HALF, reuse=True)],
        [job(C, BASE, reuse=True)],
    ]
    (answer,) = serve(engine, *stages, [job(A, ONE, reuse=True)])
    assert answer.cached > 0 and answer.bits == cold(A, ONE)
    assert {kept.adapters for kept in engine.snapshots._kept} >= {ONE, HALF}


def test_a_beginning_is_shared_within_a_list_alone(engines, cold):
    """R18: of prompts that begin alike, one computes that part for those with its adapters."""
    jobs = [
        job(A + B, ONE, reuse=True),
        job(A + C, ONE, reuse=True),
        job(A + C, HALF, reuse=True),
        job(A + C, BASE, reuse=True),
    ]
    answers = serve(engines.at(), jobs, share_length_min=50, batch_tokens=64)
    assert [answer.cached for answer in answers] == [0, 100, 0, 0]
    for answer, one in zip(answers, jobs, strict=True):
        assert answer.bits == cold(one.prompt, one.adapters)


def test_children_have_the_adapters_of_their_request(engines):
    wanted = job(A, ONE, SAMPLED, choices=3)
    (apart,) = serve(engines.at(), [wanted])
    joined = serve(engines.at(), [job(B, HALF), wanted])
    assert joined[1].bits == apart.bits
    assert len(set(apart.ids)) == 3


def test_an_adapter_that_is_not_loaded_ends_its_request_alone(engines, cold):
    lost, kept = serve(engines.at(), [job(A, ((7, 1.0),)), job(B, ONE)])
    assert lost.outcome == "failed" and lost.ids == ((),)
    assert kept.bits == cold(B, ONE)
