"""Goal: a stream begins, is kept alive, fails and is abandoned at the right moment.

Method: the shell in virtual time under the routes' own code, with a client whose reading the test
controls; what is sent is noted with its time, in seconds.
"""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from http_world import CARD
from msgspec.structs import replace
from scripted import MS, LoopSchedule, run_virtually
from storyteller import TOKENIZER, Storyteller

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import (
    AnyEvent,
    ClientResumed,
    ClientStalled,
    EngineLost,
    Request,
    RequestCancelled,
    ShutdownRequested,
    StopMatched,
)
from phaseloop.engine.protocol import limits_of
from phaseloop.http.answer_call import Answered
from phaseloop.http.completion_routes import prepare
from phaseloop.http.served import HttpOptions, Served
from phaseloop.http.sse import COMMENT, DONE
from phaseloop.runtime.gateway import Gateway, Submission
from phaseloop.runtime.loop import Stepper, run
from phaseloop.runtime.perform import Performer
from phaseloop.runtime.virtual_worker import VirtualWorker
from phaseloop.runtime.watch import Watch

HTTP = HttpOptions()
TEXT = "the quick"
IDS = TOKENIZER.encode(TEXT)
S = 1000 * MS
ROUNDS_BEFORE_TOKENS = 2  # prefill, sample


class Client:
    """Reads what it is sent, unless told to wait; stays until told to leave."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.messages: list[tuple[float, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append((round(self.loop.time(), 6), message))

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def begun_s(self) -> float:
        at_s, message = self.messages[0]
        assert message["type"] == "http.response.start"
        return at_s

    @property
    def status(self) -> int:
        return self.messages[0][1]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for _, message in self.messages)

    @property
    def has_end(self) -> bool:
        return not self.messages[-1][1].get("more_body", True)

    def times_of(self, part: bytes) -> list[float]:
        return [at_s for at_s, message in self.messages if part in message.get("body", b"")]


class Server:
    """What the routes need of a server, in virtual time."""

    def __init__(self, engine: Storyteller, *, outbox_mark: int = 1024, **limits: int) -> None:
        schedule = LoopSchedule()
        self.schedule = schedule
        limits_now = replace(limits_of(engine.describe()), **limits)
        self.gateway = Gateway(
            limits_now, schedule, schedule.mailbox, lambda: 7, outbox_mark=outbox_mark
        )
        performer = Performer(VirtualWorker(engine, schedule), self.gateway)
        watch = Watch(self.gateway)
        state = initial(limits_now, PRESETS["barrier-fair"])
        self.events: list[AnyEvent] = []

        def observe(event: AnyEvent, *others: Any) -> None:
            self.events.append(event)
            watch.observe(event, *others)

        stepper = Stepper(state, performer, observe=observe)
        self.stepper = stepper
        self.running = asyncio.create_task(run(stepper, schedule.mailbox))
        service: Any = SimpleNamespace(
            gateway=self.gateway, limits=limits_now, clock=schedule, state=state
        )
        self.served = Served(service=service, tokenizer=TOKENIZER, model=CARD)

    def post(self, client: Client, **body: Any) -> asyncio.Task[None]:
        """An answer under way."""
        raw = json.dumps({"prompt": [1, 2, 3], "stream": True, **body}).encode()
        prepared = prepare(raw, "completion", self.served, HTTP, None)
        answered = Answered(prepared.wanted, prepared.prompts, self.served, HTTP.build)
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        return asyncio.create_task(answered.streamed(scope, client.receive, client.send))

    def occupy(self, tokens: int) -> Any:
        """Let others have all slots until each has so many tokens."""
        slots = self.stepper.state.limits.slot_count
        request = Request(0, 3, output_limit=tokens)
        return self.gateway.submit([Submission(request, (1, 2, 3))] * slots)

    async def end(self) -> None:
        for _ in range(2):
            self.schedule.post(ShutdownRequested(at_ns=self.schedule.now_ns()))
        await self.running

    def count(self, kind: type[AnyEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def error_of(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))["error"]


def answered(engine: Storyteller, *, busy_tokens: int = 0, **body: Any) -> Client:
    """A client that stays and reads to the end."""

    async def main() -> Client:
        server, client = Server(engine), Client()
        others = server.occupy(busy_tokens) if busy_tokens else None
        await server.post(client, **body)
        if others is not None:
            others.close()
        await server.end()
        return client

    return run_virtually(main())


# --- beginning and silence ------------------------------------------------------------------------


def test_it_begins_with_the_prompt_and_not_with_the_first_token():
    client = answered(Storyteller(TEXT, duration_ns=300 * MS))
    assert client.begun_s == 0
    assert client.times_of(b'"text":"t')[0] == 0.3 * ROUNDS_BEFORE_TOKENS
    assert client.body.endswith(DONE)


def test_after_a_second_of_waiting_it_begins_anyway():
    """Others have all slots for 2 + 2 rounds of a second each."""
    client = answered(Storyteller(TEXT, duration_ns=S), busy_tokens=3)
    assert client.begun_s == 1
    assert client.times_of(b"data: ")[0] == 4 + ROUNDS_BEFORE_TOKENS


@pytest.mark.parametrize(
    ("interval", "times"),
    [(2, [3, 5, 7, 9]), (5, [6]), (None, []), (-1, []), (0, [])],
)
def test_comments_break_the_silence_of_waiting(interval, times):
    """Others have all slots for 8 s; its own first token comes 2 s later."""
    engine = Storyteller(TEXT, ends=False, duration_ns=S)
    client = answered(engine, busy_tokens=7, sse_ping_interval=interval, max_tokens=1)
    assert client.times_of(COMMENT) == times
    assert client.times_of(b'"text"')[0] == 10


def test_comments_fill_the_silence_between_tokens_and_only_that():
    """A token every 5 s, the first at 10 s; its round begins at 0 s."""
    client = answered(Storyteller(TEXT, duration_ns=5 * S), sse_ping_interval=3, max_tokens=3)
    assert client.times_of(COMMENT) == [3, 6, 9, 13, 18]
    assert client.times_of(b'"text":"') == [10, 15, 20, 20]


# --- errors ---------------------------------------------------------------------------------------


def test_who_waits_too_long_before_the_stream_gets_a_plain_error():
    client = answered(Storyteller(TEXT, duration_ns=S), busy_tokens=5, max_queue_ms=400)
    assert (client.begun_s, client.status) == (0.4, 503)
    headers = dict(client.messages[0][1]["headers"])
    assert headers[b"retry-after"] == b"1"
    assert json.loads(client.body)["error"]["type"] == "unavailable_error"


def test_who_waits_too_long_in_the_stream_gets_an_event():
    client = answered(Storyteller(TEXT, duration_ns=S), busy_tokens=5, max_queue_ms=2400)
    assert (client.begun_s, client.status) == (1, 200)
    *_, event, rest = client.body.split(b"\n\n")
    message = "no slot was free within 2400 ms"
    assert error_of(event) == {"code": 503, "message": message, "type": "unavailable_error"}
    assert rest == b""
    assert client.has_end
    assert DONE not in client.body


def test_a_deadline_in_mid_stream():
    client = answered(Storyteller(TEXT, duration_ns=S), deadline_ms=3500)
    assert client.body.count(b'"text"') == 2
    assert error_of(client.body.split(b"\n\n")[-2])["type"] == "unavailable_error"
    assert DONE not in client.body


def test_a_failure_of_the_engine_in_mid_stream():
    client = answered(Storyteller(TEXT, fails="decode"))
    event = error_of(client.body.split(b"\n\n")[-2])
    assert (event["type"], event["code"]) == ("server_error", 500)
    assert DONE not in client.body


def test_a_lost_engine_ends_every_stream():
    async def main() -> Client:
        server, client = Server(Storyteller(TEXT, duration_ns=S)), Client()
        answer = server.post(client)
        await server.schedule.until(2500 * MS)
        server.schedule.post(EngineLost(at_ns=server.schedule.now_ns(), reason="unplugged"))
        await answer
        return client

    client = run_virtually(main())
    assert error_of(client.body.split(b"\n\n")[-2])["type"] == "unavailable_error"


# --- clients that leave, and clients that do not read ---------------------------------------------


@pytest.mark.parametrize("busy_tokens", [0, 20], ids=["while generating", "while waiting"])
@pytest.mark.parametrize("leaves_s", [0.5, 4.5])
def test_a_client_that_leaves_frees_its_slot_within_a_round(busy_tokens, leaves_s):
    engine = Storyteller(TEXT, ends=False, duration_ns=S)

    async def main() -> tuple[Server, Client, int]:
        server, client = Server(engine), Client()
        others = server.occupy(busy_tokens) if busy_tokens else None
        answer = server.post(client)
        await server.schedule.until(round(leaves_s * S))
        client.left.set()
        await answer
        sent = len(client.messages)
        if others is not None:
            others.close()
        await server.schedule.until(round(leaves_s * S) + S)
        idle = not any(server.stepper.state.slots) and not server.stepper.state.queue
        assert idle
        await server.end()
        return server, client, sent

    server, client, sent = run_virtually(main())
    assert server.count(RequestCancelled) == (3 if busy_tokens else 1)
    assert len(client.messages) == sent, "nothing is sent to who has left"
    assert DONE not in client.body


def test_a_cancelled_task_cancels_its_request():
    """As when a server ends a connection of its own accord."""

    async def main() -> Server:
        server, client = Server(Storyteller(TEXT, ends=False)), Client()
        answer = server.post(client)
        await server.schedule.until(20 * MS)
        answer.cancel()
        await asyncio.wait([answer])
        await server.end()
        return server

    assert run_virtually(main()).count(RequestCancelled) == 1


@pytest.mark.parametrize("after", [1, 3])
def test_a_connection_that_breaks_while_writing_cancels_its_request(after):
    """As servers tell that raise an OSError from `send`, which ASGI allows."""

    class Breaking(Client):
        async def send(self, message: Any) -> None:
            if len(self.messages) == after:
                raise BrokenPipeError
            await super().send(message)

    async def main() -> Server:
        server = Server(Storyteller(TEXT, ends=False))
        await server.post(Breaking())
        await server.end()
        return server

    assert run_virtually(main()).count(RequestCancelled) == 1


def test_a_cancelled_answer_does_not_wait_for_a_stuck_connection():
    """The comment is being written when the server gives the connection up."""

    async def main() -> int:
        server, client = Server(Storyteller(TEXT, duration_ns=10 * S)), Client()
        answer = server.post(client, sse_ping_interval=2)
        await server.schedule.until(S)
        client.reads.clear()
        await server.schedule.until(5 * S)
        answer.cancel()
        await asyncio.wait([answer])
        ended_s = round(client.loop.time())
        await server.end()
        return ended_s

    assert run_virtually(main()) == 5


def test_a_fault_of_ours_is_told_in_the_stream():
    class Broken(Storyteller):
        def run(self, launch):
            outcome = super().run(launch)
            return replace(outcome, tokens=((10**6,),)) if launch.kind == "decode" else outcome

    client = answered(Broken(TEXT))
    error = error_of(client.body.split(b"\n\n")[-2])
    assert (error["type"], error["code"]) == ("server_error", 500)
    assert client.has_end


def test_who_does_not_read_waits_alone():
    """Its outbox fills to the mark and it is parked; when it reads on, nothing is missing."""

    async def main() -> tuple[Server, Client, Client]:
        server = Server(Storyteller(TEXT, ends=False), outbox_mark=8)
        slow, other = Client(), Client()
        first = server.post(slow, max_tokens=100)
        second = server.post(other, max_tokens=100)
        await server.schedule.until(5 * MS)
        slow.reads.clear()
        await second
        stalled = server.count(ClientStalled)
        assert stalled == 1
        produced = max(s.produced for s in server.stepper.state.slots if s is not None)
        assert produced < 20, "the engine does not run ahead of who reads"
        slow.reads.set()
        await first
        await server.end()
        return server, slow, other

    server, slow, other = run_virtually(main())
    assert server.count(ClientResumed) >= 1
    texts = [
        "".join(
            choice["text"]
            for line in client.body.split(b"\n\n")
            if line.startswith(b"data: {")
            for choice in json.loads(line[6:])["choices"]
        )
        for client in (slow, other)
    ]
    assert texts[0] == texts[1]
    assert len(TOKENIZER.encode(texts[0])) == 100


def test_what_was_delivered_after_a_stop_string_is_dropped_once_and_for_all():
    """The client reads late, when more than the stop string lies in its outbox."""

    async def main() -> tuple[Server, Client]:
        server, client = Server(Storyteller("abcdefgh", ends=False)), Client()
        client.reads.clear()
        answer = server.post(client, stop="cd", max_tokens=50)
        await server.schedule.until(20 * MS)
        client.reads.set()
        await answer
        await server.end()
        return server, client

    server, client = run_virtually(main())
    parts = [json.loads(line[6:]) for line in client.body.split(b"\n\n")[:-2]]
    assert "".join(part["choices"][0]["text"] for part in parts) == "ab"
    assert server.count(StopMatched) == 1


def test_progress_begins_at_the_beginning_however_late_it_is_read():
    async def main() -> Client:
        server, client = Server(Storyteller(TEXT)), Client()
        client.reads.clear()
        answer = server.post(client, return_progress=True)
        await server.schedule.until(50 * MS)
        client.reads.set()
        await answer
        await server.end()
        return client

    body = run_virtually(main()).body.split(b"\n\n")
    told = [json.loads(line[6:]).get("prompt_progress") for line in body[:-2]]
    assert [progress["processed"] for progress in told if progress] == [0, 3]


def test_who_never_reads_is_ended():
    async def main() -> tuple[Client, Server]:
        server = Server(Storyteller(TEXT, ends=False), outbox_mark=8, client_stall_ns=S)
        client = Client()
        answer = server.post(client)
        await server.schedule.until(5 * MS)
        client.reads.clear()
        await server.schedule.until(3 * S)
        assert not any(server.stepper.state.slots), "the slot is free though nobody reads"
        client.reads.set()
        await answer
        await server.end()
        return client, server

    client, _ = run_virtually(main())
    error = error_of(client.body.split(b"\n\n")[-2])
    assert error["message"].startswith("nobody read the answer for 1 s")
