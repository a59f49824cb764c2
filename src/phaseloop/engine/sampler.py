"""How an engine turns logits into tokens: the protocol, and the sampler that needs no settings."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.core.vocabulary import RequestId


class Draw(Struct, frozen=True):
    """Whose token is drawn: all that may decide it besides its row of logits."""

    request_id: RequestId
    choice: int
    seed: int  # the request's, 64 bits
    position: int  # of the token drawn, in its sequence
    tokens: Sequence[int]  # the sequence before it; read only


class Sampler(Protocol):
    def sample(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[int]:
        """One token per row of logits [rows, vocabulary].  Rows must not know of each other."""
        ...


class Greedy:
    """The likeliest token; of equals, the one with the lowest id."""

    def sample(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[int]:
        return logits.argmax(axis=1).tolist()
