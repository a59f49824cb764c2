"""attention_prefill: wrapper of cuda/attention_prefill.cu, where shapes, numerics and costs are."""

from msgspec import Struct

from .attention_decode import WINDOW_NONE, check_heads
from .contract import Array, KernelError, Launch, ceil_div, dims, f32, i32, reads, writes
from .kv import Cache, sizes_of

THREADS = 256
ROWS = 64  # of a block, a row being a token and a query head
GRID_MAX = 65535


class Chunks(Struct, frozen=True):
    """The rows of a prefill round: of each lane consecutive ones, whose keys are cached."""

    firsts: Array  # i32 [L], the row of q that is the lane's first
    starts: Array  # i32 [L], its position
    counts: Array  # i32 [L]
    table: Array  # i32 [L, pages]


def attend(
    q: Array,
    chunks: Chunks,
    cache: Cache,
    y: Array,
    *,
    count_max: int,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Launch:
    """Attention of a prompt's rows.  q f16 [T, H, D] -> y f16 [T, H, D]; the cache is F16.

    No lane has more than `count_max` rows: rows beyond would not be computed.
    """
    if cache.kind != "F16":
        raise KernelError(f"attend: a cache of {cache.kind}; unpack it to F16 first (cells.unpack)")
    sizes = sizes_of(cache)
    d = dims(
        q=(q, "f16 T H D"),
        firsts=(chunks.firsts, "i32 L"),
        starts=(chunks.starts, "i32 L"),
        counts=(chunks.counts, "i32 L"),
        table=(chunks.table, "i32 L pages"),
        y=(y, "f16 T H D"),
    )
    check_heads(d["H"], d["D"], sizes.heads, sizes.width)
    if d["L"] > GRID_MAX:
        raise KernelError(f"attend: {d['L']} lanes, more than {GRID_MAX}")
    return Launch(
        "attention_prefill",
        f"attend_chunk<{d['D']}>",
        (ceil_div(count_max * d["H"] // sizes.heads, ROWS), sizes.heads, d["L"]),
        (THREADS, 1, 1),
        (
            reads("q", q),
            reads("keys", cache.keys),
            reads("values", cache.values),
            reads("firsts", chunks.firsts),
            reads("starts", chunks.starts),
            reads("counts", chunks.counts),
            reads("table", chunks.table),
            writes("y", y),
            f32("scale", scale),
            f32("cap", cap or 0.0),
            i32("window", WINDOW_NONE if window is None else window),
            i32("H", d["H"]),
            i32("HKV", sizes.heads),
            i32("pages", d["pages"]),
        ),
        shared_bytes(d["D"]),
    )


def shared_bytes(width: int) -> int:
    """Queries, a tile of keys or values, and its weights, all f16."""
    keys = 64 if width <= 128 else 32
    return 2 * (ROWS * width + keys * width + ROWS * keys)


def entries(width: int) -> list[str]:
    return [f"attend_chunk<{width}>"]
