"""Goal: a prompt's rows attend to what the formula says, and no chunk boundary shows in their bits.

Method: caches of NaNs in shuffled pages, filled up to each lane's length, on the host's machine;
the oracle is ops.reference in float64 on what the cache holds.  Prompts in one chunk and in many,
alone and beside others, with windows and caps.  Then faults are planted.
"""

from itertools import pairwise

import numpy as np
import pytest
from kv_pages import empty_cache, read_cache, write_cache

from phaseloop.kernels.attention_prefill import ROWS, Chunks, attend, shared_bytes
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.kv import PAGE
from phaseloop.ops.interface import Attention
from phaseloop.ops.reference import attend_row

RELATIVE = 1e-3  # weights and results are halves


class Prompts:
    """Whole sequences; any stretches of their rows can be run."""

    def __init__(self, width, heads, kv_heads, lengths, *, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths, count = lengths, len(lengths)
        each = max(lengths) // PAGE + 1
        self.table = rng.permutation(count * each).astype(np.int32).reshape(count, each)
        self.keys, self.values = [], []
        self.kv_heads = kv_heads
        self.q = []
        for length in lengths:
            keys, values = (rng.standard_normal((length, kv_heads, width)) for _ in range(2))
            self.keys.append(keys.astype(np.float16))
            self.values.append(values.astype(np.float16))
            self.q.append((2 * rng.standard_normal((length, heads, width))).astype(np.float16))

    def cache(self, stops):
        """What is cached when lanes have come so far: beyond it there are NaNs."""
        cache = empty_cache("F16", self.table.size, self.kv_heads, self.q[0].shape[-1])
        for lane, stop in stops.items():
            write_cache(cache, self.table[lane], self.keys[lane][:stop], self.values[lane][:stop])
        return cache

    def run(self, host, spec, *stretches, **how):
        """y of each stretch (lane, start, stop), all in one launch."""
        cache = self.cache({lane: stop for lane, _, stop in stretches})
        rows = [self.q[lane][start:stop] for lane, start, stop in stretches]
        counts = np.array([len(each) for each in rows], np.int32)
        q = np.concatenate(rows)
        memory = Memory()
        y = memory.empty(q.shape, np.float16)
        chunks = Chunks(
            (np.cumsum(counts) - counts).astype(np.int32),
            np.array([start for _, start, _ in stretches], np.int32),
            counts,
            self.table[[lane for lane, _, _ in stretches]].copy(),
        )
        plan = attend(
            q, chunks, cache, y,
            count_max=int(counts.max()), scale=spec.scale, window=spec.window, cap=spec.cap,
        )  # fmt: skip
        host.run(plan, memory, **how)
        return np.split(y, np.cumsum(counts)[:-1])

    def error(self, y, spec, lane, start, stop):
        keys, values = read_cache(self.cache({lane: stop}), self.table[lane], stop)
        exact = []
        for position in range(start, stop):
            first = 0 if spec.window is None else max(0, position + 1 - spec.window)
            q, seen = self.q[lane][position].astype(np.float64), slice(first, position + 1)
            exact.append(attend_row(q, keys[seen], values[seen], spec).reshape(q.shape))
        if not np.isfinite(y).all():
            return np.inf
        return np.linalg.norm(y - np.array(exact)) / np.linalg.norm(exact)


def spec_of(width, **how):
    return Attention(scale=width**-0.5, **how)


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_rows_attend_to_what_was_cached(host, width):
    for heads, kv_heads, length, start in ((4, 2, 33, 0), (3, 1, 290, 251)):
        prompts = Prompts(width, heads, kv_heads, (length,))
        for spec in (spec_of(width), spec_of(width, window=40, cap=3.0)):
            (y,) = prompts.run(host, spec, (0, start, length))
            assert prompts.error(y, spec, 0, start, length) <= RELATIVE


@pytest.mark.parametrize("window", [None, 70])
def test_no_chunk_and_no_neighbour_shows(host, window):
    """One chunk, many, one row at a time at the end, beside another prompt: the same bits."""
    prompts = Prompts(64, 6, 2, (300, 45))
    spec = spec_of(64, window=window)
    (whole,) = prompts.run(host, spec, (0, 0, 300))
    assert prompts.error(whole, spec, 0, 0, 300) <= RELATIVE
    for cuts in ((0, 1, 64, 256, 299, 300), (0, 127, 300)):
        for start, stop in pairwise(cuts):
            (part,) = prompts.run(host, spec, (0, start, stop))
            assert np.array_equal(part, whole[start:stop])
    other, beside = prompts.run(host, spec, (1, 5, 45), (0, 40, 300))
    assert np.array_equal(beside, whole[40:])
    assert prompts.error(other, spec, 1, 5, 45) <= RELATIVE


@pytest.mark.parametrize("width", [64, 256])
def test_orders_of_threads_do_not_show(host, width):
    prompts = Prompts(width, 2, 1, (100,))
    spec = spec_of(width)
    (first,) = prompts.run(host, spec, (0, 20, 100))
    for order in ORDERS[1:]:
        (again,) = prompts.run(host, spec, (0, 20, 100), order=order, seed=4)
        assert np.array_equal(first, again)


def test_operands_have_no_bank_conflicts(host):
    """Multiplications read without any; weights are stored with some, four to a multiplication."""
    prompts = Prompts(128, 2, 1, (64,))
    cache, spec = prompts.cache({0: 64}), spec_of(128)
    zero = np.zeros(1, np.int32)
    chunks = Chunks(zero, zero, np.array([64], np.int32), prompts.table)
    q = prompts.q[0]
    plan = attend(q, chunks, cache, np.empty_like(q), count_max=64, scale=spec.scale)
    banks = host.run(plan, counts_banks=True).banks
    for each in sorted(banks, key=lambda each: -each.accesses)[:2]:
        assert each.wavefronts == each.wavefronts_ideal, each
    assert sum(each.wavefronts for each in banks) <= 1.5 * sum(
        each.wavefronts_ideal for each in banks
    )


FAULTS = {
    "keys overwritten while they are read": (
        "sync_block();  // all maxima are there, and", "// all maxima are there, and"),
    "values read before they are there": ("sync_block();  // weights and values", "// weights and"),
    "keys staged too early": ("sync_block();  // nobody reads weights", "// nobody reads weights"),
    "one bit of a map": ("(lane & 29) + (i & 2)", "(lane & 29) + (i & 4) / 2"),
    "columns swapped": ("(i & 4) + (lane & 2) + (i & 1)", "(i & 4) + (lane & 2) + (~i & 1)"),
    "no rescaling": ("c[n / 8][n % 8] *= factor[n / 2 % 2]", "c[n / 8][n % 8] *= 1.0f"),
    "the last tile left out": ("tile <= tile_last;", "tile < max(tile_last, 1);"),
    "a window's first tile one off": (
        "block.scoring.first(block.position(0)) / KEYS",
        "(block.scoring.first(block.position(0)) + KEYS / 2) / KEYS"),
    "the sum of one quarter": ("each < QUARTERS; ++each) sum", "each < 1; ++each) sum"),
    "what nobody wrote": ("first_halves(piece, live - i / D * OCTET)", "piece"),
    "rows of a neighbour": ("octet * ROWS + row + lane AT", "octet * ROWS + row + (lane ^ 1) AT"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    host = plant("attention_prefill.cu", *FAULTS[fault])
    prompts = Prompts(64, 2, 1, (200,))
    spec = spec_of(64, window=150)
    try:
        (y,) = prompts.run(host, spec, (0, 130, 200))
    except HostFault:
        return
    assert not prompts.error(y, spec, 0, 130, 200) <= 2 * RELATIVE


def test_plans():
    prompts = Prompts(64, 4, 2, (3,))
    zero = np.zeros(1, np.int32)
    chunks = Chunks(zero, zero, zero + 3, prompts.table)
    q = prompts.q[0]

    def plan(cache, q=q):
        return attend(q, chunks, cache, q.copy(), count_max=33, scale=1.0)

    assert plan(prompts.cache({})).grid == (2, 2, 1)  # 66 rows of 64
    with pytest.raises(KernelError, match="a cache of Q8_0; unpack it to F16 first"):
        plan(empty_cache("Q8_0", 1, 2, 64))
    with pytest.raises(KernelError, match="4 heads do not share 3 KV heads"):
        plan(empty_cache("F16", 1, 3, 64))
    assert ROWS == 64
    # Two blocks share a multiprocessor's 96 KiB up to heads of 128.
    assert [shared_bytes(width) // 1024 for width in (64, 128, 256)] == [24, 40, 52]
