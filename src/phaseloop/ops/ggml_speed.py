"""What this machine can do at best with ggml: the limits that an engine's figures stand beside."""

from collections.abc import Callable

import numpy as np

from .ggml_library import Cpu, Tensors, array_at, new_context, new_tensor
from .ggml_openmp import ggml
from .ggml_repack import Matrix, Repacked, block_sums, product
from .interface import Weight

PEAK_ROWS = 512
PEAK_RUNS = 5


def multiply_adds_per_second(weight: Weight, threads: int, now_ns: Callable[[], int]) -> float:
    """ggml's best rate in products of 512 rows with a matrix [N, D], or with one of experts'.

    The matrix as it is, or repacked, whichever is faster; by the clock `now_ns`.
    """
    outputs, width = weight.shape[-2:]
    size = weight.data.nbytes // int(np.prod(weight.shape[:-2]))
    one = Weight(weight.name, weight.kind, (outputs, width), weight.data[:size])
    cpu, plain = Cpu(threads), Tensors(1)
    repacked = Repacked(cpu, {one.name: one}, only_stable=False)
    try:
        matrices = [Matrix(plain.add(one), None, "none"), *repacked.matrices.values()]
        best_s = min(seconds(cpu, matrix, width, now_ns) for matrix in matrices)
    finally:
        repacked.close()
        plain.close()
        cpu.close()
    return outputs * width * PEAK_ROWS / best_s


def seconds(cpu: Cpu, matrix: Matrix, width: int, now_ns: Callable[[], int]) -> float:
    """The best of several runs."""
    context = new_context(16 * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead())
    rows = new_tensor(context, ggml.GGML_TYPE_F32, (PEAK_ROWS, width))
    ggml.ggml_set_input(rows)
    sums = None if matrix.offsets is None else block_sums(context, rows)
    found = product(context, matrix, rows, sums)
    ggml.ggml_set_output(found)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, found)
    allocator = cpu.allocate(graph)
    times_ns: list[int] = []
    try:
        array_at(rows, np.dtype(np.float32))[:] = 1.0
        for _ in range(PEAK_RUNS):
            start_ns = now_ns()
            cpu.compute(graph, row_by_row=False)
            times_ns.append(now_ns() - start_ns)
    finally:
        ggml.ggml_gallocr_free(allocator)
        ggml.ggml_free(context)
    return min(times_ns) / 1e9
