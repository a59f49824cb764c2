"""What a run was like for its clients and for the engine, computed from its steps alone.

The collector sees what a trace holds, nothing else; so a simulation, a live server and a replayed
trace are measured by the same code.  Its memory is bounded by the requests that are alive.

The waits of a request, in order (none overlaps the next, H4 of the reference):

    queue      from its arrival to its seat; who leaves the queue without one counts too
    prefill    from its seat to the end of its prompt, less the rounds that carried its own rows:
               what it waited for other prompts, or for others' tokens
    barrier    from the end of its prompt to the launch of the round that draws its first token
    gap        from one delivery of tokens to the next, per choice

`ttft` is from arrival to the first delivery, per request.  A wait that is still open at the last
event counts with its length so far, so that a run that is cut does not hide who starved.
"""

from msgspec import Struct

from phaseloop.core.state import Limits, Role, State
from phaseloop.core.vocabulary import (
    AnyEvent,
    DeliverTokens,
    Effects,
    Failed,
    FinishChoice,
    FinishReason,
    FinishRequest,
    LaunchRound,
    Policy,
    RequestArrived,
    RequestId,
    RoundCompleted,
    RoundFailed,
    RoundKind,
    SeatRequest,
)

from .spread import NS, Percentiles, Spread

ANSWERED: tuple[FinishReason, ...] = ("stop", "length", "no_space")
CANCELLED: tuple[FinishReason, ...] = ("cancelled", "stalled")
EXPIRED: tuple[FinishReason, ...] = ("deadline", "queue_timeout")
FAILED: tuple[FinishReason, ...] = ("failed", "engine_lost", "shutdown")
GENERATING: tuple[RoundKind, ...] = ("sample", "decode", "mixed")
PROMPT_ROLES: tuple[Role, ...] = ("prefilling", "following")
TOKEN_ROLES: tuple[Role, ...] = ("ready", "generating")
PROMPTING: tuple[RoundKind, ...] = ("prefill", "encode", "mixed")


class Summary(Struct, frozen=True):
    """One run.  `_s` are seconds; waits are nearest-rank percentiles (see sim/spread.py)."""

    policy: str
    prefill_makespan_s: float | None  # first prompt round's launch to the last prompt's end
    makespan_s: float | None  # first arrival to the last request's end
    prefill_tokens_per_s: float | None  # prompt tokens per second of rounds that carried some
    decode_tokens_per_s: float | None  # delivered tokens per second of rounds that generated some
    tokens_per_s: float | None  # delivered tokens per second of makespan
    ttft_s: Percentiles
    gap_s: Percentiles
    queue_wait_s: Percentiles
    prefill_wait_s: Percentiles
    barrier_wait_s: Percentiles
    rounds: int
    mixed_rounds: int  # rounds with both prompt rows and generating rows
    prefill_rounds: int
    decode_rounds: int
    decode_occupancy: float | None  # generating lanes / slots, weighted by the rounds' time
    phase_changes: int
    events: int
    prefill_tokens: int
    decode_tokens: int
    requests: int
    finished: int
    cancelled: int
    expired: int
    refused: int
    failed: int
    unfinished: int


class Track:
    """A seated choice, until it ends."""

    __slots__ = ("carried_ns", "delivered_ns", "ready_ns", "sampled", "seated_ns")

    def __init__(self, seated_ns: int) -> None:
        self.seated_ns = seated_ns
        self.carried_ns = 0  # time of the rounds that computed its prompt
        self.ready_ns: int | None = None  # while it waits for its first token
        self.sampled = False  # the round of its first token was launched
        self.delivered_ns: int | None = None


class Collector:
    """Fold a run's steps with `observe`, in order; ask for the `summary` at any time."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self.policy = policy.name
        self._slot_count = limits.slot_count
        self._queued: dict[RequestId, int] = {}  # arrival of those without a seat
        self._silent: dict[RequestId, int] = {}  # arrival of those without a token
        self._alive: dict[RequestId, None] = {}
        self._tracks: dict[tuple[RequestId, int], Track] = {}
        self._ttft = Spread()
        self._gap = Spread()
        self._queue_wait = Spread()
        self._prefill_wait = Spread()
        self._barrier_wait = Spread()
        self._launched_ns = 0
        self._prompt_lanes = 0  # in the round in flight
        self._first_arrival_ns: int | None = None
        self._last_end_ns: int | None = None
        self._first_prefill_ns: int | None = None
        self._last_ready_ns: int | None = None
        self._last_event_ns = 0
        self._prefill_ns = self._decode_ns = self._lane_ns = 0
        self._rounds = self._mixed_rounds = self._prefill_rounds = self._decode_rounds = 0
        self._phase_changes = 0
        self._events = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._requests = 0
        self._ends: dict[FinishReason, int] = {}

    # --- events -----------------------------------------------------------------------------------

    def observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        """One step: `event` led from `before` to `after` and was answered with `effects`."""
        at_ns = event.at_ns
        self._events += 1
        self._last_event_ns = at_ns
        if before.phase != after.phase:
            self._phase_changes += 1
        if isinstance(event, RoundCompleted):
            self._on_round_completed(event, before)
        elif isinstance(event, RequestArrived):
            self._on_request_arrived(event)
        elif isinstance(event, RoundFailed):
            self._on_round_failed(event, before)
        for effect in effects:
            if isinstance(effect, DeliverTokens):
                self._on_deliver(effect, at_ns)
            elif isinstance(effect, LaunchRound):
                self._on_launch(effect, after, at_ns)
            elif isinstance(effect, SeatRequest):
                self._on_seat(effect, at_ns)
            elif isinstance(effect, FinishChoice):
                self._on_finish_choice(effect, at_ns)
            elif isinstance(effect, FinishRequest):
                self._on_finish_request(effect, at_ns)

    def _on_request_arrived(self, event: RequestArrived) -> None:
        if self._first_arrival_ns is None:
            self._first_arrival_ns = event.at_ns
        for request in event.requests:
            if request.request_id not in self._alive:
                self._requests += 1
                self._alive[request.request_id] = None
                self._queued[request.request_id] = event.at_ns
                self._silent[request.request_id] = event.at_ns

    def _on_round_completed(self, event: RoundCompleted, before: State) -> None:
        flight = before.flight
        if flight is None or flight.round_id != event.round_id:
            return
        elapsed_ns = self._round_ended(flight.kind, event.at_ns, len(flight.lanes))
        if not self._prompt_lanes or len(event.results) != len(flight.lanes):
            return
        for lane, result in zip(flight.lanes, event.results, strict=True):
            s = before.slots[lane.slot]
            if s is None or s.role not in PROMPT_ROLES or isinstance(result, Failed):
                continue
            if flight.kind != "fork":
                self._prefill_tokens += lane.count
            track = self._tracks.get((lane.request_id, lane.choice))
            if track is None:
                continue
            track.carried_ns += elapsed_ns
            if lane.start + lane.count == s.request.prompt_length:
                self._prompt_done(track, event.at_ns, sampled=bool(lane.outputs))

    def _on_round_failed(self, event: RoundFailed, before: State) -> None:
        flight = before.flight
        if flight is not None and flight.round_id == event.round_id:
            self._round_ended(flight.kind, event.at_ns, len(flight.lanes))

    def _round_ended(self, kind: RoundKind, at_ns: int, lane_count: int) -> int:
        elapsed_ns = at_ns - self._launched_ns
        if kind in PROMPTING:
            self._prefill_ns += elapsed_ns
        if kind in GENERATING:
            self._decode_ns += elapsed_ns
            self._lane_ns += elapsed_ns * (lane_count - self._prompt_lanes)
        return elapsed_ns

    def _prompt_done(self, track: Track, at_ns: int, *, sampled: bool) -> None:
        self._last_ready_ns = at_ns
        self._prefill_wait.add(at_ns - track.seated_ns - track.carried_ns)
        if sampled:
            self._barrier_wait.add(0)
            track.sampled = True
        else:
            track.ready_ns = at_ns

    # --- effects ----------------------------------------------------------------------------------

    def _on_launch(self, launch: LaunchRound, after: State, at_ns: int) -> None:
        self._launched_ns = at_ns
        self._rounds += 1
        roles = [s.role for lane in launch.lanes if (s := after.slots[lane.slot]) is not None]
        self._prompt_lanes = sum(role in PROMPT_ROLES for role in roles)
        if self._prompt_lanes and any(role in TOKEN_ROLES for role in roles):
            self._mixed_rounds += 1
        if launch.kind in PROMPTING:
            self._prefill_rounds += 1
            if self._first_prefill_ns is None:
                self._first_prefill_ns = at_ns
        if launch.kind in GENERATING:
            self._decode_rounds += 1
        if launch.kind == "sample":
            for lane in launch.lanes:
                track = self._tracks.get((lane.request_id, lane.choice))
                if track is not None and track.ready_ns is not None:
                    self._barrier_wait.add(at_ns - track.ready_ns)
                    track.ready_ns, track.sampled = None, True

    def _on_deliver(self, effect: DeliverTokens, at_ns: int) -> None:
        tracks = self._tracks
        # Most choices of a round had their last tokens at the same time: their gaps are added once.
        since_ns, times = at_ns, 0
        for delivery in effect.deliveries:
            self._decode_tokens += delivery.tokens
            track = tracks.get((delivery.request_id, delivery.choice))
            if track is None:
                continue
            if track.delivered_ns == since_ns:
                times += 1
            elif track.delivered_ns is not None:
                if times:
                    self._gap.add(at_ns - since_ns, times)
                since_ns, times = track.delivered_ns, 1
            elif (arrived_ns := self._silent.pop(delivery.request_id, None)) is not None:
                self._ttft.add(at_ns - arrived_ns)
            track.delivered_ns = at_ns
        if times:
            self._gap.add(at_ns - since_ns, times)

    def _on_seat(self, effect: SeatRequest, at_ns: int) -> None:
        key = (effect.request_id, effect.choice)
        if key not in self._tracks:  # a sequence that comes back from host RAM keeps its track
            self._tracks[key] = Track(at_ns)
        arrived_ns = self._queued.pop(effect.request_id, None)
        if arrived_ns is not None:
            self._queue_wait.add(at_ns - arrived_ns)

    def _on_finish_choice(self, effect: FinishChoice, at_ns: int) -> None:
        track = self._tracks.pop((effect.request_id, effect.choice), None)
        if track is not None and track.ready_ns is not None and effect.reason not in ANSWERED:
            self._barrier_wait.add(at_ns - track.ready_ns)

    def _on_finish_request(self, effect: FinishRequest, at_ns: int) -> None:
        self._ends[effect.reason] = self._ends.get(effect.reason, 0) + 1
        self._last_end_ns = at_ns
        self._alive.pop(effect.request_id, None)
        self._silent.pop(effect.request_id, None)
        arrived_ns = self._queued.pop(effect.request_id, None)
        if arrived_ns is not None and at_ns > arrived_ns:
            self._queue_wait.add(at_ns - arrived_ns)

    # --- the result -------------------------------------------------------------------------------

    def summary(self) -> Summary:
        ttft, gap, queue_wait, prefill_wait, barrier_wait = self._with_open_waits()
        end_ns = self._last_event_ns if self._alive else self._last_end_ns
        makespan_ns = span(self._first_arrival_ns, end_ns)
        return Summary(
            policy=self.policy,
            prefill_makespan_s=seconds(span(self._first_prefill_ns, self._last_ready_ns)),
            makespan_s=seconds(makespan_ns),
            prefill_tokens_per_s=rate(self._prefill_tokens, self._prefill_ns),
            decode_tokens_per_s=rate(self._decode_tokens, self._decode_ns),
            tokens_per_s=rate(self._decode_tokens, makespan_ns),
            ttft_s=ttft.percentiles(),
            gap_s=gap.percentiles(),
            queue_wait_s=queue_wait.percentiles(),
            prefill_wait_s=prefill_wait.percentiles(),
            barrier_wait_s=barrier_wait.percentiles(),
            rounds=self._rounds,
            mixed_rounds=self._mixed_rounds,
            prefill_rounds=self._prefill_rounds,
            decode_rounds=self._decode_rounds,
            decode_occupancy=self._occupancy(),
            phase_changes=self._phase_changes,
            events=self._events,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            requests=self._requests,
            finished=self._ended(ANSWERED),
            cancelled=self._ended(CANCELLED),
            expired=self._ended(EXPIRED),
            refused=self._refused(),
            failed=self._ended(FAILED),
            unfinished=len(self._alive),
        )

    def _with_open_waits(self) -> tuple[Spread, Spread, Spread, Spread, Spread]:
        """Ttft, gap, queue, prefill and barrier waits; open ones with their length so far."""
        now_ns = self._last_event_ns
        ttft, queue_wait = self._ttft, self._queue_wait
        gap, prefill_wait, barrier_wait = self._gap, self._prefill_wait, self._barrier_wait
        if not self._alive:
            return ttft, gap, queue_wait, prefill_wait, barrier_wait
        ttft, queue_wait = ttft.copy(), queue_wait.copy()
        gap, prefill_wait, barrier_wait = gap.copy(), prefill_wait.copy(), barrier_wait.copy()
        for arrived_ns in self._silent.values():
            ttft.add(now_ns - arrived_ns)
        for arrived_ns in self._queued.values():
            queue_wait.add(now_ns - arrived_ns)
        for track in self._tracks.values():
            if track.delivered_ns is not None:
                gap.add(now_ns - track.delivered_ns)
            elif track.ready_ns is not None:
                barrier_wait.add(now_ns - track.ready_ns)
            elif not track.sampled:
                prefill_wait.add(now_ns - track.seated_ns - track.carried_ns)
        return ttft, gap, queue_wait, prefill_wait, barrier_wait

    def _occupancy(self) -> float | None:
        if not self._decode_ns:
            return None
        return self._lane_ns / (self._decode_ns * self._slot_count)

    def _ended(self, reasons: tuple[FinishReason, ...]) -> int:
        return sum(self._ends.get(reason, 0) for reason in reasons)

    def _refused(self) -> int:
        known = (*ANSWERED, *CANCELLED, *EXPIRED, *FAILED)
        return sum(count for reason, count in self._ends.items() if reason not in known)


def span(start_ns: int | None, end_ns: int | None) -> int | None:
    if start_ns is None or end_ns is None or end_ns < start_ns:
        return None
    return end_ns - start_ns


def seconds(length_ns: int | None) -> float | None:
    return None if length_ns is None else length_ns / NS


def rate(count: int, length_ns: int | None) -> float | None:
    """Per second; None where nothing took any time."""
    return count * NS / length_ns if length_ns else None
