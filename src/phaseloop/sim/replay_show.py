"""What the state holds at one moment, for people: the phase, the queue, the memory, one request."""

from typing import Literal, TypeAlias

from msgspec import Struct

from phaseloop.core import ordered
from phaseloop.core.explain import REASONS, explain
from phaseloop.core.state import Sequence, State
from phaseloop.core.vocabulary import RequestId

from .replay_cursor import TargetError, parse_target
from .replay_text import (
    count_text,
    lane_text,
    listed,
    name_of,
    request_text,
    requests_text,
    span_text,
    time_text,
)

View: TypeAlias = Literal["state", "queue", "kv", "request"]
QUEUE_SHOWN = 40


class Show(Struct, frozen=True):
    view: View
    request_id: RequestId = 0  # of the view `request`


def parse_show(text: str) -> Show:
    """`state`, `queue`, `kv` or `req:ID`.  Raises TargetError."""
    if text in ("state", "queue", "kv"):
        return Show(text)
    if text.startswith("req:"):
        return Show("request", parse_target(text).value)
    raise TargetError(f"{text!r} is not state, queue, kv or req:ID")


def show_lines(show: Show, state: State, now_ns: int) -> list[str]:
    match show.view:
        case "state":
            return state_lines(state, now_ns)
        case "queue":
            return queue_lines(state, now_ns)
        case "kv":
            return kv_lines(state)
        case "request":
            return request_lines(state, show.request_id, now_ns)


def state_lines(state: State, now_ns: int) -> list[str]:
    since = span_text(now_ns - state.phase_since_ns)
    lines = [f"phase {state.phase} for {since}, {count_text(state.phase_rounds, 'round')} in it"]
    pending = state.policy_pending
    lines.append(f"policy {state.policy.name}" + (f", to be {pending.name}" if pending else ""))
    lines.append(f"cohort {state.cohort}, {'sealed' if state.sealed else 'open'}")
    flight = state.flight
    if flight is None:
        lines.append("no round in flight")
    else:
        aborted = ", aborted" if flight.aborted else ""
        lanes = listed(lane_text(lane) for lane in flight.lanes)
        lines.append(f"round {flight.round_id} in flight, {flight.kind}{aborted}: {lanes}")
    for slot, sequence in enumerate(state.slots):
        text = "free" if sequence is None else sequence_text(sequence)
        lines.append(f"slot {slot}  {text}")
    for saved in state.saved:
        text = sequence_text(saved.sequence)
        lines.append(f"host RAM  {text}, {saved.cause}, since {time_text(saved.since_ns)}")
    lines.append(f"queue: {count_text(len(state.queue), 'request')}")
    lines.append(f"pages: {state.pages_free:,} of {state.limits.page_count:,} free")
    if state.shutdown_at_ns is not None:
        lines.append(f"shutting down, at the latest at {time_text(state.shutdown_at_ns)}")
    if state.stopped:
        lines.append("stopped")
    return lines


def sequence_text(s: Sequence) -> str:
    prompt = s.request.prompt_length
    parts = [
        f"{name_of(s.request.request_id, s.choice)} {s.role}",
        f"{s.length} tokens held, prompt {prompt}",
        f"{s.produced} produced" + ("" if s.output_limit is None else f" of {s.output_limit}"),
    ]
    if s.follow is not None:
        parts.append(f"forks from slot {s.follow.slot} at {s.follow.position}")
    if s.stalled_until_ns is not None:
        parts.append("its client does not read")
    return ", ".join(parts)


def queue_lines(state: State, now_ns: int) -> list[str]:
    lines = [f"{count_text(len(state.queue), 'request')} queued, first in line first"]
    for place, (_, request_id) in enumerate(ordered.keys(state.order)):
        if place == QUEUE_SHOWN:
            lines.append(f"and {len(state.queue) - QUEUE_SHOWN} more")
            break
        pending = state.queue[request_id]
        waited = span_text(now_ns - pending.arrived_ns)
        lines.append(f"request {request_id} ({request_text(pending.request)}), waits {waited}")
    return lines


def kv_lines(state: State) -> list[str]:
    limits = state.limits
    idle = sum(cache.pages for cache in state.caches)
    reserved = limits.page_count - state.pages_free - idle
    lines = [
        f"{limits.page_count:,} pages of {limits.page_length} tokens: {reserved:,} reserved, "
        f"{idle:,} idle cache, {state.pages_free:,} free"
    ]
    for slot, (sequence, cache) in enumerate(zip(state.slots, state.caches, strict=True)):
        if sequence is not None:
            name = name_of(sequence.request.request_id, sequence.choice)
            borrowed = f" and {sequence.borrowed} borrowed" if sequence.borrowed else ""
            held = f"{sequence.pages} pages{borrowed} for {sequence.length} tokens"
            lines.append(f"slot {slot}  {name}: {held}")
        else:
            held = f"{cache.length} tokens in {count_text(cache.pages, 'page')}"
            lines.append(f"slot {slot}  idle, version {cache.version}: {held}")
    for saved in state.saved:
        s = saved.sequence
        lines.append(f"host RAM  {name_of(s.request.request_id, s.choice)}: {s.length} tokens")
    return lines


def request_lines(state: State, request_id: RequestId, now_ns: int) -> list[str]:
    if request_id > state.request_id_last:
        return [f"request {request_id} has not arrived yet"]
    standing = explain(state, request_id, now_ns)
    if not standing:
        return [f"request {request_id} is gone, or never was"]
    lines: list[str] = []
    for waiting in standing:
        where = waiting.role if waiting.slot is None else f"{waiting.role} in slot {waiting.slot}"
        blockers = f"; held by {requests_text(waiting.blocked_by)}" if waiting.blocked_by else ""
        name = name_of(request_id, waiting.choice)
        lines.append(f"{name} is {where}, {waiting.reason}: {REASONS[waiting.reason]}{blockers}")
        sequence = None if waiting.slot is None else state.slots[waiting.slot]
        if sequence is not None:
            lines.append(f"    {sequence_text(sequence)}")
    return lines
