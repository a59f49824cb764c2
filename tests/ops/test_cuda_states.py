"""Goal: what holds for the bits of dense models on the CUDA backend holds for other families too.

Method: a prompt and generated tokens, whole and alone, against chunks, company and two devices, bit
by bit: with windows, mixtures and recurrent states.  Then what only states can do wrong: rounds
that fail or are aborted, marks, forks and snapshots of them.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from cuda_models import FAMILIES, generated, opened, prompt, tokens

from phaseloop.ops.interface import Aborted, BackendError, Span

IDS = tokens(61, seed=4)
ANSWER = [5, 9]


def run(backend, region=0, chunks=(61,)):
    start, found = 0, []
    for count in chunks:
        last = start + count == len(IDS)
        found += list(
            backend.forward([prompt(region, start, IDS[start : start + count], int(last))])
        )
        start += count
    for token in ANSWER:
        found += list(backend.forward([generated(region, start, token)]))
        start += 1
    return np.stack(found)


def same(found, expected):
    return np.array_equal(np.asarray(found).view(np.uint32), np.asarray(expected).view(np.uint32))


@pytest.mark.parametrize("family", ["gemma3", "qwen3moe", "qwen35", "qwen35moe"])
def test_bits(family, tmp_path):
    tiny = opened(FAMILIES[family]("Q8_0"), tmp_path)
    backend, halves = tiny.cuda(), tiny.cuda(2)
    alone = run(backend)
    assert np.isfinite(alone).all()
    assert same(run(halves, 1, (1, 60)), alone)
    backend.truncate(2, 0)
    backend.truncate(0, 0)
    rows = backend.forward([prompt(0, 0, tokens(11, seed=7), 2), prompt(2, 0, IDS, 1)])
    assert same(rows[2], alone[0])
    both = backend.forward([generated(0, 11, 3), generated(2, 61, *ANSWER)])
    assert same(both[1:], alone[1:])
    backend.close()
    halves.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    tiny = opened(FAMILIES["qwen35"]("Q8_0"), tmp_path_factory.mktemp("model"))
    backend = tiny.cuda()
    yield backend
    backend.close()


def test_states_are_marked_taken_up_copied_and_saved(hybrid):
    alone = run(hybrid)
    hybrid.truncate(0, 0)
    hybrid.forward([Span(0, 0, IDS, 1, False, (20, 48))])
    assert hybrid.positions(0) == (20, 48, 61)
    hybrid.copy(0, 1, 61)
    snapshot = hybrid.save(0, 61)
    hybrid.truncate(0, 48)
    assert same(hybrid.forward([prompt(0, 48, IDS[48:], 1)])[0], alone[0])
    assert same(hybrid.forward([generated(1, 61, ANSWER[0])])[0], alone[1])
    hybrid.restore(2, snapshot)
    assert same(hybrid.forward([generated(2, 61, ANSWER[0])])[0], alone[1])
    hybrid.restore(2, snapshot.first(20))
    assert same(hybrid.forward([prompt(2, 20, IDS[20:], 1)])[0], alone[0])
    for region in range(3):
        hybrid.truncate(region, 0)


def test_an_aborted_round_and_a_refused_one_change_no_state(hybrid):
    alone = run(hybrid)
    hybrid.truncate(0, 0)
    hybrid.forward([prompt(0, 0, IDS, 0)])
    hybrid.abort()
    with pytest.raises(Aborted):
        hybrid.forward([generated(0, 61, 77)])
    hybrid.resume()
    with pytest.raises(BackendError, match="no recurrent state after 60"):
        hybrid.forward([generated(0, 60, 77)])
    with pytest.raises(BackendError, match="recurrent states"):
        hybrid.shift(0, 3, 5, 61)
    assert same(hybrid.forward([generated(0, 61, ANSWER[0])])[0], alone[1])
    hybrid.truncate(0, 0)


def test_a_sequence_begins_from_nothing_whatever_its_cells_held(hybrid):
    alone = run(hybrid)
    hybrid.truncate(0, 0)
    assert same(run(hybrid, 0, (30, 31)), alone)
    hybrid.truncate(0, 0)
