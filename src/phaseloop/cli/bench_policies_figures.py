"""What a run was like for its clients, in numbers; and many runs, as medians.

    ttft       from the moment a request was to arrive to its first token
    gap        from one arrival of tokens to the next, per stream
    prefill    prompt tokens / time in which some request had no token yet
    decode     tokens but each stream's first / time in which some stream was between its first
               and its last
    tokens     all tokens / the run's length, which is also the makespan

All of them are seen from outside, so they mean the same for every server.  Queue and barrier wait
are what phaseloop tells with each answer.  A wait that was open when the run was cut counts with
its length so far.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct

from phaseloop.sim.spread import Percentiles, Spread

from .bench_policies_run import Read, Run

NS = 1_000_000_000
MS = 1_000_000
OCCUPANCY = ("phaseloop:decode_lane_seconds_total", "phaseloop:decode_slot_seconds_total")


class Group(Struct, frozen=True):
    """The requests of one stream of the workload."""

    requests: int
    ttft_s: Percentiles
    gap_s: Percentiles


class Sample(Struct, frozen=True):
    """One valid run."""

    makespan_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    tokens_per_s: float
    ttft_s: Percentiles
    gap_s: Percentiles
    queue_wait_s: Percentiles
    barrier_wait_s: Percentiles
    occupancy: float | None  # generating streams / slots, while the engine generated
    late_s: float
    groups: dict[str, Group]
    outputs: tuple[str, ...]  # a hash of each answer; empty for who was not answered to the end
    texts: tuple[str, ...]  # the same of the text, for servers that do not tell their tokens
    reads: tuple[Read, ...]


class Taken(Struct, frozen=True):
    """A run, or why there is none."""

    repeat: int
    target: str
    sample: Sample | None = None
    rejected: str | None = None


def sample_of(run: Run) -> Sample:
    reads, span_ns = run.reads, run.span_ns
    ends = [read.end_ns for read in reads if read.end_ns is not None]
    length_ns = max(ends) if len(ends) == len(reads) else span_ns
    names = dict.fromkeys(read.ask.stream for read in reads)
    return Sample(
        makespan_s=(length_ns - min(read.ask.at_ns for read in reads)) / NS,
        prefill_tokens_per_s=prefill_rate(reads),
        decode_tokens_per_s=decode_rate(reads),
        tokens_per_s=sum(read.tokens for read in reads) * NS / length_ns,
        ttft_s=first_tokens(reads, span_ns),
        gap_s=gaps(reads, span_ns),
        queue_wait_s=told(reads, "queue_ms"),
        barrier_wait_s=told(reads, "barrier_wait_ms"),
        occupancy=occupancy(run),
        late_s=run.late_ns / NS,
        groups={
            name: group_of([read for read in reads if read.ask.stream == name], span_ns)
            for name in names
        },
        outputs=tuple(hashed(read, msgspec.json.encode(read.ids)) for read in reads),
        texts=tuple(hashed(read, read.text.encode()) for read in reads),
        reads=reads,
    )


def group_of(reads: Sequence[Read], span_ns: int) -> Group:
    return Group(len(reads), first_tokens(reads, span_ns), gaps(reads, span_ns))


def first_tokens(reads: Iterable[Read], span_ns: int) -> Percentiles:
    spread = Spread()
    for read in reads:
        if read.times_ns:
            spread.add(read.times_ns[0] - read.ask.at_ns)
        elif read.end == "cut" and read.ask.at_ns < span_ns:
            spread.add(span_ns - read.ask.at_ns)
    return spread.percentiles()


def gaps(reads: Iterable[Read], span_ns: int) -> Percentiles:
    spread = Spread()
    for read in reads:
        for earlier, later in zip(read.times_ns, read.times_ns[1:], strict=False):
            spread.add(later - earlier)
        if read.end == "cut" and read.times_ns:
            spread.add(span_ns - read.times_ns[-1])
    return spread.percentiles()


def told(reads: Iterable[Read], name: str) -> Percentiles:
    spread = Spread()
    for read in reads:
        if read.waits_ms is not None and name in read.waits_ms:
            spread.add(round(read.waits_ms[name] * MS))
    return spread.percentiles()


def prefill_rate(reads: Iterable[Read]) -> float | None:
    done = [read for read in reads if read.times_ns]
    waiting_ns = union((read.ask.at_ns, read.times_ns[0]) for read in done)
    return sum(read.ask.prompt_length for read in done) * NS / waiting_ns if waiting_ns else None


def decode_rate(reads: Iterable[Read]) -> float | None:
    done = [read for read in reads if len(read.times_ns) > 1]
    running_ns = union((read.times_ns[0], read.times_ns[-1]) for read in done)
    tokens = sum(read.tokens - read.counts[0] for read in done)
    return tokens * NS / running_ns if running_ns else None


def union(spans: Iterable[tuple[int, int]]) -> int:
    """How long at least one of them lasted."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def occupancy(run: Run) -> float | None:
    lanes, slots = (run.counted.get(name, 0.0) for name in OCCUPANCY)
    return lanes / slots if slots else None


def hashed(read: Read, answer: bytes) -> str:
    return sha256(answer).hexdigest()[:16] if read.end == "answered" else ""


# --- many runs ------------------------------------------------------------------------------------

Figure = Callable[[Sample], float | None]


def median_of(samples: Sequence[Sample], figure: Figure) -> float | None:
    """Of those that have the figure."""
    values = [value for value in map(figure, samples) if value is not None]
    return statistics.median(values) if values else None


def range_of(samples: Sequence[Sample], figure: Figure) -> tuple[float, float] | None:
    values = [value for value in map(figure, samples) if value is not None]
    return (min(values), max(values)) if values else None


def same_answers(ours: Sample, theirs: Sample) -> tuple[int, int]:
    """How many answers are equal, of those that both gave to the end."""
    tells_tokens = any(read.ids for read in theirs.reads) and any(read.ids for read in ours.reads)
    pairs = zip(
        ours.outputs if tells_tokens else ours.texts,
        theirs.outputs if tells_tokens else theirs.texts,
        strict=True,
    )
    both = [(one, other) for one, other in pairs if one and other]
    return sum(one == other for one, other in both), len(both)
