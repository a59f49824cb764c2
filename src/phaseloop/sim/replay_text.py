"""Events, effects and times in plain words, one line each."""

from collections.abc import Iterable
from typing import assert_never

from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEffect,
    AnyEvent,
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    DeliverTokens,
    DropSaved,
    EngineLost,
    Failed,
    FinishChoice,
    FinishRequest,
    Lane,
    LaunchRound,
    PolicyChanged,
    ReleaseSlot,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestSeated,
    Result,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    ShutdownRequested,
    Stop,
    StopMatched,
)

MS, SECOND = 1_000_000, 1_000_000_000
ITEMS_MAX = 8  # of a list that a line shows before it says how many more there are


def time_text(at_ns: int) -> str:
    """A moment, to the microsecond: what happens within one is in the order of the lines."""
    return f"{at_ns / SECOND:.6f} s"


def span_text(span_ns: int) -> str:
    if span_ns < SECOND:
        return f"{span_ns / MS:.1f} ms"
    return f"{span_ns / SECOND:.3f} s"


def count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Iterable[str]) -> str:
    every = list(items)
    shown = ", ".join(every[:ITEMS_MAX])
    more = len(every) - ITEMS_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def requests_text(ids: Iterable[RequestId]) -> str:
    every = list(ids)
    return ("request " if len(every) == 1 else "requests ") + listed(map(str, every))


def name_of(request_id: RequestId, choice: int) -> str:
    return f"request {request_id}" + (f" choice {choice}" if choice else "")


def request_text(request: Request) -> str:
    parts = [request.kind, f"prompt {request.prompt_length}"]
    if request.kind == "completion":
        limit = request.output_limit
        parts.append("no output limit" if limit is None else f"limit {limit}")
    if request.choices > 1:
        parts.append(f"{request.choices} choices")
    if request.priority:
        parts.append(f"priority {request.priority}")
    if request.adapter:
        parts.append(f"adapter {request.adapter}")
    if request.deadline_after_ns is not None:
        parts.append(f"deadline after {span_text(request.deadline_after_ns)}")
    if request.queue_wait_ns_max is not None:
        parts.append(f"queues at most {span_text(request.queue_wait_ns_max)}")
    return ", ".join(parts)


def event_text(event: AnyEvent) -> str:
    match event:
        case RoundCompleted():
            results = listed(result_text(result) for result in event.results)
            took = span_text(event.duration_ns)
            return f"round {event.round_id} is done after {took}: {results}"
        case RequestArrived():
            return listed(
                f"request {r.request_id} arrives ({request_text(r)})" for r in event.requests
            )
        case RequestSeated():
            found = f", {event.cached_length} tokens in place" if event.cached_length else ""
            found += ", in host RAM" if event.restore else ""
            return f"{name_of(event.request_id, event.choice)} is in slot {event.slot}{found}"
        case RequestCancelled():
            return f"request {event.request_id} is cancelled"
        case StopMatched():
            return f"{name_of(event.request_id, event.choice)} meets a stop string"
        case DeadlineReached():
            return "a deadline is reached"
        case ClientStalled():
            return f"the client of request {event.request_id} does not read"
        case ClientResumed():
            return f"the client of request {event.request_id} reads again"
        case RoundFailed():
            return f"round {event.round_id} fails: {event.reason}"
        case EngineLost():
            return f"the engine is lost: {event.reason}"
        case PolicyChanged():
            return f"the policy is to be {event.policy.name}"
        case ShutdownRequested():
            return "shutdown is requested"
        case _:
            assert_never(event)


def result_text(result: Result) -> str:
    if isinstance(result, Failed):
        return f"failed ({result.reason})"
    return count_text(result.tokens, "token") + (", the end" if result.finish else "")


def effect_text(effect: AnyEffect) -> str:
    match effect:
        case LaunchRound():
            lanes = listed(lane_text(lane) for lane in effect.lanes)
            return f"launch round {effect.round_id}, {effect.kind} ({effect.reason}): {lanes}"
        case DeliverTokens():
            sent = listed(
                f"{name_of(d.request_id, d.choice)} +{d.tokens}" for d in effect.deliveries
            )
            return f"deliver ({effect.reason}): {sent}"
        case FinishChoice():
            return f"end {name_of(effect.request_id, effect.choice)}, {effect.reason}"
        case FinishRequest():
            return f"end request {effect.request_id} as a whole, {effect.reason}"
        case ReleaseSlot():
            return f"free slot {effect.slot} ({effect.reason}), keep {effect.keep} tokens as cache"
        case SeatRequest():
            seat = f"seat {name_of(effect.request_id, effect.choice)} in slot {effect.slot}"
            return f"{seat} ({effect.reason})"
        case AbortRound():
            return f"abort round {effect.round_id} ({effect.reason})"
        case DropSaved():
            return f"drop the saved {name_of(effect.request_id, effect.choice)} ({effect.reason})"
        case Stop():
            return f"stop with exit code {effect.exit_code} ({effect.reason})"
        case _:
            assert_never(effect)


def lane_text(lane: Lane) -> str:
    where = f"{lane.start}..{lane.start + lane.count}" if lane.count else f"at {lane.start}"
    source = "" if lane.source is None else f" from slot {lane.source}"
    return f"slot {lane.slot} {name_of(lane.request_id, lane.choice)} {where}{source}"
