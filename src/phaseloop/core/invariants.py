"""What must always hold, as code, and which policy promises what.

`check` looks at one state and `check_step` (core/transitions.py) at one transition: both are for
tests, the model checker and replay, and cost a pass over the state.  `check_launch` is for
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
from .policy import outlook
from .state import LIVE, UNFINISHED, Sequence, State
from .vocabulary import (
    DECODE_CLASS,
    PREFILL_CLASS,
    Lane,
    LaunchRound,
    Policy,
    RequestId,
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
    whole = state.limits.whole_prompts and s.role == "prefilling"
    if whole and written != s.request.prompt_length:
        fail("core", f"request {lane.request_id}: {lane.count} rows of a prompt that is one piece")


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
    tickets: set[int] = set()
    for s in (*state.slots, *(saved.sequence for saved in state.saved)):
        if s is None:
            continue
        name, prompt = (s.request.request_id, s.choice), s.request.prompt_length
        if name in seen:
            fail("core", f"request {name[0]} choice {name[1]} sits twice")
        seen.add(name)
        if s.ticket in tickets or s.ticket >= state.ticket_next:
            fail("core", f"request {name[0]} has ticket {s.ticket}, which is not its own")
        tickets.add(s.ticket)
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
