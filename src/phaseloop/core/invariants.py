"""What must always hold, as code, and which policy promises what.

`check` looks at one state, `check_step` at one transition: both are for tests, the model checker,
the simulator's debug mode and replay, and cost a pass over the state.  `check_launch` is for
production: it costs a pass over the lanes of a round and runs before every launch.

I1   no round mixes prefill-class and decode-class work, and none runs in the other's phase
I2   no first token before the barrier of its cohort has opened
I3   a sealed cohort takes nobody in
I4   while a cohort generates, no member's prompt is unfinished; while it prefills, nobody emits
I5   an idle engine means that nothing can be done: no removal, in any state, stops progress
I6   quantum: a phase that others wait for ends with the first round past its quantum
I7   fair shares: fill = min(capacity, need), unsatisfied shares differ by at most one token
I8   reservations never exceed the pages; no lane writes past what its sequence holds
I9   what is delivered is what the engine produced, cut at the limit, whatever the policy
I10  the same state and event give the same result (replay checks it, `--twice` too)
I11  each request gets exactly one terminal effect, and nothing after it
I12  a fork copies what its leader has computed, from the request it was promised by

I9 in full (equal bits under every policy) is the engine's; here it is conservation of tokens.
"""

from typing import NoReturn

from .admission import can_resume, can_seat, may_seat
from .ordered import keys
from .plan import fill_limit, follower_stops, next_stop
from .policy import all_groups_served, outlook
from .state import LIVE, UNFINISHED, Sequence, State
from .vocabulary import (
    DECODE_CLASS,
    PREFILL_CLASS,
    AnyEffect,
    AnyEvent,
    DeliverTokens,
    Effects,
    FinishChoice,
    FinishRequest,
    Lane,
    LaunchRound,
    Policy,
    Produced,
    ReleaseSlot,
    RequestArrived,
    RequestId,
    RoundCompleted,
    SeatRequest,
    Stop,
)

ALWAYS = ("I5", "I8", "I9", "I10", "I11", "I12")
PROMISES: dict[str, tuple[str, ...]] = {
    "mixed": (),
    "prompts_first": ("I1",),
    "barrier": ("I1", "I2", "I3", "I4"),
    "quantum": ("I1", "I6"),
}
COMPUTE = ("prefill", "encode", "decode", "mixed")  # rounds that run the weights


class Violation(AssertionError):
    """A broken promise: `invariant` names it ("I1".."I12", or "core" for the state's own shape)."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def promises(policy: Policy) -> tuple[str, ...]:
    fair = ("I7",) if policy.share == "fair" else ()
    return tuple(sorted((*PROMISES[policy.switch], *fair, *ALWAYS), key=lambda i: int(i[1:])))


def fail(invariant: str, message: str) -> NoReturn:
    raise Violation(invariant, message)


# --- one launch -----------------------------------------------------------------------------------


def check_launch(state: State, launch: LaunchRound) -> None:
    """`state` is the one after the step that launched.  O(slots)."""
    switch, limits = state.policy.switch, state.limits
    if switch != "mixed":
        right = PREFILL_CLASS if state.phase == "prefill" else DECODE_CLASS
        if launch.kind not in right:
            fail("I1", f"a {launch.kind} round in the {state.phase} phase")
    if switch == "barrier" and launch.kind in DECODE_CLASS:
        for s in state.slots:
            if s is not None and s.role in UNFINISHED:
                fail("I2", f"{launch.kind} while request {s.request.request_id} is {s.role}")
    rows = outputs = 0
    group = None
    for lane in launch.lanes:
        s = state.slots[lane.slot]
        if s is None or (s.request.request_id, s.choice) != (lane.request_id, lane.choice):
            fail("core", f"lane of request {lane.request_id} on a seat that is not its own")
        check_lane(state, launch, lane, s)
        rows += lane.count if launch.kind in COMPUTE else 0
        outputs += lane.outputs
        if launch.kind in COMPUTE and group not in (None, s.group):
            fail("core", f"R7: groups {group} and {s.group} share round {launch.round_id}")
        group = s.group
    if rows > limits.batch_tokens:
        fail("I8", f"{rows} rows in a round of at most {limits.batch_tokens}")
    if outputs > limits.slot_count * (1 + limits.draft_tokens):
        fail("I8", f"{outputs} output rows for {limits.slot_count} slots")
    if not launch.lanes:
        fail("core", f"round {launch.round_id} has no lanes")


def check_lane(state: State, launch: LaunchRound, lane: Lane, s: Sequence) -> None:
    held = (s.pages + s.borrowed) * state.limits.page_length
    written = lane.start + lane.count
    if launch.kind != "shift" and written > held:
        fail("I8", f"request {lane.request_id} writes {written} tokens, holds pages for {held}")
    if launch.kind == "fork":
        source = None if lane.source is None else state.slots[lane.source]
        follow = s.follow
        if source is None or follow is None or source.request.request_id != follow.request_id:
            fail("I12", f"request {lane.request_id} forks from a seat that is not its leader's")
        if source.length < lane.count:
            fail("I12", f"fork of {lane.count} tokens from a sequence of {source.length}")
    elif launch.kind in ("prefill", "encode") and written > s.request.prompt_length:
        fail("core", f"request {lane.request_id}: prompt rows up to {written}")


# --- one state ------------------------------------------------------------------------------------


def check(state: State) -> None:
    check_ledger(state)
    check_seats(state)
    check_queue(state)
    check_phase(state)
    check_progress(state)


def check_ledger(state: State) -> None:
    seated = sum(s.pages for s in state.slots if s is not None)
    idle = sum(cache.pages for cache in state.caches)
    if state.pages_free < 0 or state.pages_free + seated + idle != state.limits.page_count:
        fail("I8", f"{state.pages_free} free + {seated} reserved + {idle} cached pages")
    for slot, cache in enumerate(state.caches):
        if cache.pages and state.slots[slot] is not None:
            fail("I8", f"slot {slot} is seated and still counts as idle cache")
        if cache.length > cache.pages * state.limits.page_length:
            fail("I8", f"slot {slot} caches {cache.length} tokens in {cache.pages} pages")


def check_seats(state: State) -> None:
    seen: set[tuple[RequestId, int]] = set()
    for s in (*state.slots, *(saved.sequence for saved in state.saved)):
        if s is None:
            continue
        name, prompt = (s.request.request_id, s.choice), s.request.prompt_length
        if name in seen:
            fail("core", f"request {name[0]} choice {name[1]} sits twice")
        seen.add(name)
        if s.request.request_id in state.queue:
            fail("core", f"request {name[0]} is queued and seated")
        if s.output_limit is not None and s.produced > s.output_limit:
            fail("I9", f"request {name[0]} produced {s.produced} of at most {s.output_limit}")
        match s.role:
            case "ready" if s.length != prompt or s.produced:
                fail("core", f"ready at {s.length} of {prompt} with {s.produced} tokens")
            case "prefilling" if not s.cached <= s.length < prompt:
                fail("core", f"prefilling at {s.length} of {prompt}, {s.cached} cached")
            case "following" if s.follow is None:
                fail("I12", f"request {name[0]} follows nobody")
            case "generating" if not s.produced:
                fail("core", f"request {name[0]} generates without a first token")
            case _:
                pass
    flight = state.flight
    for lane in flight.lanes if flight else ():
        s = state.slots[lane.slot]
        if s is None or (s.request.request_id, s.choice) != (lane.request_id, lane.choice):
            fail("core", f"R4: the seat of a lane in flight (slot {lane.slot}) was given away")


def check_queue(state: State) -> None:
    limits = state.limits
    if len(state.queue) > limits.queue_length_max:
        fail("core", f"{len(state.queue)} queued, at most {limits.queue_length_max} allowed")
    order = keys(state.order)
    wanted = tuple(sorted((-p.request.priority, i) for i, p in state.queue.items()))
    if order != wanted:
        fail("core", "the queue's order is not its requests'")
    due: list[tuple[int, RequestId]] = []
    alive: dict[RequestId, Sequence] = {}
    for s in (*state.slots, *(saved.sequence for saved in state.saved)):
        if s is not None and s.role in LIVE:
            alive[s.request.request_id] = s
    for i, pending in state.queue.items():
        waits = (pending.request.queue_wait_ns_max, pending.request.deadline_after_ns)
        due += [(pending.arrived_ns + wait, i) for wait in waits if wait is not None]
    for i, s in alive.items():
        if s.request.deadline_after_ns is not None:
            due.append((s.arrived_ns + s.request.deadline_after_ns, i))
        if s.stalled_until_ns is not None:
            due.append((s.stalled_until_ns, i))
    if keys(state.timers) != tuple(sorted(due)):
        fail("core", "the timers are not those of the live requests")


def check_phase(state: State) -> None:
    switch, flight = state.policy.switch, state.flight
    if flight is not None and switch != "mixed":
        right = PREFILL_CLASS if state.phase == "prefill" else DECODE_CLASS
        if flight.kind not in right:
            fail("I1", f"a {flight.kind} round in flight in the {state.phase} phase")
    if switch != "barrier":
        return
    if state.sealed and state.phase == "idle":
        fail("I3", "an idle engine with a sealed cohort")
    if state.phase == "decode":
        if not state.sealed:
            fail("I3", "a cohort generates unsealed")
        for s in state.slots:
            if s is not None and s.role in UNFINISHED:
                fail("I4", f"request {s.request.request_id} is {s.role} while the cohort generates")


def check_progress(state: State) -> None:
    """I5: with the engine idle, whoever is left waits for a client, a timer, or a seat's answer."""
    if state.flight is not None or state.stopped:
        return
    if any(s is not None and s.role == "leaving" for s in state.slots):
        fail("I5", "a seat waits for a round that is not in flight")
    if any(s is not None and s.role in ("seating", "unseating") for s in state.slots):
        return  # the shell owes RequestSeated
    if state.linger_until_ns is not None and None in state.slots:
        return
    seen = outlook(state)
    if seen.prompts or seen.swaps or seen.saves or seen.active:
        fail("I5", f"the engine is idle in the {state.phase} phase with work on its seats")
    if may_seat(state) and can_seat(state):
        fail("I5", "the engine is idle and the first in line would fit")
    if can_resume(state):
        fail("I5", "the engine is idle and a saved sequence would fit")


# --- one transition -------------------------------------------------------------------------------


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
            if after.policy.share == "fair" and effect.kind in ("prefill", "encode"):
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
        if over and (seen.prompts or can_seat(after)):
            fail("I6", f"decode goes on after {elapsed_ns} ns while a prompt waits")


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
