"""The worker of a simulation: an engine says how long it would have taken, the clock jumps on."""

from msgspec import Struct

from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEvent,
    DropSaved,
    LaunchRound,
    ReleaseSlot,
    SeatRequest,
)
from phaseloop.engine.protocol import Content, Engine, EngineDied, Outcome

from .calls import (
    NONE_GENERATED,
    Broken,
    Choice,
    Completed,
    Generated,
    GeneratedByChoice,
    Lost,
    QuickJob,
    SeatJob,
    do_quick,
    event_of,
    generated,
    run_round,
)
from .clock import Ticket, VirtualClock


class Flight(Struct, frozen=True):
    """A round of virtual time."""

    launch: LaunchRound
    start_ns: int
    end_ns: int
    step_ns: int | None
    ticket: Ticket


class VirtualWorker:
    """Runs the engine on the spot and reports when the clock gets to where the round would end."""

    def __init__(self, engine: Engine, clock: VirtualClock) -> None:
        self._engine = engine
        self._clock = clock
        self._flight: Flight | None = None
        self._generated: GeneratedByChoice = {}
        self._is_lost = False

    def launch(self, launch: LaunchRound) -> None:
        if self._is_lost:
            return
        start_ns = self._clock.now_ns()
        try:
            answer = run_round(self._engine, launch)
        except EngineDied as error:
            self._lose(error)
            return
        step_ns = None
        if isinstance(answer, Outcome):
            step_ns = answer.step_ns
            assert answer.duration_ns is not None, "in virtual time an engine states its durations"
            answer = Completed(launch, answer, answer.duration_ns)
        end_ns = start_ns + (answer.duration_ns or 0)
        ticket = self._clock.call_at(end_ns, lambda: self._end(answer))
        self._flight = Flight(launch, start_ns, end_ns, step_ns, ticket)

    def abort(self, abort: AbortRound) -> None:
        """End the round where the engine would have looked next."""
        flight, now_ns = self._flight, self._clock.now_ns()
        if flight is None or flight.launch.round_id != abort.round_id or not flight.step_ns:
            return
        steps = -(-(now_ns - flight.start_ns) // flight.step_ns)
        end_ns = flight.start_ns + steps * flight.step_ns
        if end_ns < flight.end_ns:
            self._clock.cancel(flight.ticket)
            self._clock.call_at(end_ns, lambda: self._end(Broken(flight.launch, "aborted")))

    def seat(self, seat: SeatRequest, content: Content) -> None:
        self._do(SeatJob(seat, content))

    def release(self, release: ReleaseSlot) -> None:
        self._do(release)

    def drop(self, drop: DropSaved) -> None:
        self._do(drop)

    def generated(self, choice: Choice, count: int) -> Generated:
        return self._generated.get(choice, NONE_GENERATED).first(count)

    def _do(self, job: QuickJob) -> None:
        if self._is_lost:
            return
        try:
            answers = do_quick(self._engine, job)
        except EngineDied as error:
            self._lose(error)
            return
        for answer in answers:
            self._clock.post(event_of(answer, self._clock.now_ns()))

    def _end(self, answer: Completed | Broken) -> AnyEvent | None:
        self._flight = None
        if self._is_lost:
            return None
        if isinstance(answer, Completed):
            self._generated = generated(answer.launch, answer.outcome)
        return event_of(answer, self._clock.now_ns())

    def _lose(self, error: EngineDied) -> None:
        self._is_lost = True
        self._clock.post(event_of(Lost(str(error)), self._clock.now_ns()))
