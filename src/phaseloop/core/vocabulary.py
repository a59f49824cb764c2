"""What may happen (Event) and what must be done about it (Effect): all that crosses the border.

Time is an integer of nanoseconds (`_ns`), stamped once by the shell when a fact enters the mailbox.
Lengths and counts are tokens.  The core never sees text or token ids, so a trace of these records
is safe to share.  Rules R1..R18 are those of docs/policy.md.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

RequestId: TypeAlias = int  # given by the gateway, strictly increasing, never reused
SlotIndex: TypeAlias = int
Kind: TypeAlias = Literal["completion", "embedding", "rerank"]
RoundKind: TypeAlias = Literal[
    "prefill", "encode", "restore", "save", "fork", "sample", "decode", "shift", "mixed"
]

# R8: a round of one class never runs in the other's phase.  `mixed` rounds exist only under the
# policy of that name, which promises no exclusion.
PREFILL_CLASS: tuple[RoundKind, ...] = ("prefill", "encode", "restore", "save", "fork")
DECODE_CLASS: tuple[RoundKind, ...] = ("sample", "decode", "shift")

FinishReason: TypeAlias = Literal[
    "stop",  # an end token, a stop string, or an embedding that is done
    "length",  # the output limit, or the context, is reached
    "no_space",  # out of KV pages and alone: the answer is truncated
    "cancelled",  # the client went away
    "stalled",  # the client did not read for client_stall_ns
    "deadline",  # the request's own deadline
    "queue_timeout",  # waited longer than it was willing to
    "queue_full",
    "exceeds_context",
    "exceeds_memory",
    "exceeds_slots",
    "invalid",  # a malformed request: an id used before, a length below one
    "failed",  # the engine failed this sequence or its round
    "engine_lost",
    "shutdown",
]
SeatReason: TypeAlias = Literal["hint", "cache", "oldest", "sibling", "resume"]
LaunchReason: TypeAlias = Literal[
    "cohort_open",  # prefill; whoever arrives in time still joins
    "cohort_sealed",  # prefill; a member waits at the barrier, later arrivals stay out
    "time_slice",  # a phase of the quantum policy
    "prompts_first",  # no-cont-batching: nobody generates
    "continuous",  # mixed: prompts ride along with decode rows
    "restore_cache",
    "resume_saved",
    "save_idle",
    "free_memory",  # save a sequence, so that others get its pages or its seat
    "children",
    "shared_prefix",
    "barrier_opened",  # every member is ready: all first tokens at once
    "ready",  # first tokens of sequences that wait for no barrier
    "generate",
    "context_full",
]
ReleaseReason: TypeAlias = Literal["finished", "saved", "evicted", "seat_cancelled"]


class Candidate(Struct, frozen=True, gc=False):
    """A cached prefix that the shell found at arrival; void once the version has moved."""

    source: Literal["slot", "snapshot"]
    index: int  # the slot, or the snapshot's id
    version: int
    length: int


class Shared(Struct, frozen=True, gc=False, array_like=True):
    """An earlier request whose prompt begins with the same `length` tokens."""

    request_id: RequestId
    length: int


class Request(Struct, frozen=True, gc=False, omit_defaults=True):
    """A client's promise to be answered, in counts."""

    request_id: RequestId
    prompt_length: int
    kind: Kind = "completion"
    output_limit: int | None = None  # tokens per choice; 0 fills the cache only
    choices: int = 1
    priority: int = 0  # higher is seated first; never pre-empts
    adapter: int = 0  # which set of adapters; sets never share a compute round (R7)
    deadline_after_ns: int | None = None  # from arrival to the last token
    queue_wait_ns_max: int | None = None  # from arrival to a seat
    slot_hint: SlotIndex | None = None  # advisory: taken when it is free
    shift_keep: int | None = None  # opt-in context shift: how many leading tokens stay
    keep_cache: bool = True  # leave the sequence's state in the slot for later prompts
    stop_points: tuple[int, ...] = ()  # prompt positions where a chunk must end, ascending
    candidates: tuple[Candidate, ...] = ()
    shared: tuple[Shared, ...] = ()


class Event(Struct, frozen=True, gc=False, kw_only=True, tag=True, tag_field="event"):
    at_ns: int


class RequestArrived(Event, frozen=True, gc=False):
    """One call of a client; its requests are queued together or refused together (R3)."""

    requests: tuple[Request, ...]


class RequestSeated(Event, frozen=True, gc=False):
    """Answers SeatRequest: the shell compared tokens and found `cached_length` of them in place."""

    request_id: RequestId
    choice: int
    slot: SlotIndex
    cached_length: int = 0
    restore: bool = False  # they are in host RAM and need a restore round first


class Produced(Struct, frozen=True, gc=False, array_like=True, tag="ok"):
    """A lane that went well: how many tokens to deliver, and whether the last ended the text."""

    tokens: int = 0
    finish: bool = False


class Failed(Struct, frozen=True, gc=False, array_like=True, tag="failed"):
    reason: str


Result: TypeAlias = Produced | Failed


class RoundCompleted(Event, frozen=True, gc=False, omit_defaults=True):
    round_id: int
    results: tuple[Result, ...]  # one per lane, in lane order
    duration_ns: int
    # Drafts that were verified, per lane; () where each lane had all that it had rows for.  The
    # reducer does not look: what was accepted counts.
    drafted: tuple[int, ...] = ()

    def drafts(self, place: int, lane: "Lane") -> int:
        """How many the lane at a place verified.  Only a decode lane has more outputs than one."""
        if lane.outputs <= 1:
            return 0
        return self.drafted[place] if self.drafted else lane.count - 1


class RoundFailed(Event, frozen=True, gc=False):
    """No lane of the round is usable: each is truncated to its length before launch (R13)."""

    round_id: int
    reason: str


class EngineLost(Event, frozen=True, gc=False):
    reason: str


class RequestCancelled(Event, frozen=True, gc=False):
    request_id: RequestId


class StopMatched(Event, frozen=True, gc=False):
    """The request's own task saw a stop string in the text of one choice."""

    request_id: RequestId
    choice: int = 0


class ClientStalled(Event, frozen=True, gc=False):
    request_id: RequestId


class ClientResumed(Event, frozen=True, gc=False):
    request_id: RequestId


class DeadlineReached(Event, frozen=True, gc=False):
    """The time that `deadline_next(state)` asked for has come."""


class Policy(Struct, frozen=True, gc=False, omit_defaults=True):
    """How prompts share a round and when phases switch.  Presets: core/policy.py."""

    name: str
    share: Literal["greedy", "fair", "serial"]
    switch: Literal["mixed", "prompts_first", "barrier", "quantum"]
    serial_order: Literal["fifo", "shortest"] = "fifo"
    decode_quantum_ns: int = 0
    prefill_quantum_ns: int = 0
    seat_quantum_ns: int = 0  # quantum only: a seat held this long may be lent on; 0 = never
    linger_ns: int = 0  # barrier only: how long a new cohort waits for company


class PolicyChanged(Event, frozen=True, gc=False):
    policy: Policy


class ShutdownRequested(Event, frozen=True, gc=False):
    """First: refuse new work, let seated work finish within the grace.  Second: end at once."""


AnyEvent: TypeAlias = (
    RoundCompleted
    | RequestArrived
    | RequestSeated
    | RequestCancelled
    | StopMatched
    | DeadlineReached
    | ClientStalled
    | ClientResumed
    | RoundFailed
    | EngineLost
    | PolicyChanged
    | ShutdownRequested
)


class Lane(Struct, frozen=True, gc=False, array_like=True):
    """One sequence's row group in one round.

    prefill, encode   tokens [start, start + count) of the prompt; the last prompt row's logits are
                      retained by the engine.  `outputs` is 1 only under `mixed`, where the first
                      token is sampled in the same round.
    sample            the first token, from the retained logits: count 0, outputs 1.
    decode            the pending token and `count - 1` drafts at `start`; outputs = count.
    fork              positions [0, count) are copied from slot `source`.
    restore, save     positions [0, count) come from, or go to, host RAM.
    shift             `count` positions from `start` are dropped, later ones move down.
    """

    slot: SlotIndex
    request_id: RequestId
    choice: int
    start: int
    count: int
    outputs: int
    source: SlotIndex | None = None


class Effect(Struct, frozen=True, gc=False, tag=True, tag_field="effect"):
    """Something the shell must do, without awaiting, in tuple order (R17)."""


class LaunchRound(Effect, frozen=True, gc=False):
    """Completed by RoundCompleted or RoundFailed of the same round_id, or by EngineLost."""

    round_id: int
    kind: RoundKind
    lanes: tuple[Lane, ...]
    reason: LaunchReason


class AbortRound(Effect, frozen=True, gc=False):
    """Every lane has left: the engine may stop early.  The round still completes or fails."""

    round_id: int
    reason: Literal["lanes_left", "shutdown"]


class Delivery(Struct, frozen=True, gc=False, array_like=True):
    request_id: RequestId
    choice: int
    tokens: int


class DeliverTokens(Effect, frozen=True, gc=False):
    deliveries: tuple[Delivery, ...]
    reason: Literal["first_tokens", "generated"]


class FinishChoice(Effect, frozen=True, gc=False):
    request_id: RequestId
    choice: int
    reason: FinishReason


class FinishRequest(Effect, frozen=True, gc=False):
    """The one terminal effect of a request, after its last choice (R1)."""

    request_id: RequestId
    reason: FinishReason


class ReleaseSlot(Effect, frozen=True, gc=False):
    """Truncate the slot to `keep` tokens, which stay as cache under the new `version`."""

    slot: SlotIndex
    keep: int
    version: int
    reason: ReleaseReason


class DropSaved(Effect, frozen=True, gc=False):
    """A sequence that was saved to host RAM ended there."""

    request_id: RequestId
    choice: int
    reason: Literal["ended"]


class SeatRequest(Effect, frozen=True, gc=False):
    """Compare tokens with `source`, if any, and answer with RequestSeated."""

    request_id: RequestId
    choice: int
    slot: SlotIndex
    source: Candidate | None
    reason: SeatReason


class Stop(Effect, frozen=True, gc=False):
    """The loop ends after this step."""

    exit_code: int
    reason: Literal["shutdown", "engine_lost"]


AnyEffect: TypeAlias = (
    LaunchRound
    | DeliverTokens
    | FinishChoice
    | FinishRequest
    | ReleaseSlot
    | SeatRequest
    | AbortRound
    | DropSaved
    | Stop
)
Effects: TypeAlias = tuple[AnyEffect, ...]

# Effects that take time, and the events that may complete them.  The model checker builds its
# environment from this table; a test asserts that every other effect is complete when performed.
COMPLETIONS: dict[type[Effect], tuple[type[Event], ...]] = {
    LaunchRound: (RoundCompleted, RoundFailed, EngineLost),
    SeatRequest: (RequestSeated, EngineLost),
}
