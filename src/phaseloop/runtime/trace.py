"""The trace: one JSON line per event, from which a whole run can be recomputed and checked.

The reducer is pure, so a run is its first state and its events; nothing else needs recording.  A
trace holds the events in full and the decisions as digests.  `phaseloop replay` folds the events
again and stops at the first line where today's reducer decides otherwise.

**Lines.**  Each is one JSON object and ends with a newline; its `line` field says which kind it is.

    header      the first line.  Format and package version, digest of the reducer's sources, policy
                and limits (from which the first state follows), engine, digest of the model or
                null, seed, content: `counts`, or more in further lines (runtime/trace_content.py).
    event       `seq` counts from 0.  `event` is the tagged record of core/vocabulary.py, `at_ns` is
                nanoseconds since the server started, never decreasing.  `chain` is the digest of
                (previous chain, the bytes of `event`, the effects the reducer answered with); the
                chain of event 0 follows the digest of the header line.
    checkpoint  after every 256th event, and once more before the footer unless it has just been
                written.  `events` counts the events so far; then one digest per part of the state
                (see runtime/digest.py for the parts), so that a divergence can be named.
    footer      the last line of a run that ended in order: why, the process's exit code, the number
                of events, and a last `chain` over (previous chain, reason, exit code, events).

Digests are blake2b, 64 bits, 16 hex digits.  Keys have a fixed order: equal runs are equal files.

**Writing.**  `TraceWriter` appends to memory; `flush` hands the memory to the operating system.
The loop flushes before it launches a round: if the engine takes the process down, the last line of
the file names the round that did it.  Nothing is ever synced to the disk, so a trace survives the
crash of the process, not that of the machine.

**Reading.**  `open_trace` checks as it goes and holds one line in memory.  A last line without its
newline was torn by a crash: it is dropped and its number is kept in `Reader.torn_line`.  A trace
without a footer is one whose process ended without warning: `Reader.footer` stays None.  Everything
else that is not as above raises TraceError with the file, the line, the field and the reason.  The
reader vouches for form, order and time; that the events are the recorded ones, and the decisions
still the same, is for whoever folds them to check, with the Fingerprint that the writer used:

    with open_trace(path) as reader:
        state = initial(reader.header.limits, reader.header.policy)
        fingerprint = Fingerprint(reader.header_line, state)
        for line_number, record in reader:
            if isinstance(record, Recorded):
                after, effects = reduce(state, record.event)
                chain = fingerprint.step(record.event_json, record.event, state, after, effects)
                assert chain == record.chain
                state = after
            elif isinstance(record, Checkpoint):
                assert fingerprint.subtrees(state) == record.subtrees

The chain covers bytes as they stand in the file: editing one of a header, an event or a footer
breaks it, and a trace can still be checked when a later version gives an event a new field.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias

import msgspec
from msgspec import Raw, Struct

from phaseloop.core.state import Limits, State
from phaseloop.core.vocabulary import AnyEvent, Effects, Policy, RequestId
from phaseloop.engine.protocol import Content

from .digest import Fingerprint, Subtrees, digest_of, encode
from .trace_content import (
    LINE_BYTES_MAX,
    AnyContentLine,
    ContentChain,
    GeneratedLine,
    PromptLine,
    TokenIds,
    TraceContent,
)
from .trace_decode import Decoded, Malformed, decode

FORMAT = 1
CHECKPOINT_EVENTS = 256
FLUSH_BYTES = 1 << 16
TIME_NS_MAX = (1 << 63) - 1


class Line(Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="line"):
    """One line of the file, before its event is decoded."""


class Header(Line, frozen=True, gc=False, kw_only=True, tag="header"):
    format: int = FORMAT
    version: str  # of the package
    core: str  # digest of the reducer's sources
    policy: Policy
    limits: Limits
    engine: str
    model: str | None = None  # digest of the model file; None for engines without one
    seed: int = 0  # of whatever the engine and the gateway drew
    content: TraceContent = "counts"
    adapters: tuple[str, ...] | None = None  # digests of those loaded, by id; None for none
    cache_ram_bytes: int | None = None  # the engine's, for who runs it again; None in counts


class EventLine(Line, frozen=True, gc=False, tag="event"):
    seq: int
    event: Raw
    chain: str


class CheckpointLine(Line, frozen=True, gc=False, tag="checkpoint"):
    events: int
    queue: str
    slots: str
    kv: str
    phase: str


class Footer(Line, frozen=True, gc=False, tag="footer"):
    reason: str
    exit_code: int
    events: int
    chain: str


AnyLine: TypeAlias = EventLine | CheckpointLine | Footer | Header | AnyContentLine


class Recorded(Struct, frozen=True, gc=False):
    """An event as the trace has it."""

    seq: int
    event: AnyEvent
    chain: str
    event_json: bytes  # the bytes the chain covers


class Checkpoint(Struct, frozen=True, gc=False):
    """The state after the first `events` events."""

    events: int
    subtrees: Subtrees


Record: TypeAlias = Recorded | Checkpoint | Footer | AnyContentLine


class TraceError(Exception):
    """A file that is not a trace.  `line` counts from 1; `field` is a dotted path or None."""

    def __init__(self, path: Path, line: int, field: str | None, message: str) -> None:
        self.path, self.line, self.field, self.message = path, line, field, message
        where = f"{path}, line {line}" + (f", field {field}" if field else "")
        super().__init__(f"{where}: {message}")


class TraceWriter:
    """Appends a run to `out`, which the caller opened for bytes and will close.

    Only `flush` and `close` touch `out`, as does an `append` that finds 64 KiB pending; these may
    raise OSError.
    """

    def __init__(self, out: BinaryIO, header: Header, state: State) -> None:
        """Write the header of a run that starts in `state`."""
        line = header_line(header)
        self.events = 0
        self._out = out
        self.content: TraceContent = header.content
        self._fingerprint = Fingerprint(line, state)
        self._contents = ContentChain(line, header.content)
        self._state = state
        self._pending = bytearray(line + b"\n")
        self._checkpoint_at = -1

    def prompt(self, request_id: RequestId, content: Content, text: str | None = None) -> None:
        """Record what a request asks for, if `content` allows; just before its arrival."""
        self._pending += self._contents.prompt(request_id, content, text)

    def generated(self, round_id: int, ids: tuple[TokenIds, ...]) -> None:
        """Record the ids of each lane, if `content` allows; just before the round's completion."""
        self._pending += self._contents.generated(round_id, ids)

    def append(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        """Record that `event` led from `before` to `after` and was answered with `effects`."""
        event_json = encode(event)
        chain = self._fingerprint.step(event_json, event, before, after, effects)
        # The same bytes as encode(EventLine(...)), in a third of the time; a test compares them.
        self._pending += b'{"line":"event","seq":%d,"event":%b,"chain":"%b"}\n' % (
            self.events,
            event_json,
            chain.encode(),
        )
        self.events += 1
        self._state = after
        if self.events % CHECKPOINT_EVENTS == 0:
            self._checkpoint()
        if len(self._pending) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything appended so far to the operating system."""
        if self._pending:
            self._out.write(self._pending)
            self._pending = bytearray()
            self._out.flush()

    def close(self, reason: str, exit_code: int) -> None:
        """Write the footer: why the run ended, and with which exit code.  Leaves `out` open."""
        if self._checkpoint_at != self.events:
            self._checkpoint()
        chain = footer_chain(self._fingerprint.chain, reason, exit_code, self.events)
        self._pending += encode(Footer(reason, exit_code, self.events, chain)) + b"\n"
        self.flush()

    def _checkpoint(self) -> None:
        parts = self._fingerprint.subtrees(self._state)
        line = CheckpointLine(self.events, parts.queue, parts.slots, parts.kv, parts.phase)
        self._pending += encode(line) + b"\n"
        self._checkpoint_at = self.events


def header_line(header: Header) -> bytes:
    """In full: a limit that equals its default today is stated, as defaults may change."""
    fields = msgspec.structs.asdict(header)
    for name in ("policy", "limits"):
        fields[name] = msgspec.structs.asdict(fields[name])
    for name in ("adapters", "cache_ram_bytes"):
        if fields[name] is None:
            del fields[name]
    return msgspec.json.encode({"line": "header", **fields})


def footer_chain(chain: str, reason: str, exit_code: int, events: int) -> str:
    return digest_of(encode((chain, reason, exit_code, events)))


def open_trace(path: Path) -> "Reader":
    """Open a trace and read its header.  Raises TraceError, or OSError if it cannot be read."""
    return Reader(path, path.open("rb", buffering=1 << 18))


class FormatProbe(Struct, frozen=True, gc=False):
    """What every format's first line has."""

    line: str
    format: int = 0


format_decoder = msgspec.json.Decoder(FormatProbe)
header_decoder = msgspec.json.Decoder(Header)
line_decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)
event_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class Reader:
    """Iterates (line number, record) once, in file order, checking form, order and time.

    `footer` and `torn_line` are known only when the iteration has come to its end.
    """

    header: Header
    header_line: bytes  # what Fingerprint starts from
    footer: Footer | None
    torn_line: int | None  # the number of a last line that lacks its newline

    def __init__(self, path: Path, source: BinaryIO) -> None:
        self.path = path
        self.footer = None
        self.torn_line = None
        self._source = source
        self._number = self._events = self._at_ns = 0
        self._checkpoint_at = -1
        self._chain = ""
        try:
            self.header_line, self.header = self._read_header()
        except BaseException:
            source.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        while (content := self._read_line()) is not None:
            yield self._number, self._read_record(content)

    def _read_line(self) -> bytes | None:
        """The next whole line without its newline; None at the end."""
        line = self._source.readline(LINE_BYTES_MAX)
        if line.endswith(b"\n"):
            self._number += 1
            return line[:-1]
        if len(line) >= LINE_BYTES_MAX:
            raise self._error(f"longer than {LINE_BYTES_MAX} bytes", number=self._number + 1)
        if line:
            self.torn_line = self._number + 1
        return None

    def _read_header(self) -> tuple[bytes, Header]:
        content = self._read_line()
        if content is None:
            raise self._error("no header: the file is empty or was cut in its first line", number=1)
        probe = self._decode(format_decoder, content, "")
        if probe.line != "header":
            raise self._error("no header: the first line is not one", "line")
        if probe.format != FORMAT:
            what = f"trace format {probe.format}, but this version of phaseloop reads {FORMAT}"
            raise self._error(what, "format")
        header = self._decode(header_decoder, content, "")
        self._chain = digest_of(content)
        self._contents = ContentChain(content, header.content)
        return content, header

    def _read_record(self, content: bytes) -> Record:
        line = self._decode(line_decoder, content, "")
        if self.footer is not None:
            raise self._error("a line after the footer", "line")
        self._check_order(line)
        match line:
            case EventLine():
                record = self._read_event(line)
            case CheckpointLine():
                record = self._read_checkpoint(line)
            case Footer():
                record = self._read_footer(line)
            case PromptLine() | GeneratedLine():
                record = self._read_content(line)
            case Header():
                raise self._error("a second header", "line")
        if encode(line) != content:
            raise self._error("not as phaseloop writes it: white space, or a key given twice")
        return record

    def _check_order(self, line: AnyLine) -> None:
        """A checkpoint stands where one is due, and nowhere else."""
        regular = self._events > 0 and self._events % CHECKPOINT_EVENTS == 0
        taken = self._checkpoint_at == self._events
        if isinstance(line, CheckpointLine):
            if taken:
                raise self._error("a second checkpoint in the same place", "line")
        elif isinstance(line, Footer):
            if not taken:
                raise self._error(f"a checkpoint of {self._events} events is missing", "line")
        elif regular and not taken:
            raise self._error(f"a checkpoint of {self._events} events is missing", "line")
        elif taken and not regular:
            raise self._error("only the footer may follow this checkpoint", "line")

    def _read_event(self, line: EventLine) -> Recorded:
        if line.seq != self._events:
            raise self._error(f"out of order: {line.seq} where {self._events} is due", "seq")
        event_json = bytes(line.event)
        event = self._decode(event_decoder, event_json, "event")
        at_ns = event.at_ns
        if not self._at_ns <= at_ns <= TIME_NS_MAX:
            earlier = "is negative" if at_ns < 0 else f"goes back in time from {self._at_ns} ns"
            what = earlier if at_ns < self._at_ns else "is beyond 2**63 ns"
            raise self._error(f"{at_ns} ns {what}", "event.at_ns")
        self._check_place(event)
        self._at_ns = at_ns
        self._events += 1
        self._chain = line.chain
        return Recorded(line.seq, event, line.chain, event_json)

    def _read_checkpoint(self, line: CheckpointLine) -> Checkpoint:
        self._check_count(line.events)
        self._checkpoint_at = self._events
        return Checkpoint(line.events, Subtrees(line.queue, line.slots, line.kv, line.phase))

    def _read_footer(self, line: Footer) -> Footer:
        self._check_count(line.events)
        if line.chain != footer_chain(self._chain, line.reason, line.exit_code, line.events):
            raise self._error("does not follow from the lines before it", "chain")
        self._check_place(None)
        self.footer = line
        return line

    def _read_content(self, line: AnyContentLine) -> AnyContentLine:
        if (problem := self._contents.problem(line)) is not None:
            raise self._error(*problem)
        return line

    def _check_count(self, events: int) -> None:
        if events != self._events:
            raise self._error(f"counts {events} events where {self._events} have come", "events")

    def _check_place(self, event: AnyEvent | None) -> None:
        if (problem := self._contents.misplaced(event)) is not None:
            raise self._error(problem, "line")

    def _decode(self, decoder: msgspec.json.Decoder[Decoded], content: bytes, at: str) -> Decoded:
        """`at` is the field that `content` is the value of; empty for the whole line."""
        try:
            return decode(decoder, content)
        except Malformed as error:
            raise self._error(error.message, ".".join(filter(None, (at, error.field)))) from None

    def _error(self, message: str, field: str = "", number: int | None = None) -> TraceError:
        return TraceError(self.path, number or self._number, field or None, message)
