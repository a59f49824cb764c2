"""One call to an engine: the job, the call with its errors contained, the answer as an event.

What both workers have in common; which engine errors mean what is said in engine/protocol.py.
"""

import logging
from typing import TypeAlias

from msgspec import Struct

from phaseloop.core.vocabulary import (
    AnyEvent,
    DropSaved,
    EngineLost,
    LaunchRound,
    ReleaseSlot,
    RequestId,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
)
from phaseloop.engine.protocol import Content, Engine, EngineDied, Outcome, RoundError, Seated
from phaseloop.engine.settings import Likelihood, Vectors

Choice: TypeAlias = tuple[RequestId, int]

log = logging.getLogger(__name__)


class Generated(Struct, frozen=True):
    """What a round gave one choice.  `likelihoods` is empty, or one per id."""

    ids: tuple[int, ...] = ()
    likelihoods: tuple[Likelihood, ...] = ()
    vectors: Vectors | None = None  # of a prompt that was encoded

    def first(self, count: int) -> "Generated":
        return Generated(self.ids[:count], self.likelihoods[:count], self.vectors)


NONE_GENERATED = Generated()
GeneratedByChoice: TypeAlias = dict[Choice, Generated]


class SeatJob(Struct, frozen=True):
    seat: SeatRequest
    content: Content


class Completed(Struct, frozen=True):
    launch: LaunchRound
    outcome: Outcome
    duration_ns: int


class Broken(Struct, frozen=True):
    launch: LaunchRound
    reason: str
    duration_ns: int | None = None  # as in Outcome


class Answered(Struct, frozen=True):
    seat: SeatRequest
    seated: Seated


class Lost(Struct, frozen=True):
    reason: str


QuickJob: TypeAlias = SeatJob | ReleaseSlot | DropSaved
Job: TypeAlias = LaunchRound | QuickJob
Answer: TypeAlias = Completed | Broken | Answered | Lost


def do_quick(engine: Engine, job: QuickJob) -> tuple[Answer, ...]:
    """Raises EngineDied where the engine's memory can no longer be trusted."""
    try:
        match job:
            case SeatJob():
                return (Answered(job.seat, seat(engine, job.seat, job.content)),)
            case ReleaseSlot():
                engine.release(job.slot, job.keep, job.version)
            case DropSaved():
                engine.drop(job.request_id, job.choice)
    except EngineDied:
        raise
    except Exception as error:
        raise EngineDied(f"{type(job).__name__}: {describe(error)}") from error
    return ()


def seat(engine: Engine, request: SeatRequest, content: Content) -> Seated:
    """A seat that fails begins empty: the prompt is computed instead of found."""
    try:
        return engine.seat(request, content)
    except EngineDied:
        raise
    except Exception:
        log.exception("request %d begins without its cache", request.request_id)
        version = 0 if request.source is None else request.source.version
        engine.release(request.slot, 0, version)
        return Seated()


def run_round(engine: Engine, launch: LaunchRound) -> Outcome | Broken:
    try:
        outcome = engine.run(launch)
    except EngineDied:
        raise
    except RoundError as error:
        return Broken(launch, error.reason, error.duration_ns)
    except Exception as error:
        return Broken(launch, describe(error))
    lanes, results, tokens = len(launch.lanes), len(outcome.results), len(outcome.tokens)
    drafted = len(outcome.drafted)
    fits = tokens in (0, lanes) and drafted in (0, lanes)
    fits = fits and len(outcome.vectors) in (0, lanes)
    if results != lanes or not fits or len(outcome.likelihoods) not in (0, tokens):
        what = f"{results} results, {tokens} token lists, {drafted} drafts for {lanes} lanes"
        return Broken(launch, what, outcome.duration_ns)
    return outcome


def generated(launch: LaunchRound, outcome: Outcome) -> GeneratedByChoice:
    if outcome.vectors:
        made = zip(launch.lanes, outcome.vectors, strict=True)
        return {(lane.request_id, lane.choice): Generated(vectors=one) for lane, one in made}
    if not outcome.tokens:
        return {}
    likelihoods = outcome.likelihoods or ((),) * len(outcome.tokens)
    rows = zip(launch.lanes, outcome.tokens, likelihoods, strict=True)
    return {(lane.request_id, lane.choice): Generated(ids, likely) for lane, ids, likely in rows}


def event_of(answer: Answer, at_ns: int) -> AnyEvent:
    match answer:
        case Completed():
            return RoundCompleted(
                at_ns=at_ns,
                round_id=answer.launch.round_id,
                results=answer.outcome.results,
                duration_ns=answer.duration_ns,
                drafted=answer.outcome.drafted,
            )
        case Broken():
            return RoundFailed(at_ns=at_ns, round_id=answer.launch.round_id, reason=answer.reason)
        case Answered():
            return RequestSeated(
                at_ns=at_ns,
                request_id=answer.seat.request_id,
                choice=answer.seat.choice,
                slot=answer.seat.slot,
                cached_length=answer.seated.cached_length,
                restore=answer.seated.restore,
            )
        case Lost():
            return EngineLost(at_ns=at_ns, reason=answer.reason)


def describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
