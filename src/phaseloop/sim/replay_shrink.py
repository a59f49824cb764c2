"""The smallest scenario that still shows what a predicate asks for.

In turn, until nothing gets smaller: whole calls are left out, then other inputs, then every number
is made as small as it can be (prompts, answers, choices, times) and every option of a request put
back to its default.  Each try is a whole run in virtual time under the same cost model.
"""

from collections.abc import Callable, Iterator

from msgspec.structs import asdict, replace

from phaseloop.core.vocabulary import (
    AnyEvent,
    Candidate,
    ClientResumed,
    ClientStalled,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestId,
    Shared,
)
from phaseloop.engine.sim_cost import Cost

from .metrics import Summary
from .replay_figures import figures_of
from .replay_minimize import Exhausted, minimal_items, minimal_number
from .replay_predicate import Predicate
from .replay_rerun import EVENTS_MAX, RerunError
from .replay_scenario import Answer, Scenario
from .replay_whatif import summary_of

PLAIN = Request(0, 1)  # what every optional field of a request is put back to
LONGER_MAX, EVENTS_FREE = 2, 1000
KEPT_FIELDS = ("request_id", "prompt_length", "output_limit", "choices")
PLAIN_ANSWER: dict[str, object] = {
    "stop_after_ns": None,
    "is_late": False,
    "accepted": (),
    "seated_after_ns": 0,
    "fails_at": None,
}


class Shrinker:
    """`scenario` is the smallest found so far; `tries` counts runs."""

    def __init__(
        self, scenario: Scenario, cost: Cost, predicate: Predicate, tries_max: int
    ) -> None:
        self.scenario = bare(scenario)
        self.tries = 0
        self._cost = cost
        self._predicate = predicate
        self._tries_max = tries_max
        self._events_max = EVENTS_MAX  # a part of the run must not take much longer than the whole

    def summary(self) -> Summary:
        return summary_of(self.scenario, self._cost)

    def shows(self, scenario: Scenario) -> bool:
        """Whether a run of it satisfies the predicate.  Raises Exhausted."""
        if self.tries >= self._tries_max:
            raise Exhausted
        self.tries += 1
        try:
            summary = summary_of(scenario, self._cost, events_max=self._events_max)
        except RerunError:
            return False
        if self.tries == 1:
            self._events_max = LONGER_MAX * summary.events + EVENTS_FREE
        return self._predicate(figures_of(summary))

    def shrink(self) -> bool:
        """Until nothing gets smaller; False if the tries were spent before that.

        The scenario must satisfy the predicate to begin with.
        """
        try:
            before = None
            while before != self.scenario:
                before = self.scenario
                self._leave_out()
                self._simplify()
                self._lessen()
            self._accept(renumbered(self.scenario))
        except Exhausted:
            return False
        return True

    def _accept(self, scenario: Scenario) -> bool:
        if scenario == self.scenario or not self.shows(scenario):
            return False
        self.scenario = scenario
        return True

    def _leave_out(self) -> None:
        """Single requests, then all other inputs."""
        base = self.scenario

        def with_requests(kept: list[RequestId]) -> bool:
            return self._accept(only_requests(base, frozenset(kept)))

        minimal_items([r.request_id for r in requests_of(base)], with_requests)
        base = self.scenario
        other = [event for event in base.inputs if not isinstance(event, RequestArrived)]

        def with_inputs(kept: list[AnyEvent]) -> bool:
            inputs = tuple(e for e in base.inputs if isinstance(e, RequestArrived) or e in kept)
            return self._accept(replace(base, inputs=inputs))

        minimal_items(other, with_inputs)

    def _simplify(self) -> None:
        for request in requests_of(self.scenario):
            for name, value in asdict(request).items():
                default = asdict(PLAIN)[name]
                if name not in KEPT_FIELDS and value != default:
                    current = request_of(self.scenario, request.request_id)
                    self._accept(with_request(self.scenario, replace(current, **{name: default})))
        self._accept(replace(self.scenario, prefixes=()))
        self._accept(replace(self.scenario, until_ns=None))
        for index in range(len(self.scenario.answers)):
            for name, default in PLAIN_ANSWER.items():
                answer = self.scenario.answers[index]
                if asdict(answer)[name] != default:
                    plain = replace(answer, **{name: default})
                    self._accept(with_answer(self.scenario, index, plain))

    def _lessen(self) -> None:
        for change, value, floor in list(self._numbers()):

            def shows(number: int, change: Callable[[int], Scenario] = change) -> bool:
                return self._accept(change(number))

            minimal_number(value, floor, shows)

    def _numbers(self) -> Iterator[tuple[Callable[[int], Scenario], int, int]]:
        """(how to put it back, value, floor) of every number; each works on what is current."""
        for request in requests_of(self.scenario):
            request_id = request.request_id
            yield self._field(request_id, "prompt_length"), request.prompt_length, 1
            yield self._field(request_id, "choices"), request.choices, 1
            if request.output_limit is not None:
                yield self._field(request_id, "output_limit"), request.output_limit, 0
        for index, answer in enumerate(self.scenario.answers):
            if answer.tokens is not None:
                yield self._answer(index), answer.tokens, 0
        for index, event in enumerate(self.scenario.inputs):
            earlier_ns = self.scenario.inputs[index - 1].at_ns if index else 0
            yield self._moved(index), event.at_ns, min(earlier_ns, event.at_ns)

    def _field(self, request_id: RequestId, name: str) -> Callable[[int], Scenario]:
        def change(value: int) -> Scenario:
            request = replace(request_of(self.scenario, request_id), **{name: value})
            return with_request(self.scenario, request)

        return change

    def _answer(self, index: int) -> Callable[[int], Scenario]:
        def change(tokens: int) -> Scenario:
            answer = replace(self.scenario.answers[index], tokens=tokens)
            return with_answer(self.scenario, index, answer)

        return change

    def _moved(self, index: int) -> Callable[[int], Scenario]:
        """The input and all later ones come earlier."""

        def change(at_ns: int) -> Scenario:
            inputs = self.scenario.inputs
            by_ns = inputs[index].at_ns - at_ns
            moved = tuple(replace(event, at_ns=event.at_ns - by_ns) for event in inputs[index:])
            return replace(self.scenario, inputs=inputs[:index] + moved)

        return change


def requests_of(scenario: Scenario) -> list[Request]:
    return [
        request
        for event in scenario.inputs
        if isinstance(event, RequestArrived)
        for request in event.requests
    ]


def request_of(scenario: Scenario, request_id: RequestId) -> Request:
    return next(r for r in requests_of(scenario) if r.request_id == request_id)


def only_requests(scenario: Scenario, kept: frozenset[RequestId]) -> Scenario:
    """Without the other requests and whatever else is about them."""
    inputs: list[AnyEvent] = []
    for event in scenario.inputs:
        if isinstance(event, RequestArrived):
            requests = tuple(
                replace(r, shared=tuple(s for s in r.shared if s.request_id in kept))
                for r in event.requests
                if r.request_id in kept
            )
            if requests:
                inputs.append(replace(event, requests=requests))
        elif request_id_of(event) is None or request_id_of(event) in kept:
            inputs.append(event)
    answers = tuple(answer for answer in scenario.answers if answer.request_id in kept)
    prefixes = tuple(prefix for prefix in scenario.prefixes if prefix.request_id in kept)
    return replace(scenario, inputs=tuple(inputs), answers=answers, prefixes=prefixes)


def request_id_of(event: AnyEvent) -> RequestId | None:
    """Whom an input is about; None if it is about everybody."""
    match event:
        case RequestCancelled() | ClientStalled() | ClientResumed():
            return event.request_id
        case _:
            return None


def with_request(scenario: Scenario, request: Request) -> Scenario:
    """Put a changed request back; what points into its prompt is kept inside it."""
    length, request_id = request.prompt_length, request.request_id
    fitted = replace(
        request,
        stop_points=tuple(point for point in request.stop_points if point < length),
        candidates=tuple(cut_candidate(c, length) for c in request.candidates),
        shared=tuple(Shared(s.request_id, min(s.length, length)) for s in request.shared),
    )

    def put_back(event: AnyEvent) -> AnyEvent:
        if not isinstance(event, RequestArrived):
            return event
        requests = tuple(fitted if r.request_id == request_id else r for r in event.requests)
        return replace(event, requests=requests)

    inputs = tuple(put_back(event) for event in scenario.inputs)
    answers = tuple(a for a in scenario.answers if keeps(a, fitted))
    return replace(scenario, inputs=inputs, answers=answers)


def with_answer(scenario: Scenario, index: int, answer: Answer) -> Scenario:
    answers = scenario.answers
    return replace(scenario, answers=(*answers[:index], answer, *answers[index + 1 :]))


def bare(scenario: Scenario) -> Scenario:
    """Without what only a run that is taken up in the middle needs."""
    answers = tuple(replace(answer, slot=None, cached=0) for answer in scenario.answers)
    return replace(scenario, answers=answers, after=(), cut=0)


def renumbered(scenario: Scenario) -> Scenario:
    """The same with requests numbered from 0 on."""
    numbers = {r.request_id: number for number, r in enumerate(requests_of(scenario))}

    def renumber_request(request: Request) -> Request:
        shared = tuple(Shared(numbers[s.request_id], s.length) for s in request.shared)
        return replace(request, request_id=numbers[request.request_id], shared=shared)

    def renumber(event: AnyEvent) -> AnyEvent:
        match event:
            case RequestArrived():
                return replace(event, requests=tuple(map(renumber_request, event.requests)))
            case RequestCancelled() | ClientStalled() | ClientResumed():
                return replace(event, request_id=numbers[event.request_id])
            case _:
                return event

    return replace(
        scenario,
        inputs=tuple(map(renumber, scenario.inputs)),
        answers=tuple(replace(a, request_id=numbers[a.request_id]) for a in scenario.answers),
        prefixes=tuple(replace(p, request_id=numbers[p.request_id]) for p in scenario.prefixes),
    )


def cut_candidate(candidate: Candidate, length: int) -> Candidate:
    return replace(candidate, length=min(candidate.length, max(length - 1, 0)))


def keeps(answer: Answer, request: Request) -> bool:
    return answer.request_id != request.request_id or answer.choice < request.choices
