"""Goal: gates and soft caps are the formulas, at both ends of their range and in any company.

Method: random and extreme elements on the host's machine; the oracle is ops.reference in float64.
"""

import numpy as np
import pytest

from phaseloop.kernels.activation import gate_heads, gated, soft_cap
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, Memory
from phaseloop.ops.reference import activate

EXTREMES = np.array([0, -0.0, 1e-30, -1e-30, 88, -88, 1000, -1000, 3, -3, 11, -11], np.float32)


def case(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    gate, up = ((4 * rng.standard_normal((rows, columns))).astype(np.float32) for _ in range(2))
    gate.reshape(-1)[: len(EXTREMES)] = EXTREMES[: gate.size]
    return gate, up


def run(host, gate, up, activation, **how):
    memory = Memory()
    y = memory.empty(gate.shape, np.float16)
    host.run(gated(gate, up, y, activation), memory, **how)
    return y


def is_right(y, gate, up, activation):
    exact = activate(gate.astype(np.float64), activation) * up
    return bool((np.abs(y - exact) <= 2.0**-10 * np.abs(exact) + 2.0**-24).all())


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("shape", [(1, 12), (3, 1020), (2, 1028)])
def test_gated(host, activation, shape):
    gate, up = case(*shape)
    with np.errstate(over="ignore"):
        y = run(host, gate, up, activation)
        assert is_right(y, gate, up, activation)
        assert not is_right(np.roll(y, 1), gate, up, activation)
    for order in ORDERS[1:]:
        assert np.array_equal(run(host, gate, up, activation, order=order), y)
    assert np.array_equal(run(host, gate[-1:], up[-1:], activation)[0], y[-1])


def test_soft_cap(host):
    x = np.concatenate([EXTREMES, 40 * np.random.default_rng(1).standard_normal(1024)])
    x = x.astype(np.float32)
    y = x.copy()
    host.run(soft_cap(y, 30.0))
    assert np.abs(y - 30 * np.tanh(x.astype(np.float64) / 30)).max() <= 30 * 1e-6


def test_a_cap_does_not_hide_an_infinity(host):
    y = np.array([np.inf, -np.inf, np.nan, 3e38], np.float32)
    host.run(soft_cap(y, 30.0))
    assert np.isnan(y[:3]).all()
    assert y[3] == 30


def test_gate_heads(host):
    rng = np.random.default_rng(2)
    projected = (3 * rng.standard_normal((5, 3, 72))).astype(np.float32)
    projected[:, :, :36] = np.nan  # queries, which it has no business with
    y = rng.standard_normal((5, 3, 36)).astype(np.float16)
    exact = y * activate(projected[:, :, 36:].astype(np.float64), "sigmoid")
    host.run(gate_heads(projected, y))
    assert (np.abs(y - exact) <= 2.0**-10 * np.abs(exact) + 2.0**-24).all()


FAULTS = {
    "a factor of the cubic term": ("0.044715f", "0.044615f"),
    "the sign of the exponent": ("exp_f32(-twice)", "exp_f32(twice)"),
    "elements swapped": ("Activation::of(g.y) * u.y", "Activation::of(g.y) * u.x"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    host = plant("activation.cu", *FAULTS[fault])
    gate, up = case(2, 256)
    found = False
    with np.errstate(over="ignore"):
        for activation in ("silu", "gelu"):
            found |= not is_right(run(host, gate, up, activation), gate, up, activation)
    assert found


def test_what_it_cannot_take_is_refused():
    x = np.zeros((2, 6), np.float32)
    with pytest.raises(KernelError, match="2 rows of 6"):
        gated(x, x, x.astype(np.float16), "silu")
    with pytest.raises(KernelError, match="heads of 6, with gates 6"):
        gate_heads(x[None], x[None].astype(np.float16))
    with pytest.raises(KernelError, match="in all a multiple of 4"):
        soft_cap(x[:, :3].copy(), 1.0)
