"""Fingerprints of the reducer: of its sources, of each step it takes, and of the state it reaches.

Three uses, one rule: everything is blake2b over canonical JSON, 64 bits long and written as 16 hex
digits, so that two machines, two Python versions and two hash seeds agree.  Python's own `hash()`
is never used.

**Sources.**  `core_digest()` covers the bytes of core/*.py.  A trace carries it, so that a replay
which diverges can say whether the reducer is the one that wrote the trace.

**Steps.**  `Fingerprint.step` folds one event and its effects into the chain.  Both the writer of a
trace and its replay hold a Fingerprint; that is what makes their digests comparable.

**States.**  `Fingerprint.subtrees` digests the state in four parts, so that a divergence names the
part.  The parts cover every field of State:

    queue   the waiting requests: what they asked for and when they arrived
    slots   the seated sequences
    kv      caches, pages_free, saved
    phase   everything else, also fields that do not exist yet

The queue may hold thousands of requests, hence its digest is a sum modulo 2**64 of one hash per
entry, kept up to date by adding and subtracting: a step costs as much as the entries it touched,
not as much as the queue is long.  A request enters the queue only with RequestArrived and leaves it
only with a SeatRequest or a FinishRequest, so the step itself says which entries to look at.
`order` and `timers` index requests that are digested in full elsewhere; of these two only the first
entry, which is the one that decides, is digested.
"""

from collections.abc import Mapping
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, astuple

from phaseloop.core.ordered import first
from phaseloop.core.state import Pending, Sequence, State
from phaseloop.core.vocabulary import (
    AnyEvent,
    Effects,
    FinishRequest,
    RequestArrived,
    RequestId,
    SeatRequest,
)

DIGEST_BYTES = 8
QUEUE_MODULUS = 1 << (8 * DIGEST_BYTES)
QUEUE_FIELDS = ("queue", "order", "timers")
KV_FIELDS = ("caches", "pages_free", "saved")
ADDED = {"whole_prompts": False}  # fields of Limits that came later, and what they were before

encoder = msgspec.json.Encoder(order="deterministic")


class Subtrees(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One digest per part of the state, 16 hex digits each."""

    queue: str
    slots: str
    kv: str
    phase: str


def encode(value: object) -> bytes:
    """The canonical form: JSON with struct fields in their declared order and dict keys sorted.

    JSON as msgspec writes it has no integers beyond 64 bits.  No server gets there, but a hostile
    trace does; its values take their Python form instead, which is just as definite.
    """
    try:
        return encoder.encode(value)
    except OverflowError:
        return repr(value).encode()


def core_digest() -> str:
    """The digest of the reducer's sources: names and bytes of core/*.py, sorted by name."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    sources = (entry for entry in files("phaseloop.core").iterdir() if entry.name.endswith(".py"))
    for source in sorted(sources, key=lambda entry: entry.name):
        content = source.read_bytes()
        digest.update(b"%s %d\n" % (source.name.encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()


class Fingerprint:
    """The running digests of one trace: the chain over its steps, the sum over its queue.

    Holds two plain values, so `copy.copy` of it is a snapshot.
    """

    __slots__ = ("chain", "queue_sum")

    def __init__(self, header_line: bytes, state: State) -> None:
        """Start from the header's whole line, newline excluded: editing it breaks the chain."""
        self.chain = digest_of(header_line)
        self.queue_sum = queue_sum(state.queue)

    def step(
        self, event_json: bytes, event: AnyEvent, before: State, after: State, effects: Effects
    ) -> str:
        """Fold one step in and return the new chain.  `event_json` is as the trace has it."""
        digest = blake2b(self.chain.encode(), digest_size=DIGEST_BYTES)
        digest.update(event_json)
        digest.update(encode(effects))
        self.chain = digest.hexdigest()
        if after.queue is not before.queue:
            self.queue_sum = queue_sum_after(self.queue_sum, event, before, after, effects)
        return self.chain

    def subtrees(self, state: State) -> Subtrees:
        """The digests of `state`, which must be the `after` of the last step."""
        rest = spelled(state)
        for name in (*QUEUE_FIELDS, *KV_FIELDS, "slots"):
            del rest[name]
        for name in ("limits", "policy", "policy_pending"):
            rest[name] = spelled(rest[name])
        for name, default in ADDED.items():
            if rest["limits"][name] == default:  # so that traces of before still have their digest
                del rest["limits"][name]
        queue = (f"{self.queue_sum:016x}", first(state.order), first(state.timers))
        saved = [(spelled_sequence(one.sequence), one.since_ns, one.cause) for one in state.saved]
        return Subtrees(
            queue=digest_of(encode(queue)),
            slots=digest_of(encode([spelled_sequence(one) for one in state.slots])),
            kv=digest_of(encode((state.caches, state.pages_free, saved))),
            phase=digest_of(encode(rest)),
        )


def spelled(value: Struct | None) -> dict[str, Any]:
    """All fields by name; empty for None.

    Some records omit defaults when encoded, and msgspec recognises a default by identity: 512 read
    from a file is not omitted where 512 from the source is.  Digests need every field.
    """
    return {} if value is None else asdict(value)


def spelled_sequence(sequence: Sequence | None) -> dict[str, Any]:
    fields = spelled(sequence)
    if sequence is not None:
        fields["request"] = spelled(sequence.request)
    return fields


def digest_of(content: bytes) -> str:
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def queue_sum(queue: Mapping[RequestId, Pending]) -> int:
    """The digest of a whole queue, entry by entry; addition makes the order irrelevant."""
    return sum(entry_hash(pending) for pending in queue.values()) % QUEUE_MODULUS


def queue_sum_after(
    total: int, event: AnyEvent, before: State, after: State, effects: Effects
) -> int:
    touched = [e.request_id for e in effects if isinstance(e, SeatRequest | FinishRequest)]
    if isinstance(event, RequestArrived):
        touched.extend(request.request_id for request in event.requests)
    for request_id in dict.fromkeys(touched):
        old = before.queue.get(request_id)
        new = after.queue.get(request_id)
        if old is new:
            continue
        if old is not None:
            total -= entry_hash(old)
        if new is not None:
            total += entry_hash(new)
    return total % QUEUE_MODULUS


def entry_hash(pending: Pending) -> int:
    content = encode((pending.arrived_ns, astuple(pending.request)))
    return int.from_bytes(blake2b(content, digest_size=DIGEST_BYTES).digest(), "big")
