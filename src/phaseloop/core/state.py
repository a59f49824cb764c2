"""What is true: the whole state of one engine's scheduler as one immutable, hashable value."""

from typing import Literal, TypeAlias

from immutables import Map
from msgspec import Struct
from msgspec.structs import replace

from .ordered import Ordered
from .vocabulary import Kind, Lane, Policy, Request, RequestId, RoundKind, SlotIndex

Phase: TypeAlias = Literal["idle", "prefill", "decode"]
Group: TypeAlias = tuple[int, Kind]  # (adapter set, task kind): the unit that shares a round (R7)
Role: TypeAlias = Literal[
    "seating",  # SeatRequest is out; no lane before its answer
    "restoring",  # its state comes back from host RAM with the next restore round
    "following",  # its prefix will be forked from another slot
    "prefilling",
    "ready",  # prompt done, logits retained, waits for the barrier or its turn
    "generating",
    "swapping",  # leaves for host RAM with the next save round, to be resumed later
    "saving",  # finished; a copy of its cache goes to host RAM, then the seat is free (R8)
    "unseating",  # finished before its SeatRequest was answered; the seat waits for that
    "leaving",  # finished for the client; the seat stays until its round has ended (R4)
]
UNFINISHED: tuple[Role, ...] = ("seating", "restoring", "following", "prefilling")
LIVE: tuple[Role, ...] = (*UNFINISHED, "ready", "generating", "swapping")


class Limits(Struct, frozen=True, gc=False, omit_defaults=True):
    """What the engine can hold and what the operator allows; fixed for the life of a server."""

    slot_count: int
    batch_tokens: int  # rows of one round, B
    context_length: int  # tokens of one sequence
    page_count: int  # KV capacity
    page_length: int = 256
    draft_tokens: int = 0  # speculation: the most drafts per lane, k
    output_reserve: int = 512  # tokens reserved for a request that states no limit (R9)
    queue_length_max: int = 1024
    round_ns_max: int = 0  # R10; 0 = rounds are bounded by tokens alone
    client_stall_ns: int = 30_000_000_000
    shutdown_grace_ns: int = 3_000_000_000
    can_save: bool = False  # sequences can move to host RAM and back
    save_idle: bool = False  # copy a finished sequence's cache to host RAM before its seat is free
    shares_pages: bool = False  # a fork shares the prompt's full pages
    forks_anywhere: bool = False  # a prefix shorter than the source's state can be forked
    share_length_min: int = 1024  # shorter common prefixes are computed twice (R18)
    whole_prompts: bool = False  # a prompt is computed in one round: its rows see each other


class Pending(Struct, frozen=True, gc=False):
    request: Request
    arrived_ns: int


class Follow(Struct, frozen=True, gc=False, array_like=True):
    """Fork [0, position) from the leader's slot once it has computed that much (R6, R18)."""

    slot: SlotIndex
    request_id: RequestId  # the leader's, since its seat may change hands
    position: int


class Sequence(Struct, frozen=True, gc=False):
    """A seated choice of a request."""

    request: Request
    choice: int
    ticket: int  # admission order, never reused
    arrived_ns: int
    seated_ns: int
    group: Group
    role: Role
    length: int  # tokens whose state the slot holds
    cached: int  # prompt tokens it did not compute itself: found in the slot, restored, or forked
    produced: int  # tokens delivered
    output_limit: (
        int | None
    )  # stated limit, cut to what the context allows; None with context shift
    pages: int  # reserved
    borrowed: int = 0  # pages of the prompt that a sibling's reservation holds
    follow: Follow | None = None  # set until the fork is done, or given up
    resume: Role | None = None  # what `swapping`, saved or resumed work goes on as
    swap_for: Literal["memory", "seat"] | None = None  # what its seat or pages are wanted for
    stalled_until_ns: int | None = None  # set while its client does not read (R12)


class Saved(Struct, frozen=True, gc=False):
    """A sequence in host RAM, waiting for a seat."""

    sequence: Sequence
    since_ns: int
    cause: Literal["memory", "seat"]  # memory: resumes before any admission (R9)


class Cache(Struct, frozen=True, gc=False):
    """What an empty slot still holds.  The version moves whenever the slot is taken or cut."""

    version: int = 0
    length: int = 0
    pages: int = 0
    idle_ticket: int = 0  # order of release: the oldest is evicted first


class Flight(Struct, frozen=True, gc=False):
    """The round on the engine; at most one."""

    round_id: int
    kind: RoundKind
    lanes: tuple[Lane, ...]
    aborted: bool = False


class Pace(Struct, frozen=True, gc=False, array_like=True):
    """The last round of its kind worth extrapolating from (R10)."""

    kind: RoundKind
    tokens: int
    duration_ns: int


class Turn(Struct, frozen=True, gc=False, array_like=True):
    """What a group has had of one phase.  In a tuple of turns the last served comes last (R7).

    Whose turn is longest ago, or who is new, gets the next round: so a gap is at most one round per
    group (R11), and nobody catches up at the others' cost.
    """

    group: Group
    served: int  # prompt tokens, or decode rows: where the next remainder goes


class State(Struct, frozen=True, gc=False):
    limits: Limits
    policy: Policy
    slots: tuple[Sequence | None, ...]
    caches: tuple[Cache, ...]
    pages_free: int  # neither reserved nor held by an idle cache
    queue: Map[RequestId, Pending] = Map()
    order: Ordered = ()  # (-priority, request_id) of every queued request
    timers: Ordered = ()  # (at_ns, request_id): when something about a request expires
    saved: tuple[Saved, ...] = ()
    phase: Phase = "idle"
    phase_since_ns: int = 0
    phase_rounds: int = 0  # launched in this phase
    phase_groups: tuple[Group, ...] = ()  # groups that had a decode round in this phase
    cohort: int = 0
    sealed: bool = False
    prefill_turns: tuple[Turn, ...] = ()
    decode_turns: tuple[Turn, ...] = ()
    flight: Flight | None = None
    paces: tuple[Pace, ...] = ()
    request_id_last: RequestId = -1
    round_id_next: int = 0
    ticket_next: int = 0
    linger_until_ns: int | None = None
    policy_pending: Policy | None = None
    shutdown_at_ns: int | None = None
    stopped: bool = False


def initial(limits: Limits, policy: Policy) -> State:
    return State(
        limits,
        policy,
        slots=(None,) * limits.slot_count,
        caches=(Cache(),) * limits.slot_count,
        pages_free=limits.page_count,
    )


def with_slot(state: State, slot: SlotIndex, sequence: Sequence | None) -> State:
    slots = state.slots
    return replace(state, slots=(*slots[:slot], sequence, *slots[slot + 1 :]))
