"""Goal: a mixture's rows reach their experts and come back, each as if it were alone.

Method: routing, sorting, multiplying and combining of random rows on the host's machine, one by one
against their formulas and together against ops.reference in float64.  Then faults are planted.
"""

import numpy as np
import pytest
from kernel_blocks import random_matrix

from phaseloop.kernels.activation import gated
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.experts import entries, experts, rows_of
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.moe import Assignments, combine, route, sort_by_expert, tile_count
from phaseloop.kernels.skinny import skinny
from phaseloop.ops.reference import activate, softmax


def routed(host, logits, used, *, normalise=True, **how):
    memory = Memory()
    chosen = memory.empty((len(logits), used), np.int32)
    shares = memory.empty((len(logits), used), np.float32)
    host.run(route(logits, chosen, shares, normalise=normalise), memory, **how)
    return chosen, shares


def is_routed(chosen, shares, logits, normalise=True):
    probabilities = softmax(logits.astype(np.float64))
    expected = np.argsort(-logits, kind="stable", axis=1)[:, : chosen.shape[1]]
    exact = np.take_along_axis(probabilities, expected, axis=1)
    exact = exact / exact.sum(axis=1, keepdims=True) if normalise else exact
    return np.array_equal(chosen, expected) and np.abs(shares - exact).max() <= 1e-6


def logits_of(rows, count, seed=0):
    """Some of them equal."""
    logits = 2 * np.random.default_rng(seed).standard_normal((rows, count))
    return np.where(logits > 1, np.round(logits), logits).astype(np.float32)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 33, 8), (4, 512, 32), (3, 60, 4)])
def test_the_likeliest_serve_and_ties_go_to_the_lower(host, sizes, normalise):
    rows, count, used = sizes
    logits = logits_of(rows, count)
    chosen, shares = routed(host, logits, used, normalise=normalise)
    assert is_routed(chosen, shares, logits, normalise)
    for row in range(rows):
        alone = routed(host, logits[row : row + 1], used, normalise=normalise)
        assert np.array_equal(alone[0][0], chosen[row])
        assert np.array_equal(alone[1][0], shares[row])


def test_a_broken_row_is_still_served_by_experts_that_exist(host):
    logits = logits_of(2, 40)
    logits[0, 7] = np.nan
    chosen, shares = routed(host, logits, 4)
    assert len(set(chosen[0].tolist())) == 4
    assert ((chosen >= 0) & (chosen < 40)).all()
    assert np.isnan(shares[0]).any()
    assert np.isfinite(shares[1]).all()


def test_one_expert_serves_all_with_equal_logits(host):
    chosen, shares = routed(host, np.zeros((3, 8), np.float32), 2)
    assert chosen.tolist() == [[0, 1]] * 3
    assert (shares == 0.5).all()


def is_sorted(chosen, into, count, rows):
    flat = chosen.reshape(-1)
    order = np.argsort(flat, kind="stable")
    tiles = []
    for expert in range(count):
        stretch = np.flatnonzero(flat[order] == expert)
        tiles += [(expert, first, min(rows, stretch[-1] + 1 - first), 0)
                  for first in stretch[::rows]]  # fmt: skip
    tiles += [(-1, 0, 0, 0)] * (len(into.tiles) - len(tiles))
    return (
        np.array_equal(into.order, order)
        and np.array_equal(into.place[order], np.arange(len(flat)))
        and np.array_equal(into.tiles, tiles)
    )


def sorted_by_expert(host, chosen, count, rows, **how):
    memory = Memory()
    into = Assignments(
        memory.empty((chosen.size,), np.int32),
        memory.empty((chosen.size,), np.int32),
        memory.empty((tile_count(chosen.size, count, rows), 4), np.int32),
    )
    host.run(sort_by_expert(chosen, into, expert_count=count, rows=rows), memory, **how)
    return into


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 8, 128), (70, 3, 5), (33, 2, 512), (40, 4, 33)])
def test_assignments_are_sorted_by_expert(host, sizes):
    tokens, used, count = sizes
    rng = np.random.default_rng(tokens)
    chosen = rng.integers(0, count, (tokens, used)).astype(np.int32)
    for rows in (8, 16):
        assert is_sorted(chosen, sorted_by_expert(host, chosen, count, rows), count, rows)
    for order in ORDERS[1:]:
        into = sorted_by_expert(host, chosen, count, 8, order=order, seed=1)
        assert is_sorted(chosen, into, count, 8)
    same = np.full((tokens, used), count - 1, np.int32)
    assert is_sorted(same, sorted_by_expert(host, same, count, 8), count, 8)


def test_answers_are_summed_in_the_order_of_their_shares(host):
    rng = np.random.default_rng(4)
    x, shares = rng.standard_normal((15, 36)).astype(np.float32), rng.random((5, 3))
    place = rng.permutation(15).astype(np.int32)
    shared, gate = rng.standard_normal((5, 36)).astype(np.float32), rng.standard_normal(5)
    shares, gate = shares.astype(np.float32), gate.astype(np.float32)
    exact = (x[place].reshape(5, 3, 36).astype(np.float64) * shares[:, :, None]).sum(axis=1)
    memory = Memory()
    y = memory.empty((5, 36), np.float32)
    host.run(combine(x, place, shares, y), memory)
    assert np.abs(y - exact).max() <= 1e-6
    host.run(combine(x, place, shares, y, shared=shared, gate=gate), memory)
    opened = activate(gate.astype(np.float64), "sigmoid")[:, None] * shared
    assert np.abs(y - exact - opened).max() <= 1e-6


class Mixture:
    """Experts [F, D] and back, in blocks of random bits."""

    def __init__(self, kind, count, width, hidden):
        self.count, self.hidden = count, hidden
        blocks = 256 if kind.endswith("_K") else 32
        self.up = random_matrix(kind, count * hidden, width // blocks, seed=1)
        self.gate = random_matrix(kind, count * hidden, width // blocks, seed=2)
        self.down = random_matrix("Q8_0", count * width, hidden // 32, seed=3)

    def run(self, host, x, chosen, shares, rows=None, **how):
        rows, used = rows or rows_of(chosen.size, self.count), chosen.shape[1]
        memory, into = Memory(), sorted_by_expert(host, chosen, self.count, rows)

        def multiply(matrix, rows_in, columns, is_gathered):
            y = memory.empty((chosen.size, columns), np.float32)
            plan = experts(
                rows_in, matrix.packed, into, y, expert_count=self.count, used=used, rows=rows,
                is_gathered=is_gathered,
            )  # fmt: skip
            host.run(plan, memory, **how)
            return y

        gate, up = (multiply(each, x, self.hidden, True) for each in (self.gate, self.up))
        hidden = memory.empty(gate.shape, np.float16)
        host.run(gated(gate, up, hidden, "silu"), memory)
        answers = multiply(self.down, hidden, x.shape[1], False)
        y = memory.empty(x.shape, np.float32)
        host.run(combine(answers, into.place, shares, y), memory)
        return y

    def oracle(self, x, chosen, shares):
        def of(matrix):
            return matrix.values.astype(np.float64).reshape(self.count, -1, matrix.values.shape[1])

        gates, ups, downs = of(self.gate), of(self.up), of(self.down)
        found = np.zeros(x.shape)
        for row, vector in enumerate(x.astype(np.float64)):
            for expert, share in zip(chosen[row], shares[row], strict=True):
                hidden = activate(gates[expert] @ vector, "silu") * (ups[expert] @ vector)
                found[row] += share * (downs[expert] @ hidden)
        return found


def error(y, exact):
    if not np.isfinite(y).all():
        return np.inf
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


def case(host, kind, tokens, count=5, used=2):
    mixture = Mixture(kind, count, 256, 64)
    x = np.random.default_rng(7).standard_normal((tokens, 256))
    x = (x / mixture.up.values.std() / 16).astype(np.float16)  # so that f16 holds what is hidden
    return mixture, x, *routed(host, logits_of(tokens, count, seed=8), used)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4", "F16"])
def test_a_mixture(host, kind):
    host.load("experts", [*entries(kind), *entries("Q8_0")])
    mixture, x, chosen, shares = case(host, kind, 21)
    y = mixture.run(host, x, chosen, shares)
    assert error(y, mixture.oracle(x, chosen, shares)) <= 2e-3
    for rows in (8, 16):
        assert np.array_equal(mixture.run(host, x, chosen, shares, rows, order="shuffled"), y)
    for row in (0, 13, 20):
        one = slice(row, row + 1)
        assert np.array_equal(mixture.run(host, x[one], chosen[one], shares[one])[0], y[row])


def test_an_expert_computes_what_its_matrix_alone_would(host):
    """The bits of `skinny` on the expert's rows: one order of sums in both."""
    matrix = random_matrix("Q4_K", 3 * 32, 2)
    alone = random_matrix("Q4_K", 3 * 32, 2)
    x = np.random.default_rng(9).standard_normal((4, 512)).astype(np.float16)
    whole = np.empty((4, 96), np.float32)
    host.run(skinny(x, alone.packed, whole))
    chosen = np.array([[2], [0], [2], [1]], np.int32)
    into = sorted_by_expert(host, chosen, 3, 8)
    y = np.empty((4, 32), np.float32)
    plan = experts(x, matrix.packed, into, y, expert_count=3, used=1, rows=8, is_gathered=True)
    host.run(plan)
    for place, row in enumerate(into.order):
        first = 32 * chosen[row, 0]
        assert np.array_equal(y[place], whole[row, first : first + 32])


FAULTS = {
    "the wrong expert": ("experts.cu", "tile_of.x * groups", "(tile_of.x ^ 1) * groups"),
    "rows not gathered": ("experts.cu", "/ U : i", "% 21 : i"),
    "one bit of a map": ("experts.cu", "column + (i & 4) * 4", "column + (i & 4) * 2"),
    "a row too many": ("experts.cu", " && m < tile_of.z;", ";"),
    "no barrier before the sums": ("experts.cu", "sync_block();  // all warps' sums", "//"),
    "places one off": ("moe.cu", "(1u << lane) - 1", "(2u << lane) - 1"),
    "a tile left out": (
        "moe.cu", "lane; tile * rows < count", "lane; (tile + 1) * rows < count"),
    "no barrier before the starts": ("moe.cu", "sync_block();  // all counts", "//"),
    "ties to the higher": ("rank.cuh", "| u32(~number)", "| u32(number)"),
    "a chosen one is chosen again": ("moe.cu", "keys[i] == best ? 0 : keys[i]", "keys[i]"),
    "shares of another row": (
        "moe.cu", "load_constant(shares + row * U + j)", "load_constant(shares + j)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(host, plant, fault):
    bad = plant(*FAULTS[fault])
    mixture, x, chosen, shares = case(host, "Q8_0", 21)
    exact = mixture.oracle(x, chosen, shares)
    logits = logits_of(21, 5, seed=8)
    try:
        found, parts = routed(bad, logits, 2)
        y = mixture.run(bad, x, chosen, shares)
    except HostFault:
        return
    assert not (is_routed(found, parts, logits) and error(y, exact) <= 4e-3)


def test_what_it_cannot_take_is_refused():
    logits, ids = np.zeros((2, 513), np.float32), np.zeros((2, 3), np.int32)
    with pytest.raises(KernelError, match="513 experts, at most 512"):
        route(logits, ids, ids.astype(np.float32), normalise=True)
    with pytest.raises(KernelError, match="route: 3 of 2 experts"):
        route(logits[:, :2].copy(), ids, ids.astype(np.float32), normalise=True)
    flat = np.zeros(6, np.int32)
    into = Assignments(flat, flat, np.zeros((4, 4), np.int32))
    with pytest.raises(KernelError, match="tiles: 6 is 6 elsewhere, 4 here"):
        sort_by_expert(ids, into, expert_count=8, rows=8)
    y = np.zeros((2, 8), np.float32)
    with pytest.raises(KernelError, match="a shared expert and its gate come together"):
        combine(np.zeros((6, 8), np.float32), flat, ids.astype(np.float32), y, shared=y)
    matrix, x = random_matrix("Q8_0", 40, 1), np.zeros((2, 32), np.float16)
    into = Assignments(flat, flat, np.zeros((6, 4), np.int32))
    with pytest.raises(KernelError, match="whole groups of 32 rows each"):
        experts(x, matrix.packed, into, np.zeros((6, 20), np.float32),
                expert_count=2, used=3, rows=8, is_gathered=True)  # fmt: skip
