"""The oracle: every op as its formula, NumPy float64, nothing shared between rows but the weights.

It is also the fallback where ggml is missing.  Slow, and exact enough that any visible difference
is the other backend's.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from .checks import check_spans, output_rows
from .interface import (
    Aborted,
    Activation,
    Attention,
    Dimensions,
    Experts,
    Network,
    Region,
    Rope,
    Rows,
    Snapshot,
    Span,
    Weight,
)
from .rope import angles, magnitude, turn

Doubles = NDArray[np.float64]


def unpack(weight: Weight) -> Doubles:
    """A weight's values, in its shape."""
    values = dequantize(weight.data, GGMLQuantizationType[weight.kind])
    return values.reshape(weight.shape).astype(np.float64)


class ReferenceBackend:
    """Keeps its regions as [layer][key or value] arrays of float64."""

    name = "reference"

    def __init__(
        self,
        network: Network,
        weights: Mapping[str, Weight],
        dimensions: Dimensions,
        *,
        region_count: int,
        capacity: int,
    ) -> None:
        self._network = network
        self._weights = {name: unpack(weight) for name, weight in weights.items()}
        self._dimensions = dimensions
        self._region_count = region_count
        self._capacity = capacity
        heads, layers = dimensions.kv_head_count, len(dimensions.ropes)
        self._keys = np.zeros((layers, region_count, capacity, heads, dimensions.key_length))
        self._values = np.zeros((layers, region_count, capacity, heads, dimensions.value_length))
        self._is_aborted = False

    @property
    def position_bytes(self) -> int:
        return (self._keys[:, 0, 0].size + self._values[:, 0, 0].size) * self._keys.itemsize

    def forward(self, spans: Sequence[Span]) -> Rows:
        check_spans(spans, self._dimensions, self._region_count, self._capacity)
        ops = ReferenceOps(self._weights, self._keys, self._values, spans)
        logits = self._network(ops)
        if self._is_aborted:
            raise Aborted
        return logits[: sum(span.outputs for span in spans)].astype(np.float32)

    def abort(self) -> None:
        self._is_aborted = True

    def resume(self) -> None:
        self._is_aborted = False

    def truncate(self, region: Region, length: int) -> None:
        self._keys[:, region, length:] = 0
        self._values[:, region, length:] = 0

    def copy(self, source: Region, target: Region, length: int) -> None:
        self.restore(target, self.save(source, length))

    def save(self, region: Region, length: int) -> Snapshot:
        parts = [plane[region, :length] for plane in (*self._keys, *self._values)]
        return Snapshot(length, tuple(part.copy().view(np.uint8) for part in parts))

    def restore(self, region: Region, snapshot: Snapshot) -> None:
        for plane, part in zip((*self._keys, *self._values), snapshot.parts, strict=True):
            plane[region, : snapshot.length] = part.view(np.float64)

    def shift(self, region: Region, start: int, count: int, length: int) -> None:
        moved = slice(start + count, length)
        for layer, rope in enumerate(self._dimensions.ropes):
            factors = self._weights[rope.factors] if rope.factors else None
            keys = self._keys[layer, region]
            back = angles(rope, factors, np.full(length - start - count, -count))
            keys[start : length - count] = turn(keys[moved], rope, back, 1.0)
            values = self._values[layer, region]
            values[start : length - count] = values[moved].copy()
        self.truncate(region, length - count)

    def close(self) -> None:
        pass


class ReferenceOps:
    """The ops of one batch, computed as they are called."""

    def __init__(
        self,
        weights: Mapping[str, Doubles],
        keys: Doubles,
        values: Doubles,
        spans: Sequence[Span],
    ) -> None:
        self._weights = weights
        self._keys = keys
        self._values = values
        self._spans = spans
        self._tokens = [token for span in spans for token in span.tokens]
        self._positions = np.concatenate(
            [np.arange(span.start, span.start + len(span.tokens)) for span in spans]
        )

    def embed(self, weight: str) -> Doubles:
        return self._weights[weight][self._tokens]

    def linear(self, weight: str, x: Doubles, bias: str | None = None) -> Doubles:
        product = x @ self._weights[weight].T
        return product if bias is None else product + self._weights[bias]

    def rms_norm(self, x: Doubles, weight: str, epsilon: float) -> Doubles:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + epsilon) * self._weights[weight]

    def heads(self, x: Doubles, count: int) -> Doubles:
        return x.reshape(x.shape[0], count, -1)

    def rope(self, x: Doubles, rope: Rope) -> Doubles:
        factors = self._weights[rope.factors] if rope.factors else None
        return turn(x, rope, angles(rope, factors, self._positions), magnitude(rope))

    def attend(self, layer: int, q: Doubles, k: Doubles, v: Doubles, spec: Attention) -> Doubles:
        attended: list[Doubles] = []
        row = 0
        for span in self._spans:
            keys, values = self._keys[layer, span.region], self._values[layer, span.region]
            for position in range(span.start, span.start + len(span.tokens)):
                keys[position], values[position] = k[row], v[row]
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = slice(first, position + 1)
                attended.append(attend_row(q[row], keys[seen], values[seen], spec))
                row += 1
        return np.stack(attended)

    def add(self, x: Doubles, y: Doubles) -> Doubles:
        return x + y

    def scale(self, x: Doubles, factor: float) -> Doubles:
        return x * factor

    def soft_cap(self, x: Doubles, cap: float) -> Doubles:
        return cap * np.tanh(x / cap)

    def gated(self, gate: Doubles, up: Doubles, activation: Activation) -> Doubles:
        return activate(gate, activation) * up

    def experts(self, x: Doubles, spec: Experts) -> Doubles:
        probabilities = softmax(x @ self._weights[spec.router].T)
        gates, ups, downs = (self._weights[name] for name in (spec.gate, spec.up, spec.down))
        result = np.zeros_like(x)
        for row, probability in enumerate(probabilities):
            chosen = np.argsort(-probability, kind="stable")[: spec.used]
            share = probability[chosen]
            if spec.normalise:
                share = share / share.sum()
            for expert, part in zip(chosen, share, strict=True):
                hidden = activate(gates[expert] @ x[row], spec.activation) * (ups[expert] @ x[row])
                result[row] += part * (downs[expert] @ hidden)
        return result

    def outputs(self, x: Doubles) -> Doubles:
        return x[output_rows(self._spans)]


def attend_row(q: Doubles, keys: Doubles, values: Doubles, spec: Attention) -> Doubles:
    """q [H, DK], keys [positions, HKV, DK], values [positions, HKV, DV] -> [H * DV]."""
    group = q.shape[0] // keys.shape[1]
    scores = np.einsum("hd,phd->hp", q, np.repeat(keys, group, axis=1)) * spec.scale
    if spec.cap is not None:
        scores = spec.cap * np.tanh(scores / spec.cap)
    shares = softmax(scores)
    return np.einsum("hp,phd->hd", shares, np.repeat(values, group, axis=1)).reshape(-1)


def softmax(x: Doubles) -> Doubles:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def activate(x: Doubles, activation: Activation) -> Doubles:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
