"""Goal: what `make gpu-check` times is work that models do: operands in bounds, every row computed.

Method: the cases of the table at small shapes, filled as for a GPU, run on the host's machine over
the double of CuPy; outputs must have changed everywhere, and those of attention must be finite.
"""

import sys
from itertools import chain

import numpy as np
import pytest
from cupy_double import Machine, fake_cubin

from phaseloop.kernels import cupy_device
from phaseloop.kernels.contract import Operand
from phaseloop.kernels.sources import source_directory

sys.path.append(str(source_directory().parent / "benchmarks"))

import gpu_operands
import kernel_shapes
import kernel_shapes_attention as attention

SMALL = attention.Shape("toy", 4, 2, 64, 256, 5000)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(cupy_device, "cubin", fake_cubin)
    monkeypatch.setattr(attention, "PROMPT_ROWS", 70)
    monkeypatch.setattr(kernel_shapes, "PROMPT_ROWS", 130)
    return cupy_device.CupyDevice(Machine(), 0)


def small_cases():
    matrix = kernel_shapes.Matrix("toy", "Q4_K", 70, 256)
    yield from (kernel_shapes.product("toy", matrix, rows) for rows in (1, 16, 48, 130))
    for kind in attention.KINDS:
        yield attention.decode_case(SMALL, kind, 600, 1)
    yield attention.decode_case(SMALL, "F16", 600, 4)
    yield attention.prefill_case(SMALL, 600)
    yield attention.norm_case(SMALL, 3)
    yield attention.sample_case(SMALL)
    yield attention.delta_case(2)


def written(device, launch):
    """Contents of what the launch writes, by name."""
    found = {}
    for one in launch.arguments:
        if isinstance(one, Operand) and one.array is not None and one.access != "read":
            found[one.name] = np.empty(one.array.shape, one.array.dtype)
            device.download(one.array, found[one.name])
    return found


def test_every_row_is_computed(device):
    filler = gpu_operands.Filler(device)
    for case in small_cases():
        launch = gpu_operands.with_two_states(case.launch)
        arena = device.allocate((gpu_operands.operand_bytes(launch),), np.uint8)
        launch = filler.place(launch, arena, 0)
        before = written(device, launch)
        device.run(launch)
        after = written(device, launch)
        if launch.source == "delta":  # the cell that is read stays
            before["states"], after["states"] = before["states"][1], after["states"][1]
        for name, content in after.items():
            rows = content.reshape(-1, content.shape[-1])
            changed = (rows != before[name].reshape(rows.shape)).any(axis=-1)
            assert changed.all(), f"{case.name}: {name}"
            if launch.source == "attention_prefill":
                assert np.isfinite(content).all(), f"{case.name}: {name}"
        device.release(arena)


def test_all_real_cases_have_operands_and_fit_a_card():
    """Of 16 GB; every i32 operand is told what it holds."""
    for case in chain(kernel_shapes.cases(), attention.attention_cases()):
        launch = gpu_operands.with_two_states(case.launch)
        assert gpu_operands.operand_bytes(launch) < 8 << 30, case.name
        numbers = gpu_operands.integers(launch)
        for name, array in gpu_operands.arrays_of(launch):
            if array.dtype == np.int32:
                assert numbers[name].size == np.prod(array.shape), f"{case.name}: {name}"
