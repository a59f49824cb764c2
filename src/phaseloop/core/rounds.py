"""What a completed or failed round changes: each lane moves on, ends, or frees its seat."""

from msgspec.structs import replace

from .ending import Step, end_choice, end_request, release
from .plan import FILL_MIN
from .state import LIVE, Flight, Pace, Saved, Sequence, State, with_slot
from .vocabulary import (
    AnyEffect,
    DeliverTokens,
    Delivery,
    DropSaved,
    Effects,
    FinishReason,
    Lane,
    Produced,
    Result,
    RoundCompleted,
    RoundFailed,
    SlotIndex,
)


def on_round_completed(state: State, event: RoundCompleted) -> Step:
    flight = state.flight
    if flight is None or event.round_id != flight.round_id:
        return state, ()  # R1: not the round in flight
    if len(event.results) != len(flight.lanes):
        return fail_round(state, flight)
    state = replace(state, flight=None, paces=paces_after(state, flight, event.duration_ns))
    match flight.kind:
        case "fork" | "restore" | "save":
            return moved(state, flight, event)
        case "prefill" | "encode" | "sample" | "decode" | "shift" | "mixed":
            return computed(state, flight, event.results)


def paces_after(state: State, flight: Flight, duration_ns: int) -> tuple[Pace, ...]:
    """R10: remember prompt rounds long enough to say something about longer ones."""
    if flight.kind not in ("prefill", "encode", "mixed") or duration_ns <= 0:
        return state.paces
    tokens = sum(lane.count for lane in flight.lanes)
    if tokens < min(FILL_MIN, state.limits.batch_tokens):
        return state.paces
    others = tuple(pace for pace in state.paces if pace.kind != flight.kind)
    return (*others, Pace(flight.kind, tokens, duration_ns))


def computed(state: State, flight: Flight, results: tuple[Result, ...]) -> Step:
    """Lanes that ran through the model, the sampler, or the cache's positions."""
    slots = list(state.slots)
    deliveries: list[Delivery] = []
    endings: list[tuple[SlotIndex, FinishReason]] = []
    leaving: list[SlotIndex] = []
    for lane, result in zip(flight.lanes, results, strict=True):
        slot = lane.slot
        s = slots[slot]
        assert s is not None and s.request.request_id == lane.request_id, "a lane keeps its seat"
        if s.role == "leaving":
            slots[slot] = left_behind(s, flight, lane, result)
            leaving.append(slot)
            continue
        if not isinstance(result, Produced) or not plausible(lane, result):
            endings.append((slot, "failed"))
            continue
        if lane.outputs:
            before = s.produced
            s, ending = generated(s, lane, result.tokens, result.finish)
            if s.produced > before:
                deliveries.append(Delivery(lane.request_id, lane.choice, s.produced - before))
        elif flight.kind == "shift":
            s, ending = replace(s, length=s.length - lane.count), None
        else:
            s, ending = prompted(s, lane)
        slots[slot] = s
        if ending is not None:
            endings.append((slot, ending))
    state = replace(state, slots=tuple(slots))
    effects: Effects = ()
    if deliveries:
        reason = "first_tokens" if flight.kind == "sample" else "generated"
        effects = (DeliverTokens(tuple(deliveries), reason),)
    if endings or leaving:
        state, ended = settle(state, endings, leaving)
        effects += ended
    return state, effects


def plausible(lane: Lane, result: Produced) -> bool:
    """An engine that answers outside its contract has failed the lane (R13)."""
    if 0 < result.tokens <= lane.outputs:
        return True
    return result.tokens == 0 and (lane.outputs == 0 or result.finish)


def left_behind(s: Sequence, flight: Flight, lane: Lane, result: Result) -> Sequence:
    """What the slot of a sequence that ended meanwhile holds: of use as cache, if not to it."""
    if not isinstance(result, Produced) or not plausible(lane, result):
        return s
    if flight.kind == "shift":
        return replace(s, length=s.length - lane.count)
    if flight.kind in ("prefill", "encode"):
        return replace(s, length=s.length + lane.count)
    return s


def generated(
    s: Sequence, lane: Lane, tokens: int, finish: bool
) -> tuple[Sequence, FinishReason | None]:
    """A lane that yielded tokens.  What is past the limit is dropped before delivery (R14)."""
    limit = s.output_limit
    ending: FinishReason | None = "stop" if finish else None
    if limit is not None and s.produced + tokens >= limit:
        tokens = limit - s.produced
        ending = ending or "length"
    # A decode lane computed its pending token, and each accepted draft with it; others computed
    # the prompt's last chunk (`mixed`), or nothing (a sample round).
    rows = max(tokens, 1) if s.role == "generating" else lane.count
    produced = s.produced + tokens
    return replace(s, role="generating", length=s.length + rows, produced=produced), ending


def prompted(s: Sequence, lane: Lane) -> tuple[Sequence, FinishReason | None]:
    """A lane that computed a part of a prompt."""
    length = s.length + lane.count
    s = replace(s, length=length)
    if length < s.request.prompt_length:
        return s, None
    if s.request.kind != "completion":
        return s, "stop"  # R5: it answers at once, waits for nobody and seals nothing
    if s.output_limit == 0:
        return s, "length"
    return replace(s, role="ready"), None


def settle(
    state: State, endings: list[tuple[SlotIndex, FinishReason]], leaving: list[SlotIndex]
) -> Step:
    """End choices and free the seats of those that left while the round ran."""
    effects: list[AnyEffect] = []
    for slot in leaving:
        state, done = release(state, slot, "finished")
        effects += done
    for slot, reason in endings:
        s = state.slots[slot]
        assert s is not None and s.role in LIVE, (
            "a choice ends alone: its siblings are as they were"
        )
        state, done = end_choice(state, slot, reason)
        effects += done
    return state, tuple(effects)


def moved(state: State, flight: Flight, event: RoundCompleted) -> Step:
    """Lanes whose state was copied: to a fork, to host RAM, or back."""
    effects: list[AnyEffect] = []
    for lane, result in zip(flight.lanes, event.results, strict=True):
        ok = isinstance(result, Produced) and plausible(lane, result)
        state, done = move(state, flight, lane, event.at_ns if ok else None)
        effects += done
    state, released = release_sources(state, flight)
    return state, (*effects, *released)


def move(state: State, flight: Flight, lane: Lane, done_ns: int | None) -> Step:
    """One copied lane; `done_ns` is None where the copy failed."""
    s = state.slots[lane.slot]
    assert s is not None and s.request.request_id == lane.request_id, "a lane keeps its seat"
    match s.role:
        case "leaving":
            return left_while_moving(state, flight, lane)
        case "following":
            return forked(state, lane, s, done_ns is not None)
        case "restoring":
            return restored(state, lane, s, done_ns is not None)
        case "swapping":
            return swapped(state, lane, s, done_ns)
        case "saving":
            return release(state, lane.slot, "finished")
        case _:
            raise AssertionError(f"no {flight.kind} lane has role {s.role}")


def release_sources(state: State, flight: Flight) -> Step:
    """Leaders that ended while they were being copied have kept their seats until now."""
    effects: list[AnyEffect] = []
    for lane in flight.lanes:
        s = None if lane.source is None else state.slots[lane.source]
        if s is not None and s.role == "leaving" and lane.source is not None:
            state, done = release(state, lane.source, "finished")
            effects += done
    return state, tuple(effects)


def left_while_moving(state: State, flight: Flight, lane: Lane) -> Step:
    dropped: Effects = ()
    if flight.kind == "save":
        dropped = (DropSaved(lane.request_id, lane.choice, "ended"),)
    state, released = release(state, lane.slot, "finished")
    return state, dropped + released


def forked(state: State, lane: Lane, s: Sequence, ok: bool) -> Step:
    if not ok and s.choice > 0:
        return end_choice(state, lane.slot, "failed")
    if not ok:  # a shared prefix is only a shortcut
        return with_slot(state, lane.slot, replace(s, role="prefilling", follow=None)), ()
    whole = lane.count == s.request.prompt_length
    role = "ready" if whole else "prefilling"
    forked = replace(s, role=role, length=lane.count, cached=lane.count, follow=None)
    return with_slot(state, lane.slot, forked), ()


def restored(state: State, lane: Lane, s: Sequence, ok: bool) -> Step:
    if s.resume is None:  # a cached prefix: losing it costs time, nothing else
        found = lane.count if ok else 0
        s = replace(s, role="prefilling", length=found, cached=found)
        return with_slot(state, lane.slot, s), ()
    if not ok:
        return end_choice(state, lane.slot, "failed")
    s = replace(s, role=s.resume, resume=None, swap_for=None)
    return with_slot(state, lane.slot, s), ()


def swapped(state: State, lane: Lane, s: Sequence, saved_ns: int | None) -> Step:
    """A sequence that made room waits in host RAM; where it cannot, its answer is truncated."""
    if saved_ns is None or s.swap_for is None:
        return end_choice(state, lane.slot, "no_space")
    state, released = release(state, lane.slot, "saved")
    saved = (*state.saved, Saved(replace(s, pages=0), saved_ns, s.swap_for))
    return replace(state, saved=tuple(sorted(saved, key=resume_rank))), released


def resume_rank(saved: Saved) -> tuple[bool, int, int, int]:
    """For memory first, oldest admission first (R9); then by priority and waiting time (R11)."""
    s = saved.sequence
    if saved.cause == "memory":
        return False, 0, 0, s.ticket
    return True, -s.request.priority, saved.since_ns, s.ticket


def on_round_failed(state: State, event: RoundFailed) -> Step:
    flight = state.flight
    if flight is None or event.round_id != flight.round_id:
        return state, ()
    return fail_round(state, flight)


def fail_round(state: State, flight: Flight) -> Step:
    """R13: the requests with a lane in the round end; every lane keeps its length before launch.

    Only where the copy was a shortcut (a shared or a cached prefix) is the prompt computed instead.
    """
    state = replace(state, flight=None)
    effects: list[AnyEffect] = []
    for lane in flight.lanes:
        s = state.slots[lane.slot]
        if s is None:
            continue  # it ended with a choice before it in this round
        assert s.request.request_id == lane.request_id, "a lane keeps its seat"
        shortcut = s.choice == 0 and s.resume is None and s.role in ("following", "restoring")
        if shortcut or s.role in ("leaving", "saving"):
            state, done = move(state, flight, lane, None)
        else:
            state, done = end_request(state, lane.request_id, "failed")
        effects += done
    state, released = release_sources(state, flight)
    return state, (*effects, *released)
