"""gather: wrapper of cuda/gather.cu, where shapes, numerics, mapping and roofline are stated."""

from .contract import Array, KernelError, Launch, dims, f32, i32, reads, writes
from .repack import LAYOUTS, Packed

THREADS = 128


def gather(tokens: Array, weight: Packed, y: Array, *, scale: float = 1.0) -> Launch:
    """y[t] = scale * weight[tokens[t]].  tokens i32 [T], all below the weight's rows; y f32 [T, K].

    Who calls checks the tokens: the kernel reads whatever row it is told.
    """
    d = dims(tokens=(tokens, "i32 T"), y=(y, "f32 T K"))
    if weight.columns != d["K"]:
        raise KernelError(f"gather: rows of {weight.columns} into y of {d['K']} columns")
    if weight.kind not in LAYOUTS:
        raise KernelError(f"gather: no kernel for {weight.kind}")
    return Launch(
        "gather",
        f"gather<{weight.kind}>",
        (d["T"], 1, 1),
        (THREADS, 1, 1),
        (
            reads("tokens", tokens),
            reads("weight", weight.data),
            writes("y", y),
            f32("scale", scale),
            i32("N", weight.rows),
            i32("K", d["K"]),
        ),
    )
