"""attention_decode: wrapper of cuda/attention_decode.cu, where shapes, numerics and costs are."""

from msgspec import Struct

from .contract import Array, KernelError, Launch, Operand, ceil_div, dims, f32, i32, reads, writes
from .kv import PAGE, TYPES, WIDTHS, Cache, Kind, operands, sizes_of

THREADS = 256
ROWS = 8  # of a tile of the tensor cores
TILES = (1, 2, 4)
WINDOW_NONE = (1 << 31) - 1
GRID_MAX = 65535


class Lanes(Struct, frozen=True):
    """The rows of a round: up to W of each lane, whose keys and values are cached."""

    starts: Array  # i32 [L], the position of each lane's first row
    counts: Array  # i32 [L], its rows, at most W; 0 for a lane that is nobody's
    table: Array  # i32 [L, pages]


class Scratch(Struct, frozen=True):
    """Of partitions, until they are merged; `slots` says how many a lane may have."""

    o: Array  # f32 [L, W, H, slots, D]
    stats: Array  # f32 [L, W, H, slots, 2]


def slots_for(length: int, width: int = 1, window: int | None = None) -> int:
    """How many partitions `width` rows up to position `length` - 1 can see."""
    whole = ceil_div(length, PAGE)
    if window is None:
        return whole
    return min(whole, (window + width - 2) // PAGE + 2)


def attend(
    q: Array,
    lanes: Lanes,
    cache: Cache,
    scratch: Scratch,
    y: Array,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Launch, Launch]:
    """Attention of generated rows.  q f16 [L, W, H, D] -> y f16 [L, W, H, D].

    A row is NaN whose lane sees more partitions than `scratch` has slots (`slots_for`).
    """
    sizes = sizes_of(cache)
    d = dims(
        q=(q, "f16 L W H D"),
        starts=(lanes.starts, "i32 L"),
        counts=(lanes.counts, "i32 L"),
        table=(lanes.table, "i32 L pages"),
        o=(scratch.o, "f32 L W H slots D"),
        stats=(scratch.stats, "f32 L W H slots 2"),
        y=(y, "f16 L W H D"),
    )
    check_heads(d["H"], d["D"], sizes.heads, sizes.width)
    tiles = tiles_of(d["W"] * d["H"] // sizes.heads)
    blocks = ceil_div(d["W"] * d["H"] // sizes.heads, tiles * ROWS) * d["L"]
    if max(blocks, d["slots"], d["L"] * d["W"]) > GRID_MAX:
        raise KernelError(
            f"attend: {d['L']} lanes, {d['slots']} slots: more than {GRID_MAX} blocks"
        )
    where = (reads("starts", lanes.starts), reads("counts", lanes.counts))
    seen = WINDOW_NONE if window is None else window
    partition = Launch(
        "attention_decode",
        f"attend_partition<{TYPES[cache.kind]}, {d['D']}, {tiles}>",
        (sizes.heads, d["slots"], blocks),
        (THREADS, 1, 1),
        (
            reads("q", q),
            *operands(cache),
            *where,
            reads("table", lanes.table),
            writes("o", scratch.o),
            writes("stats", scratch.stats),
            f32("scale", scale),
            f32("cap", cap or 0.0),
            i32("window", seen),
            i32("W", d["W"]),
            i32("H", d["H"]),
            i32("HKV", sizes.heads),
            i32("pages", d["pages"]),
            i32("slots", d["slots"]),
        ),
    )
    return partition, merge(d, scratch, where, y, seen)


def merge(
    d: dict[str, int], scratch: Scratch, where: tuple[Operand, Operand], y: Array, window: int
) -> Launch:
    return Launch(
        "attention_decode",
        f"merge_partitions<{d['D']}>",
        (d["H"], d["L"] * d["W"], 1),
        (THREADS, 1, 1),
        (
            reads("o", scratch.o),
            reads("stats", scratch.stats),
            *where,
            writes("y", y),
            i32("window", window),
            i32("W", d["W"]),
            i32("H", d["H"]),
            i32("slots", d["slots"]),
        ),
    )


def check_heads(heads: int, width: int, kv_heads: int, cached: int) -> None:
    if width != cached:
        raise KernelError(f"attend: heads of {width}, but a cache for heads of {cached}")
    if width not in WIDTHS:
        raise KernelError(f"attend: no kernel for heads of {width}, only for {WIDTHS}")
    if heads % kv_heads:
        raise KernelError(f"attend: {heads} heads do not share {kv_heads} KV heads evenly")


def tiles_of(rows: int) -> int:
    """Of the rows that share a KV head; never part of a row's bits."""
    return next((tiles for tiles in TILES if rows <= tiles * ROWS), TILES[-1])


def entries(kind: Kind, width: int) -> list[str]:
    partitions = [f"attend_partition<{TYPES[kind]}, {width}, {tiles}>" for tiles in TILES]
    return [*partitions, f"merge_partitions<{width}>"]
