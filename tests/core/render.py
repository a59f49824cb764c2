"""Effects, states and explanations as the lines of a transcript."""

from typing import assert_never

from phaseloop.core.explain import Waiting
from phaseloop.core.ordered import keys
from phaseloop.core.state import Sequence, State
from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEffect,
    DeliverTokens,
    DropSaved,
    FinishChoice,
    FinishRequest,
    Lane,
    LaunchRound,
    ReleaseSlot,
    SeatRequest,
    Stop,
)

NOTHING = "-"


def render(effect: AnyEffect) -> str:
    match effect:
        case LaunchRound():
            lanes = ", ".join(render_lane(effect.kind, lane) for lane in effect.lanes)
            return f"round #{effect.round_id} {effect.kind} ({effect.reason}): {lanes}"
        case DeliverTokens():
            tokens = ", ".join(
                f"{name(one.request_id, one.choice)} +{one.tokens}" for one in effect.deliveries
            )
            return f"tokens ({effect.reason}): {tokens}"
        case FinishChoice():
            return f"choice {name(effect.request_id, effect.choice)} ends: {effect.reason}"
        case FinishRequest():
            return f"request {effect.request_id} ends: {effect.reason}"
        case ReleaseSlot():
            kept = f"keeps {effect.keep} as v{effect.version}"
            return f"slot {effect.slot} free ({effect.reason}): {kept}"
        case SeatRequest():
            source = ""
            if effect.source is not None:
                place = "slot" if effect.source.source == "slot" else "ram"
                where = f"{place}{effect.source.index}/v{effect.source.version}"
                source = f", {effect.source.length} tokens from {where}"
            who = name(effect.request_id, effect.choice)
            return f"seat {who} in slot {effect.slot} ({effect.reason}){source}"
        case AbortRound():
            return f"abort #{effect.round_id} ({effect.reason})"
        case DropSaved():
            return f"drop saved {name(effect.request_id, effect.choice)}: {effect.reason}"
        case Stop():
            return f"exit {effect.exit_code} ({effect.reason})"
        case _:
            assert_never(effect)


def name(request_id: int, choice: int) -> str:
    return f"{request_id}/{choice}" if choice else str(request_id)


def render_lane(kind: str, lane: Lane) -> str:
    who = name(lane.request_id, lane.choice)
    span = f"[{lane.start},{lane.start + lane.count})"
    match kind:
        case "sample":
            return f"{who} at {lane.start}"
        case "fork":
            return f"{who} {span} from slot {lane.source}"
        case "prefill" | "encode" | "mixed" if lane.outputs:
            return f"{who} {span} +{lane.outputs}"
        case _:
            return f"{who} {span}"


def render_state(state: State) -> list[str]:
    """Everybody's place in a few lines."""
    sealed = "sealed" if state.sealed else "open"
    cohort = f", cohort {state.cohort} {sealed}" if state.phase != "idle" else ""
    flight = f", round #{state.flight.round_id} in flight" if state.flight else ""
    lines = [f"{state.phase}{cohort}{flight}, {state.pages_free} pages free"]
    for slot, s in enumerate(state.slots):
        cache = state.caches[slot]
        if s is not None:
            lines.append(f"slot {slot}: {render_sequence(s)}")
        elif cache.length:
            lines.append(f"slot {slot}: empty, caches {cache.length}, {cache.pages} pages")
    lines += [f"saved for {one.cause}: {render_sequence(one.sequence)}" for one in state.saved]
    queued = [str(request_id) for _, request_id in keys(state.order)]
    return [*lines, f"queued: {' '.join(queued)}"] if queued else lines


def render_sequence(s: Sequence) -> str:
    who = name(s.request.request_id, s.choice)
    pages = f"{s.pages} pages" + (f" and {s.borrowed} borrowed" if s.borrowed else "")
    stalled = ", stalled" if s.stalled_until_ns is not None else ""
    return f"{who} {s.role} at {s.length}, {s.produced} out, {pages}{stalled}"


def render_waiting(request_id: int, told: Waiting) -> str:
    blockers = f", because of {' '.join(map(str, told.blocked_by))}" if told.blocked_by else ""
    return f"{name(request_id, told.choice)} {told.role}: {told.reason}{blockers}"
