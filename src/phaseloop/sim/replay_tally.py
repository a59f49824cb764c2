"""The figures that every replay prints: cheap enough to keep for each of a million events.

Unlike sim/metrics.py this keeps no distributions, only sums and the worst case; of the worst it
keeps the request, so that `--why` can be asked about it.
"""

from msgspec import Struct

from phaseloop.core.state import Phase
from phaseloop.core.vocabulary import (
    DeliverTokens,
    Delivery,
    FinishChoice,
    FinishReason,
    FinishRequest,
    LaunchRound,
    RequestArrived,
    RequestId,
    RoundKind,
)

from .replay import Step


class Worst(Struct):
    """The longest of its kind so far; `until_ns` is when it ended."""

    length_ns: int
    request_id: RequestId
    choice: int
    until_ns: int


class Tally:
    """Watches a fold.  Everything is read from its public fields."""

    def __init__(self) -> None:
        self.requests = 0
        self.outcomes: dict[FinishReason, int] = {}
        self.rounds: dict[RoundKind, int] = {}
        self.phase_ns: dict[Phase, int] = {}
        self.phases: dict[Phase, int] = {}  # how often each was entered
        self.tokens = 0
        self.worst_gap: Worst | None = None  # between two deliveries to one choice
        self.worst_wait: Worst | None = None  # from arrival to the first token, or to the end
        self._waiting: dict[RequestId, int] = {}  # arrived, no token yet
        self._delivered: dict[tuple[RequestId, int], int] = {}  # but for the last batch
        self._batch: tuple[Delivery, ...] = ()
        self._batch_ns = self._batch_tokens = 0
        self._phase: Phase = "idle"
        self._phase_ns = 0
        self._gap_ns = self._wait_ns = -1
        self.now_ns = 0

    def see(self, step: Step) -> None:
        now_ns = self.now_ns = step.event.at_ns
        if isinstance(step.event, RequestArrived):
            self._on_arrived(step.event, step.before.request_id_last)
        for effect in step.effects:
            if isinstance(effect, LaunchRound):
                self.rounds[effect.kind] = self.rounds.get(effect.kind, 0) + 1
            elif isinstance(effect, DeliverTokens):
                self._on_deliver(effect.deliveries, now_ns)
            elif isinstance(effect, FinishChoice):
                self._on_finish_choice(effect)
            elif isinstance(effect, FinishRequest):
                self._on_finish(effect, now_ns)
        if step.after.phase != self._phase:
            self._enter(step.after.phase, now_ns)

    @property
    def unfinished(self) -> int:
        return self.requests - sum(self.outcomes.values())

    def close(self) -> None:
        """Count what is still open at the last event: the phase, and who has no token yet."""
        self._enter(self._phase, self.now_ns)
        for request_id, arrived_ns in self._waiting.items():
            self._wait(request_id, arrived_ns, self.now_ns)

    def _on_arrived(self, event: RequestArrived, request_id_last: RequestId) -> None:
        for request in event.requests:
            request_id = request.request_id
            if request_id > request_id_last and request_id not in self._waiting:
                self.requests += 1
                self._waiting[request_id] = event.at_ns

    def _on_deliver(self, deliveries: tuple[Delivery, ...], now_ns: int) -> None:
        """Most rounds deliver to whom the one before did: then one look is enough for all."""
        if deliveries == self._batch:
            length_ns = now_ns - self._batch_ns
            if length_ns > self._gap_ns:
                self._gap(length_ns, deliveries[0], now_ns)
            self.tokens += self._batch_tokens
            self._batch_ns = now_ns
            return
        self._settle()
        for delivery in deliveries:
            key = (delivery.request_id, delivery.choice)
            last_ns = self._delivered.get(key)
            if last_ns is not None:
                if now_ns - last_ns > self._gap_ns:
                    self._gap(now_ns - last_ns, delivery, now_ns)
            elif (arrived_ns := self._waiting.pop(key[0], None)) is not None:
                self._wait(key[0], arrived_ns, now_ns)
        self._batch, self._batch_ns = deliveries, now_ns
        self._batch_tokens = sum(delivery.tokens for delivery in deliveries)
        self.tokens += self._batch_tokens

    def _settle(self) -> None:
        """Note for each of the last batch when it had its tokens."""
        for delivery in self._batch:
            self._delivered[(delivery.request_id, delivery.choice)] = self._batch_ns
        self._batch = ()

    def _on_finish_choice(self, effect: FinishChoice) -> None:
        self._settle()
        self._delivered.pop((effect.request_id, effect.choice), None)

    def _gap(self, length_ns: int, delivery: Delivery, now_ns: int) -> None:
        self._gap_ns = length_ns
        self.worst_gap = Worst(length_ns, delivery.request_id, delivery.choice, now_ns)

    def _on_finish(self, effect: FinishRequest, now_ns: int) -> None:
        self.outcomes[effect.reason] = self.outcomes.get(effect.reason, 0) + 1
        arrived_ns = self._waiting.pop(effect.request_id, None)
        if arrived_ns is not None:
            self._wait(effect.request_id, arrived_ns, now_ns)

    def _wait(self, request_id: RequestId, arrived_ns: int, now_ns: int) -> None:
        if now_ns - arrived_ns > self._wait_ns:
            self._wait_ns = now_ns - arrived_ns
            self.worst_wait = Worst(self._wait_ns, request_id, 0, now_ns)

    def _enter(self, phase: Phase, now_ns: int) -> None:
        old = self._phase
        self.phase_ns[old] = self.phase_ns.get(old, 0) + now_ns - self._phase_ns
        if phase != old:
            self.phases[phase] = self.phases.get(phase, 0) + 1
        self._phase, self._phase_ns = phase, now_ns
