"""What ggml is and can do here, as JSON: a process of its own, which may die of the wrong CPU.

Usage: python -m phaseloop.cli.doctor_ggml
"""

import os
import sys
from importlib.metadata import version

import msgspec
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from phaseloop.ops.ggml_library import LOADED, Cpu, Tensors, rows_are_stable
from phaseloop.ops.ggml_openmp import ggml
from phaseloop.ops.interface import Weight

from .doctor_facts import Ggml

OUTPUTS, WIDTH = 96, 512
FEATURES = (
    "sse3", "ssse3", "avx", "avx_vnni", "avx2", "bmi2", "f16c", "fma", "avx512", "avx512_vbmi",
    "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "arm_fma", "fp16_va", "dotprod",
    "matmul_int8", "sve", "sme",
)  # fmt: skip
PLAIN = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# Of types that gguf does not quantise to: where in a block f16 scales lie; all else is codes.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def examined() -> Ggml:
    threads = len(os.sched_getaffinity(0))
    cpu, kinds = Cpu(threads), (*PLAIN, *SCALES)
    tensors = Tensors(len(kinds))
    try:
        verdicts = {kind: rows_are_stable(cpu, tensors.add(sample(kind))) for kind in kinds}
    finally:
        tensors.close()
        cpu.close()
    return Ggml(
        version("ggml-python"),
        ggml.ggml_version().decode(),
        tuple(name for name in FEATURES if LOADED[f"ggml_cpu_has_{name}"]()),
        threads,
        tuple(kind for kind, is_stable in verdicts.items() if is_stable),
        tuple(kind for kind, is_stable in verdicts.items() if not is_stable),
    )


def sample(kind: str) -> Weight:
    """A matrix of random values of a type, in memory that ggml takes."""
    rng = np.random.default_rng(0)
    if kind in SCALES:
        data = random_codes(kind, rng)
    else:
        values = rng.standard_normal((OUTPUTS, WIDTH), dtype=np.float32)
        data = quants.quantize(values, GGMLQuantizationType[kind])
    return Weight(kind, kind, (OUTPUTS, WIDTH), aligned(data))


def random_codes(kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (OUTPUTS * WIDTH // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        data[:, at : at + 2] = np.full((len(data), 1), 0.01, np.float16).view(np.uint8)
    return data


def aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    room = np.empty(flat.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    room[begin : begin + flat.nbytes] = flat
    return room[begin : begin + flat.nbytes]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(examined()))
