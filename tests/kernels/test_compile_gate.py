"""Goal: every kernel compiles for Volta within its budget, and none is without one.

Method: NVRTC 12.9 compiles all entries of cuda/budgets.toml to sm_70, which needs neither a driver
nor a GPU; registers, spills and shared memory are what its log says, loads what its PTX holds.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phaseloop.kernels import nvrtc, skinny
from phaseloop.kernels.budgets import Budget, expand_row, read_budgets, resident_blocks
from phaseloop.kernels.contract import SHARED_BYTES_MAX, KernelError
from phaseloop.kernels.loader import check_architecture, cubin
from phaseloop.kernels.repack import LAYOUTS, pitch
from phaseloop.kernels.sources import source_directory

ROOT = Path(__file__).parents[2]
BUDGETS = read_budgets()
SOURCES = sorted({budget.source for budget in BUDGETS})


@pytest.mark.parametrize("source", SOURCES)
def test_every_entry_keeps_its_budget(source):
    budgets = [budget for budget in BUDGETS if budget.source == source]
    compiled = cubin(source, [budget.entry for budget in budgets])
    for budget in budgets:
        used = compiled.resources[budget.entry]
        assert used.registers <= budget.registers, budget.entry
        assert used.spill_bytes <= budget.spill_bytes, budget.entry
        assert used.shared_bytes + budget.dynamic_shared_bytes <= SHARED_BYTES_MAX, budget.entry
        if budget.is_hot:
            assert used.spill_bytes == used.stack_bytes == 0, budget.entry
            assert compiled.instructions[budget.entry].narrow_loads == 0, budget.entry


def test_the_decode_kernels_of_common_types_run_four_to_a_multiprocessor():
    """At 64 registers, without spills: what hides memory's latency when a matrix is small."""
    kinds = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
    compiled = cubin("skinny", [b.entry for b in BUDGETS if b.source == "skinny"])
    for kind in kinds:
        used = compiled.resources[f"skinny<{kind}, 1>"]
        assert used.registers <= 64
        assert used.spill_bytes == 0
        assert resident_blocks(256, used.registers, used.shared_bytes) == 4
        # Eight halves of x and of w each are two products; a unit is 4 or 8 such octets.
        assert compiled.instructions[f"skinny<{kind}, 1>"].mma in (8, 16)


def test_every_source_and_every_planned_entry_has_a_budget():
    kernels = {path.stem for path in source_directory().glob("*.cu")}
    assert kernels == set(SOURCES)
    budgeted = {budget.entry for budget in BUDGETS}
    for kind in skinny.KINDS:
        assert set(skinny.entries(kind)) <= budgeted
    entries = [(budget.source, budget.entry) for budget in BUDGETS]
    assert len(set(entries)) == len(entries)
    assert {f"gather<{kind}>" for kind in LAYOUTS} <= budgeted


def test_every_template_and_kernel_of_a_source_is_budgeted():
    """A kernel that nobody compiles is a kernel that nobody checks."""
    for path in source_directory().glob("*.cu"):
        named = re.findall(r"^KERNEL\(.*\)\s*(\w+)\(", path.read_text(), re.MULTILINE)
        assert named, path.name
        budgeted = {b.entry.split("<")[0] for b in BUDGETS if b.source == path.stem}
        assert set(named) == budgeted, path.name


def test_repacks_shared_memory_is_what_launches_ask_for():
    (largest,) = {b.dynamic_shared_bytes for b in BUDGETS if b.source == "repack"}
    assert largest == max(32 * pitch(layout) for layout in LAYOUTS.values())


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "blocks"),
    [
        (256, 64, 12288, 4),  # by registers: 8 warps of 2048
        (256, 65, 0, 3),  # 65 are given as 72
        (1024, 64, 0, 1),
        (512, 128, 49152, 1),
        (128, 32, 0, 16),
        (32, 16, 0, 32),  # by blocks
        (256, 32, 49152, 2),  # by shared memory
    ],
)
def test_resident_blocks_are_those_of_the_occupancy_calculator(
    threads, registers, shared_bytes, blocks
):
    assert resident_blocks(threads, registers, shared_bytes) == blocks


def test_a_spilling_kernel_is_seen(write_kernel, tmp_path):
    """The log is read right: 300 live floats do not fit 255 registers."""
    write_kernel("""
KERNEL(256, 1) toy(const float* x, float* y) {
    float v[300];
    for (int i = 0; i < 300; ++i) v[i] = load(x + i * 256 + threadIdx.x);
    sync_block();
    for (int i = 0; i < 300; ++i) store(y + i * 256 + threadIdx.x, v[i] * v[(i * 7 + 1) % 300]);
}
KERNEL(32, 1) narrow(const u8* x, const half* h, float* y) {
    store(y + threadIdx.x, float(load(x + threadIdx.x)) + to_f32(load_constant(h + threadIdx.x)));
}
""")
    compiled = cubin("toy", ["toy", "narrow"], directory=tmp_path)
    assert compiled.resources["toy"].spill_bytes > 0
    assert compiled.resources["narrow"].spill_bytes == 0
    assert compiled.instructions["toy"].narrow_loads == 0
    assert compiled.instructions["narrow"].narrow_loads == 2
    assert compiled.cubin.startswith(b"\x7fELF")


def test_what_cannot_be_compiled_is_told(write_kernel, tmp_path):
    write_kernel("KERNEL(32, 1) toy(float* y) { store(y, nonsense); }")
    with pytest.raises(KernelError, match=r"NVRTC refuses toy[^$]*nonsense"):
        cubin("toy", ["toy"], directory=tmp_path)
    write_kernel("KERNEL(32, 1) toy(float* y) { store(y, 1.0f); }")
    with pytest.raises(KernelError, match="absent"):
        cubin("toy", ["absent"], directory=tmp_path)


def test_a_compiler_that_does_not_know_volta_is_told(monkeypatch):
    monkeypatch.setattr(nvrtc, "architectures", lambda: [75, 80, 90, 100, 120])
    with pytest.raises(KernelError, match=r"NVRTC 13.0 compiles for .* 75 to 120, not for 70: pip"):
        check_architecture("sm_70", "13.0")


def test_an_unknown_word_in_the_budgets_is_refused(tmp_path):
    with pytest.raises(KernelError, match="registerz"):
        expand_row(tmp_path, "toy", {"entry": "toy", "threads": 32, "registerz": 1})
    row = {"entry": "toy<{n}>", "threads": 32, "registers": 8, "with": {"n": [1, 2]}}
    assert expand_row(tmp_path, "toy", row) == [
        Budget("toy", "toy<1>", 32, 8),
        Budget("toy", "toy<2>", 32, 8),
    ]


def test_the_drawing_of_fragments_is_that_of_the_shim():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "fragments_drawing.py"), "--check"], check=False
    )
    assert done.returncode == 0, "docs/images/fragments.svg is old: run `make kernels`"


def test_the_page_shows_what_compiles():
    """docs/kernels.md holds the tables that `make kernels` would write."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kernels_page.py"), "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": ""},  # without a disassembler, whose counts are not checked
        check=False,
    )
    assert done.returncode == 0, f"docs/kernels.md is old: run `make kernels`\n{done.stderr}"
