"""One run: every request of a workload is sent when it arrives, whoever else is still waiting.

Arrivals do not wait for answers (an open loop), so a server that falls behind is not spared.  All
times are the client's own, by one clock, and count from the moment at which a request was to
arrive.  A stream without an end, or with another number of tokens than was asked for, makes the
whole run void.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from .bench_policies_target import Server, Target, counters, prepare, refusal
from .bench_policies_work import Ask
from .client import ClientError, Event, Exchange

Take: TypeAlias = "Callable[[Read, Event, int], bool]"
NS = 1_000_000_000
PROMPTS = ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")
ANSWERS = "llamacpp:tokens_predicted_total"
VIOLATIONS = "phaseloop:exclusion_violations_total"
DONE = b"[DONE]"


class Rejected(Exception):
    """A run that must not count, and why."""


class Read(Struct):
    """What one client saw.  Times are nanoseconds from the start of the run."""

    ask: Ask
    sent_ns: int = 0
    times_ns: list[int] = []  # of each event that brought tokens
    counts: list[int] = []  # how many tokens it brought
    ids: list[int] = []  # the tokens, where the server tells them
    text: str = ""
    end_ns: int | None = None
    end: str = "cut"  # "answered", "left", or "cut": the run was over before it was
    fault: str | None = None
    waits_ms: dict[str, float] | None = None  # phaseloop's own figures of the request

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class Run(Struct, frozen=True):
    """A valid one."""

    reads: tuple[Read, ...]
    span_ns: int
    late_ns: int  # by how much a request was sent too late at most: the client's own load
    counted: dict[str, float]  # what the server counted meanwhile


async def run_once(
    target: Target,
    asks: Sequence[Ask],
    prompts: Sequence[list[int]],
    cut_ns: int | None,
    limit_s: float,
) -> Run:
    """Raises Rejected, also where the server is gone."""
    try:
        await prepare(target)
        before = await counters(target.server)
        reads = [Read(ask) for ask in asks]
        start_ns = time.monotonic_ns()
        await ask_all(
            target.server, reads, prompts, start_ns, limit_s if cut_ns is None else cut_ns / NS
        )
        span_ns = time.monotonic_ns() - start_ns
        if cut_ns is not None or any(read.end == "left" for read in reads):
            await prepare(target)  # who was left is still being ended
        after = await counters(target.server)
    except ClientError as error:
        raise Rejected(str(error)) from None
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    check_reads(reads, is_cut=cut_ns is not None, limit_s=limit_s)
    check_counters(target, reads, counted)
    late_ns = max(read.sent_ns - read.ask.at_ns for read in reads if read.sent_ns)
    return Run(tuple(reads), span_ns, late_ns, counted)


async def ask_all(
    server: Server,
    reads: Sequence[Read],
    prompts: Sequence[list[int]],
    start_ns: int,
    within_s: float,
) -> None:
    tasks = [
        asyncio.create_task(ask_one(server, read, prompt, start_ns))
        for read, prompt in zip(reads, prompts, strict=True)
    ]
    try:
        await asyncio.wait(tasks, timeout=within_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_one(server: Server, read: Read, prompt: list[int], start_ns: int) -> None:
    ask = read.ask
    await asyncio.sleep((start_ns + ask.at_ns - time.monotonic_ns()) / NS)
    read.sent_ns = time.monotonic_ns() - start_ns
    left_s = None if ask.leaves_after_ns is None else ask.leaves_after_ns / NS
    try:
        async with asyncio.timeout(left_s):
            await follow(server, read, prompt, start_ns)
    except TimeoutError:
        read.end, read.end_ns = "left", time.monotonic_ns() - start_ns
    except ClientError as error:
        read.fault = str(error)


async def follow(server: Server, read: Read, prompt: list[int], start_ns: int) -> None:
    route, body, take = wire(server, read.ask, prompt)
    async with Exchange(server.address, "POST", route, body, api_key=server.api_key) as answer:
        if answer.status != 200:
            raise ClientError(refusal(answer.status, await answer.body()))
        async for event in answer.events():
            is_end = take(read, event, start_ns)
            if is_end:
                read.end, read.end_ns = "answered", event.at_ns - start_ns
                return
            leaves = read.ask.leaves_after_tokens
            if leaves is not None and read.tokens >= leaves:
                read.end, read.end_ns = "left", event.at_ns - start_ns
                return
    raise ClientError("the stream broke off without its last event")


# --- the two wires --------------------------------------------------------------------------------


def wire(server: Server, ask: Ask, prompt: list[int]) -> tuple[str, dict[str, Any], Take]:
    common = {
        "prompt": prompt,
        "stream": True,
        "temperature": 0,
        "seed": ask.number,
        "ignore_eos": True,
    }
    if server.protocol == "native":
        more = {"n_predict": ask.tokens, "cache_prompt": False, "return_tokens": True}
        return "/completion", common | more, take_native
    more = {
        "model": server.model,
        "max_tokens": ask.tokens,
        "stream_options": {"include_usage": True},
    }
    return "/v1/completions", common | more, take_openai


class NativeEvent(Struct):
    """What matters of an event of /completion."""

    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    phaseloop: dict[str, float | str | None] | None = None
    error: dict[str, object] | None = None


NATIVE = msgspec.json.Decoder(NativeEvent)


def take_native(read: Read, event: Event, start_ns: int) -> bool:
    """Whether it was the last one.  Raises ClientError."""
    try:
        told = NATIVE.decode(event.data)
    except msgspec.DecodeError as error:
        raise ClientError(f"an event is not llama-server's: {error}") from None
    if told.error is not None:
        raise ClientError(f"the stream ended with an error: {told.error.get('message')}")
    if told.tokens and not told.stop:
        note(read, event.at_ns - start_ns, len(told.tokens), told.content)
        read.ids += told.tokens
    if not told.stop:
        return False
    if told.tokens_evaluated != read.ask.prompt_length:
        raise ClientError(
            f"a prompt of {read.ask.prompt_length} tokens was counted as {told.tokens_evaluated}"
        )
    if told.tokens_predicted != read.tokens:
        raise ClientError(
            f"{told.tokens_predicted} tokens were counted and {read.tokens} were delivered"
        )
    if told.phaseloop is not None:
        spans = told.phaseloop.items()
        read.waits_ms = {name: value for name, value in spans if isinstance(value, float | int)}
    return True


def take_openai(read: Read, event: Event, start_ns: int) -> bool:
    """A chunk is taken for one token, as servers send them; the usage at the end is the judge."""
    if event.data == DONE:
        return True
    try:
        told = msgspec.json.decode(event.data)
        if "error" in told:
            raise ClientError(f"the stream ended with an error: {told['error']}")
        for choice in told["choices"]:
            if choice.get("text"):
                note(read, event.at_ns - start_ns, 1, choice["text"])
        if usage := told.get("usage"):
            rest = int(usage["completion_tokens"]) - read.tokens
            if read.counts and rest > 0:  # some of its chunks carried several
                read.counts[-1] += rest
            if int(usage["prompt_tokens"]) != read.ask.prompt_length:
                raise ClientError(
                    f"a prompt of {read.ask.prompt_length} tokens was counted as "
                    f"{usage['prompt_tokens']}"
                )
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ClientError(f"an event is not OpenAI's: {error!r}") from None
    return False


def note(read: Read, at_ns: int, count: int, text: str) -> None:
    read.times_ns.append(at_ns)
    read.counts.append(count)
    read.text += text


# --- what counts ----------------------------------------------------------------------------------


def check_reads(reads: Sequence[Read], *, is_cut: bool, limit_s: float) -> None:
    """Raises Rejected."""
    for read in reads:
        who = f"request {read.ask.number} ({read.ask.stream})"
        if read.fault is not None:
            raise Rejected(f"{who}: {read.fault}")
        if read.end == "cut" and not is_cut:
            raise Rejected(f"{who}: not answered within {limit_s:g} s")
        if read.end == "answered" and read.tokens != read.ask.tokens:
            raise Rejected(f"{who}: {read.tokens} of {read.ask.tokens} tokens came")


def check_counters(target: Target, reads: Sequence[Read], counted: Mapping[str, float]) -> None:
    """The server's totals are the clients'; where somebody left, it may have done more for him."""
    if counted.get(VIOLATIONS, 0) and target.is_exclusive:
        raise Rejected(f"{counted[VIOLATIONS]:g} rounds were not of their phase")
    if ANSWERS not in counted or any(read.end != "answered" for read in reads):
        return
    answers = sum(read.tokens for read in reads)
    if counted[ANSWERS] != answers:
        raise Rejected(f"the server counted {counted[ANSWERS]:g} tokens, the clients {answers}")
    prompts = sum(read.ask.prompt_length for read in reads)
    found = sum(counted.get(name, 0.0) for name in PROMPTS)
    if found != prompts:
        raise Rejected(f"the server counted {found:g} prompt tokens, the clients {prompts}")
