"""skinny: wrapper of cuda/skinny.cu, where shapes, numerics, mapping and roofline are stated."""

from .contract import Array, KernelError, Launch, ceil_div, dims, i32, reads, updates, writes
from .repack import Packed

GROUP = 32  # rows of w, columns of y, that a block of `skinny` computes
K_WARPS = 8
ROWS = 8  # of one tile of x
ROWS_MAX = 48
TILES_UNSTAGED = 2  # up to so many tiles, x is read from global memory
TILES_STAGED = (4, 6)
STAGED_GROUPS = 2  # that share what is staged of x
KINDS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4", "F16",
)  # fmt: skip


def skinny(
    x: Array,
    weight: Packed,
    y: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
) -> Launch:
    """y = x . weight^T + bias + residual.  x [M, K], y f32 [M, N]; residual may be y.

    x is f16, M at most 48, for all types but F32; f32 and any M for that one.  A row's result is
    the same wherever it stands and whatever stands beside it.
    """
    is_f32 = weight.kind == "F32"
    d = dims(x=(x, "f32 M K" if is_f32 else "f16 M K"), y=(y, "f32 M N"))
    if not is_f32 and weight.kind not in KINDS:
        raise KernelError(f"skinny: no kernel for {weight.kind}, only for {', '.join(KINDS)}, F32")
    if (weight.rows, weight.columns) != (d["N"], d["K"]):
        raise KernelError(
            f"skinny: weight is [{weight.rows}, {weight.columns}], x and y want "
            f"[{d['N']}, {d['K']}]"
        )
    if d["M"] < 1 or (d["M"] > ROWS_MAX and not is_f32):
        raise KernelError(f"skinny: {d['M']} rows; it takes 1 to {ROWS_MAX}")
    if bias is not None:
        dims(y=(y, "f32 M N"), bias=(bias, "f32 N"))
    if residual is not None:
        dims(y=(y, "f32 M N"), residual=(residual, "f32 M N"))
    source, entry, grid, threads = mapping(weight.kind, d["M"], d["N"])
    return Launch(
        source,
        entry,
        grid,
        (threads, 1, 1),
        (
            reads("x", x),
            reads("weight", weight.data),
            reads("bias", bias),
            reads("residual", residual),
            updates("y", y) if residual is y else writes("y", y),
            i32("M", d["M"]),
            i32("N", d["N"]),
            i32("K", d["K"]),
        ),
    )


def mapping(kind: str, rows: int, columns: int) -> tuple[str, str, tuple[int, int, int], int]:
    """-> source, entry, grid, threads per block."""
    tiles, groups = ceil_div(rows, ROWS), ceil_div(columns, GROUP)
    if kind == "F32":
        return "skinny_f32", "skinny_f32", (groups, tiles, 1), K_WARPS * GROUP
    if tiles <= TILES_UNSTAGED:
        return "skinny", f"skinny<{kind}, {tiles}>", (groups, 1, 1), K_WARPS * GROUP
    tiles = next(staged for staged in TILES_STAGED if tiles <= staged)
    threads = STAGED_GROUPS * K_WARPS * GROUP
    grid = (ceil_div(groups, STAGED_GROUPS), 1, 1)
    return "skinny", f"skinny_staged<{kind}, {tiles}>", grid, threads


def entries(kind: str) -> list[str]:
    """All instances for a type, by ascending rows."""
    return list(dict.fromkeys(mapping(kind, rows, 1)[1] for rows in range(1, ROWS_MAX + 1)))
