"""The server's figures for Prometheus: llama-server's names first, then what only phaseloop has.

The first block is rendered by hand, since its names break the client library's rules (a counter
without `_total`).  Its rates are averages over the time since the last scrape, so two scrapers see
each other; whoever wants rates of his own takes them of the counters.
"""

from collections.abc import Iterable
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from phaseloop.core.state import Phase, Role, State
from phaseloop.runtime.service import Service
from phaseloop.runtime.tally import Tally
from phaseloop.runtime.watch import Counters

from .errors import not_supported
from .histograms import Durations, tallied
from .served import options_of, served_of, serving_of
from .table import get

NS = 1e9
TEXT_FORMAT = "text/plain; version=0.0.4"
PHASES: tuple[Phase, ...] = get_args(Phase)
ROLES: tuple[Role, ...] = get_args(Role)


async def metrics(request: Request) -> Response:
    if not options_of(request).metrics:
        problem = "This server does not support metrics endpoint. Start it with `--metrics`"
        raise not_supported(problem)
    serving, service = serving_of(request), served_of(request).service
    counters, before = service.watch.counters, serving.scraped
    serving.scraped = replace(counters)
    text = llamacpp(service.state, counters, before) + accepted_by_place(counters)
    text += phaseloop(service, serving.durations)
    headers = {"Process-Start-Time-Unix": str(serving.started), "Content-Type": TEXT_FORMAT}
    return Response(text, headers=headers)


# --- llama-server's block -------------------------------------------------------------------------


class Item(Struct, frozen=True):
    name: str
    help: str
    value: float


def llamacpp(state: State, counters: Counters, before: Counters) -> str:
    """`before`: the counters at the last scrape."""
    kinds = (("counter", totals(counters)), ("gauge", gauges(state, counters, before)))
    lines = [
        f"# HELP llamacpp:{item.name} {item.help}\n"
        f"# TYPE llamacpp:{item.name} {kind}\n"
        f"llamacpp:{item.name} {item.value:.12g}\n"
        for kind, items in kinds
        for item in items
    ]
    return "".join(lines)


def totals(counters: Counters) -> tuple[Item, ...]:
    return (
        Item("prompt_tokens_total", "Prompt tokens computed.", counters.prompt_tokens),
        Item(
            "prompt_tokens_cached_total",
            "Prompt tokens found in a cache instead.",
            counters.prompt_tokens_cached,
        ),
        Item("prompt_seconds_total", "Time of prompt rounds.", counters.prefill_ns / NS),
        Item("tokens_predicted_total", "Tokens generated.", counters.generated_tokens),
        Item(
            "tokens_predicted_seconds_total",
            "Time of rounds that generated.",
            counters.decode_ns / NS,
        ),
        Item("n_decode_total", "Rounds of prompt and decode rows.", computed_rounds(counters)),
        Item("n_tokens_max", "Longest sequence so far, in tokens.", counters.tokens_max),
        Item("spec_decode_num_draft_tokens_total", "Tokens drafted.", counters.drafted_tokens),
        Item(
            "spec_decode_num_accepted_tokens_total",
            "Drafted tokens that were right.",
            counters.accepted_tokens,
        ),
        Item("spec_decode_num_drafts_total", "Drafts verified.", counters.drafts),
    )


def gauges(state: State, counters: Counters, before: Counters) -> tuple[Item, ...]:
    prompt_tokens = counters.prompt_tokens - before.prompt_tokens
    prompt_ns = counters.prefill_ns - before.prefill_ns
    steps = decode_steps(counters) - decode_steps(before)
    decode_ns = counters.decode_ns - before.decode_ns
    busy = counters.decode_lanes / max(1, counters.decode_rounds)
    return (
        Item("prompt_tokens_seconds", "Prompt tokens per second.", rate(prompt_tokens, prompt_ns)),
        Item("predicted_tokens_seconds", "Tokens generated per second.", rate(steps, decode_ns)),
        Item("requests_processing", "Slots taken.", slots_taken(state)),
        Item("requests_deferred", "Requests that wait for a slot.", len(state.queue)),
        Item("n_busy_slots_per_decode", "Sequences in a decode round, on average.", busy),
    )


def accepted_by_place(counters: Counters) -> str:
    """The one that has a label; absent until a draft was right, as llama-server has it."""
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    if not counters.accepted_by_place:
        return ""
    lines = [f"# HELP {name} Drafted tokens that were right, by their place in the draft.\n"]
    lines.append(f"# TYPE {name} counter\n")
    for place, count in sorted(counters.accepted_by_place.items()):
        lines.append(f'{name}{{position="{place}"}} {count}\n')
    return "".join(lines)


def computed_rounds(counters: Counters) -> int:
    """A mixed round is both a prefill and a decode round, but one round of the engine."""
    return counters.prefill_rounds + counters.decode_rounds - counters.mixed_rounds


def decode_steps(counters: Counters) -> int:
    """Tokens without each answer's first, which costs no step: it is drawn from the prompt's."""
    return counters.decode_lanes + counters.accepted_tokens


def rate(count: int, duration_ns: int) -> float:
    return count * NS / duration_ns if duration_ns > 0 else 0.0


def slots_taken(state: State) -> int:
    return len(state.slots) - state.slots.count(None)


# --- phaseloop's own block ------------------------------------------------------------------------


def phaseloop(service: Service, durations: Durations) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service, durations))
    return generate_latest(registry).decode()


class ServiceCollector(Collector):
    """Reads the scheduler's state and counters at the moment of the scrape."""

    def __init__(self, service: Service, durations: Durations) -> None:
        self._state = service.state
        self._counters = service.watch.counters
        self._tally = service.watch.tally
        self._durations = durations

    def collect(self) -> Iterable[Metric]:
        state, counters = self._state, self._counters
        yield labelled(
            "phase",
            "1 for what the engine does now.",
            "phase",
            {phase: int(state.phase == phase) for phase in PHASES},
        )
        yield gauge("cohort", "Number of the present cohort.", state.cohort)
        yield gauge("sealed", "1 while later arrivals stay out of the cohort.", int(state.sealed))
        yield labelled("slots", "Slots by role.", "role", roles(state))
        yield gauge("queue_length", "Requests that wait for a slot.", len(state.queue))
        yield gauge("saved_sequences", "Sequences in host RAM.", len(state.saved))
        used = pages(state)
        yield labelled("kv_pages", "KV pages by use.", "use", used)
        share = used["reserved"] / state.limits.page_count
        yield gauge("kv_usage_ratio", "Reserved KV pages as a share of all, 0 to 1.", share)
        yield counted("phase_changes", "Changes of phase.", counters.phase_changes)
        yield counted("mixed_rounds", "Rounds with prompt and decode rows.", counters.mixed_rounds)
        yield by_label("rounds", "Rounds by kind.", "kind", rounds(counters))
        ends = {str(reason): count for reason, count in sorted(counters.ends.items())}
        yield by_label("requests", "Requests by how they ended.", "reason", ends)
        yield from spent(self._tally)
        yield from self._durations.families()
        yield from tallied(self._tally)


def spent(tally: Tally) -> Iterable[Metric]:
    yield counted("exclusion_violations", "Rounds of another phase's class.", tally.violations)
    yield by_label("seals", "Cohorts closed, by why.", "reason", {**tally.seals})
    for name, text, duration_ns in (
        ("decode_lane_seconds", "Sequences times the rounds they had.", tally.decode_lane_ns),
        ("decode_slot_seconds", "Slots times those rounds.", tally.decode_slot_ns),
        ("decode_lost_seconds", "What is between the two.", tally.lost_slot_ns),
    ):
        yield counted(name, text, duration_ns / NS)


def roles(state: State) -> dict[str, int]:
    named = ["empty" if s is None else s.role for s in state.slots]
    return {role: named.count(role) for role in ("empty", *ROLES)}


def pages(state: State) -> dict[str, int]:
    cached = sum(cache.pages for cache in state.caches)
    reserved = state.limits.page_count - state.pages_free - cached
    return {"free": state.pages_free, "cached": cached, "reserved": reserved}


def rounds(counters: Counters) -> dict[str, int]:
    mixed = counters.mixed_rounds
    return {
        "prefill": counters.prefill_rounds - mixed,
        "decode": counters.decode_rounds - mixed,
        "mixed": mixed,
    }


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"phaseloop:{name}", text, value=value)


def counted(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"phaseloop:{name}", text, value=value)


def labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"phaseloop:{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def by_label(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"phaseloop:{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


ROWS = (get(metrics, "/metrics"),)
