"""Two lines of the log per request: that it came, and where its time went."""

from typing import Any

import structlog

from phaseloop.runtime.gateway import Stream

MS = 1e6
S = 1e9

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def log_began(stream: Stream) -> None:
    request = stream.request
    values: dict[str, Any] = {"id": request.request_id, "prompt": request.prompt_length}
    if request.output_limit is not None:
        values["limit"] = request.output_limit
    if request.choices > 1:
        values["choices"] = request.choices
    if request.priority:
        values["priority"] = request.priority
    log.info("request", **values)


def log_ended(stream: Stream) -> None:
    """Times are milliseconds, rates tokens per second of the engine's work on the request."""
    timing, request = stream.timing, stream.request
    slot = timing.slots.get(0)
    later = timing.generated - request.choices  # the first of each choice costs no decode round
    values: dict[str, Any] = {
        "id": request.request_id,
        "slot": "-" if slot is None else slot,
        "reason": stream.outcome or "cancelled",
        "prompt": request.prompt_length,
        "cached": timing.cached,
        "generated": timing.generated,
        "queue_ms": milliseconds(timing.queue_ns()),
        "prefill_ms": milliseconds(timing.prefill_ns()),
        "barrier_ms": milliseconds(timing.barrier_ns()),
        "decode_ms": milliseconds(timing.decode_ns()),
        "prefill_rate": rate(timing.processed, timing.prefill_work_ns),
        "decode_rate": rate(max(0, later), timing.decode_work_ns),
    }
    log.info("answer", **values)


def milliseconds(span_ns: int) -> float:
    return round(span_ns / MS, 1)


def rate(count: int, span_ns: int) -> float:
    return round(count / (span_ns / S), 1) if span_ns else 0.0
