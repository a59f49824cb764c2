"""delta: wrapper of cuda/delta.cu, where shapes, numerics, mapping and roofline are stated."""

from msgspec import Struct

from .contract import (
    Array,
    KernelError,
    Launch,
    Operand,
    ceil_div,
    dims,
    f32,
    i32,
    reads,
    updates,
    writes,
)

THREADS = 256
WARPS = THREADS // 32
CONVOLVED = 32  # rows of a warp
KEPT = 4  # rows of a state in a warp
WIDTHS = (32, 64, 128)
GRID_MAX = 65535


class Lanes(Struct, frozen=True):
    """Whose rows follow each other, and between which cells.  All i32 [L]."""

    firsts: Array  # the lane's first row
    counts: Array  # its rows; 0 for a lane that is nobody's
    reads: Array  # the cell of its state before them
    writes: Array  # the cell of its state after them, another one

    def operands(self) -> tuple[Operand, ...]:
        names = ("firsts", "counts", "reads", "writes")
        arrays = (self.firsts, self.counts, self.reads, self.writes)
        return tuple(reads(name, array) for name, array in zip(names, arrays, strict=True))

    def count(self) -> int:
        return dims(
            firsts=(self.firsts, "i32 L"),
            counts=(self.counts, "i32 L"),
            reads=(self.reads, "i32 L"),
            writes=(self.writes, "i32 L"),
        )["L"]


def convolve(
    x: Array,
    taps: Array,
    histories: Array,
    c: Array,
    lanes: Lanes,
    *,
    key_heads: int,
    width: int,
    count_max: int,
    epsilon: float,
) -> Launch:
    """Mix each channel over 4 rows, gate it by SiLU, and norm queries and keys.

    x, c f32 [T, C], heads of `width` channels: queries, keys (`key_heads` each), values; taps f32
    [C, 4]; histories f32 [cells, C, 3].  No lane has more than `count_max` rows.
    """
    d = dims(
        x=(x, "f32 T C"),
        taps=(taps, "f32 C 4"),
        histories=(histories, "f32 cells C 3"),
        c=(c, "f32 T C"),
    )
    check_width("convolve", width)
    heads, blocks = d["C"] // width, ceil_div(count_max, CONVOLVED)
    if d["C"] % width or heads <= 2 * key_heads:
        raise KernelError(f"convolve: {d['C']} channels, {key_heads} key heads of {width}")
    if blocks > GRID_MAX:
        raise KernelError(f"convolve: {count_max} rows of a lane, at most {GRID_MAX * CONVOLVED}")
    return Launch(
        "delta",
        f"convolve<{width}>",
        (ceil_div(heads, WARPS), max(1, blocks), lanes.count()),
        (THREADS, 1, 1),
        (
            reads("x", x),
            reads("taps", taps),
            updates("histories", histories),
            writes("c", c),
            *lanes.operands(),
            f32("epsilon", epsilon),
            i32("HK", key_heads),
            i32("heads", heads),
        ),
    )


def recur(
    c: Array, step: Array, rate: Array, decay: Array, states: Array, y: Array, lanes: Lanes
) -> Launch:
    """Carry the states through the rows.  c f32 [T, C] of `convolve`; step, rate f32 [T, HV];

    decay f32 [HV]; states f32 [cells, HV, S, S]; y f32 [T, HV, S].
    """
    d = dims(
        c=(c, "f32 T C"),
        step=(step, "f32 T HV"),
        rate=(rate, "f32 T HV"),
        decay=(decay, "f32 HV"),
        states=(states, "f32 cells HV S S"),
        y=(y, "f32 T HV S"),
    )
    check_width("recur", d["S"])
    key_heads, left = divmod(d["C"] // d["S"] - d["HV"], 2)
    if d["C"] % d["S"] or left or key_heads < 1 or d["HV"] % key_heads:
        raise KernelError(f"recur: {d['C']} channels for {d['HV']} value heads of {d['S']}")
    return Launch(
        "delta",
        f"recur<{d['S']}>",
        (ceil_div(d["S"], WARPS * KEPT), d["HV"], lanes.count()),
        (THREADS, 1, 1),
        (
            reads("c", c),
            reads("step", step),
            reads("rate", rate),
            reads("decay", decay),
            updates("states", states),
            writes("y", y),
            *lanes.operands(),
            i32("HK", key_heads),
            i32("HV", d["HV"]),
        ),
    )


def gated_norm(found: Array, gate: Array, weight: Array, y: Array, *, epsilon: float) -> Launch:
    """y = rms_norm(found) * weight * silu(gate).  f32 [T, HV, S], weight f32 [S]; y f16."""
    d = dims(
        found=(found, "f32 T HV S"),
        gate=(gate, "f32 T HV S"),
        weight=(weight, "f32 S"),
        y=(y, "f16 T HV S"),
    )
    check_width("gated_norm", d["S"])
    rows = d["T"] * d["HV"]
    return Launch(
        "delta",
        f"gated_norm<{d['S']}>",
        (ceil_div(rows, WARPS), 1, 1),
        (THREADS, 1, 1),
        (
            reads("found", found),
            reads("gate", gate),
            reads("weight", weight),
            writes("y", y),
            f32("epsilon", epsilon),
            i32("rows", rows),
        ),
    )


def check_width(name: str, width: int) -> None:
    if width not in WIDTHS:
        raise KernelError(f"{name}: no kernel for heads of {width}, only for {WIDTHS}")


def entries(width: int) -> list[str]:
    return [f"{kernel}<{width}>" for kernel in ("convolve", "recur", "gated_norm")]
