"""How an engine turns logits into tokens: the protocol.  sampling.py has the sampler."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.core.vocabulary import RequestId

from .settings import Likelihood, Sampling


class Draw(Struct, frozen=True):
    """Whose token is drawn: all that may decide it besides its row of logits."""

    request_id: RequestId
    choice: int
    seed: int  # the request's, 64 bits
    position: int  # of the token drawn, in its text; the same in no two draws of an answer
    tokens: Sequence[int]  # the sequence before it; read only
    sampling: Sampling


class Sampled(Struct, frozen=True):
    """A drawn token; None where there can be none.

    So it is where the logits and the biases rule out every token, or the row is broken: it has a
    NaN, or plus infinity.
    """

    token: int | None
    likelihood: Likelihood | None = None  # if n_probs asked for it


class Sampler(Protocol):
    def sample(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[Sampled]:
        """One token per row of logits [rows, vocabulary].  Rows must not know of each other."""
        ...
