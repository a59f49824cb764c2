"""Quantised matrices of random bits: every code and every scale step occurs."""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.kernels.repack import LAYOUTS, Packed, pack

# Bytes of a block that are an f16, which random bits would make infinite; from GGML's structures.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_XS": (0,), "MXFP4": (), "F16": (), "F32": (),
}  # fmt: skip


class Matrix(Struct, frozen=True):
    data: NDArray[np.uint8]  # as in a file
    packed: Packed
    values: NDArray[Any]  # f32 [rows, columns], by gguf's own dequantisation


def random_matrix(kind: str, rows: int, blocks: int, seed: int = 0) -> Matrix:
    """[rows, blocks * block]; scales of either sign, around 0.01."""
    layout = LAYOUTS[kind]
    rng = np.random.default_rng(seed)
    count = rows * blocks
    data = rng.integers(0, 256, (count, layout.block_bytes), dtype=np.uint8)
    for byte in SCALES[kind]:
        scale = rng.uniform(0.005, 0.02, (count, 1)) * rng.choice([-1, 1], (count, 1))
        data[:, byte : byte + 2] = scale.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        data[:, 0] = rng.integers(113, 129, count)
    elif kind in ("F16", "F32"):
        values = rng.standard_normal((count, layout.block))
        data = values.astype({"F16": np.float16, "F32": np.float32}[kind]).view(np.uint8)
    columns = blocks * layout.block
    values = dequantize(data.reshape(rows, -1), GGMLQuantizationType[kind])
    packed = Packed(kind, rows, columns, pack(kind, rows, columns, data.reshape(-1)))
    return Matrix(data.reshape(-1), packed, values.reshape(rows, columns).astype(np.float32))
