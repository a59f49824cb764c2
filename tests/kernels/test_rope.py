"""Goal: queries, keys and values reach attention as the model's formulas say, and a row alone.

Method: random heads of several widths on the host's machine, written to shuffled pages of NaNs; the
oracles are ops.rope, in float64, and GGML's rule for Q8_0.  Then faults are planted.
"""

import numpy as np
import pytest
from kv_pages import empty_cache, quantise, read_cache

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.kv import PAGE, Rows, plane_shapes
from phaseloop.kernels.rope import angles, entries, rope_kv
from phaseloop.ops import rope as oracle
from phaseloop.ops.interface import Rope

EPSILON = 1e-6
HALF = 2.0**-10  # of the largest value: rounding to a half, and f32 before
POSITIONS = np.array([0, 255, 256, 511, 3], np.int32)
LANES = np.array([0, 0, 0, 0, 1], np.int32)
TABLE = np.array([[2, 0], [1, 1]], np.int32)


@pytest.fixture(autouse=True, scope="module")
def loaded(host):
    host.load("rope", entries())


def frequencies_of(rope):
    return oracle.angles(rope, None, np.array([1]))[0]


def turns_of(host, rope, positions, **how):
    memory = Memory()
    turns = memory.empty((positions.shape[-1], rope.dimensions // 2, 2), np.float32)
    host.run(
        angles(
            positions.reshape(-1, positions.shape[-1]),
            frequencies_of(rope),
            turns,
            factor=oracle.magnitude(rope),
            **how,
        ),
        memory,
    )
    return turns


def test_angles_keep_their_digits_at_high_positions(host):
    rope = Rope(128, 1e6, "halves", frequency_scale=0.25, extrapolation=1.0, context_original=32768)
    positions = np.array([0, 1, 4095, 131_071, 1_048_575], np.int32)
    turns = turns_of(host, rope, positions)
    angle = oracle.angles(rope, None, positions)
    exact = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * oracle.magnitude(rope)
    assert np.abs(turns - exact).max() <= 2e-7
    assert np.array_equal(turns_of(host, rope, positions[2:3])[0], turns[2])


def test_sections_turn_by_the_positions_of_their_stream(host):
    """M-RoPE, in sections and interleaved: a table says whose position each pair takes."""
    rope = Rope(32, 1e4, "halves")
    positions = np.random.default_rng(5).integers(0, 9999, (3, 4)).astype(np.int32)
    for streams in ([0] * 8 + [1] * 5 + [2] * 3, [0, 1, 2] * 5 + [0]):
        table = np.array(streams, np.int32)
        turns = turns_of(host, rope, positions, streams=table)
        angle = positions.T[:, table] * frequencies_of(rope)
        assert np.abs(turns - np.stack([np.cos(angle), np.sin(angle)], axis=-1)).max() <= 2e-7


class Case:
    """Rows of some lanes, through the kernel and through the formulas."""

    def __init__(self, host, kind, width, turned, pairs, *, heads=3, kv_heads=2, normed=False):
        self.host, self.kind, self.pairs = host, kind, pairs
        rng = np.random.default_rng(width + turned)
        rows = len(POSITIONS)
        self.q, self.k, self.v = (
            rng.standard_normal((rows, count, width)).astype(np.float32) * 2
            for count in (heads, kv_heads, kv_heads)
        )
        self.weights = [rng.uniform(0.5, 2, width).astype(np.float32) if normed else None
                        for _ in range(2)]  # fmt: skip
        self.rope = Rope(turned, 1e4, pairs)
        self.turns = turns_of(host, self.rope, POSITIONS)

    def run(self, rows=slice(None), **how):
        memory = Memory()
        cache = empty_cache(self.kind, 3, self.k.shape[1], self.k.shape[2])
        q_out = memory.empty((*self.q[rows].shape[:2], self.k.shape[2]), np.float16)
        plan = rope_kv(
            self.q[rows], self.k[rows], self.v[rows], self.turns[rows],
            Rows(LANES[rows], POSITIONS[rows], TABLE), cache, q_out,
            pairs=self.pairs, q_weight=self.weights[0], k_weight=self.weights[1], epsilon=EPSILON,
        )  # fmt: skip
        self.host.run(plan, memory, **how)
        return q_out, cache

    def oracle(self):
        exact = []
        angle = oracle.angles(self.rope, None, POSITIONS)
        for x, weight in zip((self.q, self.k), self.weights, strict=True):
            normed = x.astype(np.float64)
            if weight is not None:
                square = (normed * normed).mean(axis=-1, keepdims=True)
                normed = normed / np.sqrt(square + EPSILON) * weight
            exact.append(oracle.turn(normed, self.rope, angle, 1.0))
        return *exact, self.v.astype(np.float64)

    def cached(self, cache):
        """-> keys, values of the rows."""
        read = [read_cache(cache, TABLE[lane], position + 1, position)
                for lane, position in zip(LANES, POSITIONS, strict=True)]  # fmt: skip
        return tuple(np.concatenate([each[part] for each in read]) for part in (0, 1))

    def error(self, q_out, cache):
        """The worst, in units of what is due."""
        q, k, v = self.oracle()
        keys, values = self.cached(cache)
        due = HALF if self.kind == "F16" else 0.5 / 127 + 2 * HALF
        pairs = ((q_out, q, HALF), (keys, k, due), (values, v, due))
        return np.max([np.abs(got - exact).max() / (limit * np.abs(exact).max())
                       for got, exact, limit in pairs])  # fmt: skip


WIDTHS = ((64, 64), (64, 32), (96, 96), (128, 128), (192, 64), (256, 256), (160, 80))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_queries_and_cache(host, kind, pairs, normed):
    for width, turned in WIDTHS:
        case = Case(host, kind, width, turned, pairs, normed=normed)
        q_out, cache = case.run()
        assert case.error(q_out, cache) <= 1
        for order in ORDERS[1:]:
            again_q, again = case.run(order=order, seed=2)
            assert np.array_equal(again_q, q_out)
            assert all(np.array_equal(getattr(again, name).view(np.uint8),
                                      getattr(cache, name).view(np.uint8))
                       for name in plane_shapes(kind, 3, 2, width))  # fmt: skip


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_rows_bits_are_its_own_and_others_are_left_alone(host, kind):
    case = Case(host, kind, 96, 96, "halves", normed=True)
    q_out, whole = case.run()
    keys, values = case.cached(whole)
    for row in range(len(POSITIONS)):
        alone_q, cache = case.run(slice(row, row + 1))
        assert np.array_equal(alone_q[0], q_out[row])
        lane, position = LANES[row], POSITIONS[row]
        alone = read_cache(cache, TABLE[lane], position + 1, position)
        assert np.array_equal(alone[0][0], keys[row])
        assert np.array_equal(alone[1][0], values[row])
        codes = cache.keys.view(np.int8)
        touched = (codes != -1).any(axis=(2, 4))  # [pages, heads, tokens]
        assert touched.sum() == case.k.shape[1]
        assert touched[TABLE[lane][position // PAGE], :, position % PAGE].all()


def test_q8_codes_are_those_of_ggml(host):
    """Without turning (position 0), exact f32 inputs: codes and scales bit for bit."""
    case = Case(host, "Q8_0", 64, 64, "halves")
    _, cache = case.run(slice(0, 1))
    codes, scales = quantise(case.v[0])
    page = TABLE[0, 0]
    assert np.array_equal(cache.values[page, :, 0, :, 0], codes)
    assert np.array_equal(cache.value_scales[page, :, :, 0], scales)
    zero = Case(host, "Q8_0", 64, 64, "halves")
    zero.v[:] = 0
    _, cache = zero.run(slice(0, 1))
    assert not cache.values[page, :, 0, :, 0].any()
    assert not cache.value_scales[page, :, :, 0].any()


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e9])
def test_what_is_no_number_is_no_number_in_the_cache(host, kind, value):
    """Neither quantisation nor a half's limits may turn it into one."""
    case = Case(host, kind, 64, 64, "halves")
    case.v[0, :, 5] = value
    with np.errstate(invalid="ignore"):
        cached = case.cached(case.run()[1])[1]
    assert not np.isfinite(cached[0, :, 5]).any()
    assert np.isfinite(cached[1:]).all()


def test_gates_may_lie_beside_queries(host):
    case = Case(host, "F16", 64, 64, "halves", normed=True)
    q_out, _ = case.run()
    beside = Case(host, "F16", 64, 64, "halves", normed=True)
    beside.q = np.concatenate([case.q, np.full_like(case.q, np.nan)], axis=2)
    found, _ = beside.run()
    assert np.array_equal(found, q_out)


def test_nobodys_rows_touch_nothing(host):
    case = Case(host, "F16", 64, 64, "halves")
    memory = Memory()
    cache = empty_cache("F16", 3, 2, 64)
    q_out = memory.empty(case.q.shape, np.float16)
    unread = memory.empty(case.q.shape, np.float32)
    nobody = np.full(len(LANES), -1, np.int32)
    host.run(
        rope_kv(unread, case.k, case.v, case.turns, Rows(LANES, nobody, TABLE), cache, q_out,
                pairs="halves"), memory,
    )  # fmt: skip
    marks = memory.marks(q_out)
    assert marks is not None
    assert not marks.any()
    assert (cache.keys.view(np.uint8) == 0xFF).all()
    assert (cache.values.view(np.uint8) == 0xFF).all()


FAULTS = {
    "pairs turn the wrong way": (
        "heads.cuh", "o.x[j] * c - other.x[j] * s", "o.x[j] * c + other.x[j] * s"),
    "the wrong partner": ("heads.cuh", "lane + half_lanes : lane", "lane + half_lanes + 1 : lane"),
    "a page one off": ("rope.cu", "position / PAGE);", "(position + 1) / PAGE);"),
    "tokens swapped within a piece": (
        "kv.cuh", "* Kind::PIECE + token %", "* Kind::PIECE + 7 - token %"),
    "norms over half a head": ("rope.cu", "/ float(D) + epsilon", "/ float(D / 2) + epsilon"),
    "scale and codes of different groups": (
        "heads.cuh", "shuffle_xor(bits, 2", "shuffle_xor(bits, 4"),
    "values turn, too": ("rope.cu", "if (is_query || is_key) {", "if (true) {"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(host, plant, fault):
    kind = "Q8_0" if "codes" in fault else "F16"
    case = Case(host, kind, 96, 96, "halves", normed=True)
    case.host = plant(*FAULTS[fault])
    try:
        q_out, cache = case.run()
        bad = case.error(q_out, cache)
    except (HostFault, IndexError):
        return
    assert not bad <= 2


def test_what_it_cannot_take_is_refused(host):
    case = Case(host, "F16", 64, 64, "halves")

    def plan(cache=None, turns=case.turns, **how):
        cache = cache or empty_cache("F16", 1, 2, 64)
        q_out = np.empty(case.q.shape, np.float16)
        return rope_kv(case.q, case.k, case.v, turns, Rows(LANES, POSITIONS, TABLE), cache, q_out,
                       pairs="halves", **how)  # fmt: skip

    assert plan().grid == (5, 2, 1)
    with pytest.raises(KernelError, match="heads of 64, but a cache for heads of 96"):
        plan(empty_cache("F16", 1, 2, 96))
    with pytest.raises(KernelError, match="40 dimensions turn; it takes multiples of 16"):
        plan(turns=np.zeros((5, 20, 2), np.float32))
    with pytest.raises(KernelError, match="k_weight: D is 64 elsewhere, 63 here"):
        plan(k_weight=np.ones(63, np.float32))
    narrow = Case(host, "F16", 64, 64, "halves")
    narrow.q = narrow.q[..., :48].copy()
    with pytest.raises(KernelError, match="queries of 64 in heads of 48"):
        narrow.run()
    cache = empty_cache("Q8_0", 1, 2, 64)
    with pytest.raises(KernelError, match="no kernel for Q4_0"):
        plan(type(cache)("Q4_0", cache.keys, cache.values))
    with pytest.raises(KernelError, match="Q8_0 needs key_scales"):
        plan(type(cache)("Q8_0", cache.keys, cache.values))
