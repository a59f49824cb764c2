"""Whether kernels can hold what a matrix in a file says: they multiply weights as halves.

A half ends at 65504, and knows nothing below 2^-25.  Blocks of a file may go beyond: a scale may be
infinite or so large that weights are, an MXFP4 block's exponent reaches from 2^-127 to 2^127.
Whoever loads a matrix asks here first; what is refused names the place.
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .contract import KernelError
from .repack import F16_FINE_MIN, LAYOUTS

Bytes = NDArray[np.uint8]
REACH_MAX = 65000.0  # of a block's weights; scale, offset and weight are each rounded on the way
CHUNK_BYTES = 1 << 26  # of a file's bytes looked at together
CHECKED = (*LAYOUTS, "BF16")


class Scale(Struct, frozen=True):
    """A half in each block, and the most it is multiplied by."""

    byte: int
    reach: int  # sub-block scale times code


# Codes and sub-block scales at their extremes, as GGML's formats define them.
SCALES: dict[str, tuple[Scale, ...]] = {
    "Q4_0": (Scale(0, 8),),
    "Q4_1": (Scale(0, 15), Scale(2, 1)),
    "Q5_0": (Scale(0, 16),),
    "Q5_1": (Scale(0, 31), Scale(2, 1)),
    "Q8_0": (Scale(0, 128),),
    "IQ4_NL": (Scale(0, 127),),
    "Q2_K": (Scale(80, 15 * 3), Scale(82, 15)),
    "Q3_K": (Scale(108, 32 * 4),),
    "Q4_K": (Scale(0, 63 * 15), Scale(2, 63)),
    "Q5_K": (Scale(0, 63 * 31), Scale(2, 63)),
    "Q6_K": (Scale(208, 128 * 32),),
    "IQ4_XS": (Scale(0, 32 * 127),),
}
# Twice the magnitude of MXFP4's codes; the upper eight are the negatives.
MXFP4_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12] * 2)
MXFP4_NAN, MXFP4_SCALE_MAX = 255, 142  # as exponents: no number, 2^15


def check_values(name: str, kind: str, columns: int, data: Bytes) -> None:
    """Raise KernelError, with the tensor's name and the place, for what halves cannot hold.

    `data` are the bytes of a matrix with `columns` columns, or of several, as in the file.  F32 is
    kept as it is, and BF16 too where it exceeds a half; of both only NaN and infinity are refused.
    """
    if kind not in CHECKED:
        return  # without kernels: `layout_of` refuses it
    if kind in ("F32", "F16", "BF16"):
        check_elements(name, kind, columns, data)
        return
    layout = LAYOUTS[kind]
    largest = 0.0
    for first, blocks in chunks(data, layout.block_bytes):
        reaches = mxfp4_reaches(blocks) if kind == "MXFP4" else scale_reaches(kind, blocks)
        bad = np.flatnonzero(~(reaches <= REACH_MAX))
        if bad.size:
            block = int(bad[0])
            where = place(first + block, columns, layout.block)
            raise KernelError(f"{name}: {where}: {explained(kind, float(reaches[block]))}")
        largest = max(largest, float(reaches.max(initial=0.0)))
    if kind == "MXFP4" and 0 < largest < F16_FINE_MIN:
        raise KernelError(
            f"{name}: its largest weight is {largest:.3g}; kernels hold weights as halves, which "
            f"are coarse below {F16_FINE_MIN:.3g}: quantise the tensor to Q8_0 or Q4_K instead"
        )


def explained(kind: str, reach: float) -> str:
    if not np.isfinite(reach):
        return f"the scale of its {kind} block is not a finite number: the file is damaged"
    return (
        f"its {kind} block reaches {reach:.6g}, and kernels hold weights as halves, up to 65504: "
        "serve this file with --device cpu, or quantise the tensor to another type"
    )


def chunks(data: Bytes, block_bytes: int) -> Iterator[tuple[int, Bytes]]:
    """The number of a first block, and some of them: [count, block_bytes]."""
    blocks = data.reshape(-1, block_bytes)
    step = max(1, CHUNK_BYTES // block_bytes)
    for first in range(0, len(blocks), step):
        yield first, blocks[first : first + step]


def scale_reaches(kind: str, blocks: Bytes) -> NDArray[np.float32]:
    """Of each block, what no weight's magnitude exceeds; NaN or infinity where a scale is."""
    reaches = np.zeros(len(blocks), np.float32)
    for scale in SCALES[kind]:
        halves = np.ascontiguousarray(blocks[:, scale.byte : scale.byte + 2]).view(np.float16)
        reaches += np.abs(halves[:, 0].astype(np.float32)) * scale.reach
    return reaches


def mxfp4_reaches(blocks: Bytes) -> NDArray[np.float64]:
    """Of each block, the largest weight's magnitude; infinite where there is no number.

    Where all weights are zero and no half holds the scale, which would make NaN of them: the scale.
    """
    lower, upper = MXFP4_TWICE[blocks[:, 1:] & 15], MXFP4_TWICE[blocks[:, 1:] >> 4]
    twice = np.maximum(lower, upper).max(axis=1)
    exponents = blocks[:, 0].astype(np.int64)
    twice = np.where((twice == 0) & (exponents > MXFP4_SCALE_MAX), 2, twice)
    return np.where(exponents == MXFP4_NAN, np.inf, np.ldexp(twice / 2, exponents - 127))


def check_elements(name: str, kind: str, columns: int, data: Bytes) -> None:
    """A number is not finite where all bits of its exponent are set."""
    unsigned, mask = {
        "F32": (np.uint32, 0x7F800000),
        "F16": (np.uint16, 0x7C00),
        "BF16": (np.uint16, 0x7F80),
    }[kind]
    size = np.dtype(unsigned).itemsize
    for first, elements in chunks(data, size):
        exponents = np.ascontiguousarray(elements).view(unsigned)[:, 0] & unsigned(mask)
        bad = np.flatnonzero(exponents == mask)
        if bad.size:
            where = place(first + int(bad[0]), columns, 1)
            raise KernelError(
                f"{name}: {where}: the weight is NaN or infinite: the file is damaged"
            )


def place(number: int, columns: int, width: int) -> str:
    """Of a block or element, by its number among those of a matrix in the file's order."""
    row, block = divmod(number, columns // width)
    return f"row {row}, column {block * width}"
