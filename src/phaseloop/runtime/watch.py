"""What the loop's steps mean for each request's timing and for the server's counters.

It sees what a trace holds, after the decision and before the deeds, and decides nothing.
"""

from msgspec import Struct

from phaseloop.core.state import Flight, State
from phaseloop.core.vocabulary import (
    DECODE_CLASS,
    AnyEvent,
    DeliverTokens,
    Effects,
    Failed,
    FinishReason,
    FinishRequest,
    Lane,
    LaunchRound,
    Produced,
    RequestArrived,
    RequestSeated,
    RoundCompleted,
    RoundKind,
)

from .gateway import PROGRESS, Begun, Gateway, Stream
from .tally import Tally

COMPUTES_PROMPT: tuple[RoundKind, ...] = ("prefill", "encode", "mixed")
BEGUN = Begun()


class Counters(Struct):
    """Since the server started.  `_ns` are sums of rounds' durations; a mixed round is in both."""

    prompt_tokens: int = 0  # computed
    prompt_tokens_cached: int = 0  # found instead
    prefill_ns: int = 0
    generated_tokens: int = 0
    decode_ns: int = 0
    prefill_rounds: int = 0
    decode_rounds: int = 0
    decode_lanes: int = 0
    mixed_rounds: int = 0
    phase_changes: int = 0
    tokens_max: int = 0  # of one sequence, prompt and answer
    drafts: int = 0  # lanes that had drafts to verify
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_place: dict[int, int] = {}  # first drafts, second ones, ..., that were right
    ends: dict[FinishReason, int] = {}


class Watch:
    """Belongs to the loop: pass `observe` to its Stepper."""

    def __init__(self, gateway: Gateway) -> None:
        self.counters = Counters(ends={}, accepted_by_place={})
        self.tally = Tally()
        self._gateway = gateway

    def observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        at_ns = event.at_ns
        self.tally.observe(event, before, after, effects)
        if before.phase != after.phase:
            self.counters.phase_changes += 1
        match event:
            case RoundCompleted():
                # An answer to a round that is not in flight is ignored by the reducer, too.
                if before.flight is not None and before.flight.round_id == event.round_id:
                    self._on_round(event, before.flight, before)
            case RequestArrived():
                for request in event.requests:
                    if stream := self._gateway.stream(request.request_id):
                        stream.timing.arrived_ns = at_ns
            case RequestSeated():
                self._on_seated(event)
            case _:
                pass
        for effect in effects:
            match effect:
                case LaunchRound():
                    self._on_launch(effect, at_ns)
                case DeliverTokens():
                    self._on_delivery(effect, at_ns)
                case FinishRequest():
                    ends = self.counters.ends
                    ends[effect.reason] = ends.get(effect.reason, 0) + 1
                    if stream := self._gateway.stream(effect.request_id):
                        stream.timing.ended_ns = at_ns
                case _:
                    pass

    def _on_seated(self, event: RequestSeated) -> None:
        stream = self._gateway.stream(event.request_id)
        if stream is None:
            return
        timing = stream.timing
        timing.slots[event.choice] = event.slot
        if event.choice == 0 and timing.seated_ns is None:
            timing.seated_ns = event.at_ns
            if not event.restore:  # what is elsewhere counts once it is here
                timing.cached = event.cached_length
                self.counters.prompt_tokens_cached += event.cached_length

    def _on_launch(self, launch: LaunchRound, at_ns: int) -> None:
        for lane in launch.lanes:
            stream = self._gateway.stream(lane.request_id)
            if stream is None:
                continue
            timing = stream.timing
            if timing.begun_ns is None:
                timing.begun_ns = at_ns
                stream.put(BEGUN)
            if lane.outputs and timing.opened_ns is None:
                timing.opened_ns = at_ns

    def _on_delivery(self, delivered: DeliverTokens, at_ns: int) -> None:
        for delivery in delivered.deliveries:
            self.counters.generated_tokens += delivery.tokens
            stream = self._gateway.stream(delivery.request_id)
            if stream is not None and stream.timing.first_ns is None:
                stream.timing.first_ns = at_ns

    def _on_round(self, event: RoundCompleted, flight: Flight, before: State) -> None:
        prompt_lanes = [lane for lane in flight.lanes if is_prompt_lane(before, flight.kind, lane)]
        self._count(event, flight, prompt_lanes)
        generating = flight.kind in ("sample", "decode", "mixed")
        lanes = len(flight.lanes) - len(prompt_lanes) if generating else 0
        self.tally.on_round(flight.kind, event.duration_ns, lanes, len(before.slots))
        told: set[int] = set()  # a round counts once for a request, however many choices it has
        for lane, result in zip(flight.lanes, event.results, strict=False):
            stream = self._gateway.stream(lane.request_id)
            if stream is None:
                continue
            is_prompt = lane in prompt_lanes
            if lane.request_id not in told:
                told.add(lane.request_id)
                if is_prompt:
                    stream.timing.prefill_work_ns += event.duration_ns
                else:
                    stream.timing.decode_work_ns += event.duration_ns
            if is_prompt and not isinstance(result, Failed):
                self._on_prompt_rows(stream, lane, flight.kind, event.at_ns)

    def _on_prompt_rows(self, stream: Stream, lane: Lane, kind: RoundKind, at_ns: int) -> None:
        timing, prompt_length = stream.timing, stream.request.prompt_length
        if lane.choice != 0 or timing.ready_ns is not None:
            return
        if kind in COMPUTES_PROMPT:
            timing.processed += lane.count
        elif kind == "fork":  # the shared beginning, computed by another request (R18)
            self.counters.prompt_tokens_cached += max(0, lane.count - timing.cached)
            timing.cached = max(timing.cached, lane.count)
        elif kind == "restore" and timing.cached == timing.processed == 0:
            self.counters.prompt_tokens_cached += lane.count  # a later one brings itself back
            timing.cached = lane.count
        if lane.start + lane.count >= prompt_length:
            timing.ready_ns = at_ns
        stream.put(PROGRESS)

    def _count(self, event: RoundCompleted, flight: Flight, prompt_lanes: list[Lane]) -> None:
        counters, kind = self.counters, flight.kind
        for lane in flight.lanes:
            counters.tokens_max = max(counters.tokens_max, lane.start + lane.count)
        if kind in COMPUTES_PROMPT:
            counters.prefill_rounds += 1
            counters.prefill_ns += event.duration_ns
            counters.prompt_tokens += sum(lane.count for lane in prompt_lanes)
        if kind in ("sample", "decode", "mixed"):
            counters.decode_ns += event.duration_ns
        if kind in ("decode", "mixed"):
            counters.decode_rounds += 1
            counters.decode_lanes += len(flight.lanes) - len(prompt_lanes)
            counters.mixed_rounds += kind == "mixed"
            self._count_drafts(event, flight)

    def _count_drafts(self, event: RoundCompleted, flight: Flight) -> None:
        counters = self.counters
        for place, (lane, result) in enumerate(zip(flight.lanes, event.results, strict=False)):
            if lane.outputs <= 1 or not isinstance(result, Produced):
                continue
            drafted = event.drafts(place, lane)
            # Its last token was drawn, not guessed, except that an end token is not among them.
            accepted = max(0, min(drafted, result.tokens - (not result.finish)))
            if stream := self._gateway.stream(lane.request_id):
                stream.timing.drafted += drafted
                stream.timing.accepted += accepted
                stream.timing.drafted_last[lane.choice] = drafted
            if drafted:
                counters.drafts += 1
                counters.drafted_tokens += drafted
                counters.accepted_tokens += accepted
                for guess in range(accepted):
                    counters.accepted_by_place[guess] = counters.accepted_by_place.get(guess, 0) + 1


def is_prompt_lane(state: State, kind: RoundKind, lane: Lane) -> bool:
    """Whether a lane of the round in flight is prompt work."""
    if kind in DECODE_CLASS:
        return False
    sequence = state.slots[lane.slot]
    return kind != "mixed" or sequence is None or lane.start < sequence.request.prompt_length
