"""Goal: the machine that runs kernels on the CPU does as CUDA does, and reports every misdeed.

Method: toy kernels, right and wrong.  What is expected of the right ones follows from CUDA's rules
and from arithmetic; every wrong one must be refused with its line, block and thread.
"""

import subprocess

import numpy as np
import pytest

from phaseloop.kernels.contract import KernelError, Launch, f32, i32, reads, updates, writes
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.host_build import compiler, host_flags
from phaseloop.kernels.sources import source_directory

THREADS = 64


def launch(entry="toy", *arguments, grid=(1, 1, 1), block=(THREADS, 1, 1), shared_bytes=0):
    return Launch("toy", entry, grid, block, arguments, shared_bytes)


def fault_of(host, plan, memory=None, **how):
    with pytest.raises(HostFault) as caught:
        host.run(plan, memory, **how)
    return str(caught.value)


# --- what is right --------------------------------------------------------------------------------


def test_indices_cover_grid_and_block(write_kernel):
    host = write_kernel("""
KERNEL(64, 1) toy(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    store(out + block * 64 + thread, block * 1000 + thread);
}
""")
    for order in ORDERS:
        memory = Memory()
        out = memory.empty((2 * 3 * 2, 64), np.int32)
        host.run(
            launch("toy", writes("out", out), grid=(2, 3, 2), block=(16, 2, 2)), memory, order=order
        )
        assert np.array_equal(out, np.arange(12)[:, None] * 1000 + np.arange(64))


def test_shuffles_votes_and_sums_are_those_of_cuda(write_kernel):
    host = write_kernel("""
KERNEL(64, 1) toy(const int* x, int* out) {
    const int i = threadIdx.x, v = load(x + i);
    store(out + i, shuffle(v, 3));
    store(out + 64 + i, shuffle_xor(v, 5));
    store(out + 128 + i, shuffle_up(v, 2));
    store(out + 192 + i, shuffle_down(v, 2));
    store(out + 256 + i, int(ballot(i % 32 == 4 || i == 33)));
    store(out + 320 + i, int(block_sum<2>(float(v))));
    store(out + 384 + i, int(warp_max(float(v))));
}
""")
    x = np.random.default_rng(1).integers(0, 1000, 64, dtype=np.int32)
    out = np.zeros((7, 64), np.int32)
    host.run(launch("toy", reads("x", x), updates("out", out)))
    lanes, warps = np.arange(64) % 32, np.arange(64) // 32 * 32
    assert np.array_equal(out[0], x[warps + 3])
    assert np.array_equal(out[1], x[warps + (lanes ^ 5)])
    assert np.array_equal(out[2], x[warps + np.where(lanes < 2, lanes, lanes - 2)])
    assert np.array_equal(out[3], x[warps + np.where(lanes > 29, lanes, lanes + 2)])
    assert np.array_equal(out[4], np.where(warps == 0, 1 << 4, 1 << 4 | 1 << 1))
    assert np.array_equal(out[5], np.full(64, x.sum()))
    assert np.array_equal(out[6], np.repeat(x.reshape(2, 32).max(axis=1), 32))


@pytest.mark.parametrize("b_is_row_major", [False, True])
def test_mma_multiplies_by_the_documented_fragments(write_kernel, b_is_row_major):
    """Small integers, so that sums are exact: the product must be NumPy's."""
    rng = np.random.default_rng(2)
    a = rng.integers(-8, 9, (4, 8, 4)).astype(np.float16)  # [quad-pair][row][k]
    b = rng.integers(-8, 9, (4, 4, 8)).astype(np.float16)  # [quad-pair][k][column]
    held = np.zeros((32, 8), np.float16)  # per lane: a0..a3, b0..b3
    where = np.zeros((32, 8), np.int32)  # of c_i in [quad-pair][row][column]
    for lane in range(32):
        q, r, upper = lane >> 2 & 3, (lane & 3) + (4 if lane >= 16 else 0), lane >= 16
        held[lane, :4] = a[q, r]
        held[lane, 4:] = b[q, lane & 3, 4 * upper : 4 * upper + 4] if b_is_row_major else b[q, :, r]
        for i in range(8):
            row = (lane & 1) + (i & 2) + 4 * upper
            where[lane, i] = q * 64 + row * 8 + (i & 4) + (lane & 2) + (i & 1)
    host = write_kernel(f"""
KERNEL(32, 1) toy(const uint4* held, const int* where, float* out) {{
    const uint4 h = load(held + threadIdx.x);
    float c[8];
    for (int i = 0; i < 8; ++i) c[i] = float(i);
    {"mma_row_row" if b_is_row_major else "mma_row_col"}(c, h.x, h.y, h.z, h.w);
    for (int i = 0; i < 8; ++i) store(out + load(where + threadIdx.x * 8 + i), c[i] - float(i));
}}
""")
    out = np.zeros((4, 8, 8), np.float32)
    arguments = (reads("held", held), reads("where", where), updates("out", out))
    host.run(launch("toy", *arguments, block=(32, 1, 1)))
    assert np.array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


def test_half_arithmetic_rounds_once(write_kernel):
    host = write_kernel("""
KERNEL(64, 1) toy(const unsigned* x, const unsigned* y, const unsigned* z, unsigned* out) {
    const int i = blockIdx.x * 64 + threadIdx.x, n = gridDim.x * 64;
    const half2 a = half2_of(load(x + i)), b = half2_of(load(y + i)), c = half2_of(load(z + i));
    store(out + i, bits_of(add2(a, b)));
    store(out + n + i, bits_of(sub2(a, b)));
    store(out + 2 * n + i, bits_of(mul2(a, b)));
    store(out + 3 * n + i, bits_of(fma2(a, b, c)));
}
""")
    rng = np.random.default_rng(3)
    x, y, z = (rng.integers(-(1 << 15), 1 << 15, 4096).astype(np.int16).view(np.float16)
               for _ in range(3))  # fmt: skip
    for array in (x, y, z):
        array[~np.isfinite(array)] = 1.5
    out = np.zeros((4, 4096), np.float16)
    arguments = (reads("x", x), reads("y", y), reads("z", z), updates("out", out))
    host.run(launch("toy", *arguments, grid=(32, 1, 1)))
    with np.errstate(over="ignore"):
        a, b, c = (array.astype(np.longdouble) for array in (x, y, z))
        expected = [a + b, a - b, a * b, a * b + c]
        for got, exact in zip(out, expected, strict=True):
            assert np.array_equal(got, exact.astype(np.float16))


def test_sync_warp_orders_shared_memory_and_shuffles_do_not(write_kernel):
    text = """
KERNEL(64, 1) toy(int* out) {
    SHARED(int, s, 64);
    store_shared(s + threadIdx.x, int(threadIdx.x));
    ORDERED
    store(out + threadIdx.x, load_shared(s + (threadIdx.x ^ 1)));
}
"""
    out = np.zeros(64, np.int32)
    write_kernel(text.replace("ORDERED", "sync_warp();")).run(launch("toy", updates("out", out)))
    assert np.array_equal(out, np.arange(64) ^ 1)
    host = write_kernel(text.replace("ORDERED", "shuffle(1, 0);"))
    assert "race: a read" in fault_of(host, launch("toy", updates("out", out)))


def test_bank_conflicts_are_counted_by_line(write_kernel):
    """32 lanes at a stride of 1, 2 and 32 words take 1, 2 and 32 wavefronts; 16 bytes take 4."""
    host = write_kernel("""
KERNEL(32, 1) toy(int* out) {
    SHARED(int, s, 1024);
    for (int i = 0; i < 32; ++i) {
        store_shared(s + i * 32 + threadIdx.x, 1);
    }
    sync_block();
    int v = load_shared(s + threadIdx.x * 2);
    v += load_shared(s + threadIdx.x * 32);
    v += load_shared(reinterpret_cast<const int4*>(s) + threadIdx.x).x;
    v += load_shared(s + 7);
    store(out + threadIdx.x, v);
}
""")
    out = np.zeros(32, np.int32)
    plan = launch("toy", updates("out", out), block=(32, 1, 1))
    counted = host.run(plan, counts_banks=True).banks
    told = {banks.line: (banks.accesses, banks.wavefronts, banks.wavefronts_ideal)
            for banks in counted}  # fmt: skip
    assert told == {
        "toy.cu:6": (32, 32, 32),
        "toy.cu:9": (1, 2, 1),
        "toy.cu:10": (1, 32, 1),
        "toy.cu:11": (1, 4, 4),
        "toy.cu:12": (1, 1, 1),
    }
    assert host.run(plan).banks == ()


def test_dynamic_shared_memory_and_parameters_arrive(write_kernel):
    host = write_kernel("""
KERNEL(64, 1) toy(float* out, float scale, int offset, const float* missing) {
    SHARED_DYNAMIC(float, s);
    store_shared(s + threadIdx.x, scale * float(int(threadIdx.x) + offset));
    sync_block();
    store(out + threadIdx.x, missing ? 0.0f : load_shared(s + 63 - threadIdx.x));
}
""")
    out = np.zeros(64, np.float32)
    arguments = (updates("out", out), f32("scale", 0.5), i32("offset", 3), reads("missing", None))
    host.run(launch("toy", *arguments, shared_bytes=256))
    assert np.array_equal(out, 0.5 * (np.arange(64)[::-1] + 3))
    assert "out of bounds" in fault_of(host, launch("toy", *arguments, shared_bytes=128))
    assert "gave no shared memory" in fault_of(host, launch("toy", *arguments))


# --- what is wrong --------------------------------------------------------------------------------

FAULTS = {
    "out of bounds: a read of 4 bytes at byte 256 of `x`, which has 256": "load(x + i + 1);",
    "out of bounds: a write of 4 bytes": "store(y + i + 1, 0);",
    "a write to `x`, byte 0: it is an input": "store(const_cast<int*>(x) + i, 1);",
    "a read of `y`, byte 0, that nothing wrote": "load(y + i);",
    "a read of 8 bytes at an address that is 4 over a multiple of 8": (
        "if (i < 31) load(reinterpret_cast<const int2*>(x + 2 * i + 1));"
    ),
    "out of bounds: a read of 4 bytes at offset 256 of 256 bytes of shared memory": (
        "store_shared(s + i, 1); load_shared(s + 64);"
    ),
    "a read of shared memory, offset 0, that nothing wrote": "load_shared(s);",
    "race: a read of shared memory, offset 0, that thread 0 wrote": (
        "if (i == 0) store_shared(s, 1); ballot(true); load_shared(s);"
    ),
    "race: a write to shared memory, offset 0, that thread 0 wrote": "store_shared(s, i);",
    "race: a write to shared memory, offset 4, that several threads read": (
        "if (i == 0) store_shared(s + 1, 1); sync_block(); load_shared(s + 1); ballot(true);"
        "if (i == 5) store_shared(s + 1, 2);"
    ),
    "waits in `ballot`, but thread 7 has left the kernel": "if (i == 7) return; ballot(true);",
    "waits in `sync_block`, but thread 40 has left": "if (i == 40) return; sync_block();",
    "waits in `sync_block`, thread 32 in `sync_block` of line": (
        "if (i < 32) {\nsync_block();\n} else {\nsync_block();\n}"
    ),
    "meets `shuffle`, while lane 0 waits in `ballot` of line": (
        "if (i & 1) {\nshuffle(i, 0);\n} else {\nballot(true);\n}"
    ),
    "waits in `ballot`, thread 1 in `sync_block`": "if (i & 1) sync_block(); else ballot(true);",
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_misdeed_is_reported_with_its_place(write_kernel, words):
    host = write_kernel(f"""
KERNEL(64, 1) toy(const int* x, int* y) {{
    const int i = threadIdx.x;
    SHARED(int, s, 64);
    if (blockIdx.x == 1) {{
        {FAULTS[words]}
    }}
}}
""")
    memory = Memory()
    y = memory.empty((64,), np.int32)
    plan = launch("toy", reads("x", np.zeros(64, np.int32)), writes("y", y), grid=(2, 1, 1))
    fault = fault_of(host, plan, memory)
    assert words in fault
    assert "toy, block (1, 0, 0), thread (" in fault
    assert "toy.cu:" in fault
    for seed in range(3):
        assert fault_of(host, plan, memory, order="shuffled", seed=seed)
    assert fault_of(host, plan, memory, order="reverse")


def test_shuffled_orders_repeat_and_differ(write_kernel):
    """A racy kernel, its race hidden in global memory: the last writer wins."""
    host = write_kernel("""
KERNEL(64, 1) toy(int* out) { store(out, int(threadIdx.x)); }
""")
    winners = []
    for seed in [*range(8), *range(8)]:
        out = np.zeros(1, np.int32)
        host.run(launch("toy", updates("out", out)), order="shuffled", seed=seed)
        winners.append(int(out[0]))
    assert winners[:8] == winners[8:]
    assert len(set(winners)) > 2


def test_fibres_by_ucontext_do_the_same(tmp_path):
    """Where there is no switch of our own: the machine compiled with the system's contexts."""
    for path in source_directory().rglob("*"):
        if path.suffix in (".cuh", ".cpp", ".hpp"):
            copy = tmp_path / path.relative_to(source_directory())
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(path.read_text())
    (tmp_path / "main.cpp").write_text("""
#include "host/machine.cpp"
#include "host/memory.cpp"
#include "common.cuh"
#include <cstdio>
KERNEL(64, 1) toy(float* y) { store(y + threadIdx.x, block_sum<2>(float(threadIdx.x))); }
int main() {
    float y[64];
    const simt::Region region{"y", reinterpret_cast<std::uint8_t*>(y), sizeof y, nullptr, 1};
    void* pointer = y;
    void* arguments[] = {&pointer};
    simt::Request request{"toy", {3, 1, 1}, {64, 1, 1}, 0, 1, &region, arguments,
                          simt::SHUFFLED, 7, 2, 0};
    static simt::Report report;
    if (simt::launch(&request, &report, toy)) return std::puts(report.fault), 1;
    for (float sum : y) if (sum != 2016.0f) return 2;
    return 0;
}
""")
    program = tmp_path / "main"
    flags = [*host_flags(), "-DSIMT_UCONTEXT", f"-I{tmp_path}"]
    source = str(tmp_path / "main.cpp")
    subprocess.run([compiler(), *flags, source, "-o", str(program)], check=True)
    assert subprocess.run([str(program)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"block": (48, 1, 1)}, "whole warps"),
        ({"block": (1056, 1, 1)}, "32 to 1024"),
        ({"shared_bytes": 98305}, "96 KiB"),
        ({"grid": (1, 65536, 1)}, "below 65536"),
    ],
)
def test_a_launch_that_no_device_takes_is_refused(write_kernel, how, words):
    host = write_kernel("KERNEL(64, 1) toy(int* out) { store(out, 1); }")
    assert words in fault_of(host, launch("toy", updates("out", np.zeros(1, np.int32)), **how))


def test_parts_of_an_arena_are_marked_apart(write_kernel):
    """An engine's scratch is one allocation: its parts are operands, their bytes are known."""
    host = write_kernel("""
KERNEL(64, 1) toy(const int* x, int* y) {
    store(y + threadIdx.x, load(x + threadIdx.x) + 1);
}
""")
    memory = Memory()
    memory.empty((7,), np.int32)
    arena = memory.empty((256,), np.int32)
    first, second, third = arena[:64], arena[64:128], arena[128:192]
    host.run(launch("toy", reads("x", np.arange(64, dtype=np.int32)), writes("y", first)), memory)
    host.run(launch("toy", reads("x", first), writes("y", third)), memory)
    assert np.array_equal(third, np.arange(64) + 2)
    assert memory.marks(arena).sum() == 512
    fault = fault_of(host, launch("toy", reads("x", second), writes("y", third)), memory)
    assert "a read of `x`, byte 0, that nothing wrote" in fault
    short = launch("toy", reads("x", first), writes("y", arena[192:200]))
    assert "byte 32 of `y`, which has 32" in fault_of(host, short, memory)


def test_operands_may_overlap(write_kernel):
    """One name reads what the other updates; the input beside it stays one."""
    host = write_kernel("""
KERNEL(64, 1) toy(const int* x, int* y) {
    store(y + threadIdx.x, load(x + threadIdx.x) + load(y + threadIdx.x));
}
""")
    for order in ((reads, updates), (updates, reads)):
        y = np.arange(64, dtype=np.int32)
        plan = launch("toy", order[0]("x", y), order[1]("y", y))
        host.run(plan)
        assert np.array_equal(y, 2 * np.arange(64))


def test_an_array_that_is_read_only_is_not_written(write_kernel):
    host = write_kernel("KERNEL(64, 1) toy(int* out) { store(out, 1); }")
    out = np.zeros(1, np.int32)
    out.flags.writeable = False
    with pytest.raises(KernelError, match="out: the kernel writes it"):
        host.run(launch("toy", updates("out", out)))


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(write_kernel):
    host = write_kernel("KERNEL(64, 1) toy(int* out) { store(out, nonsense); }")
    with pytest.raises(KernelError, match="nonsense"):
        host.run(launch("toy", updates("out", np.zeros(1, np.int32))))
