"""The slots as llama-server shows them, with the phase, and why each one waits."""

from starlette.requests import Request
from starlette.responses import Response

from phaseloop.core.state import LIVE, Sequence
from phaseloop.runtime.service import Service
from phaseloop.runtime.timing import Timing

from .errors import json_response, not_supported, unavailable
from .seats import EMPTY_SEAT, Seat, seats_of
from .served import options_of, served_of
from .settings_json import settings_json
from .table import get


async def slots(request: Request) -> Response:
    if not options_of(request).slots:
        problem = "This server does not support slots endpoint. Start it with `--slots`"
        raise not_supported(problem)
    service = served_of(request).service
    if request.query_params.get("fail_on_no_slot") and None not in service.state.slots:
        raise unavailable("no slot available")
    return json_response(slots_of(service))


def slots_of(service: Service) -> list[dict[str, object]]:
    """One object per slot.  An empty slot still holds `n_prompt_tokens_cache` tokens for reuse."""
    state, now_ns = service.state, service.clock.now_ns()
    shown: list[dict[str, object]] = []
    for slot, seat in enumerate(seats_of(service, now_ns)):
        cached = state.caches[slot].length
        shown.append(
            {
                "id": slot,
                "n_ctx": state.limits.context_length,
                "speculative": state.limits.draft_tokens > 0,
                "is_processing": seat is not None,
                **({"n_prompt_tokens_cache": cached} if seat is None else task_of(service, seat)),
                "phase": state.phase,
                "cohort": state.cohort,
                **(EMPTY_SEAT if seat is None else seat.as_json(now_ns)),
            }
        )
    return shown


def task_of(service: Service, seat: Seat) -> dict[str, object]:
    s = seat.sequence
    stream = service.gateway.stream(s.request.request_id)
    shown: dict[str, object] = {
        "id_task": s.request.request_id,
        "n_prompt_tokens": s.request.prompt_length,
        "n_prompt_tokens_processed": max(0, min(s.length, s.request.prompt_length) - s.cached),
        "n_prompt_tokens_cache": s.cached,
        "next_token": [next_token_of(s)],
    }
    if stream is not None:
        content = stream.content
        limit = s.request.output_limit
        shown["params"] = settings_json(
            content.sampling,
            seed=content.seed,
            limit=limit,
            drafters=service.description.drafters,
            adapters=content.adapters,
        )
        if service.state.limits.draft_tokens:
            shown["drafts"] = drafts_of(stream.timing, s.choice)
    return shown


def drafts_of(timing: Timing, choice: int) -> dict[str, object]:
    """What guessing has come to: `width` is of the last round, the others are of the request."""
    return {
        "width": timing.drafted_last.get(choice, 0),
        "drafted": timing.drafted,
        "accepted": timing.accepted,
    }


def next_token_of(s: Sequence) -> dict[str, object]:
    limit = s.output_limit
    return {
        "has_next_token": s.role in LIVE and (limit is None or s.produced < limit),
        "n_remain": -1 if limit is None else limit - s.produced,
        "n_decoded": s.produced,
    }


ROWS = (get(slots, "/slots"),)
