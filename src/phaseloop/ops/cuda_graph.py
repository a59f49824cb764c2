"""What a network says, as a graph: nodes in the order it names them, none of them computed yet.

Kernels do several of the ops at once, so what becomes of a node is decided when all who use it are
known (cuda_lower).  Here only what is a matter of naming is settled: a part of a product is the
product by a part of the matrix, and the wanted rows of a product those of what is multiplied.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn, TypeAlias

from msgspec import Struct

from .interface import (
    Activation,
    Attention,
    BackendError,
    DeltaNet,
    Experts,
    Recurrence,
    Rope,
    Tap,
    Weight,
)

Shape: TypeAlias = tuple[int, ...]


class Node(Struct, eq=False):
    """Told apart by identity.  The last axes of `shape` are a row's."""

    shape: Shape
    inputs: tuple["Node", ...]


class Embedded(Node):
    weight: str
    row_count: int  # of the weight
    scale: float


class Linear(Node):
    """By rows `first` and on of each of a weight's matrices, shape[-1] of them."""

    weight: str
    bias: str | None
    first: int


class Norm(Node):
    weight: str
    epsilon: float


class Heads(Node):
    pass


class Part(Node):
    first: int


class Flat(Node):
    pass


class Turned(Node):
    rope: Rope


class Attended(Node):
    """Inputs: queries, keys, values."""

    layer: int
    spec: Attention


class Recurred(Node):
    """Inputs: mixed, step, rate."""

    layer: int
    spec: DeltaNet


class Sum(Node):
    pass


class Capped(Node):
    cap: float


class Gated(Node):
    """Inputs: gate, up."""

    activation: Activation


class Mixed(Node):
    spec: Experts
    expert_count: int
    hidden: int  # width of an expert's gate


class Taken(Node):
    """The rows whose logits are wanted."""


class CudaOps:
    """Implements Ops[Node].  `row_count` rows, of which `taken` are wanted; None: all."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        recurrence: Recurrence | None,
        row_count: int,
        taken: int | None,
    ) -> None:
        self._weights = weights
        self._recurrence = recurrence
        self._row_count = row_count
        self._taken = taken
        self.effects: list[Attended | Recurred] = []  # what writes to caches and states, in order

    def embed(self, weight: str, by: Literal["token", "position"] = "token") -> Node:
        if by != "token":
            refuse("embeddings of positions")
        count, width = self._weights[weight].shape
        return Embedded((self._row_count, width), (), weight, count, 1.0)

    def linear(self, weight: str, x: Node, bias: str | None = None) -> Node:
        shape = self._weights[weight].shape
        outputs = shape[-2] if len(shape) > 1 else 1
        return Linear((x.shape[0], outputs), (x,), weight, bias, 0)

    def rms_norm(self, x: Node, weight: str, epsilon: float) -> Node:
        return Norm(x.shape, (x,), weight, epsilon)

    def heads(self, x: Node, count: int) -> Node:
        return Heads((x.shape[0], count, x.shape[1] // count), (x,))

    def rope(self, x: Node, rope: Rope) -> Node:
        return Turned(x.shape, (x,), rope)

    def attend(self, layer: int, q: Node, k: Node, v: Node, spec: Attention) -> Node:
        if not spec.causal:
            refuse("attention to later rows")
        width = q.shape[1] * v.shape[2]
        node = Attended((q.shape[0], width), (q, k, v), layer, spec)
        self.effects.append(node)
        return node

    def delta_net(self, layer: int, mixed: Node, step: Node, rate: Node, spec: DeltaNet) -> Node:
        assert self._recurrence is not None, "the model's dimensions tell of its delta nets"
        shape = (*step.shape, self._recurrence.width)
        node = Recurred(shape, (mixed, step, rate), layer, spec)
        self.effects.append(node)
        return node

    def split(self, x: Node, sizes: Sequence[int]) -> tuple[Node, ...]:
        parts: list[Node] = []
        first = 0
        for size in sizes:
            shape = (*x.shape[:-1], size)
            if isinstance(x, Linear) and x.bias is None:
                part = Linear(shape, x.inputs, x.weight, None, x.first + first)
            else:
                part = Part(shape, (x,), first)
            parts.append(part)
            first += size
        return tuple(parts)

    def flat(self, x: Node) -> Node:
        return Flat((x.shape[0], x.shape[1] * x.shape[2]), (x,))

    def add(self, x: Node, y: Node) -> Node:
        return Sum(x.shape, (x, y))

    def scale(self, x: Node, factor: float) -> Node:
        if not isinstance(x, Embedded):
            refuse("scaling of anything but embeddings")
        return Embedded(x.shape, (), x.weight, x.row_count, x.scale * factor)

    def soft_cap(self, x: Node, cap: float) -> Node:
        return Capped(x.shape, (x,), cap)

    def gated(self, gate: Node, up: Node, activation: Activation) -> Node:
        return Gated(up.shape, (gate, up), activation)

    def experts(self, x: Node, spec: Experts) -> Node:
        count, width, _ = self._weights[spec.gate].shape
        return Mixed(x.shape, (x,), spec, count, width // 2 if spec.up is None else width)

    def tap(self, point: Tap, x: Node) -> None:
        """Nobody can ask this backend for hidden rows."""

    def outputs(self, x: Node) -> Node:
        if self._taken is None:
            return x
        if isinstance(x, Linear):
            inner = self.outputs(x.inputs[0])
            shape = (self._taken, *x.shape[1:])
            return Linear(shape, (inner,), x.weight, x.bias, x.first)
        return Taken((self._taken, *x.shape[1:]), (x,))

    def final(self, x: Node) -> Node:
        return x

    # --- what only encoders, classifiers and drafting blocks ask for ------------------------------

    def first_row(self, weight: str) -> Node:
        refuse("rows of weights")

    def given(self) -> Node | None:
        return None

    def layer_norm(self, x: Node, weight: str, bias: str | None, epsilon: float) -> Node:
        refuse("layer norms")

    def keep(self, layer: int, k: Node, v: Node) -> None:
        refuse("keys without queries")

    def join(self, x: Node, y: Node) -> Node:
        refuse("joined rows")

    def activated(self, x: Node, activation: Activation) -> Node:
        refuse("activations without gates")


def refuse(what: str) -> NoReturn:
    raise BackendError(f"{what}: the CUDA backend has no kernels for them; use --device cpu")


def users_of(roots: Iterable[Node]) -> dict[int, list[Node]]:
    """By a node's id, who uses it of all that the roots need."""
    users: dict[int, list[Node]] = {}
    left = list(roots)
    seen = {id(node) for node in left}
    while left:
        node = left.pop()
        for one in node.inputs:
            users.setdefault(id(one), []).append(node)
            if id(one) not in seen:
                seen.add(id(one))
                left.append(one)
    return users
