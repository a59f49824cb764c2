"""Goal: gated delta nets carry their states as the formula says, however their rows are cut.

Method: random rows and states of several lanes on the host's machine, unused cells poisoned; the
oracle is ops.reference in float64.  Then faults are planted.
"""

from itertools import pairwise

import numpy as np
import pytest

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.delta import Lanes, convolve, entries, gated_norm, recur
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.ops import reference

EPSILON = 1e-6
RELATIVE = 1e-5
CELLS = 6


class Nets:
    """A layer, sequences' rows, and states to begin from in cells 1 and 4."""

    def __init__(self, width, key_heads, value_heads, rows, seed=0):
        rng = np.random.default_rng(seed)
        self.width, self.key_heads, self.value_heads = width, key_heads, value_heads
        channels = (2 * key_heads + value_heads) * width

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(np.float32)

        self.mixed = normal(rows, channels)
        self.step, self.rate = normal(rows, value_heads, scale=2), normal(rows, value_heads)
        self.taps, self.decay = normal(channels, 4), -np.exp(normal(value_heads))
        self.histories = np.full((CELLS, channels, 3), np.nan, np.float32)
        self.states = np.full((CELLS, value_heads, width, width), np.nan, np.float32)
        for cell in (1, 4):
            self.histories[cell] = normal(channels, 3)
            self.states[cell] = normal(value_heads, width, width)

    def run(self, host, lanes, cells=None, **how):
        """lanes: (first row, rows, cell read, cell written) each.  -> y, histories, states."""
        histories, states = (each.copy() for each in cells or (self.histories, self.states))
        memory = Memory()
        where = Lanes(*(np.array(column, np.int32) for column in zip(*lanes, strict=True)))
        c = memory.empty(self.mixed.shape, np.float32)
        y = memory.empty((len(self.mixed), self.value_heads, self.width), np.float32)
        host.run(
            convolve(
                self.mixed, self.taps, histories, c, where, epsilon=EPSILON,
                key_heads=self.key_heads, width=self.width,
                count_max=max(count for _, count, _, _ in lanes),
            ), memory, **how,
        )  # fmt: skip
        plan = recur(c, self.step, self.rate, self.decay, states, y, where)
        host.run(plan, memory, **how)
        return y, histories, states

    def oracle(self, first, count, cell):
        """-> y of a lane's rows, its history and its state after them."""
        history = self.histories[cell].astype(np.float64)
        state = self.states[cell].astype(np.float64)
        shrink = np.exp(np.logaddexp(0.0, self.step.astype(np.float64)) * self.decay)
        share = 1 / (1 + np.exp(-self.rate.astype(np.float64)))
        found = []
        for row in range(first, first + count):
            window = np.concatenate((history, self.mixed[row][:, None]), axis=1)
            convolved = reference.activate((window * self.taps).sum(axis=1), "silu")
            state, output = reference.recur(state, convolved, shrink[row], share[row], EPSILON)
            found.append(output)
            history = window[:, 1:]
        return np.array(found), history, state


def error(got, exact):
    if not np.isfinite(got).all():
        return np.inf
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("sizes", [(32, 1, 1), (64, 2, 4), (128, 1, 3)])
def test_rows_and_states(host, sizes):
    host.load("delta", entries(sizes[0]))
    nets = Nets(*sizes, rows=45)
    lanes = ((40, 5, 4, 2), (0, 40, 1, 5), (0, 0, 0, 3))
    y, histories, states = nets.run(host, lanes)
    for first, count, read, write in lanes[:2]:
        exact_y, exact_history, exact_state = nets.oracle(first, count, read)
        assert error(y[first : first + count], exact_y) <= RELATIVE
        assert np.array_equal(histories[write], exact_history.astype(np.float32))
        assert error(states[write], exact_state) <= RELATIVE
    for cell in (0, 1, 3, 4):  # cells that were read, and nobody's
        assert np.array_equal(states[cell], nets.states[cell], equal_nan=True)
        assert np.array_equal(histories[cell], nets.histories[cell], equal_nan=True)
    for order in ORDERS[1:]:
        again = nets.run(host, lanes, order=order, seed=5)
        for one, other in zip(again, (y, histories, states), strict=True):
            assert np.array_equal(one, other, equal_nan=True)


def test_no_cut_and_no_neighbour_shows(host):
    """All rows at once, in pieces, and one by one, alone or beside another: the same bits."""
    nets = Nets(64, 1, 2, rows=37)
    whole, histories, states = nets.run(host, ((0, 37, 1, 5),))
    for cuts in ((0, 33, 37), (0, 1, 2, 3, 4, 37)):
        cells, cell = (nets.histories, nets.states), 1
        for start, stop in pairwise(cuts):
            target = 5 if cell != 5 else 2
            y, *cells = nets.run(host, ((start, stop - start, cell, target),), cells)
            assert np.array_equal(y[start:stop], whole[start:stop])
            cell = target
        assert np.array_equal(cells[0][cell], histories[5])
        assert np.array_equal(cells[1][cell], states[5])
    beside, *_ = nets.run(host, ((30, 7, 4, 3), (0, 30, 1, 2)))
    assert np.array_equal(beside[:30], whole[:30])


def test_an_accepted_part_of_a_draft_is_replayed(host):
    nets = Nets(32, 1, 2, rows=8)
    nets.run(host, ((0, 8, 1, 2),))
    _, histories, states = nets.run(host, ((0, 3, 1, 2),))
    cells, cell = (nets.histories, nets.states), 1
    for row in range(3):
        _, *cells = nets.run(host, ((row, 1, cell, (2, 3, 5)[row]),), cells)
        cell = (2, 3, 5)[row]
    assert np.array_equal(states[2], cells[1][5])
    assert np.array_equal(histories[2], cells[0][5])


@pytest.mark.parametrize("width", [32, 64, 128])
def test_gated_norm(host, width):
    rng = np.random.default_rng(1)
    found, gate = (2 * rng.standard_normal((2, 5, 3, width))).astype(np.float32)
    weight = rng.uniform(0.5, 2, width).astype(np.float32)
    memory = Memory()
    y = memory.empty(found.shape, np.float16)
    host.run(gated_norm(found, gate, weight, y, epsilon=EPSILON), memory)
    exact = found.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPSILON) * weight
    exact = exact * reference.activate(gate.astype(np.float64), "silu")
    assert error(y, exact) <= 2.0**-11


FAULTS = {
    "a tap one off": ("* HISTORY + HISTORY + t", "* HISTORY + max(HISTORY - 1 + t, 0)"),
    "the decay left out": ("* slope);", ");"),
    "value heads read neighbouring keys": ("key_head = head % HK", "key_head = head / (HV / HK)"),
    "what is missing before the decay": ("mine.x[j] *= shrink;", "mine.x[j] *= 1.0f;"),
    "queries at full length": ("if (head < HK) factor *= rsqrt_f32(float(S));", ""),
    "the history of one row before": ("window[j][tap + 1]);\n    }", "window[j][tap]);\n    }"),
    "no share": ("share * (load(value", "(load(value"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    host = plant("delta.cu", *FAULTS[fault])
    nets = Nets(32, 2, 4, rows=9)
    exact_y, exact_history, exact_state = nets.oracle(0, 9, 1)
    try:
        y, histories, states = nets.run(host, ((0, 9, 1, 2),))
    except HostFault:
        return
    is_right = error(y, exact_y) <= 10 * RELATIVE and error(states[2], exact_state) <= 10 * RELATIVE
    assert not (is_right and error(histories[2], exact_history) <= RELATIVE)


def test_what_it_cannot_take_is_refused(host):
    nets = Nets(32, 1, 2, rows=2)
    nets.width = 48
    with pytest.raises(KernelError, match="convolve: no kernel for heads of 48"):
        nets.run(host, ((0, 2, 1, 2),))
    nets.width, nets.key_heads = 32, 2
    with pytest.raises(KernelError, match="convolve: 128 channels, 2 key heads of 32"):
        nets.run(host, ((0, 2, 1, 2),))
    c, head = np.zeros((1, 160), np.float32), np.zeros((1, 2), np.float32)
    zero = np.zeros(1, np.int32)
    states = np.zeros((1, 2, 32, 32), np.float32)
    with pytest.raises(KernelError, match="recur: 160 channels for 2 value heads of 32"):
        recur(c, head, head, head[0], states, states[:, :, 0].copy(), Lanes(zero, zero, zero, zero))
