"""Where clients' calls become events, and effects become what a client reads.

A call is one or more requests that arrive together.  Each request has a stream: a bounded outbox
that the loop fills without waiting and the client empties at its own pace.

The bound.  At `mark` undelivered tokens the client counts as stalled: the reducer hears of it and
parks the request at the next round boundary.  The round that is running by then still delivers, so
the outbox has room for one whole round of all choices above the mark.  Once the client has read it
down to half the mark the request goes on.

Leaving.  A stream that is closed before its end, for whatever reason, has its request cancelled, by
posting an event and without awaiting: also while the task that reads it is being cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    ClientResumed,
    ClientStalled,
    Delivery,
    FinishReason,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestId,
    StopMatched,
)
from phaseloop.engine.protocol import Content, PromptState
from phaseloop.engine.settings import (
    GREEDY,
    Adapters,
    Likelihood,
    Sampling,
    Speculation,
    Vectors,
)

from .adapter_lists import AdapterLists
from .calls import Generated
from .clock import Clock
from .mailbox import Mailbox
from .prefixes import Prefixes
from .timing import Timing

OUTBOX_MARK = 1024  # tokens
SEED_BITS = 53  # drawn; a client that stores numbers as doubles can send the same one again


class Submission(Struct, frozen=True):
    """One request as the client means it.  The gateway gives it its id, and a seed if need be."""

    request: Request
    tokens: tuple[int, ...] = ()
    seed: int | None = None
    sampling: Sampling = GREEDY
    text: str | None = None  # the prompt as the client sent it, for traces that hold text
    brought: PromptState | None = None  # these three as Content has them
    take: Callable[[PromptState], None] | None = None
    forget: bool = False
    speculation: Speculation = Speculation()
    adapters: Adapters = ()


class Begun(Struct, frozen=True):
    """The engine has begun with the prompt; refusals can no longer be plain errors."""


class Progress(Struct, frozen=True):
    """A prompt round of the request has ended; its timing says how far the prompt is."""


class Delivered(Struct, frozen=True):
    """Some tokens of one choice.  `ids` is empty where the engine has none.

    `likelihoods` is empty, or has one for each id.
    """

    choice: int
    count: int
    ids: tuple[int, ...] = ()
    likelihoods: tuple[Likelihood, ...] = ()


class Ended(Struct, frozen=True):
    """The last of one choice; with it comes what a prompt was encoded to."""

    choice: int
    reason: FinishReason
    vectors: Vectors | None = None


Item: TypeAlias = Begun | Progress | Delivered | Ended
PROGRESS = Progress()


class Stream:
    """What one request yields, in order.  Iterate it from one task.

    Iteration ends with the request; then `outcome` says why it ended.  `timing` is kept up to date
    by the loop's watch (runtime/watch.py), and final once the iteration has ended.
    """

    def __init__(
        self, gateway: "Gateway", request: Request, content: Content, text: str | None = None
    ) -> None:
        self.request = request
        self.content = content
        self.text = text
        self.outcome: FinishReason | None = None
        self.timing = Timing()
        self._gateway = gateway
        self._items: deque[Item] = deque()
        self._waiting_tokens = 0
        self._is_stalled = False
        self._is_closed = False  # nobody reads any more
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        while not self._items:
            if self.outcome is not None or self._is_closed:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._take()

    def stop_matched(self, choice: int) -> None:
        """The reader found a stop string in the text of a choice: let it end there."""
        if self.outcome is None:
            self._gateway.post_stop(self.request.request_id, choice)

    def close(self) -> None:
        """Stop reading.  Cancels the request unless it has ended; never blocks."""
        if self._is_closed:
            return
        self._is_closed = True
        self._items.clear()
        self._waiting_tokens = 0
        self._wake()
        if self.outcome is None:
            self.timing.ended_ns = self._gateway.post_cancel(self.request.request_id)

    def put(self, item: Item) -> None:
        """From the loop: never blocks."""
        if self._is_closed:
            return
        if item is PROGRESS and self._items and self._items[-1] is PROGRESS:
            return  # nobody has read the last one yet, and the timing tells both
        self._items.append(item)
        if isinstance(item, Delivered):
            self._waiting_tokens += item.count
            self.timing.generated += item.count
            bound = self._gateway.outbox_bound(self.request)
            assert self._waiting_tokens <= bound, "a parked request delivers at most one round"
            if not self._is_stalled and self._waiting_tokens >= self._gateway.outbox_mark:
                self._is_stalled = True
                self._gateway.post_stalled(self.request.request_id)
        self._wake()

    def end(self, outcome: FinishReason) -> None:
        """From the loop: the request is over; what was put before can still be read."""
        self.outcome = outcome
        self._wake()

    def _take(self) -> Item:
        item = self._items.popleft()
        if isinstance(item, Delivered):
            self._waiting_tokens -= item.count
            if self._is_stalled and 2 * self._waiting_tokens <= self._gateway.outbox_mark:
                self._is_stalled = False
                if self.outcome is None:
                    self._gateway.post_resumed(self.request.request_id)
        return item

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Call:
    """The requests of one client call.  As a context manager it closes every stream at its end."""

    def __init__(self, streams: tuple[Stream, ...]) -> None:
        self.streams = streams

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class Gateway:
    """Belongs to the event loop's thread.

    `seeds` yields integers below 2**64: a generator with a stated seed in simulations and tests,
    the system's entropy in a server.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Clock,
        mailbox: Mailbox,
        seeds: Callable[[], int],
        *,
        outbox_mark: int = OUTBOX_MARK,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.outbox_mark = outbox_mark
        self._limits = limits
        self._clock = clock
        self._mailbox = mailbox
        self._seeds = seeds
        self._prefixes = prefixes
        self._request_id_next: RequestId = 0
        self._streams: dict[RequestId, Stream] = {}
        self._closed_for: FinishReason | None = None
        self._lists = AdapterLists()

    # --- from clients -----------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> Call:
        """Post the requests of one call.  Close the call when done with it."""
        call = Call(tuple(self._stream(submission) for submission in submissions))
        if self._closed_for is not None:
            for stream in call.streams:
                stream.end(self._closed_for)
            return call
        for stream in call.streams:
            self._streams[stream.request.request_id] = stream
        requests = tuple(stream.request for stream in call.streams)
        self._mailbox.post(RequestArrived(at_ns=self._clock.now_ns(), requests=requests))
        return call

    def post_cancel(self, request_id: RequestId) -> int:
        """When that was."""
        at_ns = self._clock.now_ns()
        self._mailbox.post(RequestCancelled(at_ns=at_ns, request_id=request_id))
        return at_ns

    def post_stop(self, request_id: RequestId, choice: int) -> None:
        at_ns = self._clock.now_ns()
        self._mailbox.post(StopMatched(at_ns=at_ns, request_id=request_id, choice=choice))

    def post_stalled(self, request_id: RequestId) -> None:
        self._mailbox.post(ClientStalled(at_ns=self._clock.now_ns(), request_id=request_id))

    def post_resumed(self, request_id: RequestId) -> None:
        self._mailbox.post(ClientResumed(at_ns=self._clock.now_ns(), request_id=request_id))

    def outbox_bound(self, request: Request) -> int:
        """The most tokens an outbox ever holds: just below the mark, then this round and the next.

        The delivery that reaches the mark comes after the launch of another round (R17).
        """
        round_tokens = request.choices * (1 + self._limits.draft_tokens)
        return self.outbox_mark - 1 + 2 * round_tokens

    # --- from the loop ----------------------------------------------------------------------------

    def content(self, request_id: RequestId) -> Content:
        """What the engine is told of a request that has not ended."""
        return self._streams[request_id].content

    def stream(self, request_id: RequestId) -> Stream | None:
        """The stream of a request that has not ended."""
        return self._streams.get(request_id)

    def deliver(self, delivery: Delivery, generated: Generated) -> None:
        stream = self._streams[delivery.request_id]
        ids, likelihoods = generated.ids, generated.likelihoods
        if self._prefixes is not None:
            self._prefixes.deliver(delivery, ids)
        stream.put(Delivered(delivery.choice, delivery.tokens, ids, likelihoods))

    def finish_choice(
        self,
        request_id: RequestId,
        choice: int,
        reason: FinishReason,
        vectors: Vectors | None = None,
    ) -> None:
        self._streams[request_id].put(Ended(choice, reason, vectors))

    def finish_request(self, request_id: RequestId, reason: FinishReason) -> None:
        self._streams.pop(request_id).end(reason)

    def close(self, reason: FinishReason) -> None:
        """The loop has ended: nobody waits for an answer that will not come, now or later."""
        self._closed_for = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(reason)

    def _stream(self, submission: Submission) -> Stream:
        request = replace(submission.request, request_id=self._request_id_next)
        self._request_id_next += 1
        adapters = submission.adapters
        if adapters:
            request = replace(request, adapter=self._lists.number(adapters))
        if self._prefixes is not None and self._closed_for is None:
            request = self._prefixes.place(request, submission.tokens, adapters)
        seed = self._seeds() if submission.seed is None else submission.seed
        reuse = request.keep_cache  # who leaves nothing to others takes nothing of them
        content = Content(
            submission.tokens,
            seed,
            submission.sampling,
            reuse,
            request.stop_points,
            submission.brought,
            submission.take,
            submission.forget,
            submission.speculation,
            adapters,
        )
        return Stream(self, request, content, submission.text)
