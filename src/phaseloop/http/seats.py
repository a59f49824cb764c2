"""Who sits where, in which role, and why it waits: what /phase and /slots tell alike."""

from itertools import islice

from msgspec import Struct

from phaseloop.core.explain import (
    REASONS,
    WaitReason,
    explain_queued,
    explain_saved,
    explain_seated,
)
from phaseloop.core.state import Sequence, State
from phaseloop.core.vocabulary import RequestId
from phaseloop.runtime.service import Service
from phaseloop.runtime.timing import Timing

QUEUED_SHOWN_MAX = 16  # from the head; a long queue would make a long answer


class Seat(Struct, frozen=True):
    """`since_ns` is None where nobody kept the time; `waits_for` whose progress would help."""

    sequence: Sequence
    reason: WaitReason
    waits_for: tuple[RequestId, ...]
    since_ns: int | None

    def as_json(self, now_ns: int) -> dict[str, object]:
        since_ns = self.since_ns
        return {
            "role": self.sequence.role,
            "reason": self.reason,
            "why": REASONS[self.reason],
            "waits_for": self.waits_for,
            "since_ms": None if since_ns is None else milliseconds(now_ns - since_ns),
        }


EMPTY_SEAT: dict[str, object] = {
    "role": None,
    "reason": None,
    "why": None,
    "waits_for": (),
    "since_ms": None,
}


def seats_of(service: Service, now_ns: int) -> tuple[Seat | None, ...]:
    """One per slot, None for an empty one."""
    state = service.state
    return tuple(
        None if s is None else seat_of(service, state, slot, s, now_ns)
        for slot, s in enumerate(state.slots)
    )


def seat_of(service: Service, state: State, slot: int, s: Sequence, now_ns: int) -> Seat:
    reason, waits_for = explain_seated(state, slot, s, now_ns)
    stream = service.gateway.stream(s.request.request_id)
    return Seat(s, reason, waits_for, since(s, None if stream is None else stream.timing))


def since(s: Sequence, timing: Timing | None) -> int | None:
    """When the sequence took its role; with several choices, when the first did."""
    match s.role:
        case "seating" | "restoring" | "following":
            return s.seated_ns
        case "prefilling":
            return s.seated_ns if timing is None else timing.seated_ns
        case "ready":
            return None if timing is None else timing.ready_ns
        case "generating":
            return None if timing is None else timing.opened_ns
        case "swapping" | "saving" | "unseating" | "leaving":
            return None if timing is None else timing.ended_ns


def queued(state: State, now_ns: int) -> list[dict[str, object]]:
    """Those at the head of the queue, the next one first."""
    shown: list[dict[str, object]] = []
    order = (key for block in state.order for key in block)
    for _, request_id in islice(order, QUEUED_SHOWN_MAX):
        pending = state.queue[request_id]
        reason, waits_for = explain_queued(state, pending, now_ns)
        shown.append(
            {
                "id_task": request_id,
                "reason": reason,
                "why": REASONS[reason],
                "waits_for": waits_for,
                "since_ms": milliseconds(now_ns - pending.arrived_ns),
            }
        )
    return shown


def saved(state: State, now_ns: int) -> list[dict[str, object]]:
    """Sequences in host RAM, which come back to a slot by themselves."""
    shown: list[dict[str, object]] = []
    for one in state.saved[:QUEUED_SHOWN_MAX]:
        waiting = explain_saved(state, one)
        shown.append(
            {
                "id_task": one.sequence.request.request_id,
                "reason": waiting.reason,
                "why": REASONS[waiting.reason],
                "waits_for": waiting.blocked_by,
                "since_ms": milliseconds(now_ns - one.since_ns),
            }
        )
    return shown


def milliseconds(duration_ns: int) -> float:
    return round(max(0, duration_ns) / 1e6, 3)
