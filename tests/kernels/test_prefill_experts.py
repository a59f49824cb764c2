"""Goal: a prompt's rows are multiplied by their experts' matrices as by those matrices alone.

Method: rows sorted by expert in tiles of 128 on the host's machine; the oracle is `prefill` with
each expert's matrix by itself, bit for bit, which test_prefill.py holds against float64.  Then
faults are planted.
"""

import numpy as np
import pytest
from kernel_blocks import random_matrix

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.moe import Assignments, sort_by_expert, tile_count
from phaseloop.kernels.prefill import TILE, prefill, prefill_experts
from phaseloop.kernels.repack import LAYOUTS, Packed, pack
from phaseloop.kernels.skinny import KINDS


class Experts:
    """Matrices [N, K] one after the other, and each by itself."""

    def __init__(self, kind, count, rows, blocks):
        self.count = count
        self.all = random_matrix(kind, count * rows, blocks, seed=3)
        columns = self.all.packed.columns
        self.each = [
            Packed(kind, rows, columns, pack(kind, rows, columns, data))
            for data in np.split(self.all.data, count)
        ]


def sorted_by_expert(host, chosen, count):
    memory = Memory()
    into = Assignments(
        memory.empty((chosen.size,), np.int32),
        memory.empty((chosen.size,), np.int32),
        memory.empty((tile_count(chosen.size, count, TILE), 4), np.int32),
    )
    host.run(sort_by_expert(chosen, into, expert_count=count, rows=TILE), memory)
    return into


def run(host, x, experts, chosen, *, is_gathered=True, sorter=None, **how):
    """-> y by place, and the assignments."""
    memory, into = Memory(), sorted_by_expert(sorter or host, chosen, experts.count)
    y = memory.empty((chosen.size, experts.each[0].rows), np.float32)
    plan = prefill_experts(
        x, experts.all.packed, into, y, expert_count=experts.count, used=chosen.shape[1],
        is_gathered=is_gathered,
    )  # fmt: skip
    host.run(plan, memory, **how)
    return y, into


def expected(host, x, experts, chosen, into):
    """By place, of rows that are gathered."""
    alone = np.empty((experts.count, len(x), experts.each[0].rows), np.float32)
    for expert, matrix in enumerate(experts.each):
        host.run(prefill(x, matrix, alone[expert]))
    used = chosen.shape[1]
    return alone[chosen.reshape(-1)[into.order], into.order // used]


def rows_of(tokens, columns, seed=4):
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float16)


def chosen_of(tokens, used, count, seed=5):
    """Distinct experts per row, of which the last serves nobody."""
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(count - 1)[:used] for _ in range(tokens)], np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_computes_what_its_matrix_alone_would(host, kind):
    experts = Experts(kind, 4, 32, 3 if LAYOUTS[kind].block == 32 else 1)
    x, chosen = rows_of(7, experts.all.packed.columns), chosen_of(7, 2, 4)
    y, into = run(host, x, experts, chosen)
    assert np.array_equal(y, expected(host, x, experts, chosen, into))


def test_tiles_columns_and_orders(host):
    """More rows of one expert than a tile has, and more columns; the same in any thread order."""
    experts = Experts("Q8_0", 3, 160, 1)
    x = rows_of(150, 32)
    chosen = np.where(np.arange(150) % 15 == 0, 0, 1).astype(np.int32)[:, None]
    y, into = run(host, x, experts, chosen)
    assert into.tiles[:, 0].tolist() == [0, 1, 1, -1][: len(into.tiles)]
    assert np.array_equal(y, expected(host, x, experts, chosen, into))
    for order in ORDERS[1:]:
        assert np.array_equal(run(host, x, experts, chosen, order=order)[0], y)


def test_rows_that_lie_by_place_are_not_gathered(host):
    experts = Experts("Q4_K", 4, 64, 1)
    x, chosen = rows_of(9, 256), chosen_of(9, 2, 4)
    y, into = run(host, x, experts, chosen)
    by_place = np.ascontiguousarray(x[into.order // 2])
    assert np.array_equal(run(host, by_place, experts, chosen, is_gathered=False)[0], y)


def test_a_row_is_alike_in_any_company(host):
    experts = Experts("Q5_K", 4, 32, 1)
    x, chosen = rows_of(11, 256), chosen_of(11, 2, 4)
    y, into = run(host, x, experts, chosen)
    for row in (0, 5, 10):
        one, alone = run(host, x[row : row + 1], experts, chosen[row : row + 1])
        for j in range(2):
            assert np.array_equal(one[alone.place[j]], y[into.place[2 * row + j]])


FAULTS = {
    "the wrong expert": ("tile.x * groups", "(tile.x ^ 1) * groups"),
    "rows not gathered": ("/ U : i", "% 7 : i"),
    "a tile's first row left out": ("tile.y + min(", "min("),
    "a row too many": ("row < tile.z && n < N", "n < N"),
    "columns of the next expert": ("row < tile.z && n < N", "row < tile.z"),
    "rows beyond the last are read": ("tile.z - 1);", "tile.z + 6);"),
    "another matrix's size": ("E * groups,", "groups,"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(host, plant, fault):
    bad = plant("prefill.cu", *FAULTS[fault])
    experts = Experts("Q8_0", 4, 32, 2)
    x, chosen = rows_of(7, 64), chosen_of(7, 2, 4)
    try:
        y, into = run(bad, x, experts, chosen, sorter=host)
    except HostFault as found:
        assert "prefill.cu" in str(found) or "quant.cuh" in str(found)
        return
    assert not np.array_equal(y, expected(host, x, experts, chosen, into))


def test_what_it_cannot_take_is_refused():
    matrix, x = random_matrix("Q8_0", 40, 1), np.zeros((2, 32), np.float16)
    flat = np.zeros(6, np.int32)
    into = Assignments(flat, flat, np.zeros((6, 4), np.int32))

    def plan(columns, used):
        y = np.zeros((6, columns), np.float32)
        return prefill_experts(
            x, matrix.packed, into, y, expert_count=2, used=used, is_gathered=True
        )

    with pytest.raises(KernelError, match=r"prefill_experts: weight is \[40, 32\]; 2 experts"):
        plan(20, 3)
    matrix = random_matrix("Q8_0", 64, 1)
    with pytest.raises(KernelError, match="prefill_experts: 2 rows of 32 for 6 assignments"):
        plan(32, 2)
    assert plan(32, 3).grid == (6, 1, 1)
