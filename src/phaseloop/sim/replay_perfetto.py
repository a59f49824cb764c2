"""A trace as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

Written as the fold goes, so memory stays flat whatever the length.  Times are microseconds.

    scheduler   phases, rounds by class and the engine's idleness as slices, one track each;
                arrivals, with an arrow to the round that first carries the request; instants for
                seats, cancels and checkpoints
    requests    one asynchronous track per request: inside it the stages of its one choice, or, for
                several, one more track per choice
    memory      counters: queue, KV pages, lanes and rows of the round in flight
"""

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import msgspec

from phaseloop.core.state import LIVE, State
from phaseloop.core.vocabulary import (
    DECODE_CLASS,
    PREFILL_CLASS,
    FinishChoice,
    FinishRequest,
    LaunchRound,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RoundKind,
    SeatRequest,
)
from phaseloop.runtime.trace import CHECKPOINT_EVENTS

from .replay import Step

SCHEDULER, REQUESTS, MEMORY = 1, 2, 3
PHASES, PREFILL, DECODE, MIXED, IDLE, ARRIVALS = 1, 2, 3, 4, 5, 6
TRACK_NAMES = {
    PHASES: "phases",
    PREFILL: "prefill rounds",
    DECODE: "decode rounds",
    MIXED: "mixed rounds",
    IDLE: "engine idle",
    ARRIVALS: "arrivals and marks",
}
PROCESS_NAMES = {SCHEDULER: "scheduler", REQUESTS: "requests", MEMORY: "memory"}

Key = tuple[RequestId, int]


class Perfetto:
    """Watches a fold and writes to `out`, which the caller opened for bytes and will close."""

    def __init__(self, out: BinaryIO, state: State) -> None:
        self._out = out
        self._separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
        self._phase, self._phase_ns = state.phase, 0
        self._launch: LaunchRound | None = None
        self._engine_ns = 0  # when the engine last took up work, or fell idle
        self._waiting: dict[RequestId, int] = {}  # arrived, no lane yet: where the arrow starts
        self._choices: dict[RequestId, int] = {}  # of requests that are alive
        self._stages: dict[Key, str] = {}
        self._counters: dict[str, dict[str, int]] = {}
        self._now_ns = 0
        self._name_tracks()

    def see(self, step: Step) -> None:
        now_ns = self._now_ns = step.event.at_ns
        self._on_event(step, now_ns)
        if step.before.flight is not step.after.flight:
            self._on_flight(step, now_ns)
        self._on_stages(step, now_ns)
        self._on_ends(step, now_ns)
        self._on_counters(step.after, now_ns)
        if step.after.phase != self._phase:
            self._end_phase(now_ns)
            self._phase, self._phase_ns = step.after.phase, now_ns
        if (step.seq + 1) % CHECKPOINT_EVENTS == 0:
            self._mark(f"checkpoint after {step.seq + 1} events", now_ns)

    def close(self) -> None:
        """End what is still open at the last event, and the file's JSON."""
        now_ns = self._now_ns
        self._end_phase(now_ns)
        self._end_round(now_ns)
        for key in list(self._stages):
            self._stage(key, None, now_ns)
        for request_id in self._choices:
            self._async("e", str(request_id), f"request {request_id}", now_ns)
        self._out.write(b"\n]}\n")

    # --- the parts of a step ----------------------------------------------------------------------

    def _on_event(self, step: Step, now_ns: int) -> None:
        event = step.event
        if isinstance(event, RequestCancelled):
            self._mark(f"cancel request {event.request_id}", now_ns)
        if not isinstance(event, RequestArrived):
            return
        for request in event.requests:
            request_id = request.request_id
            if request_id <= step.before.request_id_last or request_id in self._choices:
                continue  # an id used before: the reducer does not answer it
            self._choices[request_id] = request.choices
            self._waiting[request_id] = now_ns
            fields = msgspec.to_builtins(request)
            self._async("b", str(request_id), f"request {request_id}", now_ns, args=fields)
            self._slice(ARRIVALS, f"arrival of {request_id}", now_ns, now_ns)
            self._flow("s", request_id, ARRIVALS, now_ns)
            if request_id in step.after.queue:
                self._stage((request_id, 0), "queued", now_ns)

    def _on_flight(self, step: Step, now_ns: int) -> None:
        before, after = step.before.flight, step.after.flight
        if before is not None and (after is None or after.round_id != before.round_id):
            self._end_round(now_ns)
        for effect in step.effects:
            if not isinstance(effect, LaunchRound):
                continue
            self._end_round(now_ns)  # an idle engine's
            self._launch = effect
            track = track_of(effect.kind)
            for lane in effect.lanes:
                if self._waiting.pop(lane.request_id, None) is not None:
                    self._flow("f", lane.request_id, track, now_ns)

    def _end_round(self, now_ns: int) -> None:
        since_ns, launch = self._engine_ns, self._launch
        self._engine_ns, self._launch = now_ns, None
        if launch is not None:
            lanes = [msgspec.to_builtins(lane) for lane in launch.lanes]
            args = {"round": launch.round_id, "reason": launch.reason, "lanes": lanes}
            self._slice(track_of(launch.kind), launch.kind, since_ns, now_ns, args)
        elif now_ns > since_ns:
            self._slice(IDLE, "idle", since_ns, now_ns)

    def _end_phase(self, now_ns: int) -> None:
        if now_ns > self._phase_ns:
            self._slice(PHASES, self._phase, self._phase_ns, now_ns)

    def _on_stages(self, step: Step, now_ns: int) -> None:
        for effect in step.effects:
            if isinstance(effect, SeatRequest):
                self._mark(f"seat {effect.request_id} in slot {effect.slot}", now_ns)
        for before, sequence in zip(step.before.slots, step.after.slots, strict=True):
            if sequence is before or sequence is None or sequence.role not in LIVE:
                continue
            stalled = sequence.stalled_until_ns is not None
            stage = "stalled" if stalled else sequence.role
            self._stage((sequence.request.request_id, sequence.choice), stage, now_ns)
        if step.after.saved is not step.before.saved:
            for saved in step.after.saved:
                s = saved.sequence
                self._stage((s.request.request_id, s.choice), "saved", now_ns)

    def _on_ends(self, step: Step, now_ns: int) -> None:
        for effect in step.effects:
            if isinstance(effect, FinishChoice):
                self._stage((effect.request_id, effect.choice), None, now_ns)
            elif isinstance(effect, FinishRequest):
                self._stage((effect.request_id, 0), None, now_ns)
                self._waiting.pop(effect.request_id, None)
                if self._choices.pop(effect.request_id, None) is not None:
                    name = f"request {effect.request_id}"
                    args = {"outcome": effect.reason}
                    self._async("e", str(effect.request_id), name, now_ns, args=args)

    def _on_counters(self, state: State, now_ns: int) -> None:
        idle = sum(cache.pages for cache in state.caches)
        reserved = state.limits.page_count - state.pages_free - idle
        flight = state.flight
        lanes = 0 if flight is None else len(flight.lanes)
        rows = 0 if flight is None else sum(max(1, lane.count) for lane in flight.lanes)
        self._count("queue", {"requests": len(state.queue)}, now_ns)
        self._count("KV pages", {"reserved": reserved, "idle": idle}, now_ns)
        self._count("round", {"lanes": lanes, "rows": rows}, now_ns)

    # --- the records of the format ----------------------------------------------------------------

    def _stage(self, key: Key, stage: str | None, now_ns: int) -> None:
        """Move one choice to another stage; None ends the last one."""
        old = self._stages.get(key)
        if old == stage:
            return
        request_id, choice = key
        alone = self._choices.get(request_id, 1) == 1
        track = str(request_id) if alone else f"{request_id}.{choice}"
        if old is not None:
            self._async("e", track, old, now_ns)
            del self._stages[key]
        if stage is not None:
            self._async("b", track, stage, now_ns)
            self._stages[key] = stage

    def _slice(
        self, track: int, name: str, since_ns: int, until_ns: int, args: object = None
    ) -> None:
        fields = {"ph": "X", "pid": SCHEDULER, "tid": track, "name": name}
        fields |= {"ts": micros(since_ns), "dur": micros(until_ns - since_ns)}
        self._write(fields if args is None else fields | {"args": args})

    def _async(self, ph: str, track: str, name: str, now_ns: int, args: object = None) -> None:
        fields = {"ph": ph, "cat": "request", "id": track, "pid": REQUESTS, "tid": 0}
        fields |= {"name": name, "ts": micros(now_ns)}
        self._write(fields if args is None else fields | {"args": args})

    def _flow(self, ph: str, request_id: RequestId, track: int, now_ns: int) -> None:
        fields = {"ph": ph, "cat": "flow", "id": request_id, "pid": SCHEDULER, "tid": track}
        fields |= {"name": "first lane", "ts": micros(now_ns)}
        self._write(fields | {"bp": "e"} if ph == "f" else fields)

    def _mark(self, name: str, now_ns: int) -> None:
        fields = {"ph": "i", "s": "t", "pid": SCHEDULER, "tid": ARRIVALS, "name": name}
        self._write(fields | {"ts": micros(now_ns)})

    def _count(self, name: str, values: dict[str, int], now_ns: int) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            fields = {"ph": "C", "pid": MEMORY, "tid": 0, "name": name, "args": values}
            self._write(fields | {"ts": micros(now_ns)})

    def _name_tracks(self) -> None:
        for fields in names():
            self._write({"ph": "M", **fields})

    def _write(self, fields: Mapping[str, object]) -> None:
        self._out.write(self._separator)
        self._out.write(msgspec.json.encode(fields))
        self._separator = b",\n"


def names() -> Iterator[dict[str, object]]:
    for pid, name in PROCESS_NAMES.items():
        yield {"pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    for tid, name in TRACK_NAMES.items():
        yield {"pid": SCHEDULER, "tid": tid, "name": "thread_name", "args": {"name": name}}


def track_of(kind: RoundKind) -> int:
    if kind in PREFILL_CLASS:
        return PREFILL
    return DECODE if kind in DECODE_CLASS else MIXED


def micros(at_ns: int) -> msgspec.Raw:
    """Microseconds with every nanosecond digit, as a JSON number."""
    return msgspec.Raw(b"%d.%03d" % divmod(at_ns, 1000))
