"""What each slot did and why, as records of when that changed: for whoever watches or looks back.

A recorder sees what a trace holds, after the decision and before the deeds, and decides nothing.
The same one feeds the live page (http/timeline.py) and makes a timeline of a trace.  Records come
in the order of time:

    ["slot", at_ns, slot, look, role, reason, request, choice, waits_for]    until the slot's next
    ["phase", at_ns, phase, cohort, sealed, policy]
    ["queue", at_ns, length, reason, request, waits_for]                     of the one at the head
    ["figures", at_ns, prompt_tokens, generated_tokens, pages_reserved, pages_idle, saved]
    ["end", at_ns, request, slot, reason]                                    that was not the usual

Looks begin and end to the nanosecond.  Why somebody waits is read when the look begins, when the
phase turns, and at most every REFRESH_NS between, since reading it costs more than a round does.
"""

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core import ordered
from phaseloop.core.explain import REASONS, WaitReason, explain_queued, explain_seated
from phaseloop.core.state import Flight, Phase, Role, Sequence, State
from phaseloop.core.vocabulary import (
    AnyEvent,
    DeliverTokens,
    Effects,
    FinishReason,
    FinishRequest,
    RequestId,
    RoundCompleted,
    SlotIndex,
)

from .watch import COMPUTES_PROMPT, is_prompt_lane

VERSION = 1
MS = 1_000_000
REFRESH_NS = 500 * MS
FIGURES_NS = 100 * MS
RECORDS_MAX = 20_000  # not yet taken; who is slower than that gets a gap
IN_ROUND: tuple[WaitReason, tuple[RequestId, ...]] = ("in_round", ())
USUAL_ENDS: tuple[FinishReason, ...] = ("stop", "length")

Look: TypeAlias = Literal[
    "idle", "waiting", "prefill", "ready", "decode", "parked", "copy", "leaving"
]
LOOKS: dict[Look, str] = {  # in the order of a request's life
    "waiting": "seated, and waits for its turn to prefill",
    "prefill": "the engine works on its prompt",
    "copy": "its state is copied, within the engine or to and from host RAM",
    "ready": "its prompt is done; it waits to generate with the others",
    "decode": "the engine works on its answer",
    "parked": "generates, but not now",
    "leaving": "finished; the seat is about to be free",
    "idle": "nobody sits there",
}


class Stretch(Struct, frozen=True, gc=False, array_like=True, tag="slot"):
    """One slot looks like this from `at_ns` on; a role that looks alike may follow within."""

    at_ns: int
    slot: SlotIndex
    look: Look
    role: Role | None = None
    reason: WaitReason | None = None
    request_id: RequestId | None = None
    choice: int = 0
    waits_for: tuple[RequestId, ...] = ()


class Turn(Struct, frozen=True, gc=False, array_like=True, tag="phase"):
    at_ns: int
    phase: Phase
    cohort: int
    sealed: bool
    policy: str


class Line(Struct, frozen=True, gc=False, array_like=True, tag="queue"):
    """How many wait for a seat; why the first of them does."""

    at_ns: int
    length: int
    reason: WaitReason | None = None
    request_id: RequestId | None = None
    waits_for: tuple[RequestId, ...] = ()


class Figures(Struct, frozen=True, gc=False, array_like=True, tag="figures"):
    """Tokens since the recorder began; pages of the KV memory; sequences in host RAM."""

    at_ns: int
    prompt_tokens: int
    generated_tokens: int
    pages_reserved: int
    pages_idle: int
    saved: int


class End(Struct, frozen=True, gc=False, array_like=True, tag="end"):
    at_ns: int
    request_id: RequestId
    slot: SlotIndex | None  # of its first choice
    reason: FinishReason


AnyRecord: TypeAlias = Stretch | Turn | Line | Figures | End


class Head(Struct, frozen=True):
    """What a reader must know before the first record."""

    version: int
    source: str  # "live", or the name of a trace
    slot_count: int
    page_count: int
    page_length: int  # tokens
    batch_tokens: int
    context_length: int
    looks: dict[Look, str]
    reasons: dict[WaitReason, str]
    started: int = 0  # unix seconds; of another server run everything is forgotten


class Batch(Struct, frozen=True, omit_defaults=True):
    """What crosses the wire, or makes one line of a file.

    One with a head states everything anew.  `gap`: what happened before it is not known.
    """

    now_ns: int
    records: tuple[AnyRecord, ...]
    head: Head | None = None
    gap: bool = False


def head_of(state: State, source: str, started: int = 0) -> Head:
    limits = state.limits
    return Head(
        VERSION,
        source,
        limits.slot_count,
        limits.page_count,
        limits.page_length,
        limits.batch_tokens,
        limits.context_length,
        LOOKS,
        REASONS,
        started,
    )


def look_of(role: Role, reason: WaitReason) -> Look:
    works = reason == "in_round"
    match role:
        case "prefilling":
            return "prefill" if works else "waiting"
        case "seating" | "restoring" | "following":
            return "copy" if works else "waiting"
        case "ready" | "generating":
            if works:
                return "decode"
            waits_parked = role == "generating" or reason == "client_stalled"
            return "parked" if waits_parked else "ready"
        case "swapping" | "saving":
            return "copy"
        case "unseating" | "leaving":
            return "leaving"


class Recorder:
    """Show it every step from the given state on, and take what it has recorded."""

    def __init__(self, state: State, at_ns: int, records_max: int = RECORDS_MAX) -> None:
        self.has_overflowed = False
        self._records_max = records_max
        self._records: list[AnyRecord] = []
        self._state = state
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._carried = carried = carried_slots(state)
        slots = range(len(state.slots))
        self._stretches = [stretch_of(state, carried, slot, at_ns) for slot in slots]
        self._turn = turn_of(state, at_ns)
        self._line = line_of(state, at_ns)
        self._figures = self._figures_now(at_ns)
        self._refreshed_ns = at_ns
        self._is_stale = False  # something moved since the reasons were read

    def observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        at_ns = event.at_ns
        self._state = after
        self._count(event, before, effects)
        has_turned = is_turn(before, after)
        if has_turned:
            self._turn = turn_of(after, at_ns)
            self._add(self._turn)
        self._note_slots(before, at_ns)
        due = self._is_stale and at_ns - self._refreshed_ns >= REFRESH_NS
        if has_turned or due:
            self._refresh(at_ns)
        elif len(after.queue) != self._line.length:
            self._note_length(at_ns)
        for effect in effects:
            if isinstance(effect, FinishRequest) and effect.reason not in USUAL_ENDS:
                slot = slot_of(before, effect.request_id)
                self._add(End(at_ns, effect.request_id, slot, effect.reason))
        if at_ns - self._figures.at_ns >= FIGURES_NS:
            self._note_figures(at_ns)

    def take(self, now_ns: int) -> tuple[AnyRecord, ...]:
        """What changed since the last time; incomplete if it has overflowed, until `standing`."""
        self._note_figures(now_ns)
        records, self._records = tuple(self._records), []
        return records

    def standing(self, now_ns: int) -> tuple[AnyRecord, ...]:
        """Everything as it is, for somebody who knows nothing yet.  Take before, or know twice."""
        self.has_overflowed = False
        self._figures = self._figures_now(now_ns)
        everything = (*self._stretches, self._turn, self._line, self._figures)
        return tuple(replace(record, at_ns=now_ns) for record in everything)

    # --- the parts of a step ----------------------------------------------------------------------

    def _count(self, event: AnyEvent, before: State, effects: Effects) -> None:
        flight = before.flight
        if isinstance(event, RoundCompleted) and flight and flight.round_id == event.round_id:
            self._prompt_tokens += prompt_rows(before, flight)
        for effect in effects:
            if isinstance(effect, DeliverTokens):
                self._generated_tokens += sum(one.tokens for one in effect.deliveries)

    def _note_slots(self, before: State, at_ns: int) -> None:
        after = self._state
        carried = self._carried
        if after.flight is not before.flight:
            carried = carried_slots(after)
        if after.slots is before.slots and carried == self._carried:
            return
        flipped, self._carried = self._carried ^ carried, carried
        pairs = zip(before.slots, after.slots, strict=True)
        moved = [slot for slot, (old, new) in enumerate(pairs) if old is not new]
        moved = [slot for slot in moved if not is_alike(before.slots[slot], after.slots[slot])]
        for slot in sorted(flipped.union(moved)):
            self._note_slot(slot, at_ns)
            self._is_stale = True

    def _note_slot(self, slot: SlotIndex, at_ns: int) -> None:
        old = self._stretches[slot]
        new = stretch_of(self._state, self._carried, slot, at_ns)
        if not goes_on(old, new):
            self._stretches[slot] = new
            self._add(new)

    def _refresh(self, at_ns: int) -> None:
        """Read anew why everybody waits; whoever the engine works on does not."""
        self._refreshed_ns, self._is_stale = at_ns, False
        for slot, sequence in enumerate(self._state.slots):
            if sequence is not None and slot not in self._carried:
                self._note_slot(slot, at_ns)
        self._note_line(at_ns)

    def _note_line(self, at_ns: int) -> None:
        line = line_of(self._state, at_ns)
        if line != replace(self._line, at_ns=at_ns):
            self._line = line
            self._add(line)

    def _note_length(self, at_ns: int) -> None:
        first = ordered.first(self._state.order)
        if first is None or first[1] != self._line.request_id:
            self._note_line(at_ns)
        else:  # why it waits is known well enough
            self._line = replace(self._line, at_ns=at_ns, length=len(self._state.queue))
            self._add(self._line)

    def _note_figures(self, at_ns: int) -> None:
        figures = self._figures_now(at_ns)
        if figures != replace(self._figures, at_ns=at_ns):
            self._figures = figures
            self._add(figures)

    def _figures_now(self, at_ns: int) -> Figures:
        state = self._state
        idle = sum(cache.pages for cache in state.caches)
        reserved = state.limits.page_count - state.pages_free - idle
        tokens = self._prompt_tokens, self._generated_tokens
        return Figures(at_ns, *tokens, reserved, idle, len(state.saved))

    def _add(self, record: AnyRecord) -> None:
        if len(self._records) < self._records_max:
            self._records.append(record)
        else:
            self.has_overflowed = True


# --- reading a state ------------------------------------------------------------------------------


def carried_slots(state: State) -> frozenset[SlotIndex]:
    """Those with a lane in the round in flight."""
    flight = state.flight
    return frozenset() if flight is None else frozenset(lane.slot for lane in flight.lanes)


def prompt_rows(state: State, flight: Flight) -> int:
    """Prompt tokens that the round in flight computes."""
    kind = flight.kind
    if kind not in COMPUTES_PROMPT:
        return 0
    return sum(lane.count for lane in flight.lanes if is_prompt_lane(state, kind, lane))


def is_alike(old: Sequence | None, new: Sequence | None) -> bool:
    """Whether a slot looks the same, as far as its own sequence says."""
    if old is None or new is None:
        return old is new
    is_same = new.role == old.role and new.request.request_id == old.request.request_id
    stalls = (new.stalled_until_ns is None) == (old.stalled_until_ns is None)
    return is_same and stalls and new.choice == old.choice


def stretch_of(state: State, carried: frozenset[SlotIndex], slot: SlotIndex, at_ns: int) -> Stretch:
    s = state.slots[slot]
    if s is None:
        return Stretch(at_ns, slot, "idle")
    if slot in carried and s.role != "leaving":  # as explain_seated says, but at once
        reason, waits_for = IN_ROUND
    else:
        reason, waits_for = explain_seated(state, slot, s, at_ns)
    look = look_of(s.role, reason)
    return Stretch(at_ns, slot, look, s.role, reason, s.request.request_id, s.choice, waits_for)


def goes_on(old: Stretch, new: Stretch) -> bool:
    """Whether the new one only says again what the old one did."""
    return (
        new.look == old.look
        and new.reason == old.reason
        and new.request_id == old.request_id
        and new.choice == old.choice
        and new.waits_for == old.waits_for
    )


def turn_of(state: State, at_ns: int) -> Turn:
    return Turn(at_ns, state.phase, state.cohort, state.sealed, state.policy.name)


def is_turn(before: State, after: State) -> bool:
    """Whether a step ended one turn of the phase and began another."""
    return (
        before.phase != after.phase
        or before.cohort != after.cohort
        or before.sealed != after.sealed
        or before.policy is not after.policy
    )


def line_of(state: State, at_ns: int) -> Line:
    first = ordered.first(state.order)
    if first is None:
        return Line(at_ns, 0)
    _, request_id = first
    reason, waits_for = explain_queued(state, state.queue[request_id], at_ns)
    return Line(at_ns, len(state.queue), reason, request_id, waits_for)


def slot_of(state: State, request_id: RequestId) -> SlotIndex | None:
    for slot, s in enumerate(state.slots):
        if s is not None and s.request.request_id == request_id:
            return slot
    return None
