"""Run the reducer over a recorded trace again and say where it decides otherwise than it did.

`Fold` is the one way through a trace: it yields a Step per event, compares the chain at each and
the state's digests at each checkpoint, and keeps what it finds.  Everything else that replay offers
(the cursor, the stories, the exports) looks at these steps.

A divergence is found by digests, which chain: after the first one every later digest would differ
too.  So the chain is taken up again from the file after each event, and what counts as differing is
each event for itself.  Without `force` the fold runs on, in silence, to the next checkpoint, since
only there does the file say which part of the state differs, and stops.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from phaseloop.core.invariants import Violation
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.transitions import check_step
from phaseloop.core.vocabulary import AnyEvent, Effects
from phaseloop.runtime.digest import Fingerprint, Subtrees, core_digest, encode
from phaseloop.runtime.trace import Checkpoint, Footer, Reader, Recorded, TraceError
from phaseloop.runtime.trace_content import AnyContentLine

EXIT_OK, EXIT_DIVERGED, EXIT_UNREADABLE, EXIT_OTHER_SOURCES = 0, 1, 2, 3

# What a header may say.  The reducer trusts its limits; a file does not deserve that trust.
LIMIT_RANGES: dict[str, tuple[int, int]] = {
    "slot_count": (1, 1 << 16),
    "batch_tokens": (1, 1 << 32),
    "context_length": (1, 1 << 40),
    "page_count": (1, 1 << 40),
    "page_length": (1, 1 << 32),
    "draft_tokens": (0, 1 << 16),
    "output_reserve": (0, 1 << 40),
    "queue_length_max": (0, 1 << 32),
    "round_ns_max": (0, 1 << 62),
    "client_stall_ns": (0, 1 << 62),
    "shutdown_grace_ns": (0, 1 << 62),
    "share_length_min": (0, 1 << 40),
}


class Step(Struct, frozen=True, gc=False):
    """One event of a trace and what the reducer makes of it now."""

    line: int
    seq: int
    event: AnyEvent
    before: State
    after: State
    effects: Effects


class Divergence(Struct, frozen=True):
    """The first place where replay and record part."""

    what: Literal["effects", "state", "raised", "impure", "invariant"]
    line: int
    seq: int  # of the event, or of the last one before a checkpoint
    event: AnyEvent | None  # None where only a checkpoint differs
    effects: Effects = ()  # what the reducer answers now
    detail: str = ""
    subtrees: tuple[str, ...] | None = None  # that differ at the next checkpoint; None: none came


class Verdict(Struct, frozen=True):
    """What a whole fold found."""

    events: int
    same_sources: bool
    divergence: Divergence | None
    differing: int  # events that differ, each for itself
    state_notes: tuple[str, ...]  # state digests that differ where every decision is equal
    fault: str | None  # where the reducer raised, now as then
    torn_line: int | None
    footer: Footer | None
    at_ns: int  # of the last event
    is_whole: bool  # the fold came to the end of the file

    @property
    def exit_code(self) -> int:
        if self.divergence is None:
            return EXIT_OK
        # A broken invariant or an impure step is a fault of these sources, whoever wrote the trace.
        own = self.divergence.what in ("impure", "invariant")
        return EXIT_DIVERGED if self.same_sources or own else EXIT_OTHER_SOURCES


class Fold:
    """Iterates the steps of a trace once.

    `force` goes on past divergences; `twice` takes every step two times and compares; `check` holds
    every step against the invariants.  `tell` is shown the lines that hold prompts and ids.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        force: bool = False,
        twice: bool = False,
        check: bool = False,
        tell: Callable[[AnyContentLine], None] = lambda line: None,
    ) -> None:
        """Raises TraceError where the header's limits are out of range."""
        check_limits(reader.path, reader.header.limits)
        self.reader = reader
        self.same_sources = reader.header.core == present_core()
        self.state = initial(reader.header.limits, reader.header.policy)
        self.fingerprint = Fingerprint(reader.header_line, self.state)
        self.divergence: Divergence | None = None
        self.differing = 0
        self.events = 0
        self.at_ns = 0
        self._force, self._careful = force, twice or check
        self._twice, self._check, self._tell = twice, check, tell
        self._state_notes: list[str] = []
        self._fault: str | None = None
        self._is_whole = False

    def __iter__(self) -> Iterator[Step]:
        """Raises TraceError at the first line that is malformed."""
        step_chain = self.fingerprint.step
        careful = self._careful
        for line, record in self.reader:
            if isinstance(record, Recorded):
                event, before = record.event, self.state
                after, effects, fault = attempt(before, event)
                chain = step_chain(record.event_json, event, before, after, effects)
                step = Step(line, record.seq, event, before, after, effects)
                self.state = after
                if chain != record.chain:
                    self._note(divergence_of(step, "raised" if fault else "effects", fault))
                    self.fingerprint.chain = record.chain
                elif fault:
                    self._fault = f"line {line}, event {record.seq}: {fault}"
                if careful and not fault:
                    self._examine(step)
                self.events += 1
                self.at_ns = event.at_ns
                if self.divergence is None or self._force:
                    yield step
            elif isinstance(record, Checkpoint):
                self._compare(line, record)
                if self.divergence is not None and not self._force:
                    return
            elif not isinstance(record, Footer):
                self._tell(record)
        self._is_whole = True

    def verdict(self) -> Verdict:
        return Verdict(
            self.events,
            self.same_sources,
            self.divergence,
            self.differing,
            tuple(self._state_notes),
            self._fault,
            self.reader.torn_line,
            self.reader.footer,
            self.at_ns,
            self._is_whole,
        )

    def _note(self, divergence: Divergence) -> None:
        self.differing += 1
        if self.divergence is None:
            self.divergence = divergence

    def _examine(self, step: Step) -> None:
        if self._twice:
            again = reduce(step.before, step.event)
            if encode(again[1]) != encode(step.effects) or again[0] != step.after:
                self._note(divergence_of(step, "impure", "a second pass answers otherwise"))
        if self._check:
            try:
                check_step(step.before, step.event, step.after, step.effects)
            except Violation as violation:
                detail = f"{violation.invariant}: {violation}"
                self._note(divergence_of(step, "invariant", detail))

    def _compare(self, line: int, record: Checkpoint) -> None:
        now = self.fingerprint.subtrees(self.state)
        names = differing_subtrees(record.subtrees, now)
        found = self.divergence
        if found is not None:
            if found.subtrees is None:
                self.divergence = replace(found, subtrees=names)
        elif names and self.same_sources:
            detail = f"the state after {record.events} events"
            self._note(
                Divergence("state", line, record.events - 1, None, detail=detail, subtrees=names)
            )
        elif names:
            self._state_notes.append(
                f"line {line}: every decision is equal, but the digests of "
                f"{' and '.join(names)} after {record.events} events are not"
            )


@cache
def present_core() -> str:
    """The digest of the reducer's sources: they are read once per process."""
    return core_digest()


def attempt(state: State, event: AnyEvent) -> tuple[State, Effects, str]:
    """A step; where the reducer raises, what it says, and no step: so the loop records it, too."""
    try:
        after, effects = reduce(state, event)
    except Exception as error:
        return state, (), f"{type(error).__name__}: {error}"
    return after, effects, ""


def divergence_of(
    step: Step, what: Literal["effects", "raised", "impure", "invariant"], detail: str = ""
) -> Divergence:
    return Divergence(what, step.line, step.seq, step.event, step.effects, detail)


def differing_subtrees(recorded: Subtrees, now: Subtrees) -> tuple[str, ...]:
    before, after = asdict(recorded), asdict(now)
    return tuple(name for name in before if before[name] != after[name])


def check_limits(path: Path, limits: Limits) -> None:
    for name, value in asdict(limits).items():
        if isinstance(value, bool) or name not in LIMIT_RANGES:
            continue
        low, high = LIMIT_RANGES[name]
        if not low <= value <= high:
            raise TraceError(path, 1, f"limits.{name}", f"{value} is not in {low}..{high}")
