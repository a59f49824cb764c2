"""prefill: wrapper of cuda/prefill.cu, where shapes, numerics, mapping and roofline are stated."""

from .contract import Array, KernelError, Launch, ceil_div, dims, i32, reads, updates, writes
from .experts import arguments_of, check_experts_of
from .moe import Assignments
from .repack import Packed
from .skinny import KINDS

TILE = 128  # rows and columns of y that a block computes
THREADS = 256
ELEMENTS_MAX = 1 << 31  # of x: its indices have 32 bits


def prefill(
    x: Array,
    weight: Packed,
    y: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
) -> Launch:
    """y = x . weight^T + bias + residual.  x f16 [M, K], y f32 [M, N]; residual may be y.

    For rows of prompts, however many: a row's result is the same in any number of them.  It is not
    that of `skinny`, which generated tokens take.
    """
    d = dims(x=(x, "f16 M K"), y=(y, "f32 M N"))
    if weight.kind not in KINDS:
        raise KernelError(f"prefill: no kernel for {weight.kind}, only for {', '.join(KINDS)}")
    if (weight.rows, weight.columns) != (d["N"], d["K"]):
        raise KernelError(
            f"prefill: weight is [{weight.rows}, {weight.columns}], x and y want "
            f"[{d['N']}, {d['K']}]"
        )
    if d["M"] < 1 or d["M"] * d["K"] >= ELEMENTS_MAX:
        raise KernelError(f"prefill: {d['M']} rows of {d['K']}; it takes 1 to 2^31 elements")
    if bias is not None:
        dims(y=(y, "f32 M N"), bias=(bias, "f32 N"))
    if residual is not None:
        dims(y=(y, "f32 M N"), residual=(residual, "f32 M N"))
    return Launch(
        "prefill",
        f"prefill<{weight.kind}>",
        (ceil_div(d["M"], TILE), ceil_div(d["N"], TILE), 1),
        (THREADS, 1, 1),
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


def prefill_experts(
    x: Array,
    weight: Packed,
    assignments: Assignments,
    y: Array,
    *,
    expert_count: int,
    used: int,
    is_gathered: bool,
) -> Launch:
    """As `experts`, for rows of prompts, however many; the tiles are of `TILE` assignments.

    A row's result is the same in any company, and not that of `experts`.
    """
    d = check_experts_of("prefill_experts", x, weight, assignments, y, expert_count)
    if d["R"] * (used if is_gathered else 1) != d["A"] or d["R"] * d["K"] >= ELEMENTS_MAX:
        raise KernelError(
            f"prefill_experts: {d['R']} rows of {d['K']} for {d['A']} assignments; it takes 1 to "
            "2^31 elements"
        )
    return Launch(
        "prefill",
        f"prefill_experts<{weight.kind}>",
        (d["P"], ceil_div(d["N"], TILE), 1),
        (THREADS, 1, 1),
        arguments_of(x, weight, assignments, y, d, expert_count, used, is_gathered=is_gathered),
    )


def entries(kind: str) -> list[str]:
    return [f"prefill<{kind}>", f"prefill_experts<{kind}>"]
