"""The clients of a simulated run, and the gateway's part that matters to the reducer.

They arrive as the workload says, open loop: nobody waits for anybody else's answer.  Some go away
or stop reading.  Like a gateway they name the free slots that hold a part of their prompt, and
earlier requests whose prompts begin alike.  Memory holds the requests that are alive, and nothing
of those that have ended.
"""

from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    AnyEvent,
    Candidate,
    ClientResumed,
    ClientStalled,
    DeliverTokens,
    ReleaseSlot,
    RequestArrived,
    RequestCancelled,
    RequestId,
    SeatRequest,
    Shared,
    SlotIndex,
)
from phaseloop.engine.sim import Prefix, SimEngine
from phaseloop.runtime.clock import VirtualClock

from .arrivals import Arrival

SHARED_MAX = 8  # earlier requests that an arrival names


class Client:
    """One request that is alive, as its client sees it."""

    __slots__ = ("arrival", "cancel_tokens", "stall_tokens", "tokens")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.tokens = 0  # delivered, of all choices
        self.cancel_tokens = arrival.cancel_after_tokens
        self.stall_tokens = arrival.stall_after_tokens


class Roll:
    """Who is alive.  As the engine's Script it knows what the requests hold."""

    def __init__(self) -> None:
        self.clients: dict[RequestId, Client] = {}
        self._families: dict[int, dict[RequestId, int]] = {}  # to the length of the common prefix

    def enter(self, client: Client) -> None:
        request_id, prefix = client.arrival.request.request_id, client.arrival.prefix
        self.clients[request_id] = client
        if prefix is not None:
            self._families.setdefault(prefix.family, {})[request_id] = prefix.length

    def leave(self, request_id: RequestId) -> None:
        prefix = self.clients.pop(request_id).arrival.prefix
        if prefix is not None:
            family = self._families[prefix.family]
            del family[request_id]
            if not family:
                del self._families[prefix.family]

    def akin(self, prefix: Prefix) -> tuple[Shared, ...]:
        """The last few requests alive that begin alike, the earliest first."""
        alive = self._families.get(prefix.family, {})
        latest = tuple(islice(reversed(alive.items()), SHARED_MAX))
        return tuple(Shared(one, min(length, prefix.length)) for one, length in reversed(latest))

    def output_length(self, request_id: RequestId, choice: int) -> int | None:
        return self.clients[request_id].arrival.outputs[choice]

    def prefix(self, request_id: RequestId) -> Prefix | None:
        return self.clients[request_id].arrival.prefix


class Crowd:
    """All clients, present and to come."""

    def __init__(
        self,
        clock: VirtualClock,
        arrivals: Iterator[Arrival],
        roll: Roll,
        engine: SimEngine,
        limits: Limits,
    ) -> None:
        self._clock = clock
        self._arrivals = arrivals
        self._roll = roll
        self._engine = engine
        self._share_length_min = limits.share_length_min
        self._cached: dict[SlotIndex, ReleaseSlot] = {}  # free slots that hold something
        self._expect_next()

    # --- what clients do --------------------------------------------------------------------------

    def _expect_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._clock.call_at(arrival.at_ns, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> AnyEvent:
        # The next one first: who arrives at the same time comes before what this one sets off.
        self._expect_next()
        request, prefix = arrival.request, arrival.prefix
        if prefix is not None:
            shared = self._roll.akin(prefix)
            shared = tuple(one for one in shared if one.length >= self._share_length_min)
            self._roll.enter(Client(arrival))
            candidates = self._candidates(request.request_id)
            request = replace(request, candidates=candidates, shared=shared)
        else:
            self._roll.enter(Client(arrival))
        if arrival.cancel_after_ns is not None:
            at_ns = arrival.at_ns + arrival.cancel_after_ns
            self._clock.call_at(at_ns, lambda: self._cancel(request.request_id))
        return RequestArrived(at_ns=arrival.at_ns, requests=(request,))

    def _candidates(self, request_id: RequestId) -> tuple[Candidate, ...]:
        """Free slots that hold a part of the prompt."""
        found: list[Candidate] = []
        for slot in sorted(self._cached):
            held = self._cached[slot]
            length = min(self._engine.cached_length(slot, request_id), held.keep)
            if length:
                found.append(Candidate("slot", slot, held.version, length))
        return tuple(found)

    def _cancel(self, request_id: RequestId) -> AnyEvent | None:
        if request_id not in self._roll.clients:
            return None
        return RequestCancelled(at_ns=self._clock.now_ns(), request_id=request_id)

    def _resume(self, request_id: RequestId) -> AnyEvent | None:
        if request_id not in self._roll.clients:
            return None
        return ClientResumed(at_ns=self._clock.now_ns(), request_id=request_id)

    # --- what happens to clients ------------------------------------------------------------------

    def deliver(self, effect: DeliverTokens) -> None:
        for delivery in effect.deliveries:
            client = self._roll.clients[delivery.request_id]
            client.tokens += delivery.tokens
            if client.cancel_tokens is not None or client.stall_tokens is not None:
                self._react(client, delivery.request_id)

    def _react(self, client: Client, request_id: RequestId) -> None:
        """Once a client has had enough tokens it stops reading for a while, or goes away."""
        now_ns = self._clock.now_ns()
        if client.stall_tokens is not None and client.tokens >= client.stall_tokens:
            client.stall_tokens = None
            self._clock.post(ClientStalled(at_ns=now_ns, request_id=request_id))
            resume_ns = now_ns + client.arrival.stall_ns
            self._clock.call_at(resume_ns, lambda: self._resume(request_id))
        if client.cancel_tokens is not None and client.tokens >= client.cancel_tokens:
            client.cancel_tokens = None
            self._clock.call_at(now_ns, lambda: self._cancel(request_id))

    def finish(self, request_id: RequestId) -> None:
        self._roll.leave(request_id)

    def taken(self, seat: SeatRequest) -> None:
        self._cached.pop(seat.slot, None)

    def released(self, release: ReleaseSlot) -> None:
        if release.keep:
            self._cached[release.slot] = release
        else:
            self._cached.pop(release.slot, None)
