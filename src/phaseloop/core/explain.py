"""Why somebody waits: the same reading of the state that the policy makes, put into words.

`REASONS` is the documented list; `--why`, `/phase`, `/slots` and the timeline show its codes.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from .admission import first_in_line, fits, may_seat
from .policy import leaders, outlook
from .state import LIVE, UNFINISHED, Pending, Saved, Sequence, State
from .turns import lingers
from .vocabulary import RequestId, SlotIndex

WaitReason: TypeAlias = Literal[
    "in_round",
    "cohort_sealed",
    "cohort_generates",
    "decode_slice",
    "behind_others",
    "no_slot",
    "no_pages",
    "lingering",
    "being_seated",
    "state_returning",
    "state_leaving",
    "children_wait",
    "shared_prefix",
    "not_its_round",
    "prefill_slice",
    "barrier",
    "children_first",
    "client_stalled",
    "cache_saving",
    "round_ending",
    "saved_for_memory",
    "saved_for_seat",
    "other_round",
]

REASONS: dict[WaitReason, str] = {
    "in_round": "the engine works on it now",
    "cohort_sealed": "arrived after a member of this cohort was ready; it belongs to the next",
    "cohort_generates": "the cohort before it generates; its prompt begins when that has drained",
    "decode_slice": "others generate; prompts get their turn when the decode quantum is over",
    "behind_others": "others are before it in the queue, which nothing overtakes",
    "no_slot": "first in line, but no slot is free",
    "no_pages": "first in line, but too few KV pages are free",
    "lingering": "the new cohort waits for company",
    "being_seated": "its prompt is being compared with what the slot still holds",
    "state_returning": "its state comes back from host RAM",
    "state_leaving": "its state goes to host RAM, to make room",
    "children_wait": "waits for the first choice's prompt, from which it is forked",
    "shared_prefix": "another request computes the beginning that both prompts share",
    "not_its_round": "another prompt has the present round: its turn, its group, or its share",
    "prefill_slice": "prompts have the engine; tokens follow when the prefill quantum is over",
    "barrier": "its prompt is done; all generate together once the last member is ready",
    "children_first": "its prompt is done; its other choices are forked before it may go on",
    "client_stalled": "its client does not read what it was sent",
    "cache_saving": "finished; a copy of its cache goes to host RAM",
    "round_ending": "finished; the seat is free when the present round is done",
    "saved_for_memory": "in host RAM until enough KV pages are free",
    "saved_for_seat": "in host RAM until its turn for a seat comes",
    "other_round": "waits for the round in flight: another group's, or a copy",
}


class Waiting(Struct, frozen=True, gc=False):
    """Where one choice of a request stands.  `blocked_by`: whose end or progress would free it."""

    choice: int
    slot: SlotIndex | None
    role: str  # a Role of core/state.py, or "queued", or "saved"
    reason: WaitReason
    blocked_by: tuple[RequestId, ...] = ()


def explain(state: State, request_id: RequestId, now_ns: int) -> tuple[Waiting, ...]:
    """One record per choice that has not left its seat; empty for a request that is gone."""
    pending = state.queue.get(request_id)
    if pending is not None:
        reason, blockers = explain_queued(state, pending, now_ns)
        return (Waiting(0, None, "queued", reason, blockers),)
    found = [
        (s.choice, Waiting(s.choice, slot, s.role, *explain_seated(state, slot, s, now_ns)))
        for slot, s in enumerate(state.slots)
        if s is not None and s.request.request_id == request_id
    ]
    found += [
        (one.sequence.choice, explain_saved(state, one))
        for one in state.saved
        if one.sequence.request.request_id == request_id
    ]
    return tuple(waiting for _, waiting in sorted(found, key=lambda pair: pair[0]))


def seated_ids(state: State) -> tuple[RequestId, ...]:
    ids = (s.request.request_id for s in state.slots if s is not None and s.role in LIVE)
    return tuple(dict.fromkeys(ids))


def explain_queued(
    state: State, pending: Pending, now_ns: int
) -> tuple[WaitReason, tuple[RequestId, ...]]:
    first = first_in_line(state)
    if not may_seat(state):
        if state.policy.switch == "quantum":
            return "decode_slice", seated_ids(state)
        generates = state.phase == "decode"
        return ("cohort_generates" if generates else "cohort_sealed"), seated_ids(state)
    if isinstance(first, Saved):
        return "behind_others", (first.sequence.request.request_id,)
    if first is not None and first.request.request_id != pending.request.request_id:
        return "behind_others", (first.request.request_id,)
    if state.slots.count(None) < pending.request.choices:
        return "no_slot", seated_ids(state)
    if not fits(state, pending.request):
        return "no_pages", seated_ids(state)
    return ("lingering" if lingers(state, now_ns) else "other_round"), ()


def explain_saved(state: State, saved: Saved) -> Waiting:
    reason: WaitReason = "saved_for_memory" if saved.cause == "memory" else "saved_for_seat"
    return Waiting(saved.sequence.choice, None, "saved", reason, seated_ids(state))


def explain_seated(
    state: State, slot: SlotIndex, s: Sequence, now_ns: int
) -> tuple[WaitReason, tuple[RequestId, ...]]:
    flight = state.flight
    carried = flight is not None and any(lane.slot == slot for lane in flight.lanes)
    match s.role:
        case "leaving":
            return "round_ending", ()
        case _ if carried:
            return "in_round", ()
        case "saving":
            return "cache_saving", ()
        case "seating" | "unseating":
            return "being_seated", ()
        case "restoring":
            return "state_returning", ()
        case "swapping":
            return "state_leaving", ()
        case "following":
            leader = () if s.follow is None else (s.follow.request_id,)
            return ("children_wait" if s.choice else "shared_prefix"), leader
        case "prefilling":
            return explain_prompt(state, s, now_ns)
        case "ready" | "generating":
            return explain_active(state, slot, s)


def explain_prompt(
    state: State, s: Sequence, now_ns: int
) -> tuple[WaitReason, tuple[RequestId, ...]]:
    if lingers(state, now_ns):
        return "lingering", ()
    others = tuple(i for i in carried_ids(state) if i != s.request.request_id)
    if state.phase == "decode" and state.policy.switch != "mixed":
        quantum = state.policy.switch == "quantum"
        return ("decode_slice" if quantum else "cohort_generates"), others
    return "not_its_round", others


def carried_ids(state: State) -> tuple[RequestId, ...]:
    lanes = state.flight.lanes if state.flight else ()
    return tuple(dict.fromkeys(lane.request_id for lane in lanes))


def explain_active(
    state: State, slot: SlotIndex, s: Sequence
) -> tuple[WaitReason, tuple[RequestId, ...]]:
    if s.stalled_until_ns is not None:
        return "client_stalled", (s.request.request_id,)
    if slot in leaders(state):
        return "children_first", ()
    unfinished = tuple(
        dict.fromkeys(
            other.request.request_id
            for other in state.slots
            if other is not None and other.role in UNFINISHED
        )
    )
    if state.policy.switch == "barrier" and unfinished:
        return "barrier", unfinished
    if state.phase == "prefill" and outlook(state).prompts:
        return "prefill_slice", unfinished
    held = s.role == "generating" and needs_page(state, s) and not state.pages_free
    if held:
        return "no_pages", seated_ids(state)
    return "other_round", carried_ids(state)


def needs_page(state: State, s: Sequence) -> bool:
    return s.length + 1 > (s.pages + s.borrowed) * state.limits.page_length
