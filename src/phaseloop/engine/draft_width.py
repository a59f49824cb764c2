"""How many drafts a sequence's next round verifies: as many as its text has been worth so far.

A round with w drafts, each of which holds with chance p if those before it did, yields

    1 + p + p^2 + ... + p^w

tokens, and takes 1 + w * cost times as long as one without drafts.  The width with the most tokens
per time is used.  The chance is measured per sequence, the latest drafts counting most; the cost is
the engine's, measured when it is loaded.  No bit of an answer depends on either.
"""

from msgspec import Struct

PRIOR_TRIALS, PRIOR_ACCEPTED = 4.0, 3.0  # what a new text is given credit for
MEMORY = 0.9  # what an older draft counts, per draft since
REST = 16  # rounds without drafts, where they are not worth it, until one is tried again


class Width(Struct, frozen=True, gc=False):
    """A sequence's record with drafts.  Immutable, so that a saved sequence can share it."""

    trials: float = PRIOR_TRIALS  # drafts that were looked at, decayed
    accepted: float = PRIOR_ACCEPTED
    rested: int = 0  # rounds without drafts since

    @property
    def chance(self) -> float:
        return self.accepted / self.trials

    def drafts(self, most: int, cost: float) -> int:
        """At most `most`; 0 while the sequence does better without."""
        if cost <= 0.0:
            return most
        best = best_width(self.chance, most, cost)
        return min(1, most) if not best and self.rested >= REST else best

    def without(self) -> "Width":
        """After a round in which none were wanted."""
        return Width(self.trials, self.accepted, self.rested + 1)

    def after(self, drafted: int, accepted: int) -> "Width":
        """After a round that verified `drafted`, of which the first `accepted` held.

        Drafts behind the first wrong one are no evidence: they were guesses upon a wrong text.
        """
        trials, held = self.trials, self.accepted
        for place in range(min(accepted + 1, drafted)):
            trials = MEMORY * trials + 1.0
            held = MEMORY * held + (1.0 if place < accepted else 0.0)
        return Width(trials, held, 0)


def best_width(chance: float, most: int, cost: float) -> int:
    """Each draft more adds less: so the first that lowers the rate is one too many."""
    tokens = reach = 1.0
    for width in range(most):
        reach *= chance
        if reach * (1.0 + width * cost) <= tokens * cost:
            return width
        tokens += reach
    return most
