"""The launches that models make, for the floors in docs/kernels.md: planned, never performed."""

from collections.abc import Iterator

from msgspec import Struct

from phaseloop.kernels.contract import Launch, Planned, planned
from phaseloop.kernels.prefill import prefill
from phaseloop.kernels.repack import Packed, packed_bytes
from phaseloop.kernels.skinny import skinny


class Case(Struct, frozen=True):
    model: str
    name: str
    launch: Launch
    operations: int  # floating-point: a multiply-add is two
    unit: str  # which of the GPU's units does them: "HMMA", "FP32"


class Matrix(Struct, frozen=True):
    name: str
    kind: str
    rows: int  # N
    columns: int  # K


# Llama-3-8B's shape, and Qwen3.8-27B's: three of four layers gated delta net, one attention.
MODELS = {
    "8B Q4_K": (
        Matrix("attn_q, attn_output", "Q4_K", 4096, 4096),
        Matrix("attn_k, attn_v", "Q4_K", 1024, 4096),
        Matrix("ffn_gate, ffn_up", "Q4_K", 14336, 4096),
        Matrix("ffn_down", "Q4_K", 4096, 14336),
        Matrix("output", "Q6_K", 128256, 4096),
    ),
    "27B Q5_K": (
        Matrix("attn_q (query and gate)", "Q5_K", 12288, 5120),
        Matrix("attn_k, attn_v", "Q5_K", 1024, 5120),
        Matrix("attn_output, ssm_out", "Q5_K", 5120, 6144),
        Matrix("attn_qkv (delta net)", "Q5_K", 10240, 5120),
        Matrix("attn_gate (delta net)", "Q5_K", 6144, 5120),
        Matrix("ffn_gate, ffn_up", "Q5_K", 17408, 5120),
        Matrix("ffn_down", "Q5_K", 5120, 17408),
        Matrix("output", "Q6_K", 248320, 5120),
    ),
}
ROWS = (1, 16, 48)  # of generated tokens
PROMPT_ROWS = 2048


def cases() -> Iterator[Case]:
    for model, matrices in MODELS.items():
        for matrix in matrices:
            yield from (product(model, matrix, rows) for rows in (*ROWS, PROMPT_ROWS))


def product(model: str, matrix: Matrix, rows: int) -> Case:
    shape = (matrix.rows, matrix.columns)
    weight = Packed(matrix.kind, *shape, planned("u8", packed_bytes(matrix.kind, *shape)))
    x: Planned = planned("f16", rows, matrix.columns)
    plan = prefill if rows == PROMPT_ROWS else skinny
    launch = plan(x, weight, planned("f32", rows, matrix.rows))
    padded = -(-rows // 8) * 8  # tiles of x are whole
    name = f"{matrix.name} [{matrix.rows}, {matrix.columns}], M = {rows}"
    return Case(model, name, launch, 2 * padded * matrix.rows * matrix.columns, "HMMA")
