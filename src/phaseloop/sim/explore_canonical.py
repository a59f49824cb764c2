"""One name for all situations that cannot be told apart by what happens next.

The explorer visits a situation (a state and the world around it) once.  States differ in counters
and clocks that grow for ever, though only a little of them decides; `Canon.key` keeps that little.
What is left out or reduced, and why nothing that happens afterwards can depend on the rest:

    time            Only thresholds decide, and only by being reached or not, so what is kept of one
                    is how far it is ahead of the clock, and nothing below zero.  Two moments are
                    compared with each other in one place, where seats are lent: who has waited
                    longer, in host RAM or in the queue.  There, their order is kept.
    request ids     New ids are larger than all before, ids of the dead are never looked up again,
                    and the queue is ordered by (priority, id).  So ids of the living become their
                    ranks, and an id that a living request mentions but that is dead becomes -1.
    tickets         Decide by their order alone, which is kept: slots are listed by admission, empty
                    ones by how long they have been idle, after the others.
    slots           Are chosen by what they hold, never by number, and lists of lanes in slot order
                    are never cut short, but for rounds with fewer rows than lanes (no alphabet has
                    them).  So the list above needs no numbers, and mentions of a slot become places
                    in it.  Not so where sequences leave caches behind: two that end in one round
                    are released in slot order, which then is the order of eviction.  There, slots
                    keep their numbers.
    round ids       A round is the one in flight or it is ignored.
    cache versions  Are compared with those that a queued request carries: equal or void, for ever.
    turns           Groups are told apart by whose turn was when, which is their order; what they
                    were served rotates shares over at most `slot_count` prompts, so its value
                    modulo the least common multiple of 1..slot_count is kept.
    phase rounds    Decide by being none or some, and only where phases are timed; a change of
                    policy starts them afresh.
    cohort          Is a label for people.
    requests        Stand for the template they came from; limits never change.

With `symmetric=False`, slots and requests keep their numbers: more situations, same verdicts, which
is how tests check the renaming.  That nothing else is missing is tested too: situations with equal
keys must have successors with equal keys, event by event.
"""

from math import lcm
from typing import get_args

import msgspec
from msgspec.structs import replace

from phaseloop.core.state import Flight, Role, Sequence, State
from phaseloop.core.vocabulary import Policy, Request, RoundKind, SeatRequest, SlotIndex

from .enabled import World, slice_end

Key = bytes
Ranks = dict[int, int]
ROLES: dict[Role | None, int] = {role: i for i, role in enumerate((*get_args(Role), None))}
KINDS: dict[RoundKind, int] = {kind: i for i, kind in enumerate(get_args(RoundKind))}
PHASES = {"idle": 0, "prefill": 1, "decode": 2}
DEAD = -1
LEFT_BYTES = 4  # the beginning of a key: what may still happen.  The rest is what is the case.
encode = msgspec.msgpack.Encoder().encode


class Canon:
    """Keys of the situations of one exploration; only keys of the same Canon can be compared."""

    def __init__(self, state: State, world: World, *, symmetric: bool = True) -> None:
        policies = (state.policy, *world.alphabet.policies)
        requests = world.alphabet.requests
        self.symmetric = symmetric
        self.period = lcm(*range(1, state.limits.slot_count + 1))
        self.rotates = any(policy.share == "fair" for policy in policies)
        self.grouped = len({(r.adapter, r.kind) for r in requests}) > 1
        self.renames_slots = symmetric and not any(r.keep_cache for r in requests)
        self.reach = max((-x.request_id for r in requests for x in r.shared), default=0)
        self.paced = state.limits.round_ns_max > 0
        self.lends = any(policy.seat_quantum_ns > 0 for policy in policies)
        self.policies: dict[Policy | None, int] = {None: DEAD, state.policy: 0}
        self.shapes: dict[Request, int] = {}
        self.templates: dict[Request, int] = {}

    def key(self, state: State, world: World) -> Key:
        """Equal for two situations only if the same can happen to both."""
        places, order = self.places(state)
        ranks = self.ranks(state)
        awaited = {seat.slot: seat for seat in world.seats}
        left = bytes((world.requests, world.cancels, world.failures, world.extras))
        situation = (
            state.stopped,
            PHASES[state.phase],
            state.sealed,
            state.pages_free,
            [self.seat(state, slot, places, ranks, world, awaited.get(slot)) for slot in order],
            self.queue(state, places, ranks) if state.order else 0,
            self.flight(state.flight, places, ranks) if state.flight else 0,
            self.clocks(state, world.now_ns, ranks),
            self.served(state),
            [(KINDS[p.kind], p.tokens, p.duration_ns) for p in state.paces] if self.paced else 0,
            self.recent(state, ranks) if self.reach else 0,
            self.saved(state, ranks, world.now_ns) if state.saved else 0,
            self.waits(state, ranks, world.now_ns) if self.lends else 0,
            self.policy(state.policy),
            self.policy(state.policy_pending),
            0 if self.symmetric else state.request_id_last,
        )
        return left + encode(situation)

    def places(self, state: State) -> tuple[list[int], list[SlotIndex]]:
        """(place of each slot, slots in the order of their places)."""
        slots, caches = state.slots, state.caches
        count = len(slots)
        if not self.renames_slots:
            return list(range(count)), list(range(count))
        order = sorted(
            range(count),
            key=lambda i: (0, s.ticket) if (s := slots[i]) else (1, caches[i].idle_ticket),
        )
        places = [0] * count
        for place, slot in enumerate(order):
            places[slot] = place
        return places, order

    def ranks(self, state: State) -> Ranks:
        ids = {*state.queue, *(s.request.request_id for s in state.slots if s)}
        if state.saved:
            ids.update(saved.sequence.request.request_id for saved in state.saved)
        if not self.symmetric:
            return {request_id: request_id for request_id in ids}
        return {request_id: rank for rank, request_id in enumerate(sorted(ids))}

    def seat(
        self,
        state: State,
        slot: SlotIndex,
        places: list[int],
        ranks: Ranks,
        world: World,
        awaited: SeatRequest | None,
    ) -> object:
        s, cache = state.slots[slot], state.caches[slot]
        numbers = () if self.renames_slots else self.numbers(state, slot)
        if s is None:
            return (cache.length, cache.pages, *numbers)
        loan_ns = 0
        if state.policy.seat_quantum_ns:
            loan_ns = max(0, s.seated_ns + state.policy.seat_quantum_ns - world.now_ns)
        source = 0
        if awaited is not None:
            found = awaited.source
            source = 1 if found is None else (found.length, found.source == "snapshot")
        return (
            self.sequence(s, ranks, world.now_ns),
            0 if s.follow is None else (places[s.follow.slot], s.follow.position),
            loan_ns,
            source,
            cache.length,
            cache.pages,
            *numbers,
        )

    def numbers(self, state: State, slot: SlotIndex) -> tuple[int, ...]:
        """Without renaming, the orders that places express are spelled out."""
        s = state.slots[slot]
        if s is not None:
            return (sum(other is not None and other.ticket < s.ticket for other in state.slots),)
        idle = [state.caches[i].idle_ticket for i, one in enumerate(state.slots) if one is None]
        return (sum(ticket < state.caches[slot].idle_ticket for ticket in idle),)

    def sequence(self, s: Sequence, ranks: Ranks, now_ns: int) -> object:
        stalled = s.stalled_until_ns
        return (
            ranks[s.request.request_id],
            self.shape(s.request, ranks),
            s.choice,
            ROLES[s.role],
            s.length,
            s.cached,
            s.produced,
            s.pages,
            s.borrowed,
            ROLES[s.resume],
            s.swap_for,
            DEAD if stalled is None else max(0, stalled - now_ns),
        )

    def shape(self, request: Request, ranks: Ranks) -> object:
        """The template a request came from, and which of the leaders it names are there."""
        shape = self.shapes.get(request)
        if shape is None:
            template = replace(request, request_id=0, candidates=(), shared=(), slot_hint=None)
            shape = self.templates.setdefault(template, len(self.templates))
            self.shapes[request] = shape
        if not request.shared:
            return shape
        return (shape, *((ranks.get(x.request_id, DEAD), x.length) for x in request.shared))

    def queue(self, state: State, places: list[int], ranks: Ranks) -> object:
        entries: list[object] = []
        for block in state.order:
            for _, request_id in block:
                request = state.queue[request_id].request
                hint = request.slot_hint
                entries.append(
                    (
                        ranks[request_id],
                        self.shape(request, ranks),
                        DEAD if hint is None else places[hint],
                        self.candidates(state, request, places) if request.candidates else 0,
                    )
                )
        return entries

    def candidates(self, state: State, request: Request, places: list[int]) -> object:
        """Cached prefixes that are still what they were, by place; snapshots always are."""
        usable: list[tuple[int, int]] = []
        for one in request.candidates:
            if one.source == "snapshot":
                usable.append((DEAD - one.index, one.length))
            elif state.caches[one.index].version == one.version:
                usable.append((places[one.index], one.length))
        return sorted(usable)

    def flight(self, flight: Flight, places: list[int], ranks: Ranks) -> object:
        lanes = sorted(
            (
                places[lane.slot],
                ranks[lane.request_id],
                lane.choice,
                lane.start,
                lane.count,
                lane.outputs,
                DEAD if lane.source is None else places[lane.source],
            )
            for lane in flight.lanes
        )
        return (KINDS[flight.kind], flight.aborted, lanes)

    def clocks(self, state: State, now_ns: int, ranks: Ranks) -> object:
        """How far ahead each threshold is, the timers in the order they will be handled."""
        quantum = state.policy.switch == "quantum"
        linger, shutdown = state.linger_until_ns, state.shutdown_at_ns
        if not quantum and not state.timers and linger is None and shutdown is None:
            return 0
        return (
            max(0, slice_end(state) - now_ns),
            quantum and state.phase_rounds > 0,
            DEAD if linger is None else max(0, linger - now_ns),
            DEAD if shutdown is None else max(0, shutdown - now_ns),
            [
                (max(0, at_ns - now_ns), ranks[request_id])
                for block in state.timers
                for at_ns, request_id in block
            ],
        )

    def served(self, state: State) -> object:
        period = self.period if self.rotates else 1
        quantum = state.policy.switch == "quantum"
        if not self.grouped:
            rotation = state.prefill_turns[0].served % period if state.prefill_turns else 0
            return (rotation, quantum and bool(state.phase_groups))
        return (
            [(turn.group, turn.served % period) for turn in state.prefill_turns],
            [turn.group for turn in state.decode_turns],
            sorted(state.phase_groups),
        )

    def saved(self, state: State, ranks: Ranks, now_ns: int) -> object:
        """Those in host RAM, first in line first, with who was admitted before whom."""
        sequences = [saved.sequence for saved in state.saved]
        tickets = sorted(s.ticket for s in (*sequences, *(s for s in state.slots if s)))
        return [
            (
                self.sequence(saved.sequence, ranks, now_ns),
                saved.cause,
                tickets.index(saved.sequence.ticket),
            )
            for saved in state.saved
        ]

    def waits(self, state: State, ranks: Ranks, now_ns: int) -> object:
        """Who of those in host RAM and in the queue has waited longer, or only since now."""
        since = [saved.since_ns for saved in state.saved]
        arrived = sorted((ranks[i], pending.arrived_ns) for i, pending in state.queue.items())
        moments = sorted({*since, *(at_ns for _, at_ns in arrived), now_ns}, reverse=True)
        return (
            [moments.index(at_ns) for at_ns in since],
            [moments.index(at_ns) for _, at_ns in arrived],
        )

    def recent(self, state: State, ranks: Ranks) -> list[int]:
        """Which of the last ids are alive: the next requests to arrive may name them as leaders."""
        last = state.request_id_last
        return [ranks.get(last - back, DEAD) for back in range(self.reach)]

    def policy(self, policy: Policy | None) -> int:
        return self.policies.setdefault(policy, len(self.policies) - 1)
