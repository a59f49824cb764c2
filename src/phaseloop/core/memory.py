"""The ledger of KV pages (R9): what a request reserves, what is evicted, who is held.

`pages_free` counts pages that nobody holds.  Reservations (`Sequence.pages`) are promises; idle
caches (`Cache.pages`) are leftovers that any promise may evict, oldest first.
"""

from msgspec.structs import replace

from .state import Cache, Limits, Sequence, State
from .vocabulary import AnyEffect, Effects, ReleaseSlot, Request, SlotIndex


def pages_for(limits: Limits, tokens: int) -> int:
    return -(-tokens // limits.page_length)


def output_limit(limits: Limits, request: Request) -> int | None:
    """Tokens a choice may produce: its own limit cut to the context; None if nothing bounds it."""
    if request.kind != "completion":
        return 0
    stated = request.output_limit
    if request.shift_keep is not None:
        return stated
    room = limits.context_length - request.prompt_length
    return room if stated is None else min(stated, room)


def kept_on_shift(limits: Limits, request: Request) -> int | None:
    """How many leading tokens a context shift leaves alone; None where there is none."""
    keep = request.shift_keep
    return None if keep is None else max(0, min(keep, limits.context_length // 2))


def intact_length(limits: Limits, sequence: Sequence) -> int:
    """Leading tokens whose state is what a cold run of them would compute.

    After a context shift that is the kept head: the rest was computed with the dropped tokens in
    view, and stands at other positions.
    """
    request = sequence.request
    unshifted = request.prompt_length + sequence.produced - 1
    if sequence.produced and sequence.length < unshifted:
        return min(sequence.length, kept_on_shift(limits, request) or 0)
    return sequence.length


def reservation(limits: Limits, request: Request, choice: int) -> tuple[int, int]:
    """(pages reserved, pages borrowed from choice 0) for one choice."""
    stated = output_limit(limits, request)
    output = limits.output_reserve if request.output_limit is None else stated
    output = 0 if output is None else output
    if request.kind != "completion":
        output = 0
    tokens = min(request.prompt_length + output, limits.context_length)
    pages = max(1, pages_for(limits, tokens))
    borrowed = 0
    if choice > 0 and limits.shares_pages:
        borrowed = request.prompt_length // limits.page_length
    return pages - borrowed, borrowed


def reservation_of_all(limits: Limits, request: Request) -> int:
    return sum(reservation(limits, request, choice)[0] for choice in range(request.choices))


def pages_available(state: State) -> int:
    """Free pages and those of idle caches, which are evicted on demand."""
    return state.pages_free + sum(cache.pages for cache in state.caches)


def pages_spare(state: State) -> int:
    """Pages that a newcomer may have: those that a held sequence waits for are spoken for."""
    limits = state.limits
    owed = sum(
        max(0, pages_for(limits, s.length + 1) - s.pages - s.borrowed)
        for s in state.slots
        if s is not None and s.role == "generating"
    )
    return pages_available(state) - owed


def take_pages(state: State, pages: int) -> tuple[State, Effects] | None:
    """Reserve `pages`, evicting idle caches oldest first; None where even that is not enough."""
    if pages <= state.pages_free:
        return replace(state, pages_free=state.pages_free - pages), ()
    if pages > pages_available(state):
        return None
    effects: list[AnyEffect] = []
    while state.pages_free < pages:
        state, released = evict_oldest(state)
        effects.append(released)
    return replace(state, pages_free=state.pages_free - pages), tuple(effects)


def evict_oldest(state: State) -> tuple[State, ReleaseSlot]:
    slot = min(
        (i for i, cache in enumerate(state.caches) if cache.pages),
        key=lambda i: state.caches[i].idle_ticket,
    )
    cache = state.caches[slot]
    state = replace(state, pages_free=state.pages_free + cache.pages)
    emptied = replace(cache, version=cache.version + 1, length=0, pages=0)
    state = with_cache(state, slot, emptied)
    return state, ReleaseSlot(slot, 0, emptied.version, "evicted")


def with_cache(state: State, slot: SlotIndex, cache: Cache) -> State:
    caches = state.caches
    return replace(state, caches=(*caches[:slot], cache, *caches[slot + 1 :]))


def resume_pages(state: State, sequence: Sequence) -> int:
    """Pages a saved sequence wants back: room to go on, or the bare minimum where it is alone.

    Without that room it would be held, and saved again, at its next page.
    """
    limits, prompt = state.limits, sequence.request.prompt_length
    if all(s is None for s in state.slots):
        return pages_for(limits, max(sequence.length, prompt))
    ahead = limits.output_reserve
    if sequence.output_limit is not None:
        ahead = min(ahead, sequence.output_limit - sequence.produced)
    tokens = min(max(sequence.length, prompt) + max(ahead, 0), limits.context_length)
    return max(1, min(pages_for(limits, tokens), limits.page_count))
