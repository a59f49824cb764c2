"""Which weights of a network an adapter can change: the network itself is asked.

It is walked once by ops that compute nothing and write down the names.  So a matrix that a file has
and a network does not multiply by (a convolution, a block that only drafts) is none of them.
"""

from collections.abc import Sequence
from typing import Literal

from phaseloop.ops.interface import (
    Activation,
    Attention,
    DeltaNet,
    Experts,
    Network,
    Ops,
    Rope,
    Tap,
)


class Targets(Ops[None]):
    """Names of weights.  An embedding that is the head, too, counts as an embedding."""

    def __init__(self, network: Network) -> None:
        self.matrices: set[str] = set()
        self.expert_matrices: set[str] = set()
        self.embeddings: set[str] = set()
        network(self)
        self.matrices -= self.embeddings

    def embed(self, weight: str, by: Literal["token", "position"] = "token") -> None:
        if by == "token":
            self.embeddings.add(weight)

    def first_row(self, weight: str) -> None: ...

    def given(self) -> None: ...

    def linear(self, weight: str, x: None, bias: str | None = None) -> None:
        self.matrices.add(weight)

    def experts(self, x: None, spec: Experts) -> None:
        self.linear(spec.router, x)
        names = (spec.gate, spec.up, spec.down)
        self.expert_matrices.update(name for name in names if name is not None)

    def split(self, x: None, sizes: Sequence[int]) -> tuple[None, ...]:
        return (None,) * len(sizes)

    def rms_norm(self, x: None, weight: str, epsilon: float) -> None: ...

    def layer_norm(self, x: None, weight: str, bias: str | None, epsilon: float) -> None: ...

    def heads(self, x: None, count: int) -> None: ...

    def rope(self, x: None, rope: Rope) -> None: ...

    def attend(self, layer: int, q: None, k: None, v: None, spec: Attention) -> None: ...

    def keep(self, layer: int, k: None, v: None) -> None: ...

    def delta_net(self, layer: int, mixed: None, step: None, rate: None, spec: DeltaNet) -> None:
        pass

    def flat(self, x: None) -> None: ...

    def join(self, x: None, y: None) -> None: ...

    def add(self, x: None, y: None) -> None: ...

    def scale(self, x: None, factor: float) -> None: ...

    def soft_cap(self, x: None, cap: float) -> None: ...

    def activated(self, x: None, activation: Activation) -> None: ...

    def gated(self, gate: None, up: None, activation: Activation) -> None: ...

    def tap(self, point: Tap, x: None) -> None: ...

    def outputs(self, x: None) -> None: ...

    def final(self, x: None) -> None: ...
