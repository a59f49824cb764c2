"""lora: wrapper of cuda/lora.cu, where shapes, numerics, mapping and roofline are stated."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .contract import (
    Array,
    KernelError,
    Launch,
    ceil_div,
    dims,
    i32,
    reads,
    updates,
    writes,
)

THREADS = 256
WARPS = THREADS // 32
ROWS = 4  # of x that a block takes
OCTET = 8  # ranks are padded to whole pieces of 16 bytes
STRIP = 32  # columns of x come in these
RANK_MAX = 64
GRID_MAX = 65535


class Part(Struct, frozen=True):
    """What one adapter adds to one matrix [N, K]: factor * b . a, with a [rank, K], b [N, rank]."""

    a: NDArray[Any]
    b: NDArray[Any]
    factor: float


class Adapters(Struct, frozen=True):
    """All adapters' parts of one matrix.  Those that leave the matrix alone have rank 0."""

    a: Array  # f16 [C, R, K]
    b: Array  # f16 [C, R / 8, N, 8]
    ranks: Array  # i32 [C]
    factors: Array  # f32 [C]


class Choice(Struct, frozen=True):
    """Which adapter each row takes, and how much of it."""

    adapters: Array  # i32 [M]; negative: none
    scales: Array  # f32 [M]


def stack(parts: Sequence[Part | None], rows: int, columns: int) -> Adapters:
    """Lay the adapters' parts of a matrix [rows, columns] out for the kernels, in NumPy.

    None is an adapter that does not touch the matrix.  Raises KernelError for a part that does not
    fit, for a rank above 64, and for values that halves cannot hold.
    """
    ranks = [0 if part is None else part.a.shape[0] for part in parts]
    padded = ceil_div(max([1, *ranks]), OCTET) * OCTET
    a = np.zeros((len(parts), padded, columns), np.float16)
    b = np.zeros((len(parts), rows, padded), np.float16)
    for index, part in enumerate(parts):
        if part is None:
            continue
        rank = ranks[index]
        check_part(index, part, (rank, columns), (rows, rank))
        a[index, :rank] = halves(index, "a", part.a)
        b[index, :, :rank] = halves(index, "b", part.b)
    pieces = b.reshape(len(parts), rows, padded // OCTET, OCTET).transpose(0, 2, 1, 3)
    factors = [0.0 if part is None else part.factor for part in parts]
    return Adapters(
        a,
        np.ascontiguousarray(pieces),
        np.array(ranks, np.int32),
        np.array(factors, np.float32),
    )


def check_part(index: int, part: Part, a_shape: tuple[int, int], b_shape: tuple[int, int]) -> None:
    if part.a.shape != a_shape or part.b.shape != b_shape:
        raise KernelError(
            f"adapter {index}: a is {list(part.a.shape)} and b {list(part.b.shape)}, where the "
            f"matrix wants [rank, {a_shape[1]}] and [{b_shape[0]}, rank]"
        )
    if a_shape[0] > RANK_MAX:
        raise KernelError(f"adapter {index}: its rank is {a_shape[0]}, at most {RANK_MAX}")


def halves(index: int, name: str, values: NDArray[Any]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        row, column = (int(at[0]) for at in np.nonzero(~np.isfinite(rounded)))
        raise KernelError(
            f"adapter {index}: {name}[{row}, {column}] is {float(values[row, column])}, which f16 "
            "cannot hold"
        )
    return rounded


def side_path(
    x: Array, adapters: Adapters, choice: Choice, h: Array, y: Array
) -> tuple[Launch, Launch]:
    """y[m] += scale * factor * b . (a . x[m]) of the row's adapter, after the matrix's own product.

    x f16 [M, K], what the matrix was multiplied by; h f32 [M, R] is scratch; y f32 [M, N].  Rows
    without an adapter keep their bits.  Who calls checks that choices are below the adapters.
    """
    d = dims(
        x=(x, "f16 M K"),
        a=(adapters.a, "f16 C R K"),
        b=(adapters.b, f"f16 C P N {OCTET}"),
        ranks=(adapters.ranks, "i32 C"),
        factors=(adapters.factors, "f32 C"),
        adapters=(choice.adapters, "i32 M"),
        scales=(choice.scales, "f32 M"),
        h=(h, "f32 M R"),
        y=(y, "f32 M N"),
    )
    if d["R"] != d["P"] * OCTET or d["R"] > RANK_MAX or d["K"] % STRIP:
        raise KernelError(
            f"side_path: ranks up to {d['R']} beside {d['K']} columns; it takes ranks in pieces of "
            f"{OCTET}, up to {RANK_MAX}, and columns in strips of {STRIP}"
        )
    blocks = ceil_div(d["M"], ROWS)
    if blocks > GRID_MAX:
        raise KernelError(f"side_path: {d['M']} rows, at most {GRID_MAX * ROWS}")
    sizes = (i32("M", d["M"]), i32("K", d["K"]), i32("R", d["R"]))
    narrow = Launch(
        "lora",
        "narrow",
        (ceil_div(d["R"], WARPS), blocks, 1),
        (THREADS, 1, 1),
        (
            reads("x", x),
            reads("a", adapters.a),
            reads("adapters", choice.adapters),
            reads("ranks", adapters.ranks),
            writes("h", h),
            *sizes,
        ),
    )
    return narrow, widen(adapters, choice, h, y, d["R"])


def widen(adapters: Adapters, choice: Choice, h: Array, y: Array, ranks: int) -> Launch:
    rows, columns = y.shape
    return Launch(
        "lora",
        "widen",
        (ceil_div(columns, THREADS), ceil_div(rows, ROWS), 1),
        (THREADS, 1, 1),
        (
            reads("h", h),
            reads("b", adapters.b),
            reads("adapters", choice.adapters),
            reads("scales", choice.scales),
            reads("ranks", adapters.ranks),
            reads("factors", adapters.factors),
            updates("y", y),
            i32("M", rows),
            i32("N", columns),
            i32("R", ranks),
        ),
    )


def entries() -> list[str]:
    return ["narrow", "widen"]
