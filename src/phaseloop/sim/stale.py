"""Events about what is gone or never was: answers that come late, or twice, and names misspelt."""

from collections.abc import Iterator

from phaseloop.core.state import State
from phaseloop.core.vocabulary import (
    AnyEvent,
    ClientResumed,
    ClientStalled,
    Produced,
    RequestCancelled,
    RequestId,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    StopMatched,
)

from .enabled import TICK_NS, World, live_ids

UNKNOWN: RequestId = 1_000_000_000  # no request ever had this id


def stale(state: State, world: World) -> Iterator[AnyEvent]:
    """Events about what is gone or never was: each must leave everything as it is."""
    at_ns = world.now_ns
    live = live_ids(state)
    awaited = [(seat.request_id, seat.slot) for seat in world.seats]
    ended = [i for i in range(state.request_id_last, -1, -1) if i not in live][:1]
    for request_id in (*ended, UNKNOWN):
        yield RequestCancelled(at_ns=at_ns, request_id=request_id)
        yield StopMatched(at_ns=at_ns, request_id=request_id)
        yield ClientStalled(at_ns=at_ns, request_id=request_id)
        yield ClientResumed(at_ns=at_ns, request_id=request_id)
        for slot in range(len(state.slots)):
            if (request_id, slot) not in awaited:
                yield RequestSeated(at_ns=at_ns, request_id=request_id, choice=0, slot=slot)
    round_ids = {state.round_id_next, state.round_id_next - 1} - {in_flight(world)}
    for round_id in sorted(round_ids):
        yield RoundFailed(at_ns=at_ns, round_id=round_id, reason="stale")
        yield RoundCompleted(
            at_ns=at_ns, round_id=round_id, results=(Produced(1, True),), duration_ns=TICK_NS
        )


def in_flight(world: World) -> int | None:
    return None if world.launch is None else world.launch.round_id
