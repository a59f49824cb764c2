"""The phase on the wire: what the engine does now and why the others wait; which policy decides."""

import difflib
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Policy
from phaseloop.runtime.service import Service

from .body import fields_of
from .errors import ApiError, invalid_field, json_response
from .request_fields import Fields, shown
from .seats import EMPTY_SEAT, milliseconds, queued, saved, seats_of
from .served import options_of, served_of
from .table import get, put

MS = 1_000_000
DURATION_MS_MAX = 86_400_000  # a day
ORDERS = ("fifo", "shortest")


class Setting(Struct, frozen=True):
    """A number of milliseconds that PUT may carry: where it goes, and which policies have it."""

    member: str  # of Policy
    switch: str


SETTINGS: dict[str, Setting] = {
    "tg_quantum_ms": Setting("decode_quantum_ns", "quantum"),
    "pp_quantum_ms": Setting("prefill_quantum_ns", "quantum"),
    "seat_quantum_ms": Setting("seat_quantum_ns", "quantum"),
    "linger_ms": Setting("linger_ns", "barrier"),
}


async def phase(request: Request) -> Response:
    return json_response(phase_of(served_of(request).service))


async def change_policy(request: Request) -> Response:
    """The policy changes at the next boundary of a round; until then it is `pending`."""
    if not options_of(request).phase_control:
        problem = "This server does not change its policy. Start it with `--phase-control`"
        raise ApiError("permission_error", problem)
    fields, service = await fields_of(request), served_of(request).service
    policy = policy_of(fields, service.state.policy)
    service.change_policy(policy)
    return json_response(phase_of(service) | {"pending": policy.name})


def phase_of(service: Service) -> dict[str, Any]:
    state, now_ns = service.state, service.clock.now_ns()
    pending = state.policy_pending
    seats = enumerate(seats_of(service, now_ns))
    return {
        "policy": state.policy.name,
        "pending": None if pending is None else pending.name,
        "phase": state.phase,
        "since_ms": milliseconds(now_ns - state.phase_since_ns),
        "cohort": state.cohort,
        "sealed": state.sealed,
        "slots": [
            {"id": slot}
            | (
                EMPTY_SEAT
                if seat is None
                else {"id_task": seat.sequence.request.request_id, **seat.as_json(now_ns)}
            )
            for slot, seat in seats
        ],
        "queue_length": len(state.queue),
        "queue": queued(state, now_ns),
        "saved": saved(state, now_ns),
    }


def policy_of(fields: Fields, current: Policy) -> Policy:
    """A preset, or the policy in force if it is named, with what else is stated.

    Raises ApiError for an unknown policy and for a setting that it does not have.
    """
    name = fields.text("policy", current.name)
    if name not in PRESETS:
        raise invalid_field("policy", f"{shown(name)} is none; {suggestion(name)}")
    policy = current if name == current.name else PRESETS[name]
    for field, setting in SETTINGS.items():
        _, value = fields.found(field)
        if value is None:
            continue
        if policy.switch != setting.switch:
            raise invalid_field(field, f"{name} has no such setting; {setting.switch} policies do")
        duration_ms = fields.bounded(field, default=0, low=0, high=DURATION_MS_MAX)
        policy = replace(policy, **{setting.member: duration_ms * MS})
    return with_order(fields, policy)


def with_order(fields: Fields, policy: Policy) -> Policy:
    order = fields.text("serial_order", policy.serial_order)
    match order:
        case policy.serial_order:
            return policy
        case "fifo" | "shortest" if policy.share == "serial":
            return replace(policy, serial_order=order)
        case "fifo" | "shortest":
            raise invalid_field("serial_order", f"{policy.name} has no such setting")
        case _:
            raise invalid_field("serial_order", f"must be fifo or shortest, not {shown(order)}")


def suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, PRESETS, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}There are {', '.join(PRESETS)}"


ROWS = (get(phase, "/phase"), put(change_policy, "/phase"))
