"""What adapters add to ggml graphs: two narrow products beside each matrix they touch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from .adapters import Adapter, LowRank
from .ggml_library import Cpu, Tensors, rows_are_stable
from .ggml_openmp import ggml
from .interface import AdapterList

Node: TypeAlias = ggml.ggml_tensor_p
NODES_PER_PART = 6  # two products, a scaling, a sum, and the two factors as leaves


class Side(Struct, frozen=True):
    """As LowRank, over tensors of ggml."""

    a: Node
    b: Node
    factor: float


class Placed(Struct, frozen=True):
    """As Adapter, over tensors of ggml."""

    matrices: dict[str, Side]
    embeddings: dict[str, Side]

    @property
    def node_count(self) -> int:
        return NODES_PER_PART * (len(self.matrices) + len(self.embeddings))


def place(tensors: Tensors, adapter: Adapter) -> Placed:
    def side(part: LowRank) -> Side:
        return Side(tensors.add(part.a), tensors.add(part.b), part.factor)

    return Placed(
        {name: side(part) for name, part in adapter.matrices.items()},
        {name: side(part) for name, part in adapter.embeddings.items()},
    )


def unstable_kinds(cpu: Cpu, adapters: Sequence[Adapter], placed: Sequence[Placed]) -> set[str]:
    """Types of factors whose rows depend on their neighbours.

    What a kernel does may depend on a matrix's width, which may be as small as a rank; so one of
    each type and width is tried.
    """
    samples: dict[tuple[str, int], Node] = {}
    for adapter, known in zip(adapters, placed, strict=True):
        for name, part in adapter.matrices.items():
            side = known.matrices[name]
            for weight, node in ((part.a, side.a), (part.b, side.b)):
                if len(weight.shape) == 2:
                    samples.setdefault((weight.kind, weight.shape[1]), node)
    return {kind for (kind, _), node in samples.items() if not rows_are_stable(cpu, node)}


class AdapterGraph:
    """Adds the nodes of the active adapters to one graph; without any, none."""

    def __init__(
        self, context: ggml.ggml_context_p, placed: Sequence[Placed], active: AdapterList
    ) -> None:
        self._c = context
        self._active = [(placed[adapter], scale) for adapter, scale in active]

    def linear(self, weight: str, x: Node, found: Node) -> Node:
        """`found` is x times the matrix."""
        for side, scale in sides([(one.matrices, s) for one, s in self._active], weight):
            low = ggml.ggml_mul_mat(self._c, side.a, x)
            found = self._add(found, ggml.ggml_mul_mat(self._c, side.b, low), scale)
        return found

    def experts(self, weight: str, x: Node, chosen: Node, found: Node) -> Node:
        """`found` is x times the matrices of the chosen experts."""
        for side, scale in sides([(one.matrices, s) for one, s in self._active], weight):
            low = ggml.ggml_mul_mat_id(self._c, side.a, x, chosen)
            found = self._add(found, ggml.ggml_mul_mat_id(self._c, side.b, low, chosen), scale)
        return found

    def lookup(self, weight: str, tokens: Node, found: Node) -> Node:
        """`found` are the embedding's rows of the tokens."""
        for side, scale in sides([(one.embeddings, s) for one, s in self._active], weight):
            low = ggml.ggml_get_rows(self._c, side.a, tokens)
            found = self._add(found, ggml.ggml_mul_mat(self._c, side.b, low), scale)
        return found

    def _add(self, found: Node, change: Node, scale: float) -> Node:
        return ggml.ggml_add(self._c, found, ggml.ggml_scale(self._c, change, scale))


def sides(
    active: Sequence[tuple[Mapping[str, Side], float]], weight: str
) -> Iterator[tuple[Side, float]]:
    """Those that touch a weight, with all that they are scaled by."""
    for known, scale in active:
        side = known.get(weight)
        if side is not None:
            yield side, scale * side.factor
