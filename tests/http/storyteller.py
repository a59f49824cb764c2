"""An engine that answers every prompt with a text known beforehand."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace
from scripted import DESCRIPTION, MS, ScriptedEngine
from vocabularies import bpe_tokenizer

from phaseloop.core.vocabulary import Failed, Lane, LaunchRound, Produced, SeatRequest
from phaseloop.engine.protocol import Content, Description, Outcome, Seated
from phaseloop.engine.settings import Likelihood

TOKENIZER = bpe_tokenizer()
CHOSEN, SECOND = -0.25, -1.5  # log probabilities that it reports
OTHER = TOKENIZER.encode("X")[0]


class Storyteller(ScriptedEngine):
    """Every choice's answer is `tell` of its prompt: one token of it per round, then the end.

    `fails` names rounds, by kind, whose lanes fail.  While `gate` is clear, rounds wait.  In
    virtual time each takes `duration_ns`.
    """

    def __init__(
        self,
        text: str = "Once upon a time.",
        *,
        tell: Callable[[Content, int], Sequence[int]] | None = None,
        ends: bool = True,
        fails: str = "",
        duration_ns: int = MS,
        **description: Any,
    ):
        super().__init__(duration_ns=duration_ns)
        ids = TOKENIZER.encode(text)
        self.tell = tell or (lambda content, choice: ids)
        self.ends = ends
        self.fails = fails
        self.gate = threading.Event()
        self.gate.set()
        self.contents: dict[int, Content] = {}
        self.description = replace(DESCRIPTION, **description)

    def describe(self) -> Description:
        return self.description

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        self.contents[seat.request_id] = content
        return super().seat(seat, content)

    def run(self, launch: LaunchRound) -> Outcome:
        self.launches.append(launch)
        self.on_run(launch)
        self.gate.wait()
        if launch.kind == self.fails:
            failed = tuple(Failed("out of order") for _ in launch.lanes)
            return Outcome(failed, ((),) * len(failed), duration_ns=self.duration_ns)
        told = [self._told(lane) for lane in launch.lanes]
        results = tuple(result for result, _, _ in told)
        tokens = tuple(ids for _, ids, _ in told)
        likelihoods = tuple(likelihoods for _, _, likelihoods in told)
        given = likelihoods if any(likelihoods) else ()
        return Outcome(results, tokens, given, duration_ns=self.duration_ns)

    def _told(self, lane: Lane) -> tuple[Produced, tuple[int, ...], tuple[Likelihood, ...]]:
        if not lane.outputs:
            return Produced(), (), ()
        key = (lane.request_id, lane.choice)
        position = self._produced.get(key, 0)
        self._produced[key] = position + 1
        content = self.contents[lane.request_id]
        story = self.tell(content, lane.choice)
        if position >= len(story) and self.ends:
            return Produced(0, finish=True), (), ()
        token = story[position % len(story)]
        likelihoods: tuple[Likelihood, ...] = ()
        if content.sampling.n_probs:
            top = ((token, CHOSEN), (OTHER, SECOND))
            likelihoods = (Likelihood(CHOSEN, top[: content.sampling.n_probs]),)
        return Produced(1), (token,), likelihoods
