"""Goal: the products of prompts are right for every type, and do not depend on how prompts are cut.

Method: as test_skinny.py: random blocks on the host's machine against gguf's dequantisation and a
product in float64, around the edges of the 128 by 128 tile; then planted faults.
"""

import numpy as np
import pytest
from kernel_blocks import random_matrix

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.prefill import prefill
from phaseloop.kernels.repack import LAYOUTS, Packed
from phaseloop.kernels.skinny import KINDS

RELATIVE = 1e-3  # half weights: 2^-11 for scale, offset and weight each; their errors add up less


def activations(rows, columns, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16)


def product(host, x, matrix, **how):
    memory = Memory()
    y = memory.empty((len(x), matrix.packed.rows), np.float32)
    host.run(prefill(x, matrix.packed, y), memory, **how)
    return y


def error(y, x, matrix):
    """Relative, in L2; infinite where anything is not finite."""
    exact = x.astype(np.float64) @ matrix.values.astype(np.float64).T
    if not np.isfinite(y).all():
        return np.inf
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_product_and_cuts(host, kind):
    """Right for each type; the same bits in one piece, in three, alone, and in any thread order."""
    matrix = random_matrix(kind, 45, 3 if LAYOUTS[kind].block == 32 else 1)
    x = activations(40, matrix.packed.columns)
    whole = product(host, x, matrix)
    assert error(whole, x, matrix) <= RELATIVE
    for order in ORDERS[1:]:
        assert np.array_equal(product(host, x, matrix, order=order), whole)
    parts = [product(host, part, matrix) for part in (x[:7], x[7:39], x[39:])]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("shape", [(127, 128, 2), (128, 129, 1), (129, 31, 5), (300, 256, 1)])
def test_edges_of_tiles(host, shape):
    rows, columns, blocks = shape
    matrix = random_matrix("Q8_0", columns, blocks)
    x = activations(rows, matrix.packed.columns)
    y = product(host, x, matrix)
    assert error(y, x, matrix) <= RELATIVE
    for row in (0, rows // 2, rows - 1):
        assert np.array_equal(product(host, x[row : row + 1], matrix)[0], y[row])


def test_bias_and_residual_are_added(host):
    matrix = random_matrix("Q5_K", 45, 1)
    x = activations(5, 256)
    rng = np.random.default_rng(3)
    bias, residual = (rng.standard_normal(s).astype(np.float32) for s in ((45,), (5, 45)))
    plain, y = product(host, x, matrix), residual.copy()
    host.run(prefill(x, matrix.packed, y, bias=bias, residual=y))
    assert np.array_equal(y, plain + bias + residual)


def test_shared_memory_has_no_bank_conflicts(host):
    matrix = random_matrix("Q4_0", 128, 2)
    y = np.empty((128, 128), np.float32)
    run = host.run(prefill(activations(128, 64), matrix.packed, y), counts_banks=True)
    assert run.banks
    for banks in run.banks:
        assert banks.wavefronts == banks.wavefronts_ideal, banks


FAULTS = {
    "no barrier between strips": ("prefill.cu", "sync_block();  // this strip is staged,", "//"),
    "a quad-pair's rows in the other order": (
        "prefill.cu", "(lane >> 2 & 1, r + (e & 2))", "(lane >> 3 & 1, r + (e & 2))",
    ),
    "one bit of the accumulator's map": ("prefill.cu", "4) + (lane & 2)", "4) + (lane & 1)"),
    "half the octets left out": ("prefill.cu", "threadIdx.x / WARP % 2; }", "1; }"),
    "the other half's scale": (
        "quant.cuh", "strip, 2 * part)) {}", "strip, 2 - 2 * part)) {}",
    ),
    "an octet's bits of the one before": ("quant.cuh", "8 * (octet % 2)};", "0};"),
    "the strip before": ("prefill.cu", "<Type>(columns + other", "<Type>(columns"),
    "a row too many": ("prefill.cu", "if (m >= M || n >= N) return;", "if (n >= N) return;"),
    "rows beyond the last are read": ("prefill.cu", "fetched_row(i), M - 1)", "fetched_row(i), M)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    """By the machine, by the oracle, or by orders that differ."""
    host = plant(*FAULTS[fault])
    matrix = random_matrix("Q6_K", 70, 1)
    x = activations(5, 256)
    try:
        y = product(host, x, matrix)
    except HostFault as found:
        assert "prefill.cu" in str(found)
        return
    assert not error(y, x, matrix) <= 10 * RELATIVE


def test_what_it_cannot_take_is_refused():
    weight = random_matrix("F32", 3, 1).packed
    x, y = np.empty((4, 32), np.float16), np.empty((4, 3), np.float32)
    with pytest.raises(KernelError, match="no kernel for F32"):
        prefill(x, weight, y)
    weight = Packed("Q8_0", 3, 64, weight.data)
    with pytest.raises(KernelError, match=r"weight is \[3, 64\], x and y want \[3, 32\]"):
        prefill(x, weight, y)
