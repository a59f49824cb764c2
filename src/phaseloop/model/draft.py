"""What a network that drafts from another one's hidden rows is to whoever runs it."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct

from phaseloop.ops.interface import Dimensions, Network, Tap, Weight

DraftKind: TypeAlias = Literal["draft-mtp", "draft-dflash"]  # as llama-server names them


class Draft(Struct, frozen=True):
    """`taps` is where the hidden rows are seen; `tensors` what it reads, some from the model.

    What follows is DFlash's: a block is a token and behind it `block_length - 1` times the token
    `mask`.  `token_ids` are the model's ids of its own, where it knows fewer.  `sections` is the
    layout of its rotary pairs, for a model whose positions have several axes.
    """

    kind: DraftKind
    network: Network
    dimensions: Dimensions
    tensors: Mapping[str, Weight]
    taps: tuple[Tap, ...]
    block_length: int = 0
    mask: int = 0
    token_ids: tuple[int, ...] | None = None
    sections: tuple[int, ...] | None = None
