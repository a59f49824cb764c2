"""The machine's limits: what no engine that reads these weights with ggml's kernels could beat.

A decode round reads all weights that a token needs once, whatever its streams are.  A token takes
one multiply-add per weight it needs.  So a row's limit is the smaller of what memory brings and
what ggml's own matrix product, measured by itself for each type of weight, computes.  Attention,
norms and sampling come on top.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.model.shape import EMBEDDING, Model
from phaseloop.model.weights import Weights
from phaseloop.ops.ggml_speed import multiply_adds_per_second
from phaseloop.ops.interface import Weight

from .bench_engine_rows import CLOCKS, Clock, Row

HEAD = "output.weight"
READ_BYTES_MIN = 64 << 20
READ_RUNS = 7


class Limits(Struct, frozen=True):
    decode_bytes: int  # of weights, read once per decode round
    prefill_multiply_adds: int  # per token of a prompt; the head computes its last row only
    decode_multiply_adds: int  # per generated token
    bytes_per_second: float
    multiply_adds_per_second: dict[str, float]  # by type of weight
    prefill_s: float  # per token of a prompt, at these rates
    decode_s: float  # per generated token

    def rate(self, row: Row) -> float:
        """Tokens per second."""
        if row.kind == "prefill":
            return 1 / self.prefill_s
        return min(1 / self.decode_s, row.size * self.bytes_per_second / self.decode_bytes)


def measure_limits(weights: Weights, model: Model, threads: int, clock: Clock) -> Limits:
    used = share_of_experts(weights, model)
    body, head = needed(weights.tensors)
    products = matrices(body) | ({head.name: head} if head is not None else {})
    rates = {
        kind: multiply_adds_per_second(largest, threads, CLOCKS[clock])
        for kind, largest in largest_of_kinds(products).items()
    }

    def seconds(tensors: Mapping[str, Weight]) -> float:
        return sum(count(w, used) / rates[w.kind] for w in tensors.values())

    body_bytes = sum(w.data.nbytes * (used if len(w.shape) > 2 else 1.0) for w in body.values())
    return Limits(
        decode_bytes=round(body_bytes) + (0 if head is None else head.data.nbytes),
        prefill_multiply_adds=round(sum(count(w, used) for w in matrices(body).values())),
        decode_multiply_adds=round(sum(count(w, used) for w in products.values())),
        bytes_per_second=bytes_read_per_second(weights.size_bytes, threads, CLOCKS[clock]),
        multiply_adds_per_second=rates,
        prefill_s=seconds(matrices(body)),
        decode_s=seconds(products),
    )


def share_of_experts(weights: Weights, model: Model) -> float:
    """Of a layer's experts, the share that one token uses."""
    key = f"{model.architecture}.expert_count"
    if key not in weights.metadata:
        return 1.0
    count = weights.count(key, 0, 1 << 20)
    return weights.count(f"{model.architecture}.expert_used_count", 0, count) / max(1, count)


def needed(tensors: Mapping[str, Weight]) -> tuple[dict[str, Weight], Weight | None]:
    """What every token needs, and the head.  The embedding is a look-up, unless it is the head."""
    body = {name: w for name, w in tensors.items() if name not in (EMBEDDING, HEAD)}
    return body, tensors.get(HEAD, tensors.get(EMBEDDING))


def matrices(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    return {name: w for name, w in tensors.items() if len(w.shape) > 1}


def count(weight: Weight, used: float) -> float:
    """Multiply-adds per token."""
    return float(np.prod(weight.shape)) * (used if len(weight.shape) > 2 else 1.0)


def largest_of_kinds(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """The heaviest matrix of each type, experts' counted singly: what takes most of the time."""
    found: dict[str, Weight] = {}
    for weight in tensors.values():
        known = found.get(weight.kind)
        if known is None or np.prod(weight.shape[-2:]) > np.prod(known.shape[-2:]):
            found[weight.kind] = weight
    return found


def bytes_read_per_second(size_bytes: int, threads: int, now_ns: Callable[[], int]) -> float:
    """The best of several passes over as much memory as the weights take."""
    size = max(READ_BYTES_MIN, size_bytes) // (8 * threads)
    parts = [np.ones(size, np.uint64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best_s = min(read_all(pool, parts, now_ns) for _ in range(READ_RUNS))
    return 8 * size * threads / best_s


def read_all(
    pool: ThreadPoolExecutor, parts: list[NDArray[np.uint64]], now_ns: Callable[[], int]
) -> float:
    start_ns = now_ns()
    list(pool.map(np.bitwise_or.reduce, parts))  # of all reductions the one that computes least
    return (now_ns() - start_ns) / 1e9
