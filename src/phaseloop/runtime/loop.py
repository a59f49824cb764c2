"""The one loop: the next event, one reduce, effects in order.  Everything else is at its edges.

`Stepper` holds the only variable that ever changes, the state.  Two drivers feed it,
`run` from the mailbox of a live server and `run_virtual` from a heap of scheduled events, so that a
simulation runs the very code that serves.

Order within a step is a contract:

1. reduce; then the event, with the digest of what it led to, is appended to the trace;
2. effects are performed in tuple order, without awaiting;
3. before a round is launched, its invariants are checked and the trace is handed to the operating
   system, so that the file of a crashed process names the round that was running.

Deadlines are pulled from the state and become events at their own time: a DeadlineReached comes
before every event stamped later than the deadline, however busy the loop is, and after those
stamped at or before it.  Both drivers keep this rule, so time in a trace never goes back.
"""

from collections.abc import Callable
from typing import TypeAlias

from phaseloop.core.invariants import check_launch
from phaseloop.core.reduce import deadline_next, reduce
from phaseloop.core.state import State
from phaseloop.core.vocabulary import (
    AnyEffect,
    AnyEvent,
    DeadlineReached,
    Effects,
    LaunchRound,
    Stop,
)

from .clock import VirtualClock
from .mailbox import Mailbox
from .trace import TraceWriter

Perform: TypeAlias = Callable[[AnyEffect], None]
Observe: TypeAlias = Callable[[AnyEvent, State, State, Effects], None]  # event, before, after
Tell: TypeAlias = Callable[[AnyEvent, State], None]  # event, before

EXIT_FAULT = 70  # EX_SOFTWARE, as for a lost engine


class Stepper:
    """Folds events into the state, one at a time.  Effects answer with later events, not within."""

    def __init__(
        self,
        state: State,
        perform: Perform,
        trace: TraceWriter | None = None,
        trace_lost: Callable[[OSError], None] | None = None,
        observe: Observe | None = None,
        tell: Tell | None = None,
    ) -> None:
        """`trace_lost` is told, once, that the trace cannot be written; serving goes on without.

        Without it the OSError ends the run.  `observe` hears of each step before its effects are
        performed, and decides nothing.  `tell` gives the trace what belongs before an event.
        """
        self.state = state
        self.at_ns = 0  # of the last event
        self.stop: Stop | None = None  # set by the step after which the loop ends
        self._perform = perform
        self._trace = trace
        self._trace_lost = trace_lost
        self._observe = observe
        self._tell = tell
        self._deadline_told = False  # the last event was DeadlineReached

    def step(self, event: AnyEvent) -> None:
        """Take one event.  A fault in the reducer or in a launch closes the trace, then raises."""
        before = self.state
        assert event.at_ns >= self.at_ns, f"{event} goes back in time from {self.at_ns} ns"
        self.at_ns = event.at_ns
        self._deadline_told = isinstance(event, DeadlineReached)
        try:
            after, effects = reduce(before, event)
        except Exception:
            self._record(event, before, before, ())  # whoever replays it gets the same exception
            self.close("fault", EXIT_FAULT)
            raise
        self._record(event, before, after, effects)
        self.state = after
        if self._observe is not None:
            self._observe(event, before, after, effects)
        for effect in effects:
            if isinstance(effect, LaunchRound):
                self._before_launch(effect)
            elif isinstance(effect, Stop):
                self.stop = effect
            self._perform(effect)

    def deadline_ns(self) -> int | None:
        """When the next DeadlineReached is due, at or after `at_ns`; None if none is.

        A deadline that its own event did not clear is one the reducer cannot act on yet: it waits
        for the next event instead of being told again and again.
        """
        due_ns = deadline_next(self.state)
        if due_ns is None or due_ns > self.at_ns:
            return due_ns
        return None if self._deadline_told else self.at_ns

    def flush(self) -> None:
        """Hand to the operating system what the trace has of the steps so far."""
        if self._trace is not None:
            self._guard(self._trace.flush)

    def close(self, reason: str, exit_code: int) -> None:
        """Write the trace's footer.  Nothing more is recorded; closing again does nothing."""
        trace, self._trace = self._trace, None
        if trace is not None:
            self._guard(lambda: trace.close(reason, exit_code))

    def _record(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        trace = self._trace
        if trace is not None:
            if self._tell is not None:
                self._tell(event, before)
            try:
                trace.append(event, before, after, effects)
            except OSError as error:
                self._lose_trace(error)

    def _before_launch(self, launch: LaunchRound) -> None:
        try:
            check_launch(self.state, launch)
        except AssertionError:
            self.close("fault", EXIT_FAULT)
            raise
        self.flush()

    def _guard(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._lose_trace(error)

    def _lose_trace(self, error: OSError) -> None:
        self._trace = None
        if self._trace_lost is None:
            raise error
        self._trace_lost(error)


async def run(stepper: Stepper, mailbox: Mailbox) -> Stop:
    """Serve until the reducer says Stop; whoever posted in time still gets an answer.

    Raises what a step raises.  However it ends, the caller closes the gateway, the worker and the
    stepper, so that no client waits for an answer that will not come.
    """
    try:
        while (stop := stepper.stop) is None:
            if mailbox.is_empty:
                stepper.flush()  # it may be long until something happens
            stepper.step(await mailbox.next(stepper.deadline_ns()))
    finally:
        late = mailbox.close()
    for event in late:
        stepper.step(event)
    return stop


def run_virtual(stepper: Stepper, clock: VirtualClock) -> Stop | None:
    """Run until the reducer says Stop, or until nothing will ever happen again (None)."""
    while stepper.stop is None:
        next_ns, deadline_ns = clock.next_ns(), stepper.deadline_ns()
        if deadline_ns is not None and (next_ns is None or deadline_ns < next_ns):
            clock.advance(deadline_ns)
            stepper.step(DeadlineReached(at_ns=deadline_ns))
        elif next_ns is None:
            return None
        else:
            item = clock.pop()
            event = item() if callable(item) else item
            if event is not None:
                stepper.step(event)
    return stepper.stop
