"""What a transformer asks of whoever computes it: one forward pass over the lanes of a round.

A network (phaseloop.model) is a function of `Ops`; it names weights by their names in the file and
never sees a backend's arrays.  A backend runs a network over a batch: at once with arrays
(reference), or by building a graph that later batches of the same shape reuse (ggml).

Shapes.  T rows of a batch, the lanes' tokens one lane after the other; O rows whose logits are
wanted; D model width; H query heads, HKV key and value heads, DK and DV their widths; V vocabulary.
Arrays are row-major, the last axis is contiguous: `[T, H, DK]` is T rows of H heads.

KV regions.  A region holds the keys and values of one sequence in position order, from position 0.
Every region has the same capacity, and where a position lies in its region depends on nothing else.

Recurrent states.  Where a model has gated delta nets, a sequence also has a state that all its
tokens went into: it cannot be cut.  A region keeps the state after its last row, the one before its
last pass, and those that passes were told to mark; it can only go back to one of these.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Tensor = TypeVar("Tensor")
Region: TypeAlias = int
Tap: TypeAlias = int  # where hidden rows are seen: at the input of a layer, from 0, or FINAL
Rows: TypeAlias = NDArray[np.float32]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_erf", "sigmoid", "tanh"]
AdapterList: TypeAlias = tuple[tuple[int, float], ...]  # (which adapter, its scale), by the former
FINAL: Tap = -1  # after the last norm, before the head


class BackendError(Exception):
    """A batch, a weight or a machine this backend cannot serve; says what, where and the remedy."""


class Aborted(Exception):
    """The pass was told to stop; the rows it was to write to KV regions are undefined."""


class Weight(Struct, frozen=True):
    """A tensor as it lies in a file.

    `data` is its bytes, read-only, aligned as the file aligns them.  `shape` is row-major: a matrix
    that maps D to N is [N, D]; quantised types pack along the last axis.
    """

    name: str
    kind: str  # GGML's name of the type: "F32", "Q4_K"
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class Rope(Struct, frozen=True):
    """Rotary position embedding of the first `dimensions` of each head.

    Pair i turns by position * base ** (-2i / dimensions) / factors[i], and by `frequency_scale` of
    that where YaRN (`extrapolation` > 0) does not extrapolate.  `adjacent` pairs are (2i, 2i + 1),
    `halves` are (i, i + dimensions / 2).
    """

    dimensions: int
    base: float
    pairs: Literal["adjacent", "halves"]
    frequency_scale: float = 1.0
    extrapolation: float = 0.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    context_original: int = 0  # tokens; read only where extrapolation > 0
    factors: str | None = None  # a weight, F32 [dimensions / 2]


class Attention(Struct, frozen=True):
    """softmax(cap(scale * q . k)) . v over the positions up to the row's own.

    `window`: only the last that many positions, the row's own included.  `cap`: scores s become
    cap * tanh(s / cap).  Where not `causal`, rows also see those of their pass that come later.
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    causal: bool = True


class Experts(Struct, frozen=True):
    """A mixture of gated feed-forward networks: weights' names, and how many a row uses.

    router [E, D]; gate and up [E, F, D]; down [E, D, F].  The `used` experts of highest probability
    (softmax over all E) are summed by their probabilities, which `normalise` makes sum to one.
    Without `up`, gate is [E, 2 F, D], an expert's gate before its up.
    """

    router: str
    gate: str
    up: str | None
    down: str
    used: int
    normalise: bool
    activation: Activation = "silu"


class DeltaNet(Struct, frozen=True):
    """A gated delta net's weights, all F32.

    convolution [C, K], whose last column meets the row itself; decay [HV], negative.  `epsilon` is
    added to the squared lengths of queries and keys.
    """

    convolution: str
    decay: str
    epsilon: float


class Recurrence(Struct, frozen=True):
    """HK key heads and HV value heads, all of width S; value head h reads key head h % HK.

    A convolution over K rows mixes C channels: the queries', the keys' and the values'.  A state
    has per layer a matrix [S, S] per value head and the last K - 1 rows of the channels.
    """

    layer_count: int
    key_heads: int
    value_heads: int
    width: int
    kernel: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.width

    @property
    def state_size(self) -> int:
        """Values of one sequence's state, in all layers."""
        matrices = self.value_heads * self.width * self.width
        return self.layer_count * (matrices + self.channels * (self.kernel - 1))


class Dimensions(Struct, frozen=True):
    """What a backend must know to lay out what sequences hold, to turn keys, to check a batch."""

    ropes: tuple[Rope, ...]  # one per layer that attends: how its keys are turned
    kv_head_count: int
    key_length: int
    value_length: int
    vocabulary: int
    recurrence: Recurrence | None = None
    given_width: int = 0  # of the rows that come along with tokens; 0: none can
    output_width: int = 0  # of the rows that the network gives; 0: it gives logits
    whole_lanes: bool = False  # all rows of a lane see each other: they go into one pass


class Span(Struct, frozen=True):
    """One lane: consecutive tokens of one sequence, written to its region from `start`.

    `outputs` is how many of its last rows' logits are wanted.  `generated` rows may be computed by
    other means than those of a prompt, but always by the same: so the bits of a row depend on its
    sequence's tokens up to it, on which of them were generated, and on nothing else.

    `marks` are positions after `start`, up to the span's end, ascending, whose recurrent states the
    region shall keep; a model without such states ignores them.

    `adapters` change what is computed (ops/adapters.py); lanes of one pass have the same ones.

    `given` are rows that come along with the tokens, [len(tokens), W], to a network that reads
    some; either every lane of a pass has them or none.
    """

    region: Region
    start: int
    tokens: Sequence[int]
    outputs: int
    generated: bool
    marks: tuple[int, ...] = ()
    adapters: AdapterList = ()
    given: Rows | None = None


class Ops(Protocol[Tensor]):
    """The vocabulary of networks.  Weights are named; `None` for a bias means none."""

    def embed(self, weight: str, by: Literal["token", "position"] = "token") -> Tensor:
        """[V, D] -> [T, D]: the row of each token of the batch, or of its position."""
        ...

    def first_row(self, weight: str) -> Tensor: ...  # [N, D] -> [1, D]

    def given(self) -> Tensor | None:
        """[T, W]: the rows that came along with the tokens, if some did."""
        ...

    def linear(self, weight: str, x: Tensor, bias: str | None = None) -> Tensor:
        """[N, D], [T, D] -> [T, N]: x . weight^T + bias."""
        ...

    def rms_norm(self, x: Tensor, weight: str, epsilon: float) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, [T, D] or [T, H, DK]."""
        ...

    def layer_norm(self, x: Tensor, weight: str, bias: str | None, epsilon: float) -> Tensor:
        """(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias over the last axis."""
        ...

    def heads(self, x: Tensor, count: int) -> Tensor:
        """[T, count * DK] -> [T, count, DK]."""
        ...

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        """[T, H, DK], turned by each row's position."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> Tensor:
        """q [T, H, DK], k [T, HKV, DK], v [T, HKV, DV] -> [T, H * DV].

        Writes k and v to the layer's part of each lane's region, then attends, each row to the
        positions of its own region up to its own.  Query head h reads KV head h // (H / HKV).
        """
        ...

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As attend, but only writes."""
        ...

    def delta_net(
        self, layer: int, mixed: Tensor, step: Tensor, rate: Tensor, spec: DeltaNet
    ) -> Tensor:
        """mixed [T, C], step [T, HV], rate [T, HV] -> [T, HV, S].

        A lane's rows in order, from its region's state of that layer, which it leaves behind:

            q, k, v = silu(convolution(mixed)), the heads of each after one another
            q, k    to length 1, and q by 1 / sqrt(S)
            state   = exp(softplus(step) * decay) * state
            state  += outer(sigmoid(rate) * (v - state . k), k)
            row     = state . q
        """
        ...

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Cut the last axis into parts of these sizes, whose sum it is."""
        ...

    def flat(self, x: Tensor) -> Tensor: ...  # [T, H, DK] -> [T, H * DK]

    def join(self, x: Tensor, y: Tensor) -> Tensor: ...  # [T, D], [T, E] -> [T, D + E]

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...  # y may be one row

    def activated(self, x: Tensor, activation: Activation) -> Tensor: ...

    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor: ...  # cap * tanh(x / cap)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up; gelu is the tanh approximation.  sigmoid's may be one column."""
        ...

    def experts(self, x: Tensor, spec: Experts) -> Tensor:
        """[T, D] -> [T, D]."""
        ...

    def tap(self, point: Tap, x: Tensor) -> None:
        """Shows x [T, D] to whoever asked for the hidden rows of this point."""
        ...

    def outputs(self, x: Tensor) -> Tensor:
        """[T, D] -> [O, D]: the rows whose logits are wanted; at least one, wanted or not.

        Where somebody asked for the final rows, all are of use up to there: then x as it is.
        """
        ...

    def final(self, x: Tensor) -> Tensor:
        """What the last norm made of what `outputs` left -> [O, D], for the head; taps FINAL."""
        ...


class Network(Protocol):
    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        """-> logits [O, V], or rows of another width (Dimensions)."""
        ...


class State(Struct, frozen=True):
    """A sequence's recurrent state after `position` tokens.  Immutable, so it can be shared."""

    position: int
    parts: tuple[NDArray[np.uint8], ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Snapshot(Struct, frozen=True):
    """The first `length` positions of a region, outside it.  Immutable; any region may take it.

    The first axis of each part is the position.  `states` are those marked, None where the model
    has none; without the state of its last position a snapshot only serves in part.
    """

    length: int
    parts: tuple[NDArray[np.uint8], ...]
    states: tuple[State, ...] | None = None

    @property
    def size_bytes(self) -> int:
        kept = sum(state.size_bytes for state in self.states or ())
        return kept + sum(part.nbytes for part in self.parts)

    @property
    def positions(self) -> tuple[int, ...] | None:
        """As Backend.positions."""
        return None if self.states is None else tuple(state.position for state in self.states)

    def with_last_states(self, count: int) -> "Snapshot":
        return Snapshot(self.length, self.parts, self.states and self.states[-count:])

    def first(self, length: int) -> "Snapshot":
        """Its first `length` positions, in the same memory."""
        states = self.states
        if states is not None:
            states = tuple(state for state in states if state.position <= length)
        return Snapshot(length, tuple(part[:length] for part in self.parts), states)


class Backend(Protocol):
    """One loaded network and its KV regions.  One caller at a time, `abort` excepted."""

    @property
    def name(self) -> str:
        """Names the backend and all that changes its bits."""
        ...

    @property
    def position_bytes(self) -> int:
        """What one position of one sequence takes in a region or a snapshot."""
        ...

    @property
    def state_bytes(self) -> int:
        """What one recurrent state takes; 0 where the model has none."""
        ...

    def positions(self, region: Region) -> tuple[int, ...] | None:
        """Lengths, ascending, besides 0, to which a region can be cut and go on; None: to any.

        From any thread.
        """
        ...

    def forward(self, spans: Sequence[Span]) -> Rows:
        """Run the lanes; their regions are distinct.  -> [O, V] logits in lane order, a copy.

        Raises BackendError before anything is computed, Aborted meanwhile; recurrent states then
        are what they were.
        """
        ...

    def abort(self) -> None:
        """From any thread: end the running pass, or the next one, by Aborted."""
        ...

    def resume(self) -> None:
        """Forget an `abort` that came too late."""
        ...

    def truncate(self, region: Region, length: int) -> None:
        """Forget the positions from `length` on and give back their memory."""
        ...

    def copy(self, source: Region, target: Region, length: int) -> None:
        """The first `length` positions, and the states among them; `target` must be empty."""
        ...

    def save(self, region: Region, length: int) -> Snapshot: ...

    def restore(self, region: Region, snapshot: Snapshot) -> None: ...

    def shift(self, region: Region, start: int, count: int, length: int) -> None:
        """Drop [start, start + count) of `length` positions; later keys turn back by `count`.

        Raises BackendError for a model with recurrent states, from which nothing can be dropped.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class HiddenBackend(Backend, Protocol):
    """A backend that shows hidden rows, of those points that it was made with."""

    def forward_hidden(self, spans: Sequence[Span]) -> tuple[Rows, Rows]:
        """As forward, bit by bit, and beside it rows [T, W] in lane order, all points' joined."""
        ...
