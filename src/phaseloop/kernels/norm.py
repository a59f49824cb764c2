"""norm: wrapper of cuda/norm.cu, where shapes, numerics, mapping and roofline are stated."""

from .contract import Array, KernelError, Launch, ceil_div, dims, f32, i32, reads, updates, writes

THREADS = 256
PACK = 4  # elements of a row that a thread loads at once
PASSES = (1, 2, 3, 4, 5, 6, 8, 16)
COLUMNS_MAX = PASSES[-1] * THREADS * PACK


def rms_norm(
    x: Array,
    weight: Array,
    *,
    epsilon: float,
    y_half: Array | None = None,
    y_full: Array | None = None,
    delta: Array | None = None,
    delta_weight: Array | None = None,
) -> Launch:
    """y = norm(x) * weight, after x += delta, or x += norm(delta) * delta_weight.

    x, delta f32 [T, K]; weights f32 [K]; y_half f16 [T, K], y_full f32 [T, K], at least one.
    """
    d = dims(x=(x, "f32 T K"), weight=(weight, "f32 K"))
    for name, array, spec in (
        ("y_half", y_half, "f16 T K"),
        ("y_full", y_full, "f32 T K"),
        ("delta", delta, "f32 T K"),
    ):
        if array is not None:
            dims(x=(x, "f32 T K"), **{name: (array, spec)})
    if delta_weight is not None:
        if delta is None:
            raise KernelError("rms_norm: a delta_weight, but no delta to weigh")
        dims(weight=(weight, "f32 K"), delta_weight=(delta_weight, "f32 K"))
    if y_half is None and y_full is None:
        raise KernelError("rms_norm: neither y_half nor y_full takes the result")
    return Launch(
        "norm",
        f"rms_norm<{passes_of(d['K'])}>",
        (d["T"], 1, 1),
        (THREADS, 1, 1),
        (
            reads("x", x) if delta is None else updates("x", x),
            reads("delta", delta),
            reads("delta_weight", delta_weight),
            reads("weight", weight),
            writes("y_half", y_half),
            writes("y_full", y_full),
            f32("epsilon", epsilon),
            i32("K", d["K"]),
        ),
    )


def passes_of(columns: int) -> int:
    if columns < 1 or columns % PACK or columns > COLUMNS_MAX:
        raise KernelError(
            f"rms_norm: rows of {columns}; it takes multiples of {PACK} up to {COLUMNS_MAX}"
        )
    passes = ceil_div(columns, THREADS * PACK)
    return next(each for each in PASSES if passes <= each)


def entries() -> list[str]:
    return [f"rms_norm<{passes}>" for passes in PASSES]
