"""A workload's requests, one after the other in the order of their arrival.

Every property of a request is drawn from (seed, stream, its number in the stream, which property):
so it does not depend on other streams, on the policy, or on what else is drawn.
"""

import heapq
import math
from collections.abc import Iterator
from itertools import count, islice, takewhile
from typing import Protocol

from msgspec import Struct

from phaseloop.core.vocabulary import Request
from phaseloop.engine.sim import Prefix
from phaseloop.engine.sim_draws import uniform
from phaseloop.engine.sim_fields import NS

from .distributions import Distribution, pick
from .workload import Arrivals, AtTimes, Bursts, Pattern, Poisson, Ramp, Stream, Workload

WORKLOAD_KEY = 4
# What a draw is for, a part of its key.
ARRIVAL, PROMPT, LIMIT, FAMILY, CANCELS, CANCEL_AT, STALLS, STALL_AT, STALL_FOR, OUTPUT = range(10)


class Chance(Protocol):
    """A uniform number in [0, 1) for what it is for, and which of several."""

    def __call__(self, purpose: int, *which: int) -> float: ...


class Arrival(Struct, frozen=True):
    """A request, what the engine knows about it, and what its client will do."""

    at_ns: int
    request: Request
    outputs: tuple[int | None, ...]  # per choice, tokens until the text ends by itself
    prefix: Prefix | None = None
    cancel_after_ns: int | None = None
    cancel_after_tokens: int | None = None
    stall_after_tokens: int | None = None
    stall_ns: int = 0


def arrivals_of(workload: Workload, seed: int) -> Iterator[Arrival]:
    """Request ids count from 0 in this order.  `seed` replaces the workload's own."""
    bases = family_bases(workload.streams)
    merged = heapq.merge(
        *(numbered(stream, index, seed) for index, stream in enumerate(workload.streams))
    )
    horizon_ns = workload.horizon_ns
    if horizon_ns is not None:
        merged = takewhile(lambda one: one[0] < horizon_ns, merged)
    for request_id, (at_ns, index, number) in enumerate(islice(merged, workload.count)):
        yield drawn(
            workload.streams[index],
            request_id,
            at_ns,
            number,
            chance_of(seed, index, number),
            bases,
        )


def numbered(stream: Stream, index: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """(arrival, stream, number in the stream) of each of its requests."""
    times = times_of(stream.arrivals, chance_of(seed, index))
    for number, at_ns in enumerate(islice(times, stream.arrivals.count)):
        yield at_ns, index, number


def chance_of(seed: int, stream: int, *number: int) -> Chance:
    """The draws of a stream's arrivals, or of one request of it."""

    def chance(purpose: int, *which: int) -> float:
        return uniform(WORKLOAD_KEY, seed, stream, purpose, *number, *which)

    return chance


def family_bases(streams: tuple[Stream, ...]) -> dict[str, int]:
    """The first family's number under each name, so that no two names share a family."""
    sizes: dict[str, int] = {}
    for stream in streams:
        if stream.prefix is not None:
            name = stream.prefix.name
            sizes[name] = max(sizes.get(name, 0), stream.prefix.families)
    bases: dict[str, int] = {}
    total = 0
    for name, size in sizes.items():
        bases[name] = total
        total += size
    return bases


# --- when -----------------------------------------------------------------------------------------


def times_of(arrivals: Arrivals, chance: Chance) -> Iterator[int]:
    """Nanoseconds, ascending."""
    times = pattern_times(arrivals.pattern, chance)
    if arrivals.from_ns:
        times = (arrivals.from_ns + at_ns for at_ns in times)
    until_ns = arrivals.until_ns
    return times if until_ns is None else takewhile(lambda at_ns: at_ns < until_ns, times)


def pattern_times(pattern: Pattern, chance: Chance) -> Iterator[int]:
    match pattern:
        case AtTimes():
            yield from pattern.at_ns
        case Poisson():
            for events in unit_times(chance):
                yield round(events / pattern.per_s * NS)
        case Ramp():
            for events in unit_times(chance):
                seconds = ramp_time(pattern, events)
                if seconds is None:
                    return
                yield round(seconds * NS)
        case Bursts():
            for burst in count():
                start_ns = burst * pattern.every_ns
                offsets = (
                    chance(ARRIVAL, burst, one) * pattern.spread_ns for one in range(pattern.size)
                )
                yield from (start_ns + int(offset) for offset in sorted(offsets))


def unit_times(chance: Chance) -> Iterator[float]:
    """The times of a Poisson process of rate 1."""
    at = 0.0
    for number in count():
        at -= math.log(1.0 - chance(ARRIVAL, number))
        yield at


def ramp_time(ramp: Ramp, events: float) -> float | None:
    """When so many arrivals are expected; None if never.

    The expected number grows as first*t + (last - first) * t^2 / (2 * over), and then evenly.
    """
    first, last, over = ramp.first_per_s, ramp.last_per_s, ramp.over_ns / NS
    on_ramp = (first + last) / 2 * over
    if events >= on_ramp:
        return over + (events - on_ramp) / last if last else None
    slope = (last - first) / over
    return 2 * events / (first + math.sqrt(max(0.0, first * first + 2 * slope * events)))


# --- what -----------------------------------------------------------------------------------------


def drawn(
    stream: Stream,
    request_id: int,
    at_ns: int,
    number: int,
    chance: Chance,
    bases: dict[str, int],
) -> Arrival:
    def draw(distribution: Distribution | None, *key: int) -> int | None:
        if distribution is None:
            return None
        return pick(distribution, number, chance(*key))

    prompt_length = pick(stream.prompt, number, chance(PROMPT))
    request = Request(
        request_id,
        prompt_length,
        kind=stream.kind,
        output_limit=draw(stream.limit, LIMIT),
        choices=stream.choices,
        priority=stream.priority,
        adapter=stream.adapter,
        deadline_after_ns=stream.deadline_ns,
        queue_wait_ns_max=stream.queue_ns_max,
        stop_points=tuple(
            prompt_length - before for before in stream.stops_before_end if before < prompt_length
        ),
    )
    outputs = tuple(draw(stream.output, OUTPUT, choice) for choice in range(stream.choices))
    cancel = stream.cancel
    if cancel is not None and chance(CANCELS) >= cancel.fraction:
        cancel = None
    stall = stream.stall
    if stall is not None and chance(STALLS) >= stall.fraction:
        stall = None
    return Arrival(
        at_ns,
        request,
        outputs,
        prefix=prefix_of(stream, prompt_length, chance, bases),
        cancel_after_ns=draw(cancel and cancel.after_ns, CANCEL_AT),
        cancel_after_tokens=draw(cancel and cancel.after_tokens, CANCEL_AT),
        stall_after_tokens=draw(stall and stall.after_tokens, STALL_AT),
        stall_ns=draw(stall and stall.for_ns, STALL_FOR) or 0,
    )


def prefix_of(
    stream: Stream, prompt_length: int, chance: Chance, bases: dict[str, int]
) -> Prefix | None:
    prefix = stream.prefix
    if prefix is None:
        return None
    family = bases[prefix.name] + int(chance(FAMILY) * prefix.families)
    return Prefix(family, min(prefix.length, prompt_length))
