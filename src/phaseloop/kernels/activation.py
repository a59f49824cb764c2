"""activation: wrapper of cuda/activation.cu, where shapes, numerics and roofline are stated."""

import math
from typing import Literal

from .contract import (
    Array,
    KernelError,
    Launch,
    ceil_div,
    check_contiguous,
    dims,
    f32,
    i32,
    reads,
    updates,
    writes,
)

THREADS = 256
PACK = 4  # elements of a thread
ROWS_MAX = 65535
TYPES = {"silu": "Silu", "gelu": "Gelu"}


def gated(gate: Array, up: Array, y: Array, activation: Literal["silu", "gelu"]) -> Launch:
    """y = activation(gate) * up.  gate, up f32 [T, F]; y f16 [T, F]; gelu by its tanh form."""
    d = dims(gate=(gate, "f32 T F"), up=(up, "f32 T F"), y=(y, "f16 T F"))
    if d["F"] % PACK or d["T"] > ROWS_MAX:
        raise KernelError(f"gated: {d['T']} rows of {d['F']}; at most {ROWS_MAX}, of fours")
    return Launch(
        "activation",
        f"gated<{TYPES[activation]}>",
        (ceil_div(d["F"], THREADS * PACK), d["T"], 1),
        (THREADS, 1, 1),
        (reads("gate", gate), reads("up", up), writes("y", y), i32("F", d["F"])),
    )


def gate_heads(projected: Array, y: Array) -> Launch:
    """y *= sigmoid(gates), in place.  projected f32 [T, H, 2 D], queries then gates of each head;

    y f16 [T, H, D], what the queries attended to.
    """
    d = dims(projected=(projected, "f32 T H DD"), y=(y, "f16 T H D"))
    count = math.prod(y.shape)
    if d["DD"] != 2 * d["D"] or d["D"] % PACK:
        raise KernelError(f"gate_heads: heads of {d['D']}, with gates {d['DD']}; it takes fours")
    return Launch(
        "activation",
        "gate_heads",
        (ceil_div(count, THREADS * PACK), 1, 1),
        (THREADS, 1, 1),
        (
            reads("projected", projected),
            updates("y", y),
            i32("D", d["D"]),
            i32("count", count),
        ),
    )


def soft_cap(x: Array, cap: float) -> Launch:
    """x = cap * tanh(x / cap), of f32 in any shape, in place."""
    check_contiguous("x", x)
    count = math.prod(x.shape)
    if x.dtype != "float32" or count % PACK:
        raise KernelError(
            f"soft_cap: x is {x.dtype} {x.shape}; it takes f32, in all a multiple of 4"
        )
    return Launch(
        "activation",
        "soft_cap",
        (ceil_div(count, THREADS * PACK), 1, 1),
        (THREADS, 1, 1),
        (updates("x", x), f32("cap", cap), i32("count", count)),
    )


def entries() -> list[str]:
    return [*(f"gated<{each}>" for each in TYPES.values()), "gate_heads", "soft_cap"]
