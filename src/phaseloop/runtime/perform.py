"""Effects to deeds: what concerns the engine goes to its worker, what a client to the gateway."""

from typing import assert_never

from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEffect,
    DeliverTokens,
    DropSaved,
    FinishChoice,
    FinishRequest,
    LaunchRound,
    ReleaseSlot,
    SeatRequest,
    Stop,
)

from .gateway import Gateway
from .worker import Worker


class Performer:
    """Carries out one effect at a time.  Never blocks, awaits or raises."""

    def __init__(self, worker: Worker, gateway: Gateway) -> None:
        self._worker = worker
        self._gateway = gateway

    def __call__(self, effect: AnyEffect) -> None:
        match effect:
            case LaunchRound():
                self._worker.launch(effect)
            case DeliverTokens():
                self._deliver(effect)
            case FinishChoice():
                self._finish(effect)
            case FinishRequest():
                self._gateway.finish_request(effect.request_id, effect.reason)
            case SeatRequest():
                self._worker.seat(effect, self._gateway.content(effect.request_id))
            case ReleaseSlot():
                self._worker.release(effect)
            case AbortRound():
                self._worker.abort(effect)
            case DropSaved():
                self._worker.drop(effect)
            case Stop():
                pass  # the loop ends after this step, and with it whoever performs
            case _:
                assert_never(effect)

    def _finish(self, effect: FinishChoice) -> None:
        """A prompt that was encoded ends in the step that completes its last round."""
        request_id, choice = effect.request_id, effect.choice
        vectors = None
        if effect.reason == "stop":
            vectors = self._worker.generated((request_id, choice), 0).vectors
        self._gateway.finish_choice(request_id, choice, effect.reason, vectors)

    def _deliver(self, effect: DeliverTokens) -> None:
        for delivery in effect.deliveries:
            choice = (delivery.request_id, delivery.choice)
            self._gateway.deliver(delivery, self._worker.generated(choice, delivery.tokens))
