"""Goal: tests that run on a GPU notice what kernels do to memory that is not theirs.

Method: a device whose "kernel" is a Python function over the same bytes, which errs in each way
that is to be noticed; and a few of the real tests, over CuPy's double, in a process of their own.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cupy_double import Machine
from gpu_host import GpuHost

from phaseloop.kernels.contract import KernelError, Launch, i32, reads, updates, writes
from phaseloop.kernels.cupy_device import CupyDevice
from phaseloop.kernels.host import Memory

HERE = Path(__file__).parent


class Toy(CupyDevice):
    """Launches call `kernel` with the operands' NumPy arrays over the device's memory."""

    def __init__(self, kernel):
        super().__init__(Machine(), 0)
        self.kernel = kernel

    def run(self, launch):
        self.synchronize()
        self.kernel(*(one.array.host for one in launch.arguments if hasattr(one, "array")))


def launched(kernel, *arguments, memory=None):
    launch = Launch("toy", "toy", (1, 1, 1), (32, 1, 1), arguments)
    GpuHost(Toy(kernel)).run(launch, memory)


def test_what_is_written_comes_back_and_overlaps_stay():
    x = np.arange(12, dtype=np.float32)
    y = np.zeros(3, np.float32)

    def kernel(first, second, y):
        second[:] = 7  # first and second share x[4:8]
        y[:] = first[5:8]

    launched(kernel, reads("first", x[:8]), updates("second", x[4:]), writes("y", y), i32("n", 1))
    assert np.array_equal(x, [0, 1, 2, 3, *[7] * 8])
    assert np.array_equal(y, [7, 7, 7])


def test_alignment_is_the_hosts():
    whole = np.zeros(64, np.uint8)
    seen = []
    launched(lambda x: seen.append(x.ctypes.data % 256), reads("x", whole[3:9]))
    assert seen == [whole[3:].ctypes.data % 256]


def test_marks_show_what_was_written():
    memory = Memory()
    y = memory.empty((4,), np.uint8)
    launched(lambda y: y.__setitem__(2, 1), writes("y", y), memory=memory)
    assert memory.marks(y).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("by", [-4, 40])
def test_writes_outside_are_noticed(by):
    x = np.zeros(10, np.float32)

    def kernel(x):
        ctypes.c_float.from_address(x.ctypes.data + by).value = 1

    with pytest.raises(KernelError, match=f"toy wrote outside x, at byte {by}$"):
        launched(kernel, updates("x", x))


def test_writes_to_what_is_only_read_are_noticed():
    x = np.zeros(10, np.float32)
    with pytest.raises(KernelError, match="toy wrote to x, which it only reads"):
        launched(lambda x: x.__setitem__(3, 1), reads("x", x))
    assert not x.any()


def test_an_arena_grows(monkeypatch):
    monkeypatch.setattr("gpu_host.ARENA_BYTES", 1 << 10)
    host = GpuHost(Toy(lambda x, y: y.__setitem__(slice(None), x)))
    for size in (8, 1 << 16, 8):
        x, y = np.arange(size, dtype=np.int32), np.zeros(size, np.int32)
        host.run(Launch("toy", "toy", (1, 1, 1), (32, 1, 1), (reads("x", x), writes("y", y))))
        assert np.array_equal(x, y)


def test_the_real_tests_pass_over_the_double():
    """As they would on a GPU: those that perform nothing on a device are skipped with a reason."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", str(HERE / "test_norm.py"),
         "--phaseloop-device", "double", "-p", "no:cacheprovider"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "20 passed, 7 skipped" in done.stdout
    assert "faults are planted on the shim" in done.stdout
    assert "performs nothing on a device" in done.stdout
