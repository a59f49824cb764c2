"""Goal: the residual stream's additions and norms are right, and a row's bits are its own.

Method: random rows of odd and even sizes on the host's machine, outputs of NaNs nobody may read;
the oracle is the formula in float64.  Then faults are planted, and each must be noticed.
"""

import numpy as np
import pytest

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.norm import COLUMNS_MAX, rms_norm

EPSILON = 1e-5
RELATIVE = 1e-6  # f32 sums of at most some thousand squares, and three products
SHAPES = ((1, 4), (3, 36), (2, 1024), (5, 1028), (1, 2056), (1, 5120))


def normed(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight


def random_case(shape, seed=0):
    rng = np.random.default_rng(seed)
    rows = [(3 * rng.standard_normal(shape)).astype(np.float32) for _ in range(2)]
    weights = [rng.uniform(0.5, 2, shape[1]).astype(np.float32) for _ in range(2)]
    return *rows, *weights


def oracle(x, delta, weight, delta_weight):
    """-> x after the addition, y."""
    exact = [None if each is None else each.astype(np.float64)
             for each in (x, delta, weight, delta_weight)]  # fmt: skip
    x, delta, weight, delta_weight = exact
    if delta is not None:
        x = x + (delta if delta_weight is None else normed(delta, delta_weight))
    return x, normed(x, weight)


def run(host, x, delta, weight, delta_weight, **how):
    memory, x = Memory(), x.copy()
    half, full = memory.empty(x.shape, np.float16), memory.empty(x.shape, np.float32)
    plan = rms_norm(
        x,
        weight,
        epsilon=EPSILON,
        y_half=half,
        y_full=full,
        delta=delta,
        delta_weight=delta_weight,
    )
    host.run(plan, memory, **how)
    return x, half, full


def error(y, exact):
    assert np.isfinite(y).all()
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("what", ["alone", "added", "normed and added"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_norms(host, shape, what):
    x, delta, weight, delta_weight = random_case(shape)
    delta = None if what == "alone" else delta
    delta_weight = delta_weight if what == "normed and added" else None
    exact_x, exact_y = oracle(x, delta, weight, delta_weight)
    first = run(host, x, delta, weight, delta_weight)
    assert error(first[0], exact_x) <= RELATIVE
    assert error(first[2], exact_y) <= RELATIVE
    assert np.array_equal(first[1], first[2].astype(np.float16))
    for order in ORDERS[1:]:
        again = run(host, x, delta, weight, delta_weight, order=order, seed=1)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_rows_bits_are_its_own(host):
    x, delta, weight, delta_weight = random_case((7, 260))
    whole = run(host, x, delta, weight, delta_weight)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 7)):
        part = run(host, x[rows], delta[rows], weight, delta_weight)
        assert all(np.array_equal(a, b[rows]) for a, b in zip(part, whole, strict=True))


def test_one_output_may_be_left_out(host):
    x, _, weight, _ = random_case((2, 64))
    full = np.empty_like(x)
    host.run(rms_norm(x, weight, epsilon=EPSILON, y_full=full))
    half = np.empty(x.shape, np.float16)
    host.run(rms_norm(x, weight, epsilon=EPSILON, y_half=half))
    assert np.array_equal(half, full.astype(np.float16))


FAULTS = {
    "no barrier before the sums": ("common.cuh", "sync_block(AT_ONLY);  // all warps' sums", "//"),
    "the sum of one warp only": ("norm.cu", "block_sum<WARPS>(sum AT)", "warp_sum(sum AT)"),
    "weights one off": ("norm.cu", "(weight + k)", "(weight + (k ? k - 4 : 0))"),
    "columns beyond the last": ("norm.cu", "if (k >= K) continue;\n        const", "const"),
    "the norm of the sum before the addition": ("norm.cu", "sum = {sum.x + d.x,", "sum = {sum.x,"),
    "epsilon left out": ("norm.cu", "/ float(K) + epsilon", "/ float(K)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    host = plant(*FAULTS[fault])
    x, delta, weight, delta_weight = random_case((2, 516))
    x, delta = x * np.float32(1e-3), delta * np.float32(1e-3)  # so that epsilon counts
    exact_x, exact_y = oracle(x, delta, weight, delta_weight)
    try:
        got_x, _, got_y = run(host, x, delta, weight, delta_weight)
    except HostFault:
        return
    assert not max(error(got_x, exact_x), error(got_y, exact_y)) <= 10 * RELATIVE


def test_what_it_cannot_take_is_refused():
    x, weight = np.zeros((1, 6), np.float32), np.ones(6, np.float32)
    with pytest.raises(KernelError, match="rows of 6; it takes multiples of 4"):
        rms_norm(x, weight, epsilon=EPSILON, y_full=x)
    wide = np.zeros((1, COLUMNS_MAX + 4), np.float32)
    with pytest.raises(KernelError, match=f"up to {COLUMNS_MAX}"):
        rms_norm(wide, wide[0], epsilon=EPSILON, y_full=wide)
    with pytest.raises(KernelError, match="neither y_half nor y_full"):
        rms_norm(x, weight, epsilon=EPSILON)
    with pytest.raises(KernelError, match="no delta to weigh"):
        rms_norm(x, weight, epsilon=EPSILON, y_full=x, delta_weight=weight)
    with pytest.raises(KernelError, match="y_half: expected f16 T K"):
        rms_norm(x, weight, epsilon=EPSILON, y_half=x)
