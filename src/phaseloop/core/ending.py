"""How choices and requests end, and how their seats become free.

Finishing is immediate for the client; the seat follows when the engine no longer touches it (R4).
"""

from msgspec.structs import replace

from . import ordered
from .memory import intact_length, pages_for, with_cache
from .state import LIVE, Limits, Pending, Sequence, State, with_slot
from .vocabulary import (
    AnyEffect,
    DropSaved,
    Effects,
    FinishChoice,
    FinishReason,
    FinishRequest,
    ReleaseReason,
    ReleaseSlot,
    Request,
    RequestId,
    SlotIndex,
)

Step = tuple[State, Effects]


def end_request(state: State, request_id: RequestId, reason: FinishReason) -> Step:
    """End whatever is left of a request, wherever it is; nothing if it has ended already."""
    pending = state.queue.get(request_id)
    if pending is not None:
        return dequeue(state, pending), (FinishRequest(request_id, reason),)
    effects: list[AnyEffect] = []
    for slot in range(len(state.slots)):
        sequence = state.slots[slot]  # of the state so far: a parent takes its children along
        if sequence is None or sequence.request.request_id != request_id:
            continue
        if sequence.role in LIVE:
            state, ended = end_choice(state, slot, reason)
            effects += ended
    for saved in state.saved:
        if saved.sequence.request.request_id == request_id:
            state, ended = drop_saved(state, saved.sequence, reason)
            effects += ended
    return state, tuple(effects)


def end_choice(state: State, slot: SlotIndex, reason: FinishReason) -> Step:
    """End the live sequence in `slot`; children that were not forked yet go with their parent."""
    sequence = state.slots[slot]
    assert sequence is not None and sequence.role in LIVE, "only a live sequence ends"
    request = sequence.request
    if request.choices > 1 and has_waiting_children(state, sequence):
        return end_family(state, request.request_id, slot, reason)
    state, released = vacate(state, slot)
    if in_host_ram(sequence):
        released = (*released, DropSaved(request.request_id, sequence.choice, "ended"))
    return finish(state, sequence, reason, released)


def in_host_ram(sequence: Sequence) -> bool:
    """Resumed, but its state is not back in the slot yet."""
    return sequence.resume is not None and sequence.role in ("seating", "restoring")


def end_family(
    state: State, request_id: RequestId, parent: SlotIndex, reason: FinishReason
) -> Step:
    """R6: a parent that ends before its fork takes all choices along."""
    effects: list[AnyEffect] = []
    for slot, sequence in enumerate(state.slots):
        if sequence is None or slot == parent or sequence.request.request_id != request_id:
            continue
        if sequence.role in LIVE:
            state, released = vacate(state, slot)
            effects += (FinishChoice(request_id, sequence.choice, reason), *released)
    state, ended = end_choice(state, parent, reason)
    return state, (*effects, *ended)


def has_waiting_children(state: State, parent: Sequence) -> bool:
    request_id = parent.request.request_id
    return parent.choice == 0 and any(
        s is not None
        and s.request.request_id == request_id
        and s.choice > 0
        and s.role in ("seating", "following")
        for s in state.slots
    )


def finish(state: State, sequence: Sequence, reason: FinishReason, released: Effects) -> Step:
    """The effects of an ended choice, and of its request when it was the last."""
    request = sequence.request
    effects = (FinishChoice(request.request_id, sequence.choice, reason),)
    if request.choices == 1 or not is_live(state, request.request_id):
        state = without_timers(state, request, sequence.arrived_ns, sequence.stalled_until_ns)
        effects += (FinishRequest(request.request_id, reason),)
    return state, effects + released


def is_live(state: State, request_id: RequestId) -> bool:
    """Whether any choice of a seated or saved request is still to finish."""
    return any(
        s is not None and s.request.request_id == request_id and s.role in LIVE for s in state.slots
    ) or any(saved.sequence.request.request_id == request_id for saved in state.saved)


def drop_saved(state: State, sequence: Sequence, reason: FinishReason) -> Step:
    request_id, choice = sequence.request.request_id, sequence.choice
    saved = tuple(s for s in state.saved if s.sequence is not sequence)
    dropped = (DropSaved(request_id, choice, "ended"),)
    return finish(replace(state, saved=saved), sequence, reason, dropped)


def vacate(state: State, slot: SlotIndex) -> Step:
    """Free the seat of an ended sequence now, or mark it as leaving while the engine uses it."""
    sequence = state.slots[slot]
    assert sequence is not None
    if sequence.role == "seating" or on_engine(state, slot):
        role = "unseating" if sequence.role == "seating" else "leaving"
        length = 0 if in_host_ram(sequence) else sequence.length
        ended = replace(sequence, role=role, length=length, follow=None, stalled_until_ns=None)
        return with_slot(state, slot, ended), ()
    return release(state, slot, "finished")


def on_engine(state: State, slot: SlotIndex) -> bool:
    return state.flight is not None and any(
        lane.slot == slot or lane.source == slot for lane in state.flight.lanes
    )


def release(state: State, slot: SlotIndex, reason: ReleaseReason) -> Step:
    """Empty a seat.  The last choice of a request leaves its state behind as cache."""
    sequence = state.slots[slot]
    assert sequence is not None
    kept = 0 if has_sibling(state, slot) else keepable(state.limits, sequence)
    if reason == "saved" or in_host_ram(sequence):
        kept = 0
    if kept and state.limits.save_idle and sequence.role != "saving":
        saving = replace(sequence, role="saving", follow=None, stalled_until_ns=None)
        return with_slot(state, slot, saving), ()
    state, owned = bequeath(state, slot, sequence)
    pages = min(pages_for(state.limits, kept), owned)
    cache = state.caches[slot]
    cache = replace(
        cache,
        version=cache.version + 1,
        length=kept,
        pages=pages,
        idle_ticket=state.ticket_next,
    )
    state = with_cache(with_slot(state, slot, None), slot, cache)
    state = replace(
        state, pages_free=state.pages_free + owned - pages, ticket_next=state.ticket_next + 1
    )
    return state, (ReleaseSlot(slot, kept, cache.version, reason),)


def keepable(limits: Limits, sequence: Sequence) -> int:
    """Tokens whose state another prompt may find in place."""
    request = sequence.request
    if not request.keep_cache or request.kind != "completion":
        return 0
    return intact_length(limits, sequence)


def has_sibling(state: State, slot: SlotIndex) -> bool:
    sequence = state.slots[slot]
    if sequence is None or sequence.request.choices == 1:
        return False
    request_id = sequence.request.request_id
    return any(
        s is not None and i != slot and s.request.request_id == request_id
        for i, s in enumerate(state.slots)
    )


def bequeath(state: State, slot: SlotIndex, sequence: Sequence) -> tuple[State, int]:
    """Hand the shared prompt pages to a sibling that borrows them; the pages left to free."""
    if sequence.borrowed or sequence.request.choices == 1:
        return state, sequence.pages
    for i, heir in enumerate(state.slots):
        if heir is None or i == slot or not heir.borrowed:
            continue
        if heir.request.request_id == sequence.request.request_id:
            owner = replace(heir, pages=heir.pages + heir.borrowed, borrowed=0)
            return with_slot(state, i, owner), sequence.pages - heir.borrowed
    return state, sequence.pages


# --- the queue and the timers ---------------------------------------------------------------------


def dequeue(state: State, pending: Pending) -> State:
    """Take a request that ended out of the queue, with all its timers."""
    request = pending.request
    state = unqueue(state, pending)
    return without_timers(state, request, pending.arrived_ns, None)


def unqueue(state: State, pending: Pending) -> State:
    """Out of the queue; only the timers of queueing go."""
    request = pending.request
    timers = state.timers
    if request.queue_wait_ns_max is not None:
        due_ns = pending.arrived_ns + request.queue_wait_ns_max
        timers = ordered.remove(timers, (due_ns, request.request_id))
    return replace(
        state,
        queue=state.queue.delete(request.request_id),
        order=ordered.remove(state.order, (-request.priority, request.request_id)),
        timers=timers,
    )


def without_timers(
    state: State, request: Request, arrived_ns: int, stalled_until_ns: int | None
) -> State:
    timers = state.timers
    if request.deadline_after_ns is not None:
        due_ns = arrived_ns + request.deadline_after_ns
        timers = ordered.remove(timers, (due_ns, request.request_id))
    if stalled_until_ns is not None:
        timers = ordered.remove(timers, (stalled_until_ns, request.request_id))
    return state if timers is state.timers else replace(state, timers=timers)
