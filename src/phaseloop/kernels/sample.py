"""sample: wrapper of cuda/sample.cu, where shapes, numerics, mapping and roofline are stated."""

from msgspec import Struct

from .contract import Array, KernelError, Launch, ceil_div, dims, i32, reads, writes

THREADS = 256
SLICE = 4096  # logits of a block
CANDIDATES_MAX = 128
SLICES = (16, 64)
VOCABULARY_MAX = SLICES[-1] * SLICE
ROWS_MAX = 65535


class Draws(Struct, frozen=True):
    """What decides each row's token besides its logits, [B] each.

    Rows that want other samplers than these, or more candidates, take `ids` and `values`, or their
    logits, to the CPU.
    """

    seeds: Array  # u64
    positions: Array  # i32, of the tokens drawn
    choices: Array  # i32
    top_k: Array  # i32, from 1 up to the K of the keys
    temperature: Array  # f64; 0 or below: the best
    top_p: Array  # f64; 1 or above: off
    min_p: Array  # f64; 0 or below: off


class Drawn(Struct, frozen=True):
    tokens: Array  # i32 [B]; -1 where the logits are broken, or all minus infinity
    ids: Array  # i32 [B, K], the candidates, best first; -1 where there are fewer
    values: Array  # f32 [B, K], their logits


def slices_of(vocabulary: int) -> int:
    return ceil_div(vocabulary, SLICE)


def sample(logits: Array, keys: Array, draws: Draws, drawn: Drawn) -> tuple[Launch, Launch]:
    """Draw a token per row.  logits f32 [B, V]; keys u64 [B, slices_of(V), K] are scratch.

    K is how many candidates are found of each row, at most 128, whatever its own top_k.
    """
    d = dims(logits=(logits, "f32 B V"), keys=(keys, "u64 B S K"))
    if d["S"] != slices_of(d["V"]) or d["V"] > VOCABULARY_MAX:
        raise KernelError(
            f"sample: {d['S']} slices for {d['V']} tokens; {slices_of(d['V'])} are needed, for at "
            f"most {VOCABULARY_MAX}"
        )
    if not 1 <= d["K"] <= CANDIDATES_MAX or d["B"] > ROWS_MAX:
        raise KernelError(
            f"sample: {d['K']} candidates of {d['B']} rows; it takes 1 to {CANDIDATES_MAX}, of at "
            f"most {ROWS_MAX}"
        )
    top = Launch(
        "sample",
        "top_of_slice",
        (d["S"], d["B"], 1),
        (THREADS, 1, 1),
        (reads("logits", logits), writes("keys", keys), i32("V", d["V"]), i32("K", d["K"])),
    )
    return top, draw(keys, draws, drawn, d["S"], d["K"])


def draw(keys: Array, draws: Draws, drawn: Drawn, slices: int, candidates: int) -> Launch:
    b = dims(
        keys=(keys, "u64 B S K"),
        seeds=(draws.seeds, "u64 B"),
        positions=(draws.positions, "i32 B"),
        choices=(draws.choices, "i32 B"),
        top_k=(draws.top_k, "i32 B"),
        temperature=(draws.temperature, "f64 B"),
        top_p=(draws.top_p, "f64 B"),
        min_p=(draws.min_p, "f64 B"),
        tokens=(drawn.tokens, "i32 B"),
        ids=(drawn.ids, "i32 B K"),
        values=(drawn.values, "f32 B K"),
    )["B"]
    return Launch(
        "sample",
        f"draw<{next(each for each in SLICES if slices <= each)}>",
        (b, 1, 1),
        (THREADS, 1, 1),
        (
            reads("keys", keys),
            reads("seeds", draws.seeds),
            reads("positions", draws.positions),
            reads("choices", draws.choices),
            reads("top_k", draws.top_k),
            reads("temperature", draws.temperature),
            reads("top_p", draws.top_p),
            reads("min_p", draws.min_p),
            writes("tokens", drawn.tokens),
            writes("ids", drawn.ids),
            writes("values", drawn.values),
            i32("slices", slices),
            i32("K", candidates),
        ),
    )


def entries() -> list[str]:
    return ["top_of_slice", *(f"draw<{slices}>" for slices in SLICES)]
