"""Goal: rows become what the pooling says, however a prompt is cut and whoever is near.

Method: tiny encoders and a decoder on the CPU, driven round by round; what comes out is compared
with the float64 reference's rows, pooled here, and bit by bit with the same prompt alone.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from encoder_files import VOCABULARY, encoder_file
from synthetic import decoder_file

from phaseloop.core.vocabulary import Failed, Lane, LaunchRound, Produced, SeatRequest
from phaseloop.engine.cpu_load import CpuOptions
from phaseloop.engine.encoder import EncoderEngine
from phaseloop.engine.encoder_load import encoder_over
from phaseloop.engine.pooling import Pooled
from phaseloop.engine.protocol import Content, RoundError, limits_of
from phaseloop.model.embedding import encoder_of
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.interface import Aborted, Span
from phaseloop.ops.reference import ReferenceBackend

OPTIONS = CpuOptions(slot_count=4, context_length=128, batch_tokens=128, ubatch_tokens=64)
PROMPTS = [
    tuple(np.random.default_rng(length).integers(0, VOCABULARY, length).tolist())
    for length in (40, 9, 64, 1)
]


def file_of(family, **fields):
    if family == "llama":
        return decoder_file("llama")
    return encoder_file(family, **fields)


def opened(file, path):
    weights = open_weights(file.write(path / "model.gguf"))
    return weights, load_model(weights)


def engine_over(file, path, pooling=None, options=OPTIONS):
    return encoder_over(*opened(file, path), pooling, options)


def seated(engine, prompts):
    for slot, prompt in enumerate(prompts):
        seat = SeatRequest(slot, 0, slot, None, "oldest")
        assert engine.seat(seat, Content(prompt)).cached_length == 0


def encoded(engine, rounds):
    """`rounds`: of lanes (slot, start, count).  -> by slot, what it was encoded to."""
    made = {}
    for number, lanes in enumerate(rounds):
        full = tuple(Lane(slot, slot, 0, start, count, 0) for slot, start, count in lanes)
        outcome = engine.run(LaunchRound(number, "encode", full, "cohort_open"))
        assert outcome.results == (Produced(),) * len(lanes)
        for (slot, _, _), vectors in zip(lanes, outcome.vectors, strict=True):
            if vectors is not None:
                assert slot not in made
                made[slot] = vectors
    return made


def whole(prompts):
    return [[(slot, 0, len(prompt)) for slot, prompt in enumerate(prompts)]]


def pooled(rows, pooling):
    return {"none": rows, "mean": rows.mean(0)[None], "cls": rows[:1], "last": rows[-1:]}[pooling]


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
@pytest.mark.parametrize("family", ["bert", "nomic-bert", "llama"])
def test_rows_are_pooled_as_said(tmp_path, family, pooling):
    engine = engine_over(file_of(family), tmp_path, pooling)
    seated(engine, PROMPTS)
    made = encoded(engine, whole(PROMPTS))
    weights, model = opened(file_of(family), tmp_path)
    encoder, _ = encoder_of(model, weights, pooling)
    oracle = ReferenceBackend(
        encoder.network, weights.tensors, encoder.dimensions, region_count=1, capacity=128
    )
    for slot, prompt in enumerate(PROMPTS):
        rows = oracle.forward([Span(0, 0, prompt, len(prompt), False)])
        true, found = pooled(rows, pooling), np.array(made[slot].rows)
        assert found.shape == true.shape
        assert ((true - found) ** 2).sum() < 1e-5 * (true**2).sum()
        oracle.truncate(0, 0)
    assert engine.describe().pooling == pooling


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_a_decoder_s_prompt_may_be_cut_anywhere(tmp_path, pooling):
    engine = engine_over(file_of("llama"), tmp_path, pooling)
    assert not limits_of(engine.describe()).whole_prompts
    seated(engine, PROMPTS)
    together = encoded(engine, whole(PROMPTS))
    seated(engine, PROMPTS)
    cut = [
        [(0, 0, 7), (1, 0, 9), (2, 0, 1)],
        [(0, 7, 32), (2, 1, 62)],
        [(2, 63, 1), (0, 39, 1), (3, 0, 1)],
    ]
    assert encoded(engine, cut) == together


@pytest.mark.parametrize("family", ["bert", "nomic-bert"])
def test_bits_do_not_depend_on_company(tmp_path, family):
    engine = engine_over(file_of(family), tmp_path)
    seated(engine, PROMPTS)
    together = encoded(engine, whole(PROMPTS))
    for slot, prompt in enumerate(PROMPTS):
        seated(engine, [prompt])
        assert encoded(engine, whole([prompt]))[0] == together[slot]
    assert together[0] != together[1]


def test_what_the_file_says_is_done(tmp_path):
    for number, name in enumerate(["none", "mean", "cls", "last"]):
        assert engine_over(encoder_file(pooling=number), tmp_path).describe().pooling == name
    assert engine_over(encoder_file(pooling=None), tmp_path).describe().pooling == "none"


def test_scores_are_of_the_first_row(tmp_path):
    file = encoder_file(labels=2, pooling=4)
    engine = engine_over(file, tmp_path)
    seated(engine, PROMPTS)
    made = encoded(engine, whole(PROMPTS))
    weights, model = opened(file, tmp_path)
    encoder, _ = encoder_of(model, weights, "rank")
    oracle = ReferenceBackend(
        encoder.network, weights.tensors, encoder.dimensions, region_count=1, capacity=128
    )
    for slot, prompt in enumerate(PROMPTS):
        rows = oracle.forward([Span(0, 0, prompt, len(prompt), False)])
        assert np.allclose(made[slot].rows, rows[:1], atol=1e-2)
        oracle.truncate(0, 0)


def test_a_causal_ranker_scores_the_last_row():
    """Two labels share what is certain; only the last of a prompt's rows counts."""
    how = Pooled("rank", looks_ahead=False, shares=True)
    assert [how.outputs(0, 5, 9), how.outputs(5, 4, 9)] == [0, 1]
    engine = EncoderEngine(
        Fake(np.array([[0.0, np.log(3.0)]], np.float32)),
        how,
        slot_count=1,
        context_length=8,
        batch_tokens=8,
        whole_prompts=False,
    )
    seated(engine, [(1, 2, 3)])
    assert np.allclose(encoded(engine, whole([(1, 2, 3)]))[0].rows, [[0.25, 0.75]])


class Fake:
    """A backend that gives the same rows whatever it is asked, or raises."""

    name = "fake"

    def __init__(self, rows=None, error=None):
        self.rows, self.error, self.resumed = rows, error, 0

    def forward(self, spans):
        if self.error is not None:
            raise self.error
        return self.rows[: sum(span.outputs for span in spans)]

    def truncate(self, region, length):
        pass

    def resume(self):
        self.resumed += 1


def fake_engine(backend, **changes):
    fields = {"slot_count": 2, "context_length": 8, "batch_tokens": 8, "whole_prompts": True}
    return EncoderEngine(backend, Pooled("mean", looks_ahead=True), **(fields | changes))


def results_of(engine, *lanes, kind="encode"):
    full = tuple(Lane(slot, slot, 0, start, count, 0) for slot, start, count in lanes)
    return engine.run(LaunchRound(0, kind, full, "cohort_open")).results


def test_lanes_that_cannot_be_fail_alone():
    engine = fake_engine(Fake(np.ones((3, 4), np.float32)))
    seated(engine, [(1, 2, 3), (4, 5, 6)])
    sound, cut = results_of(engine, (0, 0, 3), (1, 0, 2))
    assert sound == Produced()
    assert cut == Failed("slot 1: a prompt of 3 tokens in one piece, not 2")
    seated(engine, [(1, 2, 3)])
    assert results_of(engine, (0, 1, 2)) == (
        Failed("slot 0 holds 0 tokens, the round begins at 1"),
    )
    assert results_of(engine, (0, 0, 4)) == (Failed("slot 0: the prompt ends at 3"),)


def test_it_generates_nothing():
    engine = fake_engine(Fake())
    seated(engine, [(1, 2, 3)])
    (failed,) = results_of(engine, (0, 0, 3), kind="prefill")
    assert failed == Failed("this server gives embeddings, and generates nothing")


def test_what_is_no_number_is_no_embedding():
    rows = np.array([[1.0, np.nan], [1.0, 1.0]], np.float32)
    engine = fake_engine(Fake(rows))
    seated(engine, [(1, 2)])
    assert results_of(engine, (0, 0, 2)) == (Failed("a value of the embedding is not a number"),)


def test_an_aborted_round_fails_and_the_next_one_is_computed():
    backend = Fake(np.ones((2, 4), np.float32), Aborted())
    engine = fake_engine(backend)
    seated(engine, [(1, 2)])
    with pytest.raises(RoundError, match="aborted"):
        results_of(engine, (0, 0, 2))
    backend.error = None
    assert backend.resumed == 1
    assert results_of(engine, (0, 0, 2)) == (Produced(),)
