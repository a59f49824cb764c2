"""Goal: tokens are those that the CPU's sampler draws, for the chain that most requests have.

Method: random, tied, ruled-out and broken logits on the host's machine; the oracle is ChainSampler,
whose arithmetic is float64 as here, so that tokens are the same and not only likely so.  Then
faults are planted.
"""

import numpy as np
import pytest

from phaseloop.engine.sampler import Draw
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import Sampling
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.sample import Drawn, Draws, entries, sample, slices_of

CHAINS = (
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(top_k=1),
    Sampling(top_k=12, top_p=1.0, min_p=0.0, temperature=1.0),
    Sampling(top_p=0.5, min_p=0.0, temperature=2.5),
    Sampling(top_p=1.0, min_p=0.3, temperature=0.3),
    Sampling(top_p=1e-9, min_p=1.0),
    Sampling(temperature=1e-320, top_p=1.0),
)


@pytest.fixture(autouse=True, scope="module")
def loaded(host):
    host.load("sample", entries())


def logits_of(rows, vocabulary, seed=0):
    """Many of them equal, so that ties are everywhere."""
    rng = np.random.default_rng(seed)
    coarse = np.round(4 * rng.standard_normal((rows, vocabulary))) / 2
    fine = rng.standard_normal((rows, vocabulary)) * (rng.random((rows, 1)) < 0.5)
    return (coarse + fine).astype(np.float32)


def draws_of(chains, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Draw(0, int(rng.integers(0, 5)), int(rng.integers(0, 1 << 63)) * 2 + 1,
             int(rng.integers(0, 1 << 20)), (), chain)
        for chain in chains
    ]  # fmt: skip


def run(host, logits, draws, candidates=40, **how):
    """-> tokens, ids, values."""
    rows, vocabulary = logits.shape
    memory = Memory()
    keys = memory.empty((rows, slices_of(vocabulary), candidates), np.uint64)
    chains = [draw.sampling for draw in draws]
    wanted = Draws(
        np.array([draw.seed for draw in draws], np.uint64),
        np.array([draw.position for draw in draws], np.int32),
        np.array([draw.choice for draw in draws], np.int32),
        np.array([chain.top_k for chain in chains], np.int32),
        np.array([chain.temperature for chain in chains]),
        np.array([chain.top_p for chain in chains]),
        np.array([chain.min_p for chain in chains]),
    )
    drawn = Drawn(
        memory.empty((rows,), np.int32),
        memory.empty((rows, candidates), np.int32),
        memory.empty((rows, candidates), np.float32),
    )
    for plan in sample(logits, keys, wanted, drawn):
        host.run(plan, memory, **how)
    return drawn.tokens, drawn.ids, drawn.values


def expected(logits, draws):
    sampled = ChainSampler().sample(logits, draws)
    return [-1 if each.token is None else each.token for each in sampled]


@pytest.mark.parametrize("vocabulary", [1, 50, 4096, 4097, 9000])
def test_tokens_are_those_of_the_cpus_sampler(host, vocabulary):
    for seed in range(4):
        chains = [CHAINS[(seed + row) % len(CHAINS)] for row in range(8)]
        logits, draws = logits_of(8, vocabulary, seed), draws_of(chains, seed)
        tokens, _, _ = run(host, logits, draws)
        assert tokens.tolist() == expected(logits, draws)


def test_candidates_are_the_best_and_ties_the_lowest(host):
    logits = logits_of(3, 9000)
    logits[0, [7, 8000]] = logits.max() + 1
    logits[1, ::2] = -np.inf
    _, ids, values = run(host, logits, draws_of([Sampling()] * 3), candidates=100)
    for row in range(3):
        order = np.argsort(-logits[row], kind="stable")[:100]
        assert np.array_equal(ids[row], order)
        assert np.array_equal(values[row], logits[row][order])
    few = np.full((1, 300), -np.inf, np.float32)
    few[0, [5, 200, 17]] = [1.0, 2.0, -0.0]
    _, ids, _ = run(host, few, draws_of([Sampling()]))
    assert ids[0].tolist() == [200, 5, 17] + [-1] * 37


def test_zeros_of_both_signs_are_equal(host):
    logits = np.full((2, 64), -1, np.float32)
    logits[0, [9, 30]] = [-0.0, 0.0]
    logits[1, [9, 30]] = [0.0, -0.0]
    tokens, _, _ = run(host, logits, draws_of([Sampling(temperature=0.0)] * 2))
    assert tokens.tolist() == [9, 9]


def test_a_broken_row_has_no_token_and_harms_no_other(host):
    logits = logits_of(6, 5000)
    alone = run(host, logits[5:], draws_of([Sampling()] * 6)[5:])[0]
    logits[0, 4999] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[3, 4098] = np.uint32(0xFFC00000).view(np.float32)  # a NaN with its sign set
    draws = draws_of([Sampling()] * 6)
    tokens = run(host, logits, draws)[0]
    assert tokens.tolist()[:4] == [-1, -1, -1, -1]
    assert tokens.tolist() == expected(logits, draws)
    assert tokens[5] == alone[0]


def test_a_row_is_drawn_alike_in_any_company_and_order(host):
    logits, draws = logits_of(5, 5000), draws_of(CHAINS[:5])
    together = run(host, logits, draws, candidates=60)[0]
    for row in range(5):
        one = slice(row, row + 1)
        assert run(host, logits[one], draws[one], candidates=41)[0][0] == together[row]
    for order in ORDERS[1:]:
        assert np.array_equal(run(host, logits, draws, order=order, seed=2)[0], together)


def test_draws_are_as_frequent_as_they_are_likely(host):
    """Two tokens at 3 to 1: of 160 draws, 120 within four standard deviations."""
    logits = np.full((160, 8), -np.inf, np.float32)
    logits[:, 2], logits[:, 6] = np.log(3.0), 0.0
    chain = Sampling(top_p=1.0, min_p=0.0, temperature=1.0)
    draws = [Draw(0, 0, 77, position, (), chain) for position in range(160)]
    tokens = run(host, logits, draws)[0]
    assert abs((tokens == 2).sum() - 120) <= 4 * np.sqrt(160 * 0.25 * 0.75)
    assert set(tokens.tolist()) == {2, 6}


FAULTS = {
    "ties to the highest": ("rank.cuh", "| u32(~number)", "| u32(number)"),
    "no barrier between rounds": ("sync_block(AT_ONLY);  // all warps' best", "// all warps' best"),
    "the dropped key comes again": ("if (keys[i] == best) keys[i] = 0;", ""),
    "a constant of the generator": ("0xBB67AE85u", "0xBB67AE84u"),
    "a round of the generator": ("round < 10", "round < 9"),
    "the choice left out": ("{position, 0, choice, 0}", "{position, 0, 0, 0}"),
    "a candidate too many": ("(taken == 0 || sum < target)", "(taken == 0 || sum <= target * 1.2)"),
    "the temperature left out": ("count, chances.temperature AT", "count, 1.0 AT"),
    "the last slice's end": ("token < V ?", "token < V - 1 ?"),
    "min-p of the sum": ("+ log(chances.min_p)", "+ chances.min_p"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    host = plant(*("sample.cu", *FAULTS[fault])[-3:])
    logits, draws = logits_of(16, 4200, seed=3), draws_of(CHAINS * 2)
    logits[0, -1] = logits[1, -1] = 50
    try:
        tokens, ids, _ = run(host, logits, draws)
    except HostFault:
        return
    order = np.argsort(-logits, kind="stable", axis=1)[:, :40]
    assert not (tokens.tolist() == expected(logits, draws) and np.array_equal(ids, order))


def test_what_it_cannot_take_is_refused():
    def plan(vocabulary=100, slices=1, candidates=40):
        keys = np.zeros((1, slices, candidates), np.uint64)
        one = np.zeros(1, np.int32)
        wanted = Draws(np.zeros(1, np.uint64), one, one, one, *(np.zeros(1) for _ in range(3)))
        ids = np.zeros((1, candidates), np.int32)
        drawn = Drawn(one, ids, ids.astype(np.float32))
        return sample(np.zeros((1, vocabulary), np.float32), keys, wanted, drawn)

    assert [each.entry for each in plan()] == ["top_of_slice", "draw<16>"]
    assert plan(248_320, 61)[1].entry == "draw<64>"
    with pytest.raises(KernelError, match="1 slices for 5000 tokens; 2 are needed"):
        plan(5000)
    with pytest.raises(KernelError, match="at most 262144"):
        plan(262_145, 65)
    with pytest.raises(KernelError, match="129 candidates of 1 rows; it takes 1 to 128"):
        plan(candidates=129)
