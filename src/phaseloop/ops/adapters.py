"""Low-rank adapters (LoRA): what they add to the matrices of a network.

An adapter adds `factor * scale * b . a` to a matrix, `factor` being its own and `scale` what the
list of a span says.  Backends compute it beside the matrix, as b . (a . x): the matrix stays as it
is, and a pass without adapters computes exactly what it would if none were loaded.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from .interface import AdapterList, Span, Weight


class LowRank(Struct, frozen=True):
    """What an adapter adds to one matrix.

    Beside a matrix [N, D]: a [R, D], b [N, R]; beside those of E experts [E, N, D]: a [E, R, D],
    b [E, N, R].  Beside an embedding [V, D], whose rows are looked up: a [V, R], b [D, R].
    """

    a: Weight
    b: Weight
    factor: float


class Adapter(Struct, frozen=True):
    """By names of weights.  A matrix that is also the embedding is only changed as that."""

    matrices: Mapping[str, LowRank]
    embeddings: Mapping[str, LowRank]

    @property
    def size_bytes(self) -> int:
        return sum(part.a.data.nbytes + part.b.data.nbytes for part in self.parts())

    def parts(self) -> tuple[LowRank, ...]:
        return (*self.matrices.values(), *self.embeddings.values())


def list_of(spans: Sequence[Span]) -> AdapterList:
    """The list that all lanes of a pass have; backends have checked that it is one."""
    return spans[0].adapters
