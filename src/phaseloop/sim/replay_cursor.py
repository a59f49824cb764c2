"""A place in a trace that moves both ways.

The trace is folded once, forwards, as far as anybody has looked; every BLOCK_EVENTS events the
state and the file's offset are kept.  States are persistent values, so such a snapshot is two
pointers.  To go back is to fold one block again from its snapshot, which takes milliseconds; the
last few blocks stay at hand, so that stepping to and fro costs nothing.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Self

from msgspec import Struct

from phaseloop.core.state import State
from phaseloop.core.vocabulary import RequestArrived, RequestId
from phaseloop.runtime.trace import EventLine, Reader, TraceError, event_decoder, line_decoder

from .replay import Fold, Step, Verdict, attempt
from .replay_text import SECOND

BLOCK_EVENTS = 512
BLOCKS_KEPT = 4


class Target(Struct, frozen=True):
    """A place in a trace: an event's number, the end of a moment, or a request's arrival."""

    kind: Literal["seq", "time", "request"]
    value: int  # seq, nanoseconds or request id


class TargetError(ValueError):
    """The text is no place, or the trace has no such place."""


TIME_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": SECOND}


def parse_target(text: str) -> Target:
    """SEQ (`120`), TIME (`12.5s`, `300ms`) or `req:ID`.  Raises TargetError."""
    if text.startswith("req:"):
        return Target("request", parse_count(text[4:], "req:ID", text))
    for unit, scale in TIME_UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number[-1:].isdigit():
            return Target("time", parse_time(number, scale, text))
    return Target("seq", parse_count(text, "SEQ, TIME such as 12.5s, or req:ID", text))


def parse_count(digits: str, wanted: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        raise TargetError(f"{text!r} is not {wanted}")
    return int(digits)


def parse_time(number: str, scale: int, text: str) -> int:
    whole, _, fraction = number.partition(".")
    plain = (whole + fraction).isascii() and (whole + fraction).isdigit()
    if not plain or len(whole) > 9 or len(fraction) > 9:
        raise TargetError(f"{text!r} is not a time such as 12.5s or 300ms")
    return int(whole or "0") * scale + int(fraction or "0") * scale // 10 ** len(fraction)


def upto(steps: Iterator[Step], target: Target | None) -> Iterator[Step]:
    """The steps up to and with the target; all of them where there is none."""
    for step in steps:
        if target is not None and target.kind == "time" and step.event.at_ns > target.value:
            return
        yield step
        if target is not None and reaches(target, step):
            return


def reaches(target: Target, step: Step) -> bool:
    """Whether the step is the last one that belongs to the target (for times: never known)."""
    match target.kind:
        case "seq":
            return step.seq >= target.value
        case "request":
            return brings(step, target.value)
        case "time":
            return False


def brings(step: Step, request_id: RequestId) -> bool:
    event = step.event
    return isinstance(event, RequestArrived) and any(
        request.request_id == request_id for request in event.requests
    )


class Snapshot(Struct, frozen=True):
    """Where a block begins: the state before its first event, and where that stands in the file."""

    state: State
    offset: int
    line: int  # lines before it
    at_ns: int  # of the event before it


class Cursor:
    """Random access to the steps of a trace.  Close it, or use it in a `with`."""

    def __init__(self, path: Path, *, force: bool = False) -> None:
        """Raises TraceError or OSError as open_trace does."""
        self._source = path.open("rb", buffering=1 << 16)
        self._back = path.open("rb", buffering=1 << 16)
        try:
            self.reader = Reader(path, self._source)
            self.fold = Fold(self.reader, force=force)
        except BaseException:
            self.close()
            raise
        self._steps = iter(self.fold)
        self._snapshots = [Snapshot(self.fold.state, self._source.tell(), 1, 0)]
        self._blocks: dict[int, tuple[Step, ...]] = {}
        self.known = 0  # events folded so far
        self.complete = False  # whether these are all
        self.broken: TraceError | None = None  # why there are no more, if not for the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()
        self._back.close()

    @property
    def initial(self) -> State:
        return self._snapshots[0].state

    def step(self, seq: int) -> Step | None:
        """The step of event `seq`; None beyond the end, which a divergence may be (see `fold`)."""
        while self.known <= seq and not self.complete:
            self._extend()
        if not 0 <= seq < self.known:
            return None
        index, place = divmod(seq, BLOCK_EVENTS)
        return self._block(index)[place]

    def find(self, target: Target) -> int:
        """The number of the event at the target, -1 for before the first.  Raises TargetError."""
        match target.kind:
            case "seq":
                return self._find_seq(target.value)
            case "time":
                return self._find_time(target.value)
            case "request":
                return self._find_request(target.value)

    def verdict(self) -> Verdict:
        return self.fold.verdict()

    def end(self) -> int:
        """The number of the last event."""
        while not self.complete:
            self._extend()
        return self.known - 1

    def _find_seq(self, seq: int) -> int:
        if self.step(seq) is None:
            raise TargetError(f"there is no event {seq}: the trace has events 0..{self.known - 1}")
        return seq

    def _find_time(self, at_ns: int) -> int:
        while not self.complete and self._snapshots[-1].at_ns <= at_ns:
            self._extend()
        # The last block that begins at or before the moment holds the last event not after it.
        index = sum(1 for snapshot in self._snapshots[1:] if snapshot.at_ns <= at_ns)
        first = index * BLOCK_EVENTS
        within = self._block(index) if first < self.known else ()
        return first - 1 + sum(1 for step in within if step.event.at_ns <= at_ns)

    def _find_request(self, request_id: RequestId) -> int:
        return self._find(lambda step: brings(step, request_id), f"request {request_id}")

    def _find(self, wanted: Callable[[Step], bool], name: str) -> int:
        seq = 0
        while (step := self.step(seq)) is not None:
            if wanted(step):
                return seq
            seq += 1
        raise TargetError(f"{name} does not occur in the trace")

    def _extend(self) -> None:
        """Fold the next block for the first time."""
        block: list[Step] = []
        try:
            for step in self._steps:
                block.append(step)
                if len(block) == BLOCK_EVENTS:
                    break
            else:
                self.complete = True
        except TraceError as error:
            self.complete, self.broken = True, error
        if not block:
            return
        self._keep(self.known // BLOCK_EVENTS, tuple(block))
        self.known += len(block)
        if not self.complete:
            last = block[-1]
            self._snapshots.append(
                Snapshot(last.after, self._source.tell(), last.line, last.event.at_ns)
            )

    def _block(self, index: int) -> tuple[Step, ...]:
        block = self._blocks.get(index)
        if block is None:
            count = min(BLOCK_EVENTS, self.known - index * BLOCK_EVENTS)
            block = tuple(self._refold(self._snapshots[index], index * BLOCK_EVENTS, count))
            self._keep(index, block)
        return block

    def _keep(self, index: int, block: tuple[Step, ...]) -> None:
        self._blocks[index] = block
        if len(self._blocks) > BLOCKS_KEPT:
            del self._blocks[next(iter(self._blocks))]

    def _refold(self, snapshot: Snapshot, seq: int, count: int) -> Iterator[Step]:
        """Steps that the fold has checked before: only the reducer runs again."""
        self._back.seek(snapshot.offset)
        state, number = snapshot.state, snapshot.line
        while count:
            number += 1
            line = line_decoder.decode(self._back.readline())
            if not isinstance(line, EventLine):
                continue
            event = event_decoder.decode(line.event)
            after, effects, _ = attempt(state, event)
            yield Step(number, seq, event, state, after, effects)
            state, seq, count = after, seq + 1, count - 1
