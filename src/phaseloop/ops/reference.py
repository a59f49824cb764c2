"""The oracle: every op as its formula, NumPy float64, nothing shared between rows but the weights.

It is also the fallback where ggml is missing.  Slow, and exact enough that any visible difference
is the other backend's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from .adapters import Adapter, list_of
from .checks import check_spans, output_rows
from .delta_states import NO_SHIFT, Leg, States
from .interface import (
    FINAL,
    Aborted,
    Activation,
    Attention,
    BackendError,
    DeltaNet,
    Dimensions,
    Experts,
    Network,
    Region,
    Rope,
    Rows,
    Snapshot,
    Span,
    Tap,
    Weight,
)
from .passes import cut
from .rope import angles, magnitude, turn

Doubles = NDArray[np.float64]
erf = np.vectorize(math.erf, otypes=[np.float64])


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
        adapters: Sequence[Adapter] = (),
        taps: Sequence[Tap] = (),
    ) -> None:
        """`taps`: where the hidden rows are seen that forward_hidden returns."""
        self._taps = tuple(taps)
        self._adapters = [Unpacked(adapter) for adapter in adapters]
        self._network = network
        self._weights = {name: unpack(weight) for name, weight in weights.items()}
        self._dimensions = dimensions
        self._region_count = region_count
        self._capacity = capacity
        heads, layers = dimensions.kv_head_count, len(dimensions.ropes)
        self._keys = np.zeros((layers, region_count, capacity, heads, dimensions.key_length))
        self._values = np.zeros((layers, region_count, capacity, heads, dimensions.value_length))
        shape = dimensions.recurrence
        self._states = shape and States(shape, np.float64, region_count=region_count)
        self._is_aborted = False

    @property
    def state_bytes(self) -> int:
        return 0 if self._states is None else self._states.state_bytes

    def positions(self, region: Region) -> tuple[int, ...] | None:
        return None if self._states is None else self._states.positions(region)

    @property
    def position_bytes(self) -> int:
        return (self._keys[:, 0, 0].size + self._values[:, 0, 0].size) * self._keys.itemsize

    def forward(self, spans: Sequence[Span]) -> Rows:
        return self._forward(spans, ())[0]

    def forward_hidden(self, spans: Sequence[Span]) -> tuple[Rows, Rows]:
        return self._forward(spans, self._taps)

    def _forward(self, spans: Sequence[Span], taps: Sequence[Tap]) -> tuple[Rows, Rows]:
        adapter_count = len(self._adapters)
        check_spans(spans, self._dimensions, self._region_count, self._capacity, adapter_count)
        legs = {} if self._states is None else self._states.begin(spans)
        passes = [one for span in spans for one in cut([span], len(span.tokens), apart=False)]
        found = [self._run(one.pieces, legs, taps) for one in passes]
        if self._is_aborted:
            raise Aborted
        if self._states is not None:
            self._states.commit(legs)
        logits, hidden = (
            np.concatenate(rows).astype(np.float32) for rows in zip(*found, strict=True)
        )
        return logits, hidden

    def _run(
        self, pieces: Sequence[Span], legs: dict[Region, Leg], taps: Sequence[Tap]
    ) -> tuple[Doubles, Doubles]:
        active = [(self._adapters[adapter], scale) for adapter, scale in list_of(pieces)]
        ops = ReferenceOps(
            self._weights, self._keys, self._values, pieces, self._states, legs, active, taps
        )
        logits = self._network(ops)
        if self._states is not None:
            self._states.passed(legs, pieces)
        shown = [ops.shown[point] for point in taps]
        hidden = np.concatenate(shown, axis=1) if shown else np.empty((len(logits), 0))
        return logits[: sum(piece.outputs for piece in pieces)], hidden

    def abort(self) -> None:
        self._is_aborted = True

    def resume(self) -> None:
        self._is_aborted = False

    def truncate(self, region: Region, length: int) -> None:
        self._keys[:, region, length:] = 0
        self._values[:, region, length:] = 0
        if self._states is not None:
            self._states.truncate(region, length)

    def copy(self, source: Region, target: Region, length: int) -> None:
        self.restore(target, self.save(source, length))

    def save(self, region: Region, length: int) -> Snapshot:
        parts = [plane[region, :length] for plane in (*self._keys, *self._values)]
        states = None if self._states is None else self._states.save(region, length)
        return Snapshot(length, tuple(part.copy().view(np.uint8) for part in parts), states)

    def restore(self, region: Region, snapshot: Snapshot) -> None:
        for plane, part in zip((*self._keys, *self._values), snapshot.parts, strict=True):
            plane[region, : snapshot.length] = part.view(np.float64)
        if self._states is not None:
            self._states.restore(region, snapshot.states or (), snapshot.length)

    def shift(self, region: Region, start: int, count: int, length: int) -> None:
        if self._states is not None:
            raise BackendError(NO_SHIFT)
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


class Unpacked:
    """An adapter's factors by weight: a, and b with the adapter's own factor in it."""

    def __init__(self, adapter: Adapter) -> None:
        self.matrices, self.embeddings = (
            {name: (unpack(part.a), part.factor * unpack(part.b)) for name, part in parts.items()}
            for parts in (adapter.matrices, adapter.embeddings)
        )


class ReferenceOps:
    """The ops of one batch, computed as they are called."""

    def __init__(
        self,
        weights: Mapping[str, Doubles],
        keys: Doubles,
        values: Doubles,
        spans: Sequence[Span],
        states: States | None,
        legs: Mapping[Region, Leg],
        adapters: Sequence[tuple[Unpacked, float]],
        taps: Sequence[Tap],
    ) -> None:
        self._taps = taps
        self.shown: dict[Tap, Doubles] = {}
        self._adapters = adapters
        self._states = states
        self._legs = legs
        self._weights = weights
        self._keys = keys
        self._values = values
        self._spans = spans
        self._tokens = [token for span in spans for token in span.tokens]
        self._positions = np.concatenate(
            [np.arange(span.start, span.start + len(span.tokens)) for span in spans]
        )

    def embed(self, weight: str, by: Literal["token", "position"] = "token") -> Doubles:
        if by == "position":
            return self._weights[weight][self._positions]
        found = self._weights[weight][self._tokens]
        for adapter, scale in self._adapters:
            if weight in adapter.embeddings:
                a, b = adapter.embeddings[weight]
                found = found + scale * (a[self._tokens] @ b.T)
        return found

    def given(self) -> Doubles | None:
        rows = [span.given for span in self._spans if span.given is not None]
        return np.concatenate(rows).astype(np.float64) if rows else None

    def linear(self, weight: str, x: Doubles, bias: str | None = None) -> Doubles:
        matrix = self._weights[weight]
        product = x @ matrix.reshape(-1, matrix.shape[-1]).T
        for a, b in self._factors(weight):
            product = product + (x @ a.T) @ b.T
        return product if bias is None else product + self._weights[bias]

    def first_row(self, weight: str) -> Doubles:
        return self._weights[weight][:1]

    def layer_norm(self, x: Doubles, weight: str, bias: str | None, epsilon: float) -> Doubles:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + epsilon) * self._weights[weight]
        return normed if bias is None else normed + self._weights[bias]

    def rms_norm(self, x: Doubles, weight: str, epsilon: float) -> Doubles:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + epsilon) * self._weights[weight]

    def heads(self, x: Doubles, count: int) -> Doubles:
        return x.reshape(x.shape[0], count, -1)

    def rope(self, x: Doubles, rope: Rope) -> Doubles:
        factors = self._weights[rope.factors] if rope.factors else None
        return turn(x, rope, angles(rope, factors, self._positions), magnitude(rope))

    def attend(self, layer: int, q: Doubles, k: Doubles, v: Doubles, spec: Attention) -> Doubles:
        self.keep(layer, k, v)
        attended: list[Doubles] = []
        row = 0
        for span in self._spans:
            keys, values = self._keys[layer, span.region], self._values[layer, span.region]
            last = span.start + len(span.tokens)
            for position in range(span.start, last):
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = slice(first, position + 1 if spec.causal else last)
                attended.append(attend_row(q[row], keys[seen], values[seen], spec))
                row += 1
        return np.stack(attended)

    def keep(self, layer: int, k: Doubles, v: Doubles) -> None:
        row = 0
        for span in self._spans:
            rows, count = slice(row, row + len(span.tokens)), len(span.tokens)
            cells = slice(span.start, span.start + count)
            self._keys[layer, span.region, cells] = k[rows]
            self._values[layer, span.region, cells] = v[rows]
            row += count

    def delta_net(
        self, layer: int, mixed: Doubles, step: Doubles, rate: Doubles, spec: DeltaNet
    ) -> Doubles:
        assert self._states is not None, "the model's dimensions tell of its delta nets"
        kernel, decay = self._weights[spec.convolution], self._weights[spec.decay]
        shrink = np.exp(np.logaddexp(0.0, step) * decay)
        share = 1 / (1 + np.exp(-rate))
        matrices, histories = self._states.matrices[layer], self._states.histories[layer]
        found: list[Doubles] = []
        for span in self._spans:
            leg = self._legs[span.region]
            state, history = matrices[leg.read].copy(), histories[leg.read].copy()
            for _ in span.tokens:
                row = len(found)
                window = np.concatenate((history, mixed[row][:, None]), axis=1)
                convolved = activate((window * kernel).sum(axis=1), "silu")
                state, output = recur(state, convolved, shrink[row], share[row], spec.epsilon)
                found.append(output)
                history = window[:, 1:]
            matrices[leg.write], histories[leg.write] = state, history
        return np.stack(found)

    def split(self, x: Doubles, sizes: Sequence[int]) -> tuple[Doubles, ...]:
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))

    def flat(self, x: Doubles) -> Doubles:
        return x.reshape(x.shape[0], -1)

    def join(self, x: Doubles, y: Doubles) -> Doubles:
        return np.concatenate((x, y), axis=1)

    def add(self, x: Doubles, y: Doubles) -> Doubles:
        return x + y

    def scale(self, x: Doubles, factor: float) -> Doubles:
        return x * factor

    def soft_cap(self, x: Doubles, cap: float) -> Doubles:
        return cap * np.tanh(x / cap)

    def activated(self, x: Doubles, activation: Activation) -> Doubles:
        return activate(x, activation)

    def gated(self, gate: Doubles, up: Doubles, activation: Activation) -> Doubles:
        return activate(gate, activation) * up

    def experts(self, x: Doubles, spec: Experts) -> Doubles:
        probabilities = softmax(self.linear(spec.router, x))
        gates, downs = self._changed(spec.gate), self._changed(spec.down)
        if spec.up is None:
            gates, ups = np.split(gates, 2, axis=1)
        else:
            ups = self._changed(spec.up)
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

    def tap(self, point: Tap, x: Doubles) -> None:
        if point in self._taps:
            self.shown[point] = x

    def outputs(self, x: Doubles) -> Doubles:
        return x if FINAL in self._taps else x[output_rows(self._spans)]

    def final(self, x: Doubles) -> Doubles:
        self.tap(FINAL, x)
        return x[output_rows(self._spans)] if FINAL in self._taps else x

    def _factors(self, weight: str) -> list[tuple[Doubles, Doubles]]:
        """What the active adapters add to a matrix, as b . a."""
        known = [(adapter.matrices.get(weight), scale) for adapter, scale in self._adapters]
        return [(pair[0], scale * pair[1]) for pair, scale in known if pair is not None]

    def _changed(self, weight: str) -> Doubles:
        """A matrix, or those of all experts, with what adapters add."""
        return sum((b @ a for a, b in self._factors(weight)), self._weights[weight])


def attend_row(q: Doubles, keys: Doubles, values: Doubles, spec: Attention) -> Doubles:
    """q [H, DK], keys [positions, HKV, DK], values [positions, HKV, DV] -> [H * DV]."""
    group = q.shape[0] // keys.shape[1]
    scores = np.einsum("hd,phd->hp", q, np.repeat(keys, group, axis=1)) * spec.scale
    if spec.cap is not None:
        scores = spec.cap * np.tanh(scores / spec.cap)
    shares = softmax(scores)
    return np.einsum("hp,phd->hd", shares, np.repeat(values, group, axis=1)).reshape(-1)


def recur(
    state: Doubles, convolved: Doubles, shrink: Doubles, share: Doubles, epsilon: float
) -> tuple[Doubles, Doubles]:
    """One row of a delta net: state [HV, S, S] and the row's channels -> the next, [HV, S]."""
    heads, width, _ = state.shape
    channels = convolved.reshape(-1, width)
    key_heads = (len(channels) - heads) // 2
    q, k, v = np.split(channels, (key_heads, 2 * key_heads))
    q, k = (np.tile(unit(part, epsilon), (heads // key_heads, 1)) for part in (q, k))
    state = state * shrink[:, None, None]
    missing = v - np.einsum("hvk,hk->hv", state, k)
    state = state + np.einsum("hv,hk->hvk", share[:, None] * missing, k)
    return state, np.einsum("hvk,hk->hv", state, q) / np.sqrt(width)


def unit(x: Doubles, epsilon: float) -> Doubles:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + epsilon)


def softmax(x: Doubles) -> Doubles:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def activate(x: Doubles, activation: Activation) -> Doubles:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if activation == "tanh":
        return np.tanh(x)
    if activation == "gelu_erf":
        return 0.5 * x * (1 + erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
