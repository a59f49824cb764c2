"""A trace as one CSV row per request, and as a trace that holds no more than decisions need."""

import csv
from typing import BinaryIO, TextIO

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import Role, State
from phaseloop.core.vocabulary import (
    AnyEvent,
    DeliverTokens,
    EngineLost,
    Failed,
    FinishReason,
    FinishRequest,
    Request,
    RequestArrived,
    RequestId,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
)
from phaseloop.runtime.trace import Footer, Header, TraceWriter

from .replay import Step
from .spread import NS

REDACTED = "redacted"
PROMPT_DONE: tuple[Role, ...] = ("ready", "generating")


class Row(Struct):
    """What a request went through; times are nanoseconds since the server started."""

    request: Request
    arrived_ns: int
    seated_ns: int | None = None
    ready_ns: int | None = None  # its prompt, of every choice, is done
    first_token_ns: int | None = None
    ended_ns: int | None = None
    outcome: FinishReason | None = None
    cached: int = 0  # prompt tokens found in place
    tokens: int = 0
    gap_ns_max: int = 0  # between deliveries to one choice


COLUMNS = (
    "request_id", "kind", "prompt_length", "output_limit", "choices", "priority", "adapter",
    "arrived_s", "seated_s", "ready_s", "first_token_s", "ended_s", "outcome", "cached", "tokens",
    "gap_max_s",
)  # fmt: skip


class RequestTable:
    """Watches a fold and writes a row when a request ends; those that do not, at `close`."""

    def __init__(self, out: TextIO) -> None:
        self._writer = csv.writer(out, lineterminator="\n")
        self._writer.writerow(COLUMNS)
        self._alive: dict[RequestId, Row] = {}
        self._delivered: dict[tuple[RequestId, int], int] = {}

    def see(self, step: Step) -> None:
        event = step.event
        if isinstance(event, RequestArrived):
            for request in event.requests:
                if request.request_id > step.before.request_id_last:
                    self._alive.setdefault(request.request_id, Row(request, event.at_ns))
        elif isinstance(event, RequestSeated):
            row = self._alive.get(event.request_id)
            if row is not None and event.choice == 0:
                row.cached = max(row.cached, event.cached_length)
        self._see_ready(step)
        for effect in step.effects:
            if isinstance(effect, SeatRequest):
                row = self._alive.get(effect.request_id)
                if row is not None and row.seated_ns is None:
                    row.seated_ns = event.at_ns
            elif isinstance(effect, DeliverTokens):
                self._see_delivery(effect, event.at_ns)
            elif isinstance(effect, FinishRequest):
                self._end(effect, event.at_ns)

    def close(self) -> None:
        for row in self._alive.values():
            self._write(row)

    def _see_ready(self, step: Step) -> None:
        for before, sequence in zip(step.before.slots, step.after.slots, strict=True):
            if sequence is before or sequence is None or sequence.role not in PROMPT_DONE:
                continue
            if before is None or before.role in PROMPT_DONE or before.resume is not None:
                continue
            row = self._alive.get(sequence.request.request_id)
            if row is not None:
                row.ready_ns = step.event.at_ns

    def _see_delivery(self, effect: DeliverTokens, now_ns: int) -> None:
        for delivery in effect.deliveries:
            row = self._alive.get(delivery.request_id)
            if row is None:
                continue
            if row.first_token_ns is None:
                row.first_token_ns = now_ns
            row.tokens += delivery.tokens
            key = (delivery.request_id, delivery.choice)
            last_ns = self._delivered.get(key)
            if last_ns is not None:
                row.gap_ns_max = max(row.gap_ns_max, now_ns - last_ns)
            self._delivered[key] = now_ns

    def _end(self, effect: FinishRequest, now_ns: int) -> None:
        row = self._alive.pop(effect.request_id, None)
        if row is None:
            return
        for choice in range(row.request.choices if row.tokens else 0):
            self._delivered.pop((effect.request_id, choice), None)
        row.ended_ns, row.outcome = now_ns, effect.reason
        self._write(row)

    def _write(self, row: Row) -> None:
        request = row.request
        times = (row.arrived_ns, row.seated_ns, row.ready_ns, row.first_token_ns, row.ended_ns)
        self._writer.writerow(
            (
                request.request_id, request.kind, request.prompt_length, request.output_limit,
                request.choices, request.priority, request.adapter,
                *map(seconds_text, times),
                row.outcome or "unfinished", row.cached, row.tokens,
                seconds_text(row.gap_ns_max if row.tokens else None),
            )
        )  # fmt: skip


def seconds_text(at_ns: int | None) -> str:
    """Seconds with every digit; empty for what did not happen."""
    return "" if at_ns is None else f"{at_ns // NS}.{at_ns % NS:09d}"


# --- redaction ------------------------------------------------------------------------------------


class Redactor:
    """Writes the trace that it watches again, without what no decision depends on.

    That is text and token ids, the model's digest, the seed, and the free text of engine errors.
    Lengths, times, identifiers and which prompts share a beginning stay: decisions follow from
    them.
    """

    def __init__(self, out: BinaryIO, header: Header, state: State) -> None:
        redacted = replace(
            header, model=None, adapters=None, seed=0, content="counts", cache_ram_bytes=None
        )
        self.dropped: dict[str, int] = {}
        self._note("prompt text", header.content == "text")
        self._note("token ids, seeds and sampling settings", header.content != "counts")
        self._note("model digest", header.model != redacted.model)
        self._note("digests of adapters", header.adapters is not None)
        self._note("seed", header.seed != redacted.seed)
        self._writer = TraceWriter(out, redacted, state)

    def see(self, step: Step) -> None:
        event = without_text(step.event)
        self._note("engine error text", event != step.event)
        self._writer.append(event, step.before, step.after, step.effects)

    def close(self, footer: Footer | None) -> None:
        """As the original ends: with the footer, or as if the process had ended here."""
        if footer is None:
            self._writer.flush()
        else:
            self._writer.close(footer.reason, footer.exit_code)

    def _note(self, what: str, is_dropped: bool) -> None:
        if is_dropped:
            self.dropped[what] = self.dropped.get(what, 0) + 1


def without_text(event: AnyEvent) -> AnyEvent:
    match event:
        case RoundFailed() | EngineLost():
            return replace(event, reason=REDACTED)
        case RoundCompleted() if any(isinstance(result, Failed) for result in event.results):
            results = tuple(Failed(REDACTED) if isinstance(r, Failed) else r for r in event.results)
            return replace(event, results=results)
        case _:
            return event
