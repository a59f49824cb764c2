"""Tells a trace what the reducer never sees: the prompts of a call, and the ids of a round."""

from phaseloop.core.state import State
from phaseloop.core.vocabulary import AnyEvent, RequestArrived, RoundCompleted

from .gateway import Gateway
from .trace import TraceWriter
from .worker import Worker


class Contents:
    """Belongs to the loop: `tell` is called before each event is appended to the trace."""

    def __init__(self, trace: TraceWriter, gateway: Gateway, worker: Worker) -> None:
        self._trace = trace
        self._gateway = gateway
        self._worker = worker

    def tell(self, event: AnyEvent, before: State) -> None:
        match event:
            case RequestArrived():
                for request in event.requests:
                    stream = self._gateway.stream(request.request_id)
                    assert stream is not None, "a request cannot end before it has arrived"
                    self._trace.prompt(request.request_id, stream.content, stream.text)
            case RoundCompleted():
                self._tell_round(event, before)
            case _:
                pass

    def _tell_round(self, event: RoundCompleted, before: State) -> None:
        flight = before.flight
        if flight is None or flight.round_id != event.round_id:
            return
        if any(lane.outputs for lane in flight.lanes):
            choices = [((lane.request_id, lane.choice), lane.outputs) for lane in flight.lanes]
            ids = tuple(self._worker.generated(choice, count).ids for choice, count in choices)
            self._trace.generated(event.round_id, ids)
