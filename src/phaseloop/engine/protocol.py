"""What an engine is to the rest of phaseloop: the one who computes rounds, and owns their memory.

An engine is synchronous and has one caller, its worker (runtime/worker.py).  All calls come from
one thread, one at a time, in the order in which the reducer decided them; only `abort` may come
from another thread, while `run` runs or just after.  An engine never calls back, knows no clock and
decides nothing about who runs when: it is told.

Slots are seats with state: KV pages, recurrent state, the last logits, draft state.  A slot is
described to the outside by one number, its length: how many tokens' state it holds.  Whatever an
engine keeps per slot is truncated, forked, saved and freed as one.

Errors.  A lane that cannot be computed is a `Failed` in the outcome.  An exception from `run` fails
the whole round: the engine must then still have every slot at its length before the launch, longer
ones being truncated by the engine itself.  An exception from `seat` costs the cached prefix.
`EngineDied` from any call, or any other exception from `release` and `drop`, means that the
engine's state can no longer be trusted: it is lost, and the server ends.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from msgspec import Struct

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    LaunchRound,
    RequestId,
    Result,
    SeatRequest,
    SlotIndex,
)

from .settings import GREEDY, Adapters, Likelihood, Pooling, Sampling, Speculation, Vectors
from .snapshots import Kept

PromptState: TypeAlias = Kept  # of a whole prompt, outside any slot; immutable


class EngineDied(Exception):
    """The engine is beyond use: a lost device, a dead process, memory that contradicts itself."""


class RoundError(Exception):
    """The round failed as a whole, the engine lives.  `duration_ns` as in Outcome."""

    def __init__(self, reason: str, duration_ns: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.duration_ns = duration_ns


class Description(Struct, frozen=True):
    """What an engine can hold; becomes the engine's half of Limits."""

    name: str  # names the engine and whatever changes its results, for the trace's header
    slot_count: int
    batch_tokens: int  # rows of one round
    context_length: int  # tokens of one sequence
    page_count: int
    page_length: int = 256
    draft_tokens: int = 0  # most drafts per lane; a round may make fewer
    drafters: str = "none"  # their names, as llama-server has them
    can_save: bool = False
    shares_pages: bool = False
    forks_anywhere: bool = False
    cache_ram_bytes: int = 0  # most that prefixes in host RAM may take
    can_shift: bool = True  # sequences can lose their middle (context shift)
    whole_prompts: bool = False  # a prompt is computed in one round: its rows see each other
    pooling: Pooling | None = None  # what encode rounds give; None: there can be none
    reuses_generated: bool = False  # a prompt may find state that was computed as generated tokens
    # What makes the bits of an answer depend on its company, in words; nothing where P3 holds.
    unstable: tuple[str, ...] = ()
    model: str | None = None  # digest of the model file
    adapters: tuple[str, ...] = ()  # digests of those loaded, by id


class Content(Struct, frozen=True):
    """What the reducer never sees of a request.  Empty tokens where the engine computes none."""

    tokens: tuple[int, ...] = ()  # the prompt
    seed: int = 0  # of its sampler, 64 bits
    sampling: Sampling = GREEDY
    reuse: bool = True  # whether the prompt may find state of earlier ones
    stop_points: tuple[int, ...] = ()  # as Request has them: where later prompts may part from it
    brought: PromptState | None = None  # came with the request, as good as found
    # Is given the prompt's state once it is computed, on the engine's thread: must be quick.
    take: Callable[[PromptState], None] | None = None
    forget: bool = False  # what the slot held before is of no use to anybody
    speculation: Speculation = Speculation()
    adapters: Adapters = ()  # what is found must have been computed with the same ones


class Seated(Struct, frozen=True):
    """How a seat begins: as RequestSeated has it."""

    cached_length: int = 0
    restore: bool = False


class Outcome(Struct, frozen=True):
    """A round that came to its end.

    An engine that only pretends to compute says how long it would have taken, and how often it
    would have looked at `abort` meanwhile; in virtual time that becomes the duration.
    """

    results: tuple[Result, ...]  # one per lane, in lane order
    tokens: tuple[tuple[int, ...], ...] = ()  # ids per lane, in lane order; () if there are none
    # Beside each of these ids how likely it was, for lanes that asked; () if none did.
    likelihoods: tuple[tuple[Likelihood, ...], ...] = ()
    drafted: tuple[int, ...] = ()  # as RoundCompleted has it
    vectors: tuple[Vectors | None, ...] = ()  # per lane of an encode round that ends its prompt
    duration_ns: int | None = None  # None: what the worker measures
    step_ns: int | None = None  # None: an abort changes nothing


class Engine(Protocol):
    def describe(self) -> Description:
        """Constant for the life of the engine."""
        ...

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        """Make `seat.slot` ready for a sequence and say how much of its prompt it holds already.

        Compares the prompt with what the slot, or the snapshot `seat.source`, really holds, keeps
        the common prefix, shorter than the prompt, and drops the rest; what it finds elsewhere it
        announces by `restore`.  A child (reason `sibling`) and a saved sequence (`resume`) begin
        empty: a fork or restore round fills them.
        """
        ...

    def run(self, launch: LaunchRound) -> Outcome:
        """Compute one round.  What each kind of lane means is said at Lane in core/vocabulary.py.

        Lanes of prefill, encode, fork, restore, save and shift produce no tokens (one of encode
        that ends its prompt gives vectors); of sample, one; of decode, one to `outputs`; a mixed
        round's prefill lane with `outputs=1`, one.  A lane whose text ends sets `finish`; then
        `tokens` counts those before the end, possibly none.
        Limits on length are not the engine's business.
        """
        ...

    def abort(self, round_id: int) -> None:
        """From any thread: nobody waits for this round any more; end it soon, however it ends.

        Ignored unless that round is running.  Must return at once.
        """
        ...

    def release(self, slot: SlotIndex, keep: int, version: int) -> None:
        """Truncate the slot to `keep` tokens; from now on they are its cache of that version."""
        ...

    def drop(self, request_id: RequestId, choice: int) -> None:
        """Forget a sequence that was saved to host RAM."""
        ...


class SlotFileError(Exception):
    """A file that cannot be taken: which, why, and the remedy."""


class SlotFiles(Protocol):
    """Where an engine's states are kept on disk.  Reading and writing take their time."""

    def write(self, name: str, state: PromptState) -> int:
        """Its size in bytes.  Whole or not at all.  Raises OSError."""
        ...

    def read(self, name: str) -> tuple[PromptState, int]:
        """With its size in bytes.  Raises SlotFileError, OSError."""
        ...


def limits_of(description: Description) -> Limits:
    """The engine's half of the limits; the operator's half stands at its defaults."""
    return Limits(
        slot_count=description.slot_count,
        batch_tokens=description.batch_tokens,
        context_length=description.context_length,
        page_count=description.page_count,
        page_length=description.page_length,
        draft_tokens=description.draft_tokens,
        can_save=description.can_save,
        shares_pages=description.shares_pages,
        forks_anywhere=description.forks_anywhere,
        whole_prompts=description.whole_prompts,
    )
