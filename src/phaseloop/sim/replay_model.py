"""Run the recorded rounds again on an engine and compare what comes out, token by token.

The engine gets what the recorded one got, in the same order: the seats, releases and rounds that
the reducer decided, with the prompts of a trace that holds ids.  A round that failed or was aborted
changed nothing that stayed, so it is left out; so is one that the trace does not see the end of.

The order is that of the worker (runtime/worker.py): what was asked for while a round ran was done
when it had ended.  Here a round runs once the fold has come to its end, and whatever was asked for
after it waits behind it.

A prompt that brought its state from a file computes it here, with the same bits.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.vocabulary import (
    DropSaved,
    EngineLost,
    Failed,
    FinishRequest,
    Lane,
    LaunchRound,
    Produced,
    ReleaseSlot,
    RequestArrived,
    RequestId,
    RequestSeated,
    Result,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
)
from phaseloop.engine.draft_recorded import RecordedDrafts
from phaseloop.engine.protocol import Content, Engine, Outcome, Seated
from phaseloop.runtime.calls import Answered, Broken, SeatJob, do_quick, run_round
from phaseloop.runtime.trace_content import AnyContentLine, GeneratedLine, PromptLine, TokenIds

from .replay import Step

Choice: TypeAlias = tuple[RequestId, int]
Waiting: TypeAlias = LaunchRound | SeatJob | ReleaseSlot | DropSaved


class MissingContent(Exception):
    """The trace does not hold what the engine would have to be told, or compared with."""


class Difference(Struct, frozen=True):
    """Where an engine first parts from the record, for one choice of one request."""

    what: Literal["cached", "token", "result"]
    request_id: RequestId
    choice: int
    seq: int  # of the event that recorded it
    round_id: int | None  # None for a seat
    token: int | None  # which one of the answer, from 0
    position: int | None  # of that token in its sequence, from 0
    expected: str
    got: str


class Compared(Struct):
    """What has been compared so far."""

    rounds: int = 0
    skipped: int = 0  # rounds that failed or were aborted
    seats: int = 0
    tokens: int = 0
    requests: int = 0  # that were seated
    lost: str | None = None  # the recorded engine was lost here, in its words


class EngineReplay:
    """Watches a fold: `tell` with its content lines, `see` with its steps.

    `differences` holds the first of each choice, in the order in which they were found.
    """

    def __init__(self, engine: Engine, drafts: RecordedDrafts | None = None) -> None:
        """`drafts`: the engine's drafter, where the recorded one had some."""
        self.compared = Compared()
        self.differences: list[Difference] = []
        self._engine = engine
        self._drafts = drafts
        self._contents: dict[RequestId, Content] = {}
        self._ids: GeneratedLine | None = None  # of the round whose completion comes next
        self._waiting: deque[Waiting] = deque()
        self._launch: LaunchRound | None = None  # in flight in the record
        self._recorded: dict[Choice, tuple[RequestSeated, int]] = {}
        self._seated: dict[Choice, Seated] = {}
        self._tokens: dict[Choice, int] = {}  # of each answer so far
        self._differing: set[Choice] = set()
        self._brought: set[RequestId] = set()
        self._lacking: dict[Choice, int] = {}  # tokens in place of what was brought

    def tell(self, line: AnyContentLine) -> None:
        match line:
            case PromptLine():
                self._contents[line.request_id] = line.content()
                if line.brought:
                    self._brought.add(line.request_id)
            case GeneratedLine():
                self._ids = line

    def see(self, step: Step) -> None:
        """Raises MissingContent, or EngineDied where the engine cannot go on."""
        if self.compared.lost is not None:
            return
        match step.event:
            case RequestArrived() as event:
                for request in event.requests:
                    if request.request_id not in self._contents:
                        raise MissingContent(f"line {step.line}: request {request.request_id}")
            case RequestSeated() as event:
                self._recorded[(event.request_id, event.choice)] = (event, step.seq)
            case RoundCompleted() as event:
                self._complete(event, step)
            case RoundFailed() as event:
                self._skip(event)
            case EngineLost() as event:
                self.compared.lost = event.reason
                return
            case _:
                pass
        self._work()
        for effect in step.effects:
            match effect:
                case LaunchRound() | ReleaseSlot() | DropSaved():
                    self._waiting.append(effect)
                case SeatRequest():
                    self._waiting.append(SeatJob(effect, self._contents[effect.request_id]))
                case FinishRequest():
                    self._contents.pop(effect.request_id, None)
                    self._brought.discard(effect.request_id)
                case _:
                    pass
        self._work()

    # --- the worker's order -----------------------------------------------------------------------

    def _work(self) -> None:
        """Do what waits, up to the next round."""
        while self._waiting and not isinstance(self._waiting[0], LaunchRound):
            job = self._waiting.popleft()
            assert not isinstance(job, LaunchRound), "it has been looked at"
            for answer in do_quick(self._engine, job):
                assert isinstance(answer, Answered), "quick jobs have no other answers"
                self._seated[(answer.seat.request_id, answer.seat.choice)] = answer.seated
        for key in self._seated.keys() & self._recorded.keys():
            self._compare_seat(key)

    def _take_round(self, round_id: int) -> LaunchRound | None:
        """The round that ends now; None for an event that the reducer ignores."""
        head = self._waiting[0] if self._waiting else None
        if not isinstance(head, LaunchRound) or head.round_id != round_id:
            return None
        self._waiting.popleft()
        return head

    def _skip(self, event: RoundFailed) -> None:
        if self._take_round(event.round_id) is not None:
            self.compared.skipped += 1

    def _complete(self, event: RoundCompleted, step: Step) -> None:
        ids, self._ids = self._ids, None
        launch = self._take_round(event.round_id)
        if launch is None:
            return
        if ids is None and any(lane.outputs for lane in launch.lanes):
            raise MissingContent(f"line {step.line}: round {event.round_id}")
        expected = ((),) * len(launch.lanes) if ids is None else ids.ids
        if self._drafts is not None:
            self._drafts.tell(accepted(launch, event, expected))
        outcome = self._run(launch)
        self.compared.rounds += 1
        rows = zip(launch.lanes, event.results, expected, strict=False)
        for index, (lane, result, ids_of_lane) in enumerate(rows):
            got = outcome_of(outcome, index)
            self._compare_lane(launch, lane, step, result, ids_of_lane, got)

    def _run(self, launch: LaunchRound) -> Outcome | Broken:
        if launch.kind != "restore" or not self._lacking:
            return run_round(self._engine, launch)
        rounds = [self._instead(launch, lane) for lane in launch.lanes]
        outcomes = [run_round(self._engine, one) for one in rounds]
        broken = next((one for one in outcomes if isinstance(one, Broken)), None)
        if broken is not None:
            return broken
        return Outcome(tuple(outcome_of(one, 0)[0] for one in outcomes))

    def _instead(self, launch: LaunchRound, lane: Lane) -> LaunchRound:
        """One lane by itself: what was brought is computed, anything else restored."""
        start = self._lacking.pop((lane.request_id, lane.choice), None)
        if start is None:
            return replace(launch, lanes=(lane,))
        missing = replace(lane, start=start, count=lane.count - start)
        return replace(launch, kind="prefill", lanes=(missing,))

    # --- comparing --------------------------------------------------------------------------------

    def _compare_seat(self, key: Choice) -> None:
        event, seq = self._recorded.pop(key)
        seated = self._seated.pop(key)
        self.compared.seats += 1
        self.compared.requests += event.choice == 0
        if event.request_id in self._brought and event.restore:
            if not seated.restore:
                self._lacking[key] = seated.cached_length
            elif seated.cached_length != event.cached_length:
                self._lacking[key] = 0
            return
        expected, got = (
            f"{length:,} tokens found{' elsewhere' if restore else ''}"
            for length, restore in (
                (event.cached_length, event.restore),
                (seated.cached_length, seated.restore),
            )
        )
        if expected != got:
            self._note(Difference("cached", *key, seq, None, None, None, expected, got))

    def _compare_lane(
        self,
        launch: LaunchRound,
        lane: Lane,
        step: Step,
        result: Result,
        expected: TokenIds,
        got: tuple[Result, TokenIds],
    ) -> None:
        key = (lane.request_id, lane.choice)
        count = self._tokens.get(key, 0)
        self._tokens[key] = count + len(expected)
        self.compared.tokens += len(expected)
        found, ids = got
        for index, (left, right) in enumerate(zip(expected, ids, strict=False)):
            if left != right:
                # The last row of a lane that wants n tokens gives the one after it, as the n-th.
                position = lane.start + lane.count - lane.outputs + 1 + index
                place = (step.seq, launch.round_id, count + index, position)
                self._note(Difference("token", *key, *place, str(left), str(right)))
                return
        if result_text(result) != result_text(found) or len(expected) != len(ids):
            place = (step.seq, launch.round_id, None, None)
            texts = result_text(result), result_text(found)
            self._note(Difference("result", *key, *place, *texts))

    def _note(self, difference: Difference) -> None:
        key = (difference.request_id, difference.choice)
        if key not in self._differing:
            self._differing.add(key)
            self.differences.append(difference)


def accepted(
    launch: LaunchRound, event: RoundCompleted, ids: Sequence[TokenIds]
) -> dict[Choice, TokenIds]:
    """Per lane all tokens but the one that was drawn last, which an end token hides."""
    return {
        (lane.request_id, lane.choice): made
        if isinstance(result, Produced) and result.finish
        else made[:-1]
        for lane, result, made in zip(launch.lanes, event.results, ids, strict=False)
    }


def outcome_of(outcome: Outcome | Broken, index: int) -> tuple[Result, TokenIds]:
    """The result and the ids of one lane."""
    if isinstance(outcome, Broken):
        return Failed(outcome.reason), ()
    return outcome.results[index], outcome.tokens[index] if outcome.tokens else ()


def result_text(result: Result) -> str:
    """Why a lane failed is the engine's own wording, and not compared."""
    match result:
        case Failed():
            return "a failed lane"
        case Produced():
            end = ", the end of the text" if result.finish else ""
            return f"{result.tokens} tokens{end}"
