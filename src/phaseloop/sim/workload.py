"""A workload: who asks for what and when, as a TOML file says it.

    [run]
    seed = 0             # of everything that is drawn; the same file and seed are the same requests
    count = 1000         # no more than so many requests arrive
    horizon_s = 600      # nobody arrives at this time or later
    cut_s = 900          # the run is cut here, whatever is unfinished; by default it is not cut

    [[request]]          # one request; any number of these tables
    at_s = 0.0           # when it arrives
    prompt = 8192        # tokens; a distribution, see sim/distributions.py
    ...                  # any key of a stream except `arrivals`

    [[stream]]           # many requests of a kind; any number of these tables
    name = "chat"        # for messages
    arrivals = { kind = "poisson", per_s = 0.5 }
    prompt = 512
    output = 200         # tokens after which the text ends by itself; without it, it never does
    limit = 256          # the output limit the client states; without it, none
    kind = "completion"  # or "embedding", "rerank"
    choices = 1          # n; each choice draws its own output
    priority = 0         # higher is seated first
    adapter = 0          # which set of adapters
    deadline_s = 60      # from arrival to the last token
    queue_s_max = 10     # from arrival to a seat
    stops_before_end = [1028, 4]  # chunks of the prompt end so many tokens before its end
    prefix = { name = "system", length = 2048, families = 4 }  # begins as others of its family
    cancel = { fraction = 0.1, after_s = 5 }    # or after_tokens; the client goes away
    stall = { fraction = 0.1, after_tokens = 50, for_s = 5 }   # the client stops reading

Kinds of arrivals; `count`, and except for lists `from_s` and `until_s`, may stand beside each:

    { kind = "list", at_s = [0, 0, 1.5] }
    { kind = "poisson", per_s = 0.5 }
    { kind = "burst", every_s = 60, size = 8, spread_s = 1 }
    { kind = "ramp", per_s = [0.1, 2.0], over_s = 600 }    # then on at the second rate

`output`, `limit`, `prompt`, `after_s`, `after_tokens` and `for_s` are distributions.
"""

from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from phaseloop.core.vocabulary import Kind
from phaseloop.engine.sim_fields import NS, SECONDS_MAX, Table, nanoseconds, read_toml

from .distributions import Distribution, read_distribution

LENGTH_MAX = 1 << 28  # tokens
COUNT_MAX = 10**9
RATE_MIN, RATE_MAX = 1e-6, 1e6  # per second
CHOICES_MAX = 4096
SEED_MAX = (1 << 63) - 1
FAMILIES_MAX = 1 << 20


class AtTimes(Struct, frozen=True):
    at_ns: tuple[int, ...]  # ascending


class Poisson(Struct, frozen=True):
    per_s: float


class Bursts(Struct, frozen=True):
    """`size` requests within `spread_ns` of every multiple of `every_ns`."""

    every_ns: int
    size: int
    spread_ns: int


class Ramp(Struct, frozen=True):
    """Poisson, its rate rising or falling evenly, then staying."""

    first_per_s: float
    last_per_s: float
    over_ns: int


Pattern: TypeAlias = AtTimes | Poisson | Bursts | Ramp


class Arrivals(Struct, frozen=True):
    pattern: Pattern
    count: int | None = None
    from_ns: int = 0
    until_ns: int | None = None


class SharedPrefix(Struct, frozen=True):
    """Each request belongs to one of `families`, drawn evenly; a name is shared between streams."""

    name: str
    length: int
    families: int


class Leaving(Struct, frozen=True):
    """A share of the clients goes away, some time or some tokens after it came."""

    fraction: float
    after_ns: Distribution | None = None
    after_tokens: Distribution | None = None


class Stalling(Struct, frozen=True):
    fraction: float
    after_tokens: Distribution
    for_ns: Distribution


class Stream(Struct, frozen=True, kw_only=True):
    name: str
    arrivals: Arrivals
    prompt: Distribution
    output: Distribution | None = None
    limit: Distribution | None = None
    kind: Kind = "completion"
    choices: int = 1
    priority: int = 0
    adapter: int = 0
    deadline_ns: int | None = None
    queue_ns_max: int | None = None
    stops_before_end: tuple[int, ...] = ()  # descending
    prefix: SharedPrefix | None = None
    cancel: Leaving | None = None
    stall: Stalling | None = None


class Workload(Struct, frozen=True):
    name: str
    streams: tuple[Stream, ...]
    seed: int = 0
    count: int | None = None
    horizon_ns: int | None = None
    cut_ns: int | None = None


def read_workload(path: Path) -> Workload:
    """Raises SettingError, which names file, key, value and what is allowed."""
    root = read_toml(path)
    requests = [read_request(table) for table in root.tables("request")]
    streams = [read_stream(table, number) for number, table in enumerate(root.tables("stream"), 1)]
    run = root.table("run") if "run" in root else Table(path, "run", {})
    workload = Workload(
        path.stem,
        tuple(requests + streams),
        seed=run.integer("seed", 0, SEED_MAX, 0),
        count=run.integer("count", 1, COUNT_MAX) if "count" in run else None,
        horizon_ns=optional_seconds(run, "horizon_s"),
        cut_ns=optional_seconds(run, "cut_s"),
    )
    run.done()
    root.done()
    if not workload.streams:
        raise root.missing("request", "a workload has a [[request]] or a [[stream]]")
    for number, stream in enumerate(streams, 1):
        if not ends(workload, stream.arrivals):
            at = f"stream[{number}].arrivals"
            why = "nothing ends this stream; give count, until_s, run.count or run.horizon_s"
            raise root.missing(f"{at}.until_s", why)
    return workload


def ends(workload: Workload, arrivals: Arrivals) -> bool:
    bounds = (workload.count, workload.horizon_ns, arrivals.count, arrivals.until_ns)
    return isinstance(arrivals.pattern, AtTimes) or any(bound is not None for bound in bounds)


def read_request(table: Table) -> Stream:
    at_ns = table.seconds("at_s", 0, SECONDS_MAX, 0)
    stream = read_wishes(table, Arrivals(AtTimes((at_ns,))), table.text("name", table.at))
    table.done()
    return stream


def read_stream(table: Table, number: int) -> Stream:
    arrivals = read_arrivals(table.table("arrivals"))
    stream = read_wishes(table, arrivals, table.text("name", f"stream {number}"))
    table.done()
    return stream


def read_wishes(table: Table, arrivals: Arrivals, name: str) -> Stream:
    """What `[[request]]` and `[[stream]]` have in common."""
    kind = table.text("kind", "completion", among=("completion", "embedding", "rerank"))
    return Stream(
        name=name,
        arrivals=arrivals,
        prompt=read_distribution(table, "prompt", 1, LENGTH_MAX),
        output=optional_lengths(table, "output"),
        limit=optional_lengths(table, "limit"),
        kind=kind,  # pyright: ignore[reportArgumentType]
        choices=table.integer("choices", 1, CHOICES_MAX, 1),
        priority=table.integer("priority", -1_000_000, 1_000_000, 0),
        adapter=table.integer("adapter", 0, 1_000_000, 0),
        deadline_ns=optional_seconds(table, "deadline_s"),
        queue_ns_max=optional_seconds(table, "queue_s_max"),
        stops_before_end=read_stops(table),
        prefix=read_prefix(table.table("prefix"), name) if "prefix" in table else None,
        cancel=read_cancel(table.table("cancel")) if "cancel" in table else None,
        stall=read_stall(table.table("stall")) if "stall" in table else None,
    )


def read_arrivals(table: Table) -> Arrivals:
    kind = table.text("kind", among=("list", "poisson", "burst", "ramp"))
    pattern = PATTERNS[kind](table)
    count = table.integer("count", 1, COUNT_MAX) if "count" in table else None
    if isinstance(pattern, AtTimes):
        table.done()
        return Arrivals(pattern, count)
    from_ns = table.seconds("from_s", 0, SECONDS_MAX, 0)
    until_ns = optional_seconds(table, "until_s")
    if until_ns is not None and until_ns <= from_ns:
        must = f"must be later than from_s = {from_ns / NS:g}"
        raise table.error("until_s", table.value("until_s"), must)
    table.done()
    return Arrivals(pattern, count, from_ns, until_ns)


def read_times(table: Table) -> AtTimes:
    return AtTimes(tuple(sorted(map(nanoseconds, table.numbers("at_s", 0, SECONDS_MAX)))))


def read_poisson(table: Table) -> Poisson:
    return Poisson(table.number("per_s", RATE_MIN, RATE_MAX))


def read_bursts(table: Table) -> Bursts:
    every_ns = table.seconds("every_s", 1e-6, SECONDS_MAX)
    size = table.integer("size", 1, 1_000_000)
    return Bursts(every_ns, size, table.seconds("spread_s", 0, every_ns / NS, 0))


def read_ramp(table: Table) -> Ramp:
    rates = table.numbers("per_s", 0, RATE_MAX)
    if len(rates) != 2 or max(rates) < RATE_MIN:
        must = f"must be two rates, the first and the last, one of them at least {RATE_MIN:g}"
        raise table.error("per_s", rates, must)
    return Ramp(rates[0], rates[1], table.seconds("over_s", 1e-6, SECONDS_MAX))


PATTERNS = {"list": read_times, "poisson": read_poisson, "burst": read_bursts, "ramp": read_ramp}


def read_stops(table: Table) -> tuple[int, ...]:
    if "stops_before_end" not in table:
        return ()
    return tuple(sorted(table.integers("stops_before_end", 1, LENGTH_MAX), reverse=True))


def read_prefix(table: Table, name: str) -> SharedPrefix:
    prefix = SharedPrefix(
        table.text("name", name),
        table.integer("length", 1, LENGTH_MAX),
        table.integer("families", 1, FAMILIES_MAX, 1),
    )
    table.done()
    return prefix


def read_cancel(table: Table) -> Leaving:
    fraction = table.number("fraction", 0, 1, 1)
    given = [key for key in ("after_s", "after_tokens") if key in table]
    if not given:
        raise table.missing("after_s or after_tokens")
    if len(given) > 1:
        raise table.error("after_tokens", table.value("after_tokens"), "cannot stand with after_s")
    after_ns = after_tokens = None
    if "after_s" in table:
        after_ns = read_distribution(table, "after_s", 0, SECONDS_MAX, NS)
    else:
        after_tokens = read_distribution(table, "after_tokens", 1, LENGTH_MAX)
    table.done()
    return Leaving(fraction, after_ns, after_tokens)


def read_stall(table: Table) -> Stalling:
    stall = Stalling(
        table.number("fraction", 0, 1, 1),
        read_distribution(table, "after_tokens", 1, LENGTH_MAX),
        read_distribution(table, "for_s", 0, SECONDS_MAX, NS),
    )
    table.done()
    return stall


def optional_lengths(table: Table, key: str) -> Distribution | None:
    return read_distribution(table, key, 0, LENGTH_MAX) if key in table else None


def optional_seconds(table: Table, key: str) -> int | None:
    """Above 0, in nanoseconds."""
    return table.seconds(key, 1e-9, SECONDS_MAX) if key in table else None
