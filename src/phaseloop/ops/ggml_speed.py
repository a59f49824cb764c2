"""What this machine can do at best with ggml: the limits that an engine's figures stand beside."""

import time

import numpy as np

from .ggml_library import Cpu, Tensors, array_at, new_context
from .ggml_openmp import ggml
from .interface import Weight

PEAK_ROWS = 512
PEAK_RUNS = 5


def multiply_adds_per_second(weight: Weight, threads: int) -> float:
    """ggml's best rate in products of 512 rows with a matrix [N, D], or with one of experts'."""
    cpu, tensors = Cpu(threads), Tensors(1)
    shape = weight.shape[-2:]
    matrix = tensors.place_as(weight, shape)
    context = new_context(8 * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead())
    rows = ggml.ggml_new_tensor_2d(context, ggml.GGML_TYPE_F32, shape[1], PEAK_ROWS)
    ggml.ggml_set_input(rows)
    product = ggml.ggml_mul_mat(context, matrix, rows)
    ggml.ggml_set_output(product)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, product)
    allocator = cpu.allocate(graph)
    try:
        array_at(rows, np.dtype(np.float32))[:] = 1.0
        cpu.compute(graph, row_by_row=False)
        best_s = min(seconds(cpu, graph) for _ in range(PEAK_RUNS))
    finally:
        ggml.ggml_gallocr_free(allocator)
        ggml.ggml_free(context)
        tensors.close()
        cpu.close()
    return shape[0] * shape[1] * PEAK_ROWS / best_s


def seconds(cpu: Cpu, graph: ggml.ggml_cgraph_p) -> float:
    start_ns = time.perf_counter_ns()
    cpu.compute(graph, row_by_row=False)
    return (time.perf_counter_ns() - start_ns) / 1e9
