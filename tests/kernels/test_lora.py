"""Goal: each row gets what its own adapter adds, and rows without one keep their bits.

Method: rows of mixed adapters of odd ranks on the host's machine against b . (a . x) in float64,
alone and together, in several thread orders, over scratch that nothing wrote; then planted faults.
"""

import numpy as np
import pytest

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.lora import Choice, Part, entries, side_path, stack

RELATIVE = 1e-5  # f32 sums of at most 600 terms
RANKS = (8, None, 1, 13, 64)
CHOSEN = (0, 0, 0, 2, -1, 3, 3, 1, 4, 4, 4, -1, 0, 3, 2, -1, 2)  # 1 does not touch the matrix


@pytest.fixture(autouse=True, scope="module")
def loaded(host):
    host.load("lora", entries())


def part(rank, rows, columns, seed):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rank, columns)).astype(np.float16)
    b = rng.standard_normal((rows, rank)).astype(np.float16)
    return Part(a, b, 0.5 + seed)


class Case:
    def __init__(self, rows=70, columns=544, ranks=RANKS, chosen=CHOSEN):
        rng = np.random.default_rng(1)
        self.parts = [
            None if rank is None else part(rank, rows, columns, seed)
            for seed, rank in enumerate(ranks)
        ]
        self.adapters = stack(self.parts, rows, columns)
        self.chosen = np.array(chosen, np.int32)
        self.scales = rng.uniform(-1, 2, len(chosen)).astype(np.float32)
        self.x = rng.standard_normal((len(chosen), columns)).astype(np.float16)
        self.y = rng.standard_normal((len(chosen), rows)).astype(np.float32)

    def run(self, host, rows=slice(None), **how):
        memory = Memory()
        x, y = self.x[rows].copy(), self.y[rows].copy()
        h = memory.empty((len(x), self.adapters.a.shape[1]), np.float32)
        choice = Choice(self.chosen[rows].copy(), self.scales[rows].copy())
        for launch in side_path(x, self.adapters, choice, h, y):
            host.run(launch, memory, **how)
        return y

    def added(self):
        """In f64, by row."""
        found = np.zeros(self.y.shape)
        for m, i in enumerate(self.chosen):
            if i >= 0 and (one := self.parts[i]) is not None:
                narrowed = one.a.astype(np.float64) @ self.x[m].astype(np.float64)
                scale = float(self.scales[m]) * one.factor
                found[m] = scale * (one.b.astype(np.float64) @ narrowed)
        return found

    def is_right(self, y):
        added = self.added()
        touched = added.any(axis=1)
        error = np.linalg.norm(y - self.y - added, axis=1)[touched]
        bound = RELATIVE * (np.linalg.norm(added, axis=1) + np.linalg.norm(self.y, axis=1))[touched]
        return bool((error <= bound).all()) and np.array_equal(y[~touched], self.y[~touched])


def test_each_row_takes_its_own_adapter(host):
    case = Case()
    y = case.run(host)
    assert case.is_right(y)
    untouched = np.isin(case.chosen, (-1, 1))
    assert np.array_equal(y[untouched].view(np.uint32), case.y[untouched].view(np.uint32))
    for order in ORDERS[1:]:
        assert np.array_equal(case.run(host, order=order, seed=3), y)


def test_a_row_is_alike_in_any_company(host):
    case = Case()
    y = case.run(host)
    for row in range(len(CHOSEN)):
        assert np.array_equal(case.run(host, slice(row, row + 1))[0], y[row])
    parts = [case.run(host, cut) for cut in (slice(0, 3), slice(3, 9), slice(9, None))]
    assert np.array_equal(np.concatenate(parts), y)


def test_an_adapters_bits_do_not_depend_on_the_others(host):
    """Neither on how many there are nor on their ranks, which decide how far it is padded."""
    case = Case()
    y = case.run(host)
    rows = [m for m, i in enumerate(CHOSEN) if i == 3]
    alone = Case(ranks=(None,), chosen=(0,) * len(rows))
    alone.parts, alone.adapters = [case.parts[3]], stack([case.parts[3]], 70, 544)
    alone.scales, alone.x, alone.y = case.scales[rows], case.x[rows], case.y[rows]
    assert np.array_equal(alone.run(host), y[rows])


@pytest.mark.parametrize("shape", [(1, 32, 1), (257, 288, 9), (33, 256, 64)])
def test_odd_sizes(host, shape):
    rows, columns, rank = shape
    case = Case(rows, columns, (rank, None), (0, -1, 0, 0, 1, 0))
    assert case.is_right(case.run(host))


def test_a_minus_zero_stays_where_nothing_is_added(host):
    case = Case(rows=8, columns=32, ranks=(None, 2), chosen=(-1, 0, 1))
    case.y[:] = -0.0
    y = case.run(host)
    assert np.signbit(y[:2]).all()


def test_a_broken_row_stays_broken_and_harms_no_other(host):
    case = Case()
    y = case.run(host)
    case.x[1, 5] = np.nan
    broken = case.run(host)
    assert np.isnan(broken[1]).all()
    others = np.arange(len(CHOSEN)) != 1
    assert np.array_equal(broken[others], y[others])


FAULTS = {
    "a neighbour's adapter": ("adapter[row] != adapter[row - 1]", "false"),
    "a rank too few": ("r + i >= rank", "r + i + 1 >= rank"),
    "ranks beyond the last": ("if (r + i >= rank) break;", ""),
    "the factor left out": (" *\n                            load_constant(factors", ";  // ("),
    "a row of x one off": ("x + size_t(first + row) * K", "x + size_t(first) * K"),
    "columns left out": ("k += WARP * OCTET", "k += 2 * WARP * OCTET"),
    "base rows written": ("if (adapter[row] < 0) continue;\n        const float scale",
                          "const float scale"),
    "halves of a pair swapped": ("i % 2 ? high_of", "i % 2 == 0 ? high_of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    host = plant("lora.cu", *FAULTS[fault])
    case = Case()
    try:
        y = case.run(host)
    except HostFault as found:
        assert "lora.cu" in str(found)
        return
    assert not case.is_right(y)


def test_what_it_cannot_take_is_refused():
    good = part(4, 8, 32, 0)
    with pytest.raises(KernelError, match="adapter 1: its rank is 65, at most 64"):
        stack([good, part(65, 8, 32, 0)], 8, 32)
    with pytest.raises(KernelError, match=r"adapter 0: a is \[4, 32\] and b \[8, 4\], where"):
        stack([good], 9, 32)
    large = Part(good.a.astype(np.float32), good.b.astype(np.float32), 1.0)
    large.b[3, 2] = 1e5
    with pytest.raises(KernelError, match=r"adapter 0: b\[3, 2\] is 100000.0, which f16 cannot"):
        stack([large], 8, 32)
    case = Case(rows=8, columns=32, ranks=(2,), chosen=(0,))
    choice, h = Choice(case.chosen, case.scales), np.empty((1, 8), np.float32)
    with pytest.raises(KernelError, match="y: N is 8 elsewhere, 9 here"):
        side_path(case.x, case.adapters, choice, h, np.empty((1, 9), np.float32))
    with pytest.raises(KernelError, match="scales: M is 1 elsewhere, 2 here"):
        side_path(case.x, case.adapters, Choice(case.chosen, np.ones(2, np.float32)), h, case.y)
