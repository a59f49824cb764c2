"""Goal: generated rows attend to what the formula says, and their bits know of nothing else.

Method: caches of NaNs in shuffled pages, filled up to each lane's length, on the host's machine;
the oracle is ops.reference in float64 on what the cache holds.  Lanes of one row and of several,
from one position to several pages, with windows and caps.  Then faults are planted.
"""

import numpy as np
import pytest
from kv_pages import empty_cache, read_cache, write_cache

from phaseloop.kernels.attention_decode import Lanes, Scratch, attend, entries, slots_for
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.kv import PAGE
from phaseloop.ops.interface import Attention
from phaseloop.ops.reference import attend_row

RELATIVE = 1e-3  # weights and results are halves


class Case:
    """Lanes with so many rows each, the last at position length - 1, over one cache."""

    def __init__(self, kind, width, heads, kv_heads, lengths, rows, *, seed=0):
        rng = np.random.default_rng(seed)
        self.rows, self.lengths = np.array(rows, np.int32), np.array(lengths, np.int32)
        count, rows_max = len(lengths), max(rows)
        each = max(lengths) // PAGE + 2
        self.table = rng.permutation(count * each).astype(np.int32).reshape(count, each)
        self.cache = empty_cache(kind, count * each, kv_heads, width)
        self.q = np.full((count, rows_max, heads, width), np.nan, np.float16)
        for lane, length in enumerate(lengths):
            keys, values = (rng.standard_normal((length, kv_heads, width)) for _ in range(2))
            keys, values = keys.astype(np.float16), values.astype(np.float16)
            write_cache(self.cache, self.table[lane], keys, values)
            self.q[lane, : rows[lane]] = 2 * rng.standard_normal((rows[lane], heads, width))

    def run(self, host, spec, lanes=slice(None), *, width=None, slots=None, **how):
        """-> y of the lanes, which have room for `width` rows."""
        q = self.q[lanes]
        rows = q.shape[1] if width is None else width
        q = np.concatenate([q, np.full_like(q, np.nan)], axis=1)[:, :rows].copy()
        memory = Memory()
        slots = slots or slots_for(int(self.lengths[lanes].max()), rows, spec.window)
        shape = (*q.shape[:3], slots)
        scratch = Scratch(
            memory.empty((*shape, q.shape[3]), np.float32), memory.empty((*shape, 2), np.float32)
        )
        y = memory.empty(q.shape, np.float16)
        starts = self.lengths[lanes] - self.rows[lanes]
        where = Lanes(starts, self.rows[lanes].copy(), self.table[lanes].copy())
        for plan in attend(
            q, where, self.cache, scratch, y, scale=spec.scale, window=spec.window, cap=spec.cap
        ):
            host.run(plan, memory, **how)
        return y

    def live(self, y):
        return np.concatenate([y[lane, :count] for lane, count in enumerate(self.rows)])

    def exact(self, spec):
        found = []
        for lane, length in enumerate(self.lengths):
            keys, values = read_cache(self.cache, self.table[lane], length)
            for t in range(self.rows[lane]):
                position = length - self.rows[lane] + t
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = slice(first, position + 1)
                q = self.q[lane, t].astype(np.float64)
                found.append(attend_row(q, keys[seen], values[seen], spec).reshape(q.shape))
        return np.array(found)

    def error(self, y, spec):
        exact = self.exact(spec)
        if not np.isfinite(self.live(y)).all():
            return np.inf
        return np.linalg.norm(self.live(y) - exact) / np.linalg.norm(exact)


def spec_of(width, **how):
    return Attention(scale=width**-0.5, **how)


def load(host, kind, width):
    host.load("attention_decode", entries(kind, width))


SHAPES = (  # heads, KV heads, lengths, rows
    (2, 1, (1, 300), (1, 1)),
    (6, 1, (257, 8, 520), (4, 2, 1)),
    (3, 3, (256, 511), (5, 5)),
)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_rows_attend_to_what_was_cached(host, kind, width):
    load(host, kind, width)
    for heads, kv_heads, lengths, rows in SHAPES:
        case = Case(kind, width, heads, kv_heads, lengths, rows)
        for spec in (spec_of(width), spec_of(width, window=200, cap=5.0)):
            y = case.run(host, spec)
            assert case.error(y, spec) <= RELATIVE
            if width == 64:
                for order in ORDERS[1:]:
                    again = case.run(host, spec, order=order, seed=3)
                    assert np.array_equal(case.live(again), case.live(y))


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_rows_bits_are_its_own(host, kind):
    """Alone, in a batch, with room for other rows and slots: bit for bit the same."""
    load(host, kind, 64)
    case = Case(kind, 64, 6, 2, (300, 7, 520), (3, 1, 2))
    for spec in (spec_of(64), spec_of(64, window=260)):
        whole = case.live(case.run(host, spec))
        first = 0
        for lane, count in enumerate(case.rows):
            one = slice(lane, lane + 1)
            for how in ({}, {"width": 8}, {"slots": 4}):
                alone = case.run(host, spec, one, **how)
                assert np.array_equal(alone[0, :count], whole[first : first + count])
            first += count


@pytest.mark.parametrize("window", [None, 200])
def test_drafted_rows_are_those_that_step_by_step_would_come(host, window):
    """Verifying five rows at once, and each by itself after those before it: the same bits."""
    load(host, "F16", 128)
    case = Case("F16", 128, 2, 1, (258,), (5,))
    spec = spec_of(128, window=window)
    together = case.run(host, spec)[0]
    for t in range(5):
        step = Case("F16", 128, 2, 1, (258,), (5,))
        step.q = case.q[:, t : t + 1].copy()
        step.rows, step.lengths = np.array([1], np.int32), np.array([254 + t], np.int32)
        assert np.array_equal(step.run(host, spec)[0, 0], together[t])


def test_where_pages_lie_does_not_matter(host):
    load(host, "F16", 64)
    spec = spec_of(64)
    found = []
    for seed in (0, 1):
        case = Case("F16", 64, 2, 1, (520,), (1,))
        other = Case("F16", 64, 2, 1, (520,), (1,))
        other.table[0] = np.random.default_rng(seed).permutation(4)
        for name in ("keys", "values"):
            getattr(other.cache, name)[other.table[0]] = getattr(case.cache, name)[case.table[0]]
        other.q = case.q
        found.append(other.run(host, spec))
    assert np.array_equal(found[0], found[1])


def test_too_few_slots_give_nan(host):
    load(host, "F16", 64)
    case = Case("F16", 64, 2, 1, (520, 3), (1, 1))
    y = case.run(host, spec_of(64), slots=2)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_nobodys_lane_is_left_alone(host):
    load(host, "F16", 64)
    case = Case("F16", 64, 2, 1, (40, 3), (1, 1))
    case.rows[1] = 0
    y = case.run(host, spec_of(64))
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()  # as it was


FAULTS = {
    "no barrier before the sums": (
        "sync_block();  // all warps' sums and weights", "// all warps' sums and weights"),
    "no barrier between parts": ("sync_block(AT_ONLY);  // the parts'", "// the parts'"),
    "one bit of a map": ("attention.cuh", "4 * (i & 4)", "8 * (i & 2)"),
    "a partition one off": (
        "/ PARTITION + blockIdx.y;", "/ PARTITION + blockIdx.y + (blockIdx.y > 1);"),
    "a key too many": (
        "attention.cuh", "key_position <= row_position", "key_position <= row_position + 1"),
    "a window one off": ("attention.cuh", "- key_position < window", "- key_position <= window"),
    "what nobody wrote": ("first_halves(all, block.live - octet * OCTET)", "all"),
    "the cap left out": ("attention.cuh", "cap > 0.0f ?", "cap > 1e9f ?"),
    "scales of another group": (
        "kv.cuh", "dim / GROUP * PAGE + token", "(dim / GROUP ^ 1) * PAGE + token"),
    "a partition's maximum ignored": ("exp_f32(stat.x - top)", "exp_f32(0.0f)"),
    "a warp's partitions left out": ("p += WARPS) {", "p += 2 * WARPS) {"),
    "weights of another row": (
        "octet * TILES * ROWS + row AT", "octet * TILES * ROWS + (row ^ 1) AT"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    name, good, bad = ("attention_decode.cu", *FAULTS[fault])[-3:]
    host = plant(name, good, bad)
    kind = "Q8_0" if "scales" in fault else "F16"
    case = Case(kind, 64, 6, 1, (2300 if "warp's" in fault else 700,), (2,))
    spec = spec_of(64, window=None if "warp's" in fault else 600, cap=2.0)
    try:
        y = case.run(host, spec)
    except HostFault:
        return
    assert not case.error(y, spec) <= 2 * RELATIVE


def test_shared_memory_has_few_bank_conflicts(host):
    load(host, "F16", 128)
    case = Case("F16", 128, 8, 1, (256,), (1,))
    memory = Memory()
    shape = (1, 1, 8, 1)
    scratch = Scratch(np.empty((*shape, 128), np.float32), np.empty((*shape, 2), np.float32))
    y = memory.empty(case.q.shape, np.float16)
    where = Lanes(case.lengths - 1, case.rows, case.table)
    plan, _ = attend(case.q, where, case.cache, scratch, y, scale=1.0)
    banks = host.run(plan, memory, counts_banks=True).banks
    assert banks
    for each in banks:
        assert each.wavefronts <= 4 * each.wavefronts_ideal, each


def test_slots():
    assert [slots_for(length) for length in (1, 256, 257, 512)] == [1, 1, 2, 2]
    for window in (1, 100, 256, 257, 512):
        for width in (1, 4):
            for start in range(1200):
                first = max(0, start + 1 - window) // 256
                needed = (start + width - 1) // 256 - first + 1
                assert needed <= slots_for(start + width, width, window)
    assert slots_for(100_000, 1, 512) == 3


def test_what_it_cannot_take_is_refused():
    case = Case("F16", 64, 6, 2, (3,), (1,))

    def plan(q=case.q, **how):
        cache = empty_cache("F16", 1, how.get("kv_heads", 2), how.get("width", 64))
        shape = (*q.shape[:3], 1)
        o, stats = (np.empty((*shape, last), np.float32) for last in (q.shape[3], 2))
        lanes = Lanes(case.lengths - 1, case.rows, case.table)
        return attend(q, lanes, cache, Scratch(o, stats), q.copy(), scale=1.0)

    partition, merge = plan()
    assert (partition.entry, partition.grid) == ("attend_partition<KvF16, 64, 1>", (2, 1, 1))
    assert (merge.entry, merge.grid) == ("merge_partitions<64>", (6, 1, 1))
    with pytest.raises(KernelError, match="6 heads do not share 4 KV heads"):
        plan(kv_heads=4)
    with pytest.raises(KernelError, match="heads of 64, but a cache for heads of 96"):
        plan(width=96)
    odd = np.zeros((1, 1, 2, 160), np.float16)
    with pytest.raises(KernelError, match="no kernel for heads of 160"):
        plan(odd, width=160)
