"""Goal: the bits of a recurrent state depend on its tokens alone, however they came to be computed.

Method: tiny hybrids; a prompt and eight generated tokens alone, in one pass, on one thread, are the
standard.  Chunks, marks, threads, company, states taken up again and rounds that were aborted must
give the same bytes; that states matter is shown by leaving one out.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file
from synthetic import VOCABULARY
from test_ggml_bits import ANSWER, OTHER, PROMPT, Tiny, alone

from phaseloop.ops.interface import Aborted, BackendError, Span
from phaseloop.ops.reference import ReferenceBackend

MODELS = {
    "F16": lambda: hybrid_file("F16"),
    "Q4_K": lambda: hybrid_file("Q4_K"),
    "mixture": lambda: hybrid_file("Q4_0", mixture=True, fused=True),
}


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp(request.param), MODELS[request.param]())


@pytest.fixture(scope="module")
def standard(tiny):
    return alone(tiny.backend())


def answered(backend, region=0):
    """The bytes of the generated tokens' logits, after PROMPT."""
    spans = [Span(region, len(PROMPT) + i, [token], 1, True) for i, token in enumerate(ANSWER)]
    return np.concatenate([backend.forward([span]) for span in spans]).tobytes()


def ending(standard):
    """The standard without the row of the prompt."""
    return standard[len(standard) // (1 + len(ANSWER)) :]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 63, 64, 65, 130, 299])
def test_chunks_do_not_show(tiny, standard, chunk):
    assert alone(tiny.backend(), chunk=chunk) == standard


@pytest.mark.parametrize("options", [{"threads": 2}, {"threads": 3}, {"ubatch": 32}])
def test_threads_and_passes_do_not_show(tiny, standard, options):
    assert alone(tiny.backend(**options), region=2) == standard


def test_company_does_not_show(tiny, standard):
    backend = tiny.backend(threads=2)
    spans = [
        Span(3, 0, OTHER, 1, False),
        Span(1, 0, PROMPT, 1, False, (100, 300)),
        Span(0, 0, OTHER[:5], 5, False),
    ]
    rows = [backend.forward(spans)[1:2]]
    for index, token in enumerate(ANSWER):
        others = [Span(0, 5 + index, [9], 1, True), Span(3, 130 + index, [3], 1, True)]
        mine = Span(1, len(PROMPT) + index, [token], 1, True)
        rows.append(backend.forward([*others, mine])[2:])
    assert np.concatenate(rows).tobytes() == standard


@pytest.mark.parametrize("mark", [1, 2, 3, 64, 150, 284, 299])
def test_a_state_taken_up_again_does_not_show(tiny, standard, mark):
    backend = tiny.backend()
    backend.forward([Span(0, 0, PROMPT, 1, False, (mark,))])
    backend.forward([Span(0, 300, OTHER, 1, False)])
    backend.truncate(0, mark)
    backend.forward([Span(0, mark, PROMPT[mark:], 1, False)])
    assert answered(backend) == ending(standard)


def test_forks_and_snapshots_do_not_show(tiny, standard):
    backend = tiny.backend()
    backend.forward([Span(0, 0, PROMPT[:200], 0, False, (70,))])
    backend.copy(0, 1, 200)
    snapshot = backend.save(0, 200)
    backend.forward([Span(0, 200, OTHER, 1, False)])
    backend.restore(2, snapshot)
    backend.restore(3, snapshot.first(100).first(70))
    assert backend.positions(3) == (70,)
    backend.forward(
        [
            Span(1, 200, PROMPT[200:], 1, False),
            Span(2, 200, PROMPT[200:], 1, False),
            Span(3, 70, PROMPT[70:], 1, False),
        ]
    )
    assert {answered(backend, region) for region in (1, 2, 3)} == {ending(standard)}


def test_an_aborted_round_does_not_show(tiny, standard):
    """Aborted before its first pass, and by a mark's pass: nothing of it is left."""
    backend = tiny.backend(ubatch=32)
    backend.forward([Span(0, 0, PROMPT[:150], 0, False)])
    run, passes = backend._run, []

    def run_two(*arguments):
        passes.append(arguments)
        if len(passes) == 3:
            backend.abort()
        run(*arguments)

    backend._run = run_two
    with pytest.raises(Aborted):
        backend.forward([Span(0, 150, OTHER, 1, False, (190,))])
    backend._run = run
    backend.resume()
    assert len(passes) == 3 and backend.positions(0) == (150,)
    backend.truncate(0, 150)
    backend.forward([Span(0, 150, PROMPT[150:], 1, False)])
    assert answered(backend) == ending(standard)


def test_a_round_that_was_taken_back_does_not_show(tiny, standard):
    backend = tiny.backend()
    backend.forward([Span(0, 0, PROMPT, 1, False)])
    backend.forward([Span(0, 300, [7], 1, True)])
    backend.truncate(0, 300)
    assert answered(backend) == ending(standard)


def test_another_state_would_show(tiny, standard):
    """Its keys and values are not all that a sequence has."""
    backend = tiny.backend()
    backend.forward([Span(0, 0, PROMPT, 1, False)])
    for matrices in backend._states.matrices:
        matrices[:] = 0
    assert answered(backend) != ending(standard)


def test_what_cannot_be_done_is_refused(tiny):
    backend = tiny.backend()
    backend.forward([Span(0, 0, PROMPT, 1, False)])
    with pytest.raises(BackendError, match="no recurrent state after 100 tokens"):
        backend.truncate(0, 100)
        backend.forward([Span(0, 100, [1], 1, False)])
    with pytest.raises(BackendError, match="nothing can be dropped"):
        backend.shift(0, 5, 5, 100)


def test_the_reference_keeps_states_as_the_other_does(tmp_path):
    tiny = Tiny(tmp_path, hybrid_file())
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, 40).tolist()

    def rows(backend):
        backend.forward([Span(0, 0, tokens[:30], 0, False, (8, 20))])
        assert backend.positions(0) == (8, 20, 30)
        backend.copy(0, 1, 20)
        backend.truncate(0, 8)
        spans = [Span(0, 8, tokens[8:], 3, False), Span(1, 20, tokens[20:], 3, False)]
        return backend.forward(spans)

    dimensions = tiny.model.dimensions
    reference = ReferenceBackend(
        tiny.model.network, tiny.weights.tensors, dimensions, region_count=2, capacity=64
    )
    found = rows(reference)
    np.testing.assert_allclose(found[:3], found[3:], atol=1e-6)
    np.testing.assert_allclose(rows(tiny.backend()), found, atol=0.01)
    with pytest.raises(BackendError, match="nothing can be dropped"):
        reference.shift(0, 1, 1, 30)
    assert tiny.backend().state_bytes == 4 * dimensions.recurrence.state_size
    assert reference.state_bytes == 8 * dimensions.recurrence.state_size
