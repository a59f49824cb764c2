"""reduce(state, event) -> (state, effects): total, pure, the only place where State changes.

How to read it: `reduce` first lets the event change what is true (one `on_<event>` each), then, in
`advance`, asks what to do next.  While a round is in flight that is only seating; when the engine
is free it is, in this order: a pending policy, the seal, admission, the phase, the next round.

What is not here: which phase (policy.py), what a round carries (plan.py), who gets a seat
(admission.py), how things end (ending.py), how completed lanes move on (rounds.py), pages
(memory.py), why somebody waits (explain.py), what must always hold (invariants.py).
"""

from collections.abc import Iterable
from typing import assert_never

from msgspec.structs import replace

from . import ordered
from .admission import admit, can_resume, can_seat, enqueue, may_seat, refusal
from .ending import drop_saved, end_choice, end_request, release
from .policy import Outlook, change_policy, enter, next_phase, outlook
from .rounds import on_round_completed, on_round_failed
from .sharing import choose_leader, refollow
from .state import LIVE, Flight, Sequence, State, with_slot
from .turns import launch_next, lend_seat
from .vocabulary import (
    AbortRound,
    AnyEffect,
    AnyEvent,
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    DeliverTokens,
    Effects,
    EngineLost,
    FinishChoice,
    FinishReason,
    FinishRequest,
    LaunchRound,
    PolicyChanged,
    ReleaseSlot,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    ShutdownRequested,
    Stop,
    StopMatched,
)

Step = tuple[State, Effects]
EXIT_OK, EXIT_ENGINE_LOST = 0, 70


def reduce(state: State, event: AnyEvent) -> Step:
    """One step.  Events about what is gone, or never was, change nothing and are no error."""
    if state.stopped:
        return on_event_after_stop(state, event)
    state, effects = on_event(state, event)
    if state.stopped:
        return state, in_order(effects)
    if state.flight is not None and effects:
        state, aborted = abort_if_abandoned(state, state.flight)
        effects += aborted
    state, more = advance(state, event.at_ns)
    return state, in_order(effects + more)


def on_event(state: State, event: AnyEvent) -> Step:
    match event:
        case RoundCompleted():
            return on_round_completed(state, event)
        case RequestArrived():
            return on_request_arrived(state, event)
        case RequestSeated():
            return on_request_seated(state, event)
        case RequestCancelled():
            return end_request(state, event.request_id, "cancelled")
        case StopMatched():
            return on_stop_matched(state, event)
        case DeadlineReached():
            return on_deadline_reached(state, event)
        case ClientStalled():
            return on_client_stalled(state, event), ()
        case ClientResumed():
            return on_client_resumed(state, event.request_id), ()
        case RoundFailed():
            return on_round_failed(state, event)
        case EngineLost():
            return end_everything(state, "engine_lost", Stop(EXIT_ENGINE_LOST, "engine_lost"))
        case PolicyChanged():
            return replace(state, policy_pending=event.policy), ()
        case ShutdownRequested():
            return on_shutdown_requested(state, event)
        case _:
            assert_never(event)


def deadline_next(state: State) -> int | None:
    """When (ns) to post DeadlineReached if nothing happens first.  Pulled, so never stale."""
    timer = ordered.first(state.timers)
    due = [] if timer is None else [timer[0]]
    if state.linger_until_ns is not None and state.flight is None:
        due.append(state.linger_until_ns)
    if state.shutdown_at_ns is not None and not state.stopped:
        due.append(state.shutdown_at_ns)
    return min(due, default=None)


# --- events ---------------------------------------------------------------------------------------


def on_request_arrived(state: State, event: RequestArrived) -> Step:
    """R1, R3: a call's requests are queued together or refused together."""
    fresh = tuple(r for r in event.requests if r.request_id > state.request_id_last)
    if not fresh:
        return state, ()  # a reused id may belong to somebody alive: it must not be answered
    state = replace(state, request_id_last=max(r.request_id for r in fresh))
    reason = refusal(state, fresh)
    if reason is None and len({r.request_id for r in fresh}) < len(event.requests):
        reason = "invalid"
    if reason is not None:
        refused = unique(r.request_id for r in fresh)
        return state, tuple(FinishRequest(request_id, reason) for request_id in refused)
    for request in fresh:
        state = enqueue(state, request, event.at_ns)
    return state, ()


def on_request_seated(state: State, event: RequestSeated) -> Step:
    if not 0 <= event.slot < len(state.slots):
        return state, ()
    s = state.slots[event.slot]
    if s is None or (s.request.request_id, s.choice) != (event.request_id, event.choice):
        return state, ()
    found = max(0, min(event.cached_length, s.request.prompt_length - 1))
    if s.role == "unseating":
        s = replace(s, length=0 if event.restore else found)
        return release(with_slot(state, event.slot, s), event.slot, "seat_cancelled")
    if s.role != "seating":
        return state, ()
    return with_slot(state, event.slot, seated(state, s, found, event.restore)), ()


def seated(state: State, s: Sequence, found: int, restore: bool) -> Sequence:
    """What a sequence does first once its seat is ready."""
    if s.resume is not None:
        return replace(s, role="restoring")
    if s.choice > 0:
        return replace(s, role="following")
    follow = choose_leader(state, replace(s, cached=found))
    here = 0 if restore else found
    if follow is not None:  # worth more than what is stored, which then stays where it is
        return replace(s, role="following", length=here, cached=here, follow=follow)
    if restore and found:
        return replace(s, role="restoring", cached=found)
    return replace(s, role="prefilling", length=here, cached=here)


def on_stop_matched(state: State, event: StopMatched) -> Step:
    for slot, s in enumerate(state.slots):
        if s is None or s.role not in LIVE or s.choice != event.choice:
            continue
        if s.request.request_id == event.request_id and s.produced:
            return end_choice(state, slot, "stop")
    return stop_saved(state, event)


def stop_saved(state: State, event: StopMatched) -> Step:
    for saved in state.saved:
        s = saved.sequence
        if s.request.request_id == event.request_id and s.choice == event.choice and s.produced:
            return drop_saved(state, s, "stop")
    return state, ()


def on_deadline_reached(state: State, event: DeadlineReached) -> Step:
    """Everything due by now, earliest first."""
    effects: list[AnyEffect] = []
    timer = ordered.first(state.timers)
    while timer is not None and timer[0] <= event.at_ns:
        state, ended = end_request(state, timer[1], expiry_of(state, timer))
        effects += ended
        timer = ordered.first(state.timers)
    if state.shutdown_at_ns is not None and state.shutdown_at_ns <= event.at_ns:
        state, ended = end_everything(state, "shutdown", Stop(EXIT_OK, "shutdown"))
        effects += ended
    return state, tuple(effects)


def expiry_of(state: State, timer: tuple[int, int]) -> FinishReason:
    """Which of a request's promises ran out; the deadline names itself where several did."""
    due_ns, request_id = timer
    pending = state.queue.get(request_id)
    if pending is not None:
        wait_ns = pending.request.deadline_after_ns
        expired = wait_ns is not None and pending.arrived_ns + wait_ns == due_ns
        return "deadline" if expired else "queue_timeout"
    for s in sequences(state):
        if s.request.request_id == request_id and s.stalled_until_ns == due_ns:
            return "stalled"
    return "deadline"


def sequences(state: State) -> tuple[Sequence, ...]:
    seated = tuple(s for s in state.slots if s is not None and s.role in LIVE)
    return seated + tuple(saved.sequence for saved in state.saved)


def on_client_stalled(state: State, event: ClientStalled) -> State:
    """R12: parked from the next boundary on; ended if it lasts."""
    stalled = [s for s in sequences(state) if s.request.request_id == event.request_id]
    if not stalled or any(s.stalled_until_ns is not None for s in stalled):
        return state
    until_ns = event.at_ns + state.limits.client_stall_ns
    timers = ordered.insert(state.timers, (until_ns, event.request_id))
    return mark_stalled(replace(state, timers=timers), event.request_id, until_ns)


def on_client_resumed(state: State, request_id: int) -> State:
    for s in sequences(state):
        if s.request.request_id == request_id and s.stalled_until_ns is not None:
            timers = ordered.remove(state.timers, (s.stalled_until_ns, request_id))
            return mark_stalled(replace(state, timers=timers), request_id, None)
    return state


def mark_stalled(state: State, request_id: int, until_ns: int | None) -> State:
    def marked(s: Sequence) -> Sequence:
        return replace(s, stalled_until_ns=until_ns)

    slots = tuple(
        marked(s) if s and s.role in LIVE and s.request.request_id == request_id else s
        for s in state.slots
    )
    saved = tuple(
        replace(one, sequence=marked(one.sequence))
        if one.sequence.request.request_id == request_id
        else one
        for one in state.saved
    )
    return replace(state, slots=slots, saved=saved)


def on_shutdown_requested(state: State, event: ShutdownRequested) -> Step:
    """R16: the first request drains, the second ends at once."""
    if state.shutdown_at_ns is not None:
        return end_everything(state, "shutdown", Stop(EXIT_OK, "shutdown"))
    state = replace(state, shutdown_at_ns=event.at_ns + state.limits.shutdown_grace_ns)
    effects: list[AnyEffect] = []
    for _, request_id in ordered.keys(state.order):
        state, ended = end_request(state, request_id, "shutdown")
        effects += ended
    return state, tuple(effects)


def end_everything(state: State, reason: FinishReason, stop: Stop) -> Step:
    """Every client gets its end, then the loop stops.  Nothing is left that could act."""
    waiting = [request_id for _, request_id in ordered.keys(state.order)]
    seated = unique(s.request.request_id for s in sequences(state))
    effects: list[AnyEffect] = []
    for request_id in (*seated, *waiting):
        state, ended = end_request(state, request_id, reason)
        effects += (e for e in ended if isinstance(e, FinishChoice | FinishRequest))
    running = state.flight is not None and reason != "engine_lost"
    if state.flight is not None and running and not state.flight.aborted:
        effects.append(AbortRound(state.flight.round_id, "shutdown"))
    effects.append(stop)
    idle = replace(
        state,
        slots=(None,) * len(state.slots),
        caches=tuple(replace(c, length=0, pages=0) for c in state.caches),
        pages_free=state.limits.page_count,
        phase="idle",
        flight=None,
        linger_until_ns=None,
        policy_pending=None,
        sealed=False,
        stopped=True,
    )
    return idle, tuple(effects)


def on_event_after_stop(state: State, event: AnyEvent) -> Step:
    """The loop has ended; a call that was already in the mailbox still gets its answer."""
    if isinstance(event, RequestArrived):
        return on_request_arrived(state, event)
    return state, ()


# --- what to do next ------------------------------------------------------------------------------


def advance(state: State, now_ns: int) -> Step:
    """Seat whom the phase lets in and, if the engine is free, launch the next round.

    Each turn of the loop launches, or moves a phase on, or takes something off a seat; so a few
    turns per slot are enough, and more would be a fault in the policy.
    """
    effects: Effects = ()
    if state.flight is None:
        state = change_policy(state, now_ns)
    for _ in range(8 + 2 * len(state.slots)):
        before = state
        state, done = advance_once(state, now_ns)
        effects += done
        if state is before or state.flight is not None:
            return drain(state, effects)
    raise AssertionError("the policy does not settle")


def advance_once(state: State, now_ns: int) -> Step:
    if state.flight is not None:
        waiting = bool(state.order or state.saved)
        return admit(state, now_ns) if waiting and may_seat(state) else (state, ())
    seen = outlook(state)
    if seen.follows:
        state = refollow(state)
        seen = outlook(state)
    state = seal(state, seen)
    effects: Effects = ()
    resumable = seatable = False
    if state.order or state.saved:
        if state.saved or may_seat(state):
            state, effects = admit(state, now_ns)
            seen = outlook(state) if effects else seen
        resumable = can_resume(state)
        seatable = state.policy.switch == "quantum" and can_seat(state)
    phase = next_phase(state, seen, now_ns, seatable, resumable)
    if phase != state.phase:
        return enter(state, phase, now_ns), effects
    lent = lend_seat(state, seen, now_ns, seatable)
    if lent is not state:
        return lent, effects  # it leaves before another token is made (R11)
    state, launched = launch_next(state, now_ns)
    return state, effects + launched


def seal(state: State, seen: Outlook) -> State:
    """R5: the cohort is closed once a member waits at the barrier; nothing reopens it."""
    if state.sealed or state.phase != "prefill" or state.policy.switch != "barrier":
        return state
    return replace(state, sealed=True, linger_until_ns=None) if seen.waiting else state


def drain(state: State, effects: Effects) -> Step:
    """R16: when a shutdown has nothing left to wait for, the loop stops."""
    if state.shutdown_at_ns is None or state.flight is not None or state.saved:
        return state, effects
    if any(s is not None and s.role != "saving" for s in state.slots):
        return state, effects
    state, ended = end_everything(state, "shutdown", Stop(EXIT_OK, "shutdown"))
    return state, effects + ended


def abort_if_abandoned(state: State, flight: Flight) -> Step:
    """R10: a round whose lanes have all left need not be finished."""
    seats = (state.slots[lane.slot] for lane in flight.lanes)
    if flight.aborted or any(s is not None and s.role != "leaving" for s in seats):
        return state, ()
    aborted = replace(state, flight=replace(flight, aborted=True))
    return aborted, (AbortRound(flight.round_id, "lanes_left"),)


ORDER: dict[type, int] = {
    ReleaseSlot: 0,
    LaunchRound: 1,
    DeliverTokens: 2,
    FinishChoice: 3,
    FinishRequest: 3,
    Stop: 5,
}


def in_order(effects: Effects) -> Effects:
    """R17: the launch before tokens, endings and seats, so that the device works while HTTP writes.

    Only releases go before it: they are bookkeeping, and the launch may spend the pages they free.
    """
    if len(effects) < 2:
        return effects
    if len(effects) == 2:
        first, second = effects
        if isinstance(first, DeliverTokens) and isinstance(second, LaunchRound):
            return second, first  # the usual step
    return tuple(sorted(effects, key=lambda effect: ORDER.get(type(effect), 4)))


def unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
