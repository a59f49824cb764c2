"""Goal: on the CUDA backend, too, no bit of an answer depends on its company, policy, chunks,
caches, leavers, drafts or devices.

Method: a model in the shape of SmolLM2, and a hybrid, on the host's shim behind the
whole service.  The standard is each request alone, without drafts, on one device; every setting
changes several things at once.  Tokens and likelihoods must be equal, not close.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, SNAPSHOT_BYTES, Job, serve
from hybrid_files import hybrid_file
from p3 import Setting, Subject, alone, name_of, together
from synthetic import VOCABULARY, decoder_file

from phaseloop.engine.cuda_load import (
    CudaOptions,
    cuda_engine,
    plan_cuda,
)
from phaseloop.engine.draft_ngram import NgramDrafter, Ngrams
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.speculate import Terms
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.cuda_devices import open_devices

RANDOM = np.random.default_rng(3)
SLOTS = 4


def prompt(length):
    return tuple(RANDOM.integers(0, VOCABULARY, length).tolist())


SUBJECT = Subject(prompt(82), prompt(75), tuple(map(prompt, (20, 33, 7, 9, 65, 40, 30))), 6)
SETTINGS = (
    Setting(cohort=3, policy="quantum", batch_tokens=100),
    Setting(cohort=4, policy="mixed", batch_tokens=32, leaver="generating"),
    Setting(policy="barrier-serial", cache="slot", leaver="prefilling"),
    Setting(cohort=3, policy="barrier-greedy", cache="other slot"),
    Setting(policy="no-cont-batching", cache="snapshot", batch_tokens=32, leaver="waiting"),
)


def smollm_file():
    """Its ties: heads that share keys by three, an embedding that is the head."""
    return decoder_file("llama", "Q4_1", tied=True)


MODELS = {
    "smollm2-F16": (smollm_file, "F16"),
    "hybrid-Q8_0": (lambda: hybrid_file("Q4_K", layers=2, full_attention_interval=2), "Q8_0"),
}


def opened(file, folder):
    weights = open_weights(file.write(folder / "tiny.gguf"))
    return weights, load_model(weights)


def engine_over(weights, model, *, drafts=False, **changes):
    chosen = {"slot_count": SLOTS, "context_length": 512, "cache_ram_bytes": SNAPSHOT_BYTES}
    options = CudaOptions(**(chosen | changes))
    devices = open_devices("cuda-host", len(options.split))
    drafter = NgramDrafter(Ngrams(2, 8, 1), SLOTS) if drafts else None
    plan = plan_cuda(weights, model, options, None)
    return cuda_engine(
        weights,
        model,
        devices,
        plan,
        ChainSampler(),
        frozenset(),
        drafting=lambda backend: (drafter, Terms(0, 0.0, 0.0)),
    )


@pytest.fixture(scope="module", params=MODELS)
def subject(request, tmp_path_factory):
    make, kv = MODELS[request.param]
    weights, model = opened(make(), tmp_path_factory.mktemp("p3"))
    engine = engine_over(weights, model, cache=kv)
    return weights, model, kv, engine, [answer.bits for answer in alone(engine, SUBJECT)]


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_no_setting_shows(subject, setting):
    *_, engine, expected = subject
    assert [answer.bits for answer in together(engine, SUBJECT, setting)] == expected


def test_the_standard_has_answers_that_could_differ(subject):
    *_, engine, expected = subject
    (greedy,), ((first, *_),) = expected[0]
    assert len(greedy) == 6 and len(first.top) == 3 and first.chosen < 0
    changed = (*SUBJECT.greedy[:20], (SUBJECT.greedy[20] + 1) % VOCABULARY, *SUBJECT.greedy[21:])
    assert serve(engine, [Job(changed, 6, GREEDY)])[0].bits != expected[0]
    assert [answer.bits for answer in alone(engine, SUBJECT)] == expected


def test_neither_drafts_nor_devices_show(subject):
    weights, model, kv, plain, _ = subject
    repeated = (SUBJECT.greedy[:9] * 6)[:50]
    drafting = engine_over(weights, model, cache=kv, drafts=True, split=(1.0, 2.0, 1.0))
    job = Job(repeated, 12, GREEDY)
    assert serve(drafting, [job])[0].bits == serve(plain, [job])[0].bits
    assert drafting.describe().draft_tokens == 8


def test_a_forked_answer_is_its_own(subject):
    *_, engine, expected = subject
    (answer,) = serve(engine, [Job(SUBJECT.greedy, 6, GREEDY, choices=2)])
    assert answer.ids == (expected[0][0][0],) * 2
