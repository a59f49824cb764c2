"""How the policy spends the engine: gaps, cohorts, seals, rounds, and slots that stood empty.

It is fed by the watch with what every step meant.  Sums are integers, so a server that runs for
years loses nothing; distributions are counts between fixed bounds.
"""

from bisect import bisect_left
from typing import Literal, TypeAlias

from phaseloop.core.state import Role, State
from phaseloop.core.vocabulary import (
    DECODE_CLASS,
    PREFILL_CLASS,
    AnyEvent,
    ClientResumed,
    DeliverTokens,
    Effects,
    FinishChoice,
    LaunchRound,
    PolicyChanged,
    RequestId,
    RoundCompleted,
    RoundKind,
)

NS = 1_000_000_000
# Seconds, upper ends: from a small model's decode round to a prompt of many pages.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0,
)  # fmt: skip
GENERATING: tuple[Role, ...] = ("ready", "generating")  # parked ones too
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
SealReason: TypeAlias = Literal["prompt_finished", "stream_resumed", "policy_changed", "other"]
EXCLUSIVE_BUT = "mixed"  # the switch under which a round may carry both


class Distribution:
    """How many values lay between its bounds, which are upper ends, and what they add up to."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Tally:
    """Since the server started."""

    def __init__(self) -> None:
        self.gaps_within = Distribution(SECONDS)  # one phase
        self.gaps_across = Distribution(SECONDS)  # a change of phase
        self.cohorts = Distribution(COUNTS)
        self.seals: dict[SealReason, int] = {}
        self.rounds: dict[RoundKind, Distribution] = {}
        self.decode_lane_ns = 0  # of generating sequences, while the engine generated
        self.decode_slot_ns = 0  # of all slots, meanwhile
        self.violations = 0
        self._changes = 0
        # When each choice last had tokens, and how many changes of phase there had been by then.
        self._delivered: dict[tuple[RequestId, int], tuple[int, int]] = {}

    @property
    def lost_slot_ns(self) -> int:
        """Slots' time in which the engine generated for others."""
        return self.decode_slot_ns - self.decode_lane_ns

    def observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        if before.phase != after.phase:
            self._changes += 1
            if after.phase == "decode":
                self._on_decode_phase(after)
        if after.sealed and not before.sealed:
            reason = seal_reason(event)
            self.seals[reason] = self.seals.get(reason, 0) + 1
        for effect in effects:
            if isinstance(effect, DeliverTokens):
                self._on_delivery(effect, event.at_ns)
            elif isinstance(effect, LaunchRound):
                self._on_launch(effect, after)
            elif isinstance(effect, FinishChoice):
                self._delivered.pop((effect.request_id, effect.choice), None)

    def on_round(self, kind: RoundKind, duration_ns: int, lanes: int, slots: int) -> None:
        """A round ended; `lanes` of it generated."""
        if kind not in self.rounds:
            self.rounds[kind] = Distribution(SECONDS)
        self.rounds[kind].observe(duration_ns / NS)
        if kind in ("sample", "decode") or lanes:
            self.decode_lane_ns += lanes * duration_ns
            self.decode_slot_ns += slots * duration_ns

    def _on_decode_phase(self, state: State) -> None:
        members = sum(s is not None and s.role in GENERATING for s in state.slots)
        if members:
            self.cohorts.observe(members)

    def _on_delivery(self, delivered: DeliverTokens, at_ns: int) -> None:
        """Most choices of a round had their last tokens at one time: those gaps count at once."""
        now = (at_ns, self._changes)
        last, times = now, 0
        for delivery in delivered.deliveries:
            key = (delivery.request_id, delivery.choice)
            earlier = self._delivered.get(key)
            self._delivered[key] = now
            if earlier is None:
                continue
            if earlier != last:
                self._count_gaps(last, now, times)
                last, times = earlier, 0
            times += 1
        self._count_gaps(last, now, times)

    def _count_gaps(self, last: tuple[int, int], now: tuple[int, int], times: int) -> None:
        if times:
            gaps = self.gaps_within if last[1] == now[1] else self.gaps_across
            gaps.observe((now[0] - last[0]) / NS, times)

    def _on_launch(self, launch: LaunchRound, after: State) -> None:
        if after.policy.switch == EXCLUSIVE_BUT:
            return
        right = PREFILL_CLASS if after.phase == "prefill" else DECODE_CLASS
        self.violations += launch.kind not in right


def seal_reason(event: AnyEvent) -> SealReason:
    """R5: what made a member wait, so that the cohort takes nobody in any more."""
    if isinstance(event, RoundCompleted):
        return "prompt_finished"
    if isinstance(event, ClientResumed):
        return "stream_resumed"
    if isinstance(event, PolicyChanged):
        return "policy_changed"
    return "other"
