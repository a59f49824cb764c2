"""`phaseloop bench server`: what HTTP, the loop and the gateway cost when the engine costs nothing.

Without `--url` a server is started for the occasion on the sim engine, whose rounds take no time,
so that all time measured is phaseloop's own.  All streams begin together; a token counts when its
event arrived here.  The figures of a server that was given are its engine's as well.

    tokens/s   all tokens / from the first token of any stream to the last one of any
    gap        from one event of a stream to the next
    per round  the same time, less what the engine took, / decode rounds, which the server counts
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from phaseloop.sim.spread import Percentiles, Spread

from .child import ChildServer
from .client import Address, ClientError, Exchange
from .ending_async import run_async
from .errors import UserError

HELP = "streams through HTTP: tokens per second, gaps, and the cost of a round"
PRESET = "v100x4-qwen27b"
PROMPT = "phaseloop "
ROUNDS = "llamacpp:n_decode_total"
ENGINE_SECONDS = "llamacpp:tokens_predicted_seconds_total"
DONE = b"[DONE]"


class Sample(Struct, frozen=True):
    """One run: every stream got all its tokens."""

    tokens: int
    span_s: float
    first_s: float  # from the first request sent to the first token
    gap_s: Percentiles
    round_s: float | None  # None where the server does not count its rounds
    client_share: float  # of one core, that the measuring itself took

    @property
    def rate(self) -> float:
        return self.tokens / self.span_s


class Read(Struct, frozen=True):
    """What came of one stream: when each event with tokens came, and how many tokens in all."""

    times_ns: list[int]
    tokens: int


class Target(Struct, frozen=True):
    address: Address
    api_key: str | None
    streams: int
    tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server; by default one is started")
    parser.add_argument("--api-key", metavar="KEY", help="for --url")
    for name, default, what in (
        ("streams", 64, "that generate at once"),
        ("tokens", 256, "per stream"),
        ("repeats", 5, "of which the median is shown"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")


def run(args: argparse.Namespace) -> int:
    for name in ("streams", "tokens", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: at least 1 is needed")
    try:
        samples = run_async(measure(args))
    except ClientError as error:
        raise UserError(str(error)) from None
    show(samples, args)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(samples)) + b"\n")
    return 0


async def measure(args: argparse.Namespace) -> list[Sample]:
    if args.url is not None:
        address = Address.parse(args.url)
        return await repeat(Target(address, args.api_key, args.streams, args.tokens), args.repeats)
    own = ("--sim", PRESET, "--sim-speed", "0", "--parallel", str(args.streams), "--metrics")
    async with ChildServer(own) as server:
        target = Target(server.address, None, args.streams, args.tokens)
        return await repeat(target, args.repeats)


async def repeat(target: Target, repeats: int) -> list[Sample]:
    await sample(target)  # caches, code paths and connections are warm from here on
    return [await sample(target) for _ in range(repeats)]


async def sample(target: Target) -> Sample:
    rounds_before, engine_before = await counters(target)
    start_ns, cpu_start_ns = time.monotonic_ns(), time.process_time_ns()
    reads = await asyncio.gather(*(read(target, number) for number in range(target.streams)))
    cpu_ns, wall_ns = time.process_time_ns() - cpu_start_ns, time.monotonic_ns() - start_ns
    rounds_after, engine_after = await counters(target)
    first_ns = min(one.times_ns[0] for one in reads)
    span_ns = max(one.times_ns[-1] for one in reads) - first_ns
    gaps = Spread()
    for one in reads:
        for earlier, later in zip(one.times_ns, one.times_ns[1:], strict=False):
            gaps.add(later - earlier)
    rounds, engine_s = rounds_after - rounds_before, engine_after - engine_before
    return Sample(
        tokens=sum(one.tokens for one in reads),
        span_s=span_ns / 1e9,
        first_s=(first_ns - start_ns) / 1e9,
        gap_s=gaps.percentiles(),
        round_s=(span_ns / 1e9 - engine_s) / rounds if rounds else None,
        client_share=cpu_ns / wall_ns,
    )


async def read(target: Target, number: int) -> Read:
    """One stream to its end.  Raises ClientError if a token is missing: the sample is void."""
    body = {
        "prompt": f"{number} {PROMPT * 8}",
        "max_tokens": target.tokens,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
        "stream_options": {"include_usage": True},
    }
    times_ns: list[int] = []
    tokens = 0
    route, key = "/v1/completions", target.api_key
    async with Exchange(target.address, "POST", route, body, api_key=key) as answer:
        if answer.status != 200:
            text = (await answer.body()).decode(errors="replace")
            raise ClientError(f"the server answered {answer.status}: {text[:300]}")
        async for event in answer.events():
            if event.data == DONE:
                break
            times_ns.append(event.at_ns)
            if b'"usage":{' in event.data:
                tokens = msgspec.json.decode(event.data)["usage"]["completion_tokens"]
    if tokens != target.tokens:
        raise ClientError(f"a stream ended after {tokens} of {target.tokens} tokens")
    return Read(times_ns, tokens)


async def counters(target: Target) -> tuple[int, float]:
    """Decode rounds and the seconds the engine spent generating; zeros where /metrics is off."""
    async with Exchange(target.address, "GET", "/metrics", api_key=target.api_key) as answer:
        text = (await answer.body()).decode(errors="replace")
        if answer.status != 200:
            return 0, 0.0
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    return int(float(values.get(ROUNDS, 0))), float(values.get(ENGINE_SECONDS, 0))


def show(samples: Sequence[Sample], args: argparse.Namespace) -> None:
    one = sorted(samples, key=lambda sample: sample.rate)[len(samples) // 2]
    title = f"{args.streams} streams of {args.tokens} tokens, median of {len(samples)} runs"
    table = Table(title=title, show_header=False, title_justify="left")
    rates = [sample.rate for sample in samples]
    table.add_row("tokens/s", f"{one.rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")
    table.add_row("first token after", f"{one.first_s * 1e3:.0f} ms")
    gap = one.gap_s
    table.add_row("gap, median / p99", f"{milli(gap.p50)} / {milli(gap.p99)} ms")
    if one.round_s is not None:
        table.add_row("per round beside the engine", f"{one.round_s * 1e3:.2f} ms")
    table.add_row("this client's CPU", f"{one.client_share:.0%} of one core")
    Console().print(table)


def milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
