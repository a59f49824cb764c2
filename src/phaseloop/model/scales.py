"""Finds NaN and infinity in weights without unpacking them: in the scales of quantised blocks."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from phaseloop.ops.interface import Weight

BLOCKS_AT_ONCE = 1 << 20

# Where in a block its F16 scales lie, in bytes.
F16_SCALES: dict[str, tuple[int, ...]] = {
    "F16": (0,),
    "Q1_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
IQ1_M_SCALES = (48, 50, 52, 54)  # the top four bits of each, lowest first, make one F16


def first_bad_value(weight: Weight) -> int | None:
    """The first block with a scale, or the first element, that is not finite."""
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[weight.kind]][1]
    blocks = weight.data.reshape(-1, block_bytes)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        bad = is_bad(blocks[start : start + BLOCKS_AT_ONCE], weight.kind)
        if bad.any():
            return start + int(bad.argmax())
    return None


def is_bad(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.bool_]:
    """One truth per block.  blocks [count, bytes of one]."""
    match kind:
        case "F32":
            return bad_words(blocks, 0, "<u4", 0x7F80_0000)
        case "BF16":
            return bad_words(blocks, 0, "<u2", 0x7F80)
        case "F64":
            return bad_words(blocks, 0, "<u8", 0x7FF0_0000_0000_0000)
        case "MXFP4":
            return blocks[:, 0] == 0xFF
        case "NVFP4":
            return ((blocks[:, :4] & 0x7F) == 0x7F).any(axis=1)
        case "IQ1_M":
            words = [word_at(blocks, at, "<u2") >> 12 for at in IQ1_M_SCALES]
            scale = words[0] | words[1] << 4 | words[2] << 8 | words[3] << 12
            return (scale & 0x7C00) == 0x7C00
        case _:
            bad = np.zeros(len(blocks), np.bool_)
            for offset in F16_SCALES.get(kind, ()):  # integers have none, and are never bad
                bad |= bad_words(blocks, offset, "<u2", 0x7C00)
            return bad


def bad_words(
    blocks: NDArray[np.uint8], offset: int, layout: str, exponent: int
) -> NDArray[np.bool_]:
    """A float is NaN or infinite exactly if all bits of its exponent are set."""
    mask = np.dtype(layout).type(exponent)
    return (word_at(blocks, offset, layout) & mask) == mask


def word_at(blocks: NDArray[np.uint8], offset: int, layout: str) -> NDArray[np.unsignedinteger]:
    size = np.dtype(layout).itemsize
    return np.ascontiguousarray(blocks[:, offset : offset + size]).view(layout)[:, 0]
