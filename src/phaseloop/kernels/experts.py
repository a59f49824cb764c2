"""experts: wrapper of cuda/experts.cu, where shapes, numerics, mapping and roofline are stated."""

from .contract import (
    Array,
    KernelError,
    Launch,
    Operand,
    Parameter,
    dims,
    i32,
    reads,
    writes,
)
from .moe import Assignments
from .repack import Packed
from .skinny import KINDS

THREADS = 256
GROUP = 32  # columns of y that a block computes
ROWS = 8  # of a tile of the tensor cores
TILES = (1, 2)
GRID_MAX = 65535


def rows_of(assignments: int, experts: int) -> int:
    """Of a tile: 16 where experts have many rows to share a matrix.  Never part of a row's bits."""
    return ROWS * (2 if assignments > 4 * experts else 1)


def experts(
    x: Array,
    weight: Packed,
    assignments: Assignments,
    y: Array,
    *,
    expert_count: int,
    used: int,
    rows: int,
    is_gathered: bool,
) -> Launch:
    """y[i] = x's row . w of its expert.  x f16 [R, K]; y f32 [A, N], by place in `order`.

    `weight` has the experts' matrices [N, K] one after the other; `rows` is that of the tiles.
    `is_gathered`: x has the rows that were assigned, `used` times each; else it is by place.
    """
    d = check_experts_of("experts", x, weight, assignments, y, expert_count)
    if d["R"] * (used if is_gathered else 1) != d["A"] or rows not in {ROWS * n for n in TILES}:
        raise KernelError(f"experts: {d['R']} rows for {d['A']} assignments, in tiles of {rows}")
    return Launch(
        "experts",
        f"experts<{weight.kind}, {rows // ROWS}>",
        (d["N"] // GROUP, d["P"], 1),
        (THREADS, 1, 1),
        arguments_of(x, weight, assignments, y, d, expert_count, used, is_gathered=is_gathered),
    )


def arguments_of(
    x: Array,
    weight: Packed,
    assignments: Assignments,
    y: Array,
    d: dict[str, int],
    expert_count: int,
    used: int,
    *,
    is_gathered: bool,
) -> tuple[Operand | Parameter, ...]:
    """As both kernels take them, this one and that of prompts; `d` of check_experts_of."""
    return (
        reads("x", x),
        reads("weight", weight.data),
        reads("order", assignments.order if is_gathered else None),
        reads("tiles", assignments.tiles),
        writes("y", y),
        i32("U", used),
        i32("E", expert_count),
        i32("N", d["N"]),
        i32("K", d["K"]),
    )


def check_experts_of(
    name: str, x: Array, weight: Packed, assignments: Assignments, y: Array, expert_count: int
) -> dict[str, int]:
    """The sizes R, K, A, N and P (tiles), for a plan that is called `name` in errors."""
    d = dims(
        x=(x, "f16 R K"),
        y=(y, "f32 A N"),
        order=(assignments.order, "i32 A"),
        tiles=(assignments.tiles, "i32 P 4"),
    )
    if weight.kind not in KINDS:
        raise KernelError(f"{name}: no kernel for {weight.kind}, only for {', '.join(KINDS)}")
    if (weight.rows, weight.columns) != (expert_count * d["N"], d["K"]) or d["N"] % GROUP:
        raise KernelError(
            f"{name}: weight is [{weight.rows}, {weight.columns}]; {expert_count} experts of "
            f"[{d['N']}, {d['K']}] are wanted, whole groups of {GROUP} rows each"
        )
    if d["P"] > GRID_MAX:
        raise KernelError(f"{name}: {d['P']} tiles, at most {GRID_MAX}")
    return d


def entries(kind: str) -> list[str]:
    return [f"experts<{kind}, {tiles}>" for tiles in TILES]
