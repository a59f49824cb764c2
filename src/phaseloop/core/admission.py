"""Who is queued, who is refused, and who gets a seat (R2, R3, R9).

A seat is given only to a sequence whose prompt could be computed in the present phase; everybody
else waits in the queue, holding nothing.  Nothing overtakes the head of the queue.
"""

from msgspec.structs import replace

from . import ordered
from .ending import unqueue
from .memory import (
    output_limit,
    pages_spare,
    reservation,
    reservation_of_all,
    resume_pages,
    take_pages,
    with_cache,
)
from .state import Follow, Limits, Pending, Saved, Sequence, State, with_slot
from .vocabulary import (
    AnyEffect,
    Candidate,
    Effects,
    FinishReason,
    Request,
    SeatReason,
    SeatRequest,
    SlotIndex,
)


def refusal(state: State, requests: tuple[Request, ...]) -> FinishReason | None:
    """Why this call cannot be taken, if it cannot; one request refused refuses its call (R3)."""
    if state.stopped or state.shutdown_at_ns is not None:
        return "shutdown"
    for request in requests:
        reason = unfit(state.limits, request)
        if reason is not None:
            return reason
    if len(state.queue) + len(requests) > state.limits.queue_length_max:
        return None if walks_in(state, requests) else "queue_full"
    return None


def walks_in(state: State, requests: tuple[Request, ...]) -> bool:
    """Whether the whole call finds seats at once, so that it never waits in the queue."""
    if state.order or state.saved or not may_seat(state) or state.policy_pending is not None:
        return False
    pages = sum(reservation_of_all(state.limits, request) for request in requests)
    seats = sum(request.choices for request in requests)
    return seats <= state.slots.count(None) and pages <= pages_spare(state)


def unfit(limits: Limits, request: Request) -> FinishReason | None:
    """Why a request can never be served by this engine."""
    if request.prompt_length < 1 or request.choices < 1 or (request.output_limit or 0) < 0:
        return "invalid"
    if request.choices > 1 and request.kind != "completion":
        return "invalid"
    if limits.whole_prompts and request.prompt_length > limits.batch_tokens:
        return "invalid"
    if request.choices > limits.slot_count:
        return "exceeds_slots"
    generates = request.kind == "completion" and request.output_limit != 0
    if request.prompt_length + generates > limits.context_length:
        return "exceeds_context"
    if reservation_of_all(limits, request) > limits.page_count:
        return "exceeds_memory"
    return None


def enqueue(state: State, request: Request, at_ns: int) -> State:
    timers = state.timers
    for wait_ns in (request.queue_wait_ns_max, request.deadline_after_ns):
        if wait_ns is not None:
            timers = ordered.insert(timers, (at_ns + wait_ns, request.request_id))
    return replace(
        state,
        queue=state.queue.set(request.request_id, Pending(request, at_ns)),
        order=ordered.insert(state.order, (-request.priority, request.request_id)),
        timers=timers,
    )


def head(state: State) -> Pending | None:
    key = ordered.first(state.order)
    return None if key is None else state.queue[key[1]]


def may_seat(state: State) -> bool:
    """Whether the phase lets a new prompt in.  A sealed cohort takes nobody (R5)."""
    match state.policy.switch:
        case "barrier":
            return state.phase == "idle" or (state.phase == "prefill" and not state.sealed)
        case "quantum":
            return state.phase != "decode"
        case "mixed" | "prompts_first":
            return True


def can_resume(state: State) -> bool:
    return (
        bool(state.saved)
        and state.saved[0].cause == "memory"
        and fits_saved(state, state.saved[0].sequence)
    )


def fits_saved(state: State, sequence: Sequence) -> bool:
    return None in state.slots and resume_pages(state, sequence) <= pages_spare(state)


def fits(state: State, request: Request) -> bool:
    return state.slots.count(None) >= request.choices and (
        reservation_of_all(state.limits, request) <= pages_spare(state)
    )


def can_seat(state: State) -> bool:
    """Whether whoever is first in line would fit now."""
    waiting = first_in_line(state)
    if isinstance(waiting, Saved):
        return fits_saved(state, waiting.sequence)
    return waiting is not None and fits(state, waiting.request)


def first_in_line(state: State) -> Saved | Pending | None:
    """Saved for memory first (R9); else by priority, then by how long it has waited."""
    queued = head(state)
    if not state.saved:
        return queued
    saved = state.saved[0]
    if saved.cause == "memory" or queued is None:
        return saved
    saved_rank = (-saved.sequence.request.priority, saved.since_ns)
    queued_rank = (-queued.request.priority, queued.arrived_ns)
    return saved if saved_rank <= queued_rank else queued


def admit(state: State, now_ns: int) -> tuple[State, Effects]:
    """Seat from the front of the line for as long as the first in line fits."""
    effects: list[AnyEffect] = []
    opened = may_seat(state)
    while state.saved or state.order:
        waiting = first_in_line(state)
        if isinstance(waiting, Saved):
            # Back to its own cohort after making room (R9), or to a new one after lending its seat.
            allowed = opened or (waiting.cause == "memory" and state.phase == "prefill")
            if not allowed or not fits_saved(state, waiting.sequence):
                break
            state, done = resume(state, waiting, now_ns)
        else:
            if not opened or waiting is None or not fits(state, waiting.request):
                break
            state, done = seat(state, waiting, now_ns)
        effects += done
    return state, tuple(effects)


def resume(state: State, saved: Saved, now_ns: int) -> tuple[State, Effects]:
    """Give a saved sequence a seat again; a restore round brings its state back."""
    pages = resume_pages(state, saved.sequence)
    slot, _, reason = choose_slot(state, saved.sequence.request, resumed=True)
    taken = take_pages(claim(state, slot), pages)
    assert taken is not None, "resuming was checked to fit"
    state, evicted = taken
    sequence = replace(
        saved.sequence, role="seating", pages=pages, ticket=state.ticket_next, seated_ns=now_ns
    )
    state = replace(state, saved=state.saved[1:], ticket_next=state.ticket_next + 1)
    request_id, choice = sequence.request.request_id, sequence.choice
    return with_slot(state, slot, sequence), (
        *evicted,
        SeatRequest(request_id, choice, slot, None, reason),
    )


def seat(state: State, pending: Pending, now_ns: int) -> tuple[State, Effects]:
    """Give every choice of a queued request a slot and its pages."""
    state = unqueue(state, pending)
    effects: list[AnyEffect] = []
    parent: SlotIndex | None = None
    for choice in range(pending.request.choices):
        state, slot, done = seat_choice(state, pending, choice, parent, now_ns)
        parent = slot if parent is None else parent
        effects += done
    return state, tuple(effects)


def seat_choice(
    state: State, pending: Pending, choice: int, parent: SlotIndex | None, now_ns: int
) -> tuple[State, SlotIndex, Effects]:
    request, limits = pending.request, state.limits
    slot, source, reason = choose_slot(state, request, resumed=choice > 0)
    follow = None
    if parent is not None:
        reason = "sibling"
        follow = Follow(parent, request.request_id, request.prompt_length)
    state = claim(state, slot)
    pages, borrowed = reservation(limits, request, choice)
    taken = take_pages(state, pages)
    assert taken is not None, "seating was checked to fit"
    state, evicted = taken
    sequence = Sequence(
        request=request,
        choice=choice,
        ticket=state.ticket_next,
        arrived_ns=pending.arrived_ns,
        seated_ns=now_ns,
        group=(request.adapter, request.kind),
        role="seating",
        length=0,
        cached=0,
        produced=0,
        output_limit=output_limit(limits, request),
        pages=pages,
        borrowed=borrowed,
        follow=follow,
    )
    state = replace(with_slot(state, slot, sequence), ticket_next=state.ticket_next + 1)
    return state, slot, (*evicted, SeatRequest(request.request_id, choice, slot, source, reason))


def claim(state: State, slot: SlotIndex) -> State:
    """Turn the slot's idle cache into free pages: the reservation that follows covers them."""
    cache = state.caches[slot]
    if not cache.pages:
        return state
    state = replace(state, pages_free=state.pages_free + cache.pages)
    return with_cache(state, slot, replace(cache, length=0, pages=0))


def choose_slot(
    state: State, request: Request, *, resumed: bool
) -> tuple[SlotIndex, Candidate | None, SeatReason]:
    """The hinted slot if free, else the longest cached prefix, else the longest idle slot (R2)."""
    free = [slot for slot, sequence in enumerate(state.slots) if sequence is None]
    oldest = min(free, key=lambda slot: state.caches[slot].idle_ticket)
    if resumed:
        return oldest, None, "resume"
    usable = [c for c in request.candidates if is_usable(state, c, free)]
    best = max(usable, key=lambda c: (c.length, c.source == "slot"), default=None)
    if request.slot_hint in free:
        hint = request.slot_hint
        here = [c for c in usable if c.source == "slot" and c.index == hint]
        stored = [c for c in usable if c.source == "snapshot"]
        source = max(here + stored, key=lambda c: (c.length, c.source == "slot"), default=None)
        return hint, source, "hint"
    if best is not None and best.source == "slot":
        return best.index, best, "cache"
    return oldest, best, "oldest" if best is None else "cache"


def is_usable(state: State, candidate: Candidate, free: list[SlotIndex]) -> bool:
    if candidate.source == "snapshot":
        return True  # the shell checks the version when it compares tokens
    if candidate.index not in free:
        return False
    cache = state.caches[candidate.index]
    return cache.version == candidate.version and candidate.length <= cache.length
