"""rope: wrapper of cuda/rope.cu, where shapes, numerics, mapping and roofline are stated."""

from typing import Literal

from .contract import Array, KernelError, Launch, ceil_div, dims, f32, i32, reads, writes
from .kv import TYPES, Cache, Rows, operands, sizes_of

THREADS = 128
WARPS = THREADS // 32
WIDTH_MAX = 256  # of a head


def angles(
    positions: Array,
    frequencies: Array,
    turns: Array,
    *,
    streams: Array | None = None,
    factor: float = 1.0,
) -> Launch:
    """turns[t, i] = factor * (cos, sin) of positions[streams[i], t] * frequencies[i].

    positions i32 [S, T]; frequencies f64 [P], radians per position; streams i32 [P], each below S,
    by default all 0; turns f32 [T, P, 2].
    """
    d = dims(
        positions=(positions, "i32 S T"),
        frequencies=(frequencies, "f64 P"),
        turns=(turns, "f32 T P 2"),
    )
    if streams is not None:
        dims(frequencies=(frequencies, "f64 P"), streams=(streams, "i32 P"))
    return Launch(
        "rope",
        "angles",
        (d["T"], 1, 1),
        (THREADS, 1, 1),
        (
            reads("positions", positions),
            reads("streams", streams),
            reads("frequencies", frequencies),
            writes("turns", turns),
            f32("factor", factor),
            i32("T", d["T"]),
            i32("pairs", d["P"]),
        ),
    )


def rope_kv(
    q: Array,
    k: Array,
    v: Array,
    turns: Array,
    rows: Rows,
    cache: Cache,
    q_out: Array,
    *,
    pairs: Literal["adjacent", "halves"],
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    epsilon: float = 0.0,
) -> Launch:
    """Norm and turn queries and keys, and write keys and values to the cache.

    q f32 [T, H, Q], of which the first D are queries (beside them may lie gates); k, v f32 [T, HKV,
    D]; turns f32 [T, P, 2] of `angles`, 2 P dimensions turn; q_out f16 [T, H, D]; weights f32 [D],
    of norms with `epsilon`.
    """
    heads = sizes_of(cache).heads
    d = dims(
        q=(q, "f32 T H Q"),
        k=(k, f"f32 T {heads} D"),
        v=(v, f"f32 T {heads} D"),
        turns=(turns, "f32 T P 2"),
        lanes=(rows.lanes, "i32 T"),
        positions=(rows.positions, "i32 T"),
        table=(rows.table, "i32 L pages"),
        q_out=(q_out, "f16 T H D"),
    )
    weights = tuple(reads(f"{name}_weight", w) for name, w in (("q", q_weight), ("k", k_weight)))
    for weight in weights:
        if weight.array is not None:
            dims(q_out=(q_out, "f16 T H D"), **{weight.name: (weight.array, "f32 D")})
    d |= {"HKV": heads, "R": 2 * d["P"]}
    check_widths(d["D"], d["R"], sizes_of(cache).width, d["Q"])
    return Launch(
        "rope",
        f"rope_kv<{TYPES[cache.kind]}, {'true' if pairs == 'adjacent' else 'false'}>",
        (d["T"], ceil_div(d["H"] + 2 * heads, WARPS), 1),
        (THREADS, 1, 1),
        (
            *(reads(name, array) for name, array in (("q", q), ("k", k), ("v", v))),
            *weights,
            reads("turns", turns),
            *rows.operands(),
            writes("q_out", q_out),
            *operands(cache, is_written=True),
            f32("epsilon", epsilon),
            *(i32(name, d[name]) for name in ("H", "HKV", "D", "Q", "R", "pages")),
        ),
    )


def check_widths(width: int, turned: int, cached: int, beside: int) -> None:
    """`beside` is the width of queries with what lies beside them."""
    if beside < width or beside % 4:
        raise KernelError(f"rope_kv: queries of {width} in heads of {beside}")
    if width != cached:
        raise KernelError(f"rope_kv: heads of {width}, but a cache for heads of {cached}")
    if width % 32 or width > WIDTH_MAX:
        raise KernelError(f"rope_kv: heads of {width}; it takes multiples of 32 up to {WIDTH_MAX}")
    if turned % 16 or turned > width:
        raise KernelError(
            f"rope_kv: {turned} dimensions turn; it takes multiples of 16 up to the head's {width}"
        )


def entries() -> list[str]:
    turning = [f"rope_kv<{kind}, {a}>" for kind in TYPES.values() for a in ("true", "false")]
    return ["angles", *turning]
