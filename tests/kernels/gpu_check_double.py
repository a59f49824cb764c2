"""`make gpu-check` over the double of CuPy, for test_gpu_check.py; arguments: fault, JSON, seconds.

All checks of the real one, with few kernels and tests, so that it takes seconds.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "benchmarks")]

import gpu_checks  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_table  # noqa: E402
from cupy_double import CURRENT, Graph, Machine, fake_cubin  # noqa: E402
from kernel_shapes import Case  # noqa: E402

from phaseloop.kernels import cupy_device  # noqa: E402
from phaseloop.kernels.budgets import Budget  # noqa: E402
from phaseloop.kernels.contract import KernelError, planned  # noqa: E402
from phaseloop.kernels.driver import Driver, Gpu  # noqa: E402
from phaseloop.kernels.norm import rms_norm  # noqa: E402

GEMM = 64


class Cublas:
    """One product [64, 64], whose arguments must be those of cublasGemmEx for it."""

    def __init__(self):
        self.machine = None

    def create(self):
        return 7

    def destroy(self, handle):
        assert handle == 7

    def gemmEx(self, *arguments):
        (handle, ta, tb, m, n, k, _, a, a_type, lda, b, b_type, ldb, _, c, c_type, ldc,
         compute, algorithm) = arguments  # fmt: skip
        assert (handle, ta, tb, m, n, k, lda, ldb, ldc) == (7, 1, 0, *[GEMM] * 6)
        assert (a_type, b_type, c_type, compute, algorithm) == (2, 2, 0, 68, -1)
        for address, size in ((a, 2), (b, 2), (c, 4)):
            self.machine.behind(address, 0, GEMM * GEMM * size)
        CURRENT[-1].add(lambda: None)


class Wrong:
    """A GPU whose kernels get one bit of their last result wrong."""

    def __init__(self, host):
        self.host = host

    def run(self, launch):
        self.host.run(launch)
        written = [one.array for one in launch.arguments if getattr(one, "array", None) is not None]
        written[-1].reshape(-1).view(np.uint8)[1] ^= 64


def norm_cases(shapes):
    for rows, columns in shapes:
        x, weight = planned("f32", rows, columns), planned("f32", columns)
        launch = rms_norm(x, weight, epsilon=1e-6, y_half=planned("f16", rows, columns), delta=x)
        yield Case("toy", f"norm [{columns}], rows = {rows}", launch, 7 * rows * columns, "HMMA")


def driver(fault):
    if fault == "no driver":
        raise KernelError("libcuda.so.1 cannot be loaded: install NVIDIA's driver")
    gpu = Gpu(0, "Double GPU", (7, 0), 1 << 30, None, ())
    return Driver("575.57.08", (12, 9), () if fault == "no gpu" else (gpu,))


def plant(fault, machine):
    if fault == "wrong bits":
        machine.host = Wrong(machine.host)
    if fault == "corrupt peers":
        machine.corrupts = machine.reaches
    if fault == "wrong copies":
        connect = gpu_checks.connect

        def later(*arguments):
            found = connect(*arguments)
            machine.corrupts = machine.reaches  # after the trial
            return found

        gpu_checks.connect = later
    if fault == "wrong graph":
        Graph.launch = lambda graph, stream: [stream.add(lambda: None) for _ in graph.steps]


def main(fault, target, seconds):
    cublas = Cublas() if fault != "no cublas" else None
    machine = Machine(2, cublas=cublas, reaches={(0, 1), (1, 0)})
    if cublas is not None:
        cublas.machine = machine
    plant(fault, machine)
    gpu_table.GEMM_SIZE, gpu_table.COPIED_BYTES = GEMM, 1 << 20
    gpu_table.SETS_MAX = 2
    cupy_device.cubin = gpu_checks.cubin = fake_cubin
    gpu_checks.read_driver = partial(driver, fault)
    gpu_checks.load_cupy = lambda: machine
    gpu_checks.read_budgets = lambda: [Budget("norm", "rms_norm<1>", 256, 64)]
    gpu_checks.cases = lambda: norm_cases([(1, 1024)])
    gpu_checks.attention_cases = lambda: norm_cases([(2, 512), (1 << 13, 1 << 14)])
    gpu_engine.FAMILIES = {"qwen3": "Q4_K"}
    gpu_checks.run_tests = partial(gpu_checks.run_tests, tests=(HERE / "test_norm.py",))
    return gpu_checks.run(0, float(seconds), "all", Path(target))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
