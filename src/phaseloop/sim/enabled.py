"""The environment of the reducer: every event that could come next, whatever the shell is doing.

`enabled(state, world)` yields them, `after(world, event, effects)` is what the environment knows
once the reducer has answered.  A World is an immutable value: which effects are still unanswered
(that is where COMPLETIONS comes in), how many surprises are left, and the clock.  The model checker
takes every event of every state, a property test one at random:

    state, world = root(...)
    for event in enabled(state, world):
        next_state, effects = reduce(state, event)
        next_world = after(world, event, effects)

Surprises are budgeted (requests, cancels, failures, extras), so that the tree is finite.  What ends
something needs no budget.  Time moves by whole ticks, and only while some threshold is still ahead:
each event happens now or one tick later, a deadline is reported early, on time or late.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.reduce import deadline_next
from phaseloop.core.state import LIVE, Sequence, State
from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEvent,
    Candidate,
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    Effects,
    EngineLost,
    Failed,
    Lane,
    LaunchRound,
    Policy,
    PolicyChanged,
    Produced,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestSeated,
    Result,
    RoundCompleted,
    RoundFailed,
    RoundKind,
    SeatRequest,
    Shared,
    ShutdownRequested,
    Stop,
    StopMatched,
)

TICK_NS = 1_000_000


class Alphabet(Struct, frozen=True, gc=False):
    """Which events a world can bring forth at all.

    requests   what may arrive.  Ids are given on arrival, and `shared` names leaders relative to
               the follower's own id: -1 is the request before it.
    calls      indices into `requests` that arrive together, one tuple per kind of call.
    caching    requests arrive with the prefixes that free slots hold, and seating may find them.
    snapshots  lengths of prefixes in host RAM that requests arrive with.
    stalls, policies, shutdown, engine_loss
               events outside the life of a request, each spent from World.extras.
    """

    requests: tuple[Request, ...]
    calls: tuple[tuple[int, ...], ...]
    caching: bool = False
    snapshots: tuple[int, ...] = ()
    stalls: bool = False
    policies: tuple[Policy, ...] = ()
    shutdown: bool = False
    engine_loss: bool = False
    durations_ns: tuple[int, ...] = (TICK_NS,)


class World(Struct, frozen=True, gc=False):
    """What the environment owes the reducer, and what it may still surprise it with."""

    alphabet: Alphabet
    requests: int
    cancels: int = 0
    failures: int = 0
    extras: int = 0
    now_ns: int = 0
    seats: tuple[SeatRequest, ...] = ()
    launch: LaunchRound | None = None
    aborted: bool = False  # the engine may give the round up, which is no failure
    stopped: bool = False


def enabled(state: State, world: World) -> Iterator[AnyEvent]:
    """Every event that may come next, in an order that depends on nothing but the arguments."""
    yield from answers(state, world)
    yield from surprises(state, world)


def after(world: World, event: AnyEvent, effects: Effects) -> World:
    """The environment once `event` has happened and the reducer has answered with `effects`."""
    seats, launch = world.seats, world.launch
    aborted, stopped = world.aborted, world.stopped
    requests, cancels = world.requests, world.cancels
    failures, extras = world.failures, world.extras
    match event:
        case RoundCompleted():
            launch, aborted = None, False
            failures -= sum(isinstance(result, Failed) for result in event.results)
        case RequestSeated():
            seats = tuple(seat for seat in seats if seat.slot != event.slot)
        case RequestArrived():
            requests -= len(event.requests)
        case RequestCancelled():
            cancels -= 1
        case RoundFailed():
            failures -= not aborted
            launch, aborted = None, False
        case ClientStalled() | PolicyChanged() | ShutdownRequested():
            extras -= 1
        case EngineLost():
            seats, launch, extras = (), None, extras - 1
        case StopMatched() | ClientResumed() | DeadlineReached():
            pass
    for effect in effects:
        match effect:
            case LaunchRound():
                launch = effect
            case AbortRound():
                aborted = True
            case SeatRequest():
                seats = (*seats, effect)
            case Stop():
                stopped = True
            case _:
                pass
    return World(
        world.alphabet,
        requests,
        cancels,
        failures,
        extras,
        event.at_ns,
        seats,
        launch,
        aborted,
        stopped,
    )


# --- an engine and a shell that answer ------------------------------------------------------------


def answers(state: State, world: World) -> Iterator[AnyEvent]:
    """What a healthy engine and shell owe; the due deadline once nothing else is owed.

    As long as these keep coming, every request must end.
    """
    if world.stopped:
        return
    for at_ns in moments(state, world):
        yield from completions(world, at_ns)
    due_ns = deadline_next(state)
    if due_ns is not None and world.launch is None and not world.seats:
        yield DeadlineReached(at_ns=max(due_ns, world.now_ns))


def completions(world: World, at_ns: int) -> Iterator[AnyEvent]:
    for seat in world.seats:
        for cached, restore in finds(seat):
            yield RequestSeated(
                at_ns=at_ns,
                request_id=seat.request_id,
                choice=seat.choice,
                slot=seat.slot,
                cached_length=cached,
                restore=restore,
            )
    launch = world.launch
    if launch is None:
        return
    for results in product(*(successes(launch.kind, lane) for lane in launch.lanes)):
        for duration_ns in world.alphabet.durations_ns:
            yield RoundCompleted(
                at_ns=at_ns, round_id=launch.round_id, results=results, duration_ns=duration_ns
            )
    if world.aborted:
        yield RoundFailed(at_ns=at_ns, round_id=launch.round_id, reason="aborted")


def moments(state: State, world: World) -> tuple[int, ...]:
    """When the next event may happen: time is allowed to pass only where it could matter."""
    now_ns = world.now_ns
    due_ns = deadline_next(state)
    ahead = due_ns is not None and due_ns > now_ns
    if ahead or now_ns < slice_end(state) or now_ns < loan_end(state):
        return (now_ns, now_ns + TICK_NS)
    return (now_ns,)


def slice_end(state: State) -> int:
    """When the present phase has had its quantum; 0 where phases are not timed."""
    if state.policy.switch != "quantum" or state.phase == "idle":
        return 0
    policy = state.policy
    decode = state.phase == "decode"
    return state.phase_since_ns + (
        policy.decode_quantum_ns if decode else policy.prefill_quantum_ns
    )


def loan_end(state: State) -> int:
    """When the last of the seated has held its seat for a seat quantum; 0 where seats are kept."""
    quantum_ns = state.policy.seat_quantum_ns
    if not quantum_ns:
        return 0
    return max((s.seated_ns + quantum_ns for s in state.slots if s is not None), default=0)


def finds(seat: SeatRequest) -> Iterator[tuple[int, bool]]:
    """What comparing tokens may find: nothing, or the whole of the source that was asked for."""
    yield 0, False
    if seat.source is not None:
        yield seat.source.length, seat.source.source == "snapshot"


def successes(kind: RoundKind, lane: Lane) -> tuple[Result, ...]:
    """How a lane may go well: it goes on, its last token ends the text, or a bare end token."""
    if lane.outputs == 0:
        return (Produced(0),)
    if kind == "decode":
        some = range(1, lane.outputs + 1)
        return (
            *(Produced(tokens) for tokens in some),
            Produced(0, True),
            *(Produced(tokens, True) for tokens in some),
        )
    return (Produced(1), Produced(0, True), Produced(1, True))


# --- everything else that may happen --------------------------------------------------------------


def surprises(state: State, world: World) -> Iterator[AnyEvent]:
    """Arrivals, endings that clients ask for, failures, and what operators do, at any moment."""
    if world.stopped:
        yield from arrivals(state, world, world.now_ns)  # a call was in the mailbox already
        return
    for at_ns in moments(state, world):
        yield from arrivals(state, world, at_ns)
        yield from client_events(state, world, at_ns)
        if world.failures:
            yield from failures(world, at_ns)
        if world.extras:
            yield from extras(state, world, at_ns)
    yield from deadlines(state, world)


def arrivals(state: State, world: World, at_ns: int) -> Iterator[AnyEvent]:
    alphabet = world.alphabet
    for call in alphabet.calls:
        if len(call) <= world.requests:
            first = state.request_id_last + 1
            requests = [issued(alphabet.requests[i], first + k) for k, i in enumerate(call)]
            if alphabet.caching:
                requests = [with_candidates(state, alphabet, one) for one in requests]
            yield RequestArrived(at_ns=at_ns, requests=tuple(requests))


@lru_cache(maxsize=1024)
def issued(template: Request, request_id: RequestId) -> Request:
    shared = tuple(
        Shared(request_id + leader.request_id, leader.length)
        for leader in template.shared
        if request_id + leader.request_id >= 0
    )
    return replace(template, request_id=request_id, shared=shared)


def with_candidates(state: State, alphabet: Alphabet, request: Request) -> Request:
    """What the shell would find at this moment: at least one prompt token is always computed."""
    most = request.prompt_length - 1
    held = tuple(
        Candidate("slot", slot, cache.version, min(cache.length, most))
        for slot, cache in enumerate(state.caches)
        if cache.length and most and state.slots[slot] is None
    )
    stored = tuple(
        Candidate("snapshot", index, 0, min(length, most))
        for index, length in enumerate(alphabet.snapshots)
        if most
    )
    return replace(request, candidates=held + stored)


def client_events(state: State, world: World, at_ns: int) -> Iterator[AnyEvent]:
    if world.cancels:
        for request_id in live_ids(state):
            yield RequestCancelled(at_ns=at_ns, request_id=request_id)
    for request_id, choice in speaking(state):
        yield StopMatched(at_ns=at_ns, request_id=request_id, choice=choice)
    if world.alphabet.stalls:
        stalled = stalled_ids(state)
        for request_id in seated_ids(state):
            if request_id in stalled:
                yield ClientResumed(at_ns=at_ns, request_id=request_id)
            elif world.extras:
                yield ClientStalled(at_ns=at_ns, request_id=request_id)


def failures(world: World, at_ns: int) -> Iterator[AnyEvent]:
    """Some lanes fail while the others go any way they may, or the whole round is lost."""
    launch = world.launch
    if launch is None:
        return
    outcomes = [(*successes(launch.kind, lane), Failed("injected")) for lane in launch.lanes]
    for results in product(*outcomes):
        if 0 < sum(isinstance(result, Failed) for result in results) <= world.failures:
            yield RoundCompleted(
                at_ns=at_ns, round_id=launch.round_id, results=results, duration_ns=TICK_NS
            )
    yield RoundFailed(at_ns=at_ns, round_id=launch.round_id, reason="injected")


def extras(state: State, world: World, at_ns: int) -> Iterator[AnyEvent]:
    for policy in world.alphabet.policies:
        if policy != state.policy or state.policy_pending is not None:
            yield PolicyChanged(at_ns=at_ns, policy=policy)
    if world.alphabet.shutdown:
        yield ShutdownRequested(at_ns=at_ns)
    if world.alphabet.engine_loss:
        yield EngineLost(at_ns=at_ns, reason="injected")


def deadlines(state: State, world: World) -> Iterator[AnyEvent]:
    """A timer that fires too early, too late, or while the engine still owes an answer."""
    due_ns = deadline_next(state)
    if due_ns is None:
        return
    if world.now_ns < due_ns:
        yield DeadlineReached(at_ns=world.now_ns)
    if world.launch is not None or world.seats:
        yield DeadlineReached(at_ns=max(due_ns, world.now_ns))
    yield DeadlineReached(at_ns=max(due_ns, world.now_ns) + TICK_NS)


# --- who is there ---------------------------------------------------------------------------------


def sequences(state: State) -> list[Sequence]:
    """Choices that have a seat, or had one and will get it back, and have not ended."""
    seated = [s for s in state.slots if s is not None and s.role in LIVE]
    return seated + [saved.sequence for saved in state.saved]


def live_ids(state: State) -> list[RequestId]:
    """Requests that have not ended, oldest first."""
    return sorted({*state.queue, *(s.request.request_id for s in sequences(state))})


def seated_ids(state: State) -> list[RequestId]:
    return sorted({s.request.request_id for s in sequences(state)})


def stalled_ids(state: State) -> list[RequestId]:
    stalled = {s.request.request_id for s in sequences(state) if s.stalled_until_ns is not None}
    return sorted(stalled)


def speaking(state: State) -> list[tuple[RequestId, int]]:
    """Choices whose clients have seen text: a stop string may be found in it."""
    return sorted((s.request.request_id, s.choice) for s in sequences(state) if s.produced)
