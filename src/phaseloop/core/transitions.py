"""What must hold of one transition: the second half of core/invariants.py."""

from .admission import can_seat
from .invariants import check_launch, fail
from .plan import fill_limit, follower_stops, next_stop
from .policy import all_groups_served, outlook
from .state import LIVE, State
from .vocabulary import (
    PREFILL_CLASS,
    AnyEffect,
    AnyEvent,
    DeliverTokens,
    Effects,
    FinishChoice,
    FinishRequest,
    LaunchRound,
    Produced,
    ReleaseSlot,
    RequestArrived,
    RequestId,
    RoundCompleted,
    SeatRequest,
    Stop,
)


def check_step(before: State, event: AnyEvent, after: State, effects: Effects) -> None:
    check_boundary(before, event, after)
    check_endings(before, event, after, effects)
    check_deliveries(before, event, after, effects)
    check_order(effects)
    check_releases(before, after, effects)
    for effect in effects:
        if isinstance(effect, LaunchRound):
            check_launch(after, effect)
            check_quantum(before, event, after, effect)
            shared = after.policy.share == "fair" and not after.limits.whole_prompts
            if shared and effect.kind in ("prefill", "encode"):
                check_shares(after, effect)
        elif isinstance(effect, SeatRequest):
            same = before.cohort == after.cohort and before.sealed
            if same and after.policy.switch == "barrier" and not is_resumed(after, effect):
                fail("I3", f"request {effect.request_id} joins a sealed cohort")


def is_resumed(state: State, effect: SeatRequest) -> bool:
    s = state.slots[effect.slot]
    return s is not None and s.resume is not None


def check_boundary(before: State, event: AnyEvent, after: State) -> None:
    """R4: while a round stays in flight, phase, seal and policy stay."""
    if before.flight is None or after.flight is None:
        return
    if before.flight.round_id == after.flight.round_id:
        same = (before.phase, before.sealed, before.policy, before.cohort)
        if same != (after.phase, after.sealed, after.policy, after.cohort):
            fail("core", f"R4: {type(event).__name__} changed the phase under a round in flight")


def check_endings(before: State, event: AnyEvent, after: State, effects: Effects) -> None:
    finished: set[RequestId] = set()
    choices: set[tuple[RequestId, int]] = set()
    for effect in effects:
        if isinstance(effect, FinishRequest):
            if effect.request_id in finished:
                fail("I11", f"request {effect.request_id} finished twice")
            finished.add(effect.request_id)
        elif isinstance(effect, FinishChoice):
            choice = (effect.request_id, effect.choice)
            if choice in choices or effect.request_id in finished:
                fail("I11", f"choice {choice} finished twice, or after its request")
            choices.add(choice)
    born: set[RequestId] = set()
    if isinstance(event, RequestArrived):
        born = {r.request_id for r in event.requests if r.request_id > before.request_id_last}
    if live(after) != (live(before) | born) - finished:
        fail("I11", f"a request left without its end, or ended and stayed: {effects}")
    gone = live_choices(before) - live_choices(after)
    if gone != choices & live_choices(before):
        fail("I11", f"choices {gone} left, {choices} were finished")


def live(state: State) -> set[RequestId]:
    return set(state.queue) | {request_id for request_id, _ in live_choices(state)}


def live_choices(state: State) -> set[tuple[RequestId, int]]:
    seated = [s for s in state.slots if s is not None and s.role in LIVE]
    saved = [one.sequence for one in state.saved]
    return {(s.request.request_id, s.choice) for s in seated + saved}


def check_deliveries(before: State, event: AnyEvent, after: State, effects: Effects) -> None:
    delivered = [e for e in effects if isinstance(e, DeliverTokens)]
    if not delivered:
        return
    flight = before.flight
    if not isinstance(event, RoundCompleted) or flight is None or len(delivered) > 1:
        fail("I9", f"{type(event).__name__} delivers tokens")
    if flight.kind in PREFILL_CLASS and before.policy.switch != "mixed":
        fail("I4", f"a {flight.kind} round delivers tokens")
    yields = {
        (lane.request_id, lane.choice): result.tokens
        for lane, result in zip(flight.lanes, event.results, strict=True)
        if isinstance(result, Produced)
    }
    held = {(s.request.request_id, s.choice): s for s in before.slots if s and s.role in LIVE}
    for one in delivered[0].deliveries:
        name = (one.request_id, one.choice)
        if name not in held:
            fail("I11", f"tokens for {name}, which has ended")
        s, tokens = held[name], yields.get(name, 0)
        room = tokens if s.output_limit is None else min(tokens, s.output_limit - s.produced)
        if one.tokens != room or one.tokens <= 0:
            fail("I9", f"{name} was given {one.tokens} tokens, {room} were its own")


def check_order(effects: Effects) -> None:
    """R17: releases, the launch, tokens, then endings and seats, then the stop."""
    rank: list[int] = [order_of(effect) for effect in effects]
    if rank != sorted(rank):
        fail("core", f"R17: effects out of order: {[type(e).__name__ for e in effects]}")
    if rank.count(1) > 1:
        fail("core", "two rounds launched in one step")


def order_of(effect: AnyEffect) -> int:
    match effect:
        case ReleaseSlot():
            return 0
        case LaunchRound():
            return 1
        case DeliverTokens():
            return 2
        case FinishChoice() | FinishRequest():
            return 3
        case Stop():
            return 5
        case _:
            return 4


def check_releases(before: State, after: State, effects: Effects) -> None:
    """What the shell is told of a slot's cache ends where the state is, and never goes back."""
    versions = {slot: cache.version for slot, cache in enumerate(before.caches)}
    for effect in effects:
        if isinstance(effect, ReleaseSlot):
            if effect.version != versions[effect.slot] + 1:
                fail("core", f"slot {effect.slot} is released under a stale version")
            versions[effect.slot] = effect.version
    if not after.stopped and any(c.version != versions[i] for i, c in enumerate(after.caches)):
        fail("core", "a cache changed and the shell was not told")


def check_quantum(before: State, event: AnyEvent, after: State, launch: LaunchRound) -> None:
    policy = after.policy
    if policy.switch != "quantum" or before.policy != policy or before.phase != after.phase:
        return
    if after.phase_rounds <= before.phase_rounds:
        return  # a new phase of the same kind: in between, everybody was held for memory
    elapsed_ns = event.at_ns - before.phase_since_ns
    seen = outlook(after)
    if after.phase == "prefill":
        over = before.phase_rounds > 0 and elapsed_ns >= policy.prefill_quantum_ns
        if over and seen.active:
            fail("I6", f"prefill goes on after {elapsed_ns} ns while others could generate")
    elif launch.kind == "decode":
        over = all_groups_served(before) and elapsed_ns >= policy.decode_quantum_ns
        if seen.swaps or (over and (seen.prompts or can_seat(after))):
            fail("I6", f"decode goes on after {elapsed_ns} ns while a prompt or a seat waits")


def check_shares(state: State, launch: LaunchRound) -> None:
    """Against the state the launch left: lengths move only when a round completes."""
    first = state.slots[launch.lanes[0].slot]
    assert first is not None
    stops = follower_stops(state)
    shares = {lane.slot: lane.count for lane in launch.lanes}
    needs: dict[int, int] = {}
    for slot, s in enumerate(state.slots):
        if s is not None and s.role == "prefilling" and s.group == first.group:
            needs[slot] = next_stop(slot, s, stops) - s.length
    fill, capacity = sum(shares.values()), fill_limit(state.limits, state.paces, launch.kind)
    if fill != min(capacity, sum(needs.values())):
        fail("I7", f"fill {fill} of capacity {capacity} with needs {needs}")
    open_shares = [shares.get(slot, 0) for slot in needs if shares.get(slot, 0) < needs[slot]]
    if open_shares and max(open_shares) - min(open_shares) > 1:
        fail("I7", f"unsatisfied shares {open_shares} differ by more than one token")
    if open_shares and max(shares.values()) > min(open_shares) + 1:
        fail("I7", f"a satisfied share exceeds the unsatisfied {open_shares}: {shares}")
