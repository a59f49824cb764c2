"""Drafters for tests: they know the answers, and say them, or something else, or fail."""

import numpy as np

from phaseloop.engine.draft import NoDrafts
from phaseloop.ops.interface import BackendError

UNKNOWN = (1, 2, 3, 4, 5)  # drafts for a text that is not known


class Scripted(NoDrafts):
    """Says the right token wherever `knack(position)` is true, and another one elsewhere.

    `known` has by (prompt, seed, choice) the answer.  `drafted` and `accepted` count tokens,
    `rounds` the lanes that had drafts.
    """

    name = "scripted"

    def __init__(self, known, knack, vocabulary, most=5):
        self.most = most
        self.known = known
        self.knack = knack
        self.vocabulary = vocabulary
        self.drafted = self.accepted = self.rounds = 0
        self.widths = []

    def propose(self, wishes):
        found = [self._propose(wish)[: wish.count] for wish in wishes]
        self.drafted += sum(map(len, found))
        self.rounds += sum(map(bool, found))
        self.widths += [wish.count for wish in wishes]
        return found

    def follow(self, computed):
        for one in computed:
            if one.generated:
                self.accepted += len(one.sequence) - one.start - 1

    def _propose(self, wish):
        tokens, draw = tuple(wish.draw.tokens), wish.draw
        assert draw.position >= len(tokens)
        for (prompt, seed, choice), answer in self.known.items():
            if (seed, choice) == (draw.seed, draw.choice) and tokens[: len(prompt)] == prompt:
                rest = answer[len(tokens) - len(prompt) :]
                return tuple(
                    token if self.knack(len(tokens) + place) else (token + 1) % self.vocabulary
                    for place, token in enumerate(rest)
                )
        return UNKNOWN


def always(position):
    return True


def never(position):
    return False


def by_chance(position):
    return np.random.default_rng(position).random() < 0.6


class Failing(NoDrafts):
    name = "failing"
    most = 3

    def propose(self, wishes):
        raise BackendError("there is no draft today")

    def follow(self, computed):
        raise BackendError("nor will there be one")
