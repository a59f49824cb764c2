"""What clients of a benchmark ask for: a workload's requests, with prompts of real tokens.

Prompts are drawn from a list of words that the server itself turns into tokens, so they are text of
its vocabulary, and no two of them begin alike.  They are sent as tokens: whoever is compared has to
serve the same model.
"""

import heapq
from collections.abc import Callable, Iterator
from random import Random

from msgspec import Struct

from phaseloop.sim.arrivals import Arrival, arrivals_of, numbered
from phaseloop.sim.workload import Stream, Workload

from .errors import UserError

TEXT = (
    "river stone garden window paper morning winter letter market engine silver table music "
    "forest island bridge summer doctor camera planet pepper copper mirror number answer basket "
    "shadow valley orange pencil harbor travel simple gentle narrow bright distant hollow ancient "
    "carry follow listen wonder gather build measure explain remember forget begin finish"
)
WORDS = tuple(TEXT.split())
ASKS_MAX = 10_000
NOT_OVER_HTTP: dict[str, Callable[[Stream], bool]] = {
    "kind": lambda stream: stream.kind != "completion",
    "choices": lambda stream: stream.choices != 1,
    "priority": lambda stream: stream.priority != 0,
    "adapter": lambda stream: stream.adapter != 0,
    "deadline_s": lambda stream: stream.deadline_ns is not None,
    "queue_s_max": lambda stream: stream.queue_ns_max is not None,
    "stops_before_end": lambda stream: bool(stream.stops_before_end),
    "prefix": lambda stream: stream.prefix is not None,
    "stall": lambda stream: stream.stall is not None,
}


class Ask(Struct, frozen=True):
    """One request, as its client will send it."""

    number: int
    stream: str  # of the workload
    at_ns: int  # from the start of the run
    prompt_length: int
    tokens: int  # of the answer: each server is made to give exactly so many
    leaves_after_ns: int | None
    leaves_after_tokens: int | None


def asks_of(workload: Workload, seed: int) -> list[Ask]:
    """Raises UserError for what cannot be asked of every server, and names the key."""
    for stream in workload.streams:
        for key, is_used in NOT_OVER_HTTP.items():
            if is_used(stream):
                raise UserError(
                    f"workload {workload.name}, {stream.name}: {key} is for phaseloop simulate; "
                    "servers are compared on prompts, outputs, arrivals and cancels alone"
                )
    asks: list[Ask] = []
    for arrival, name in zip(arrivals_of(workload, seed), origins(workload, seed), strict=False):
        if len(asks) == ASKS_MAX:
            raise UserError(
                f"workload {workload.name}: more than {ASKS_MAX:,} requests; set [run] count"
            )
        asks.append(ask_of(workload, arrival, name))
    if not asks:
        raise UserError(f"workload {workload.name}: nobody arrives")
    return asks


def origins(workload: Workload, seed: int) -> Iterator[str]:
    """The name of each request's stream, in the order of arrival."""
    merged = heapq.merge(
        *(numbered(one, index, seed) for index, one in enumerate(workload.streams))
    )
    return (workload.streams[index].name for _, index, _ in merged)


def ask_of(workload: Workload, arrival: Arrival, name: str) -> Ask:
    request = arrival.request
    bounds = [bound for bound in (request.output_limit, arrival.outputs[0]) if bound is not None]
    if not bounds:
        raise UserError(
            f"workload {workload.name}, {name}: its answer never ends; give it output or limit"
        )
    return Ask(
        number=request.request_id,
        stream=name,
        at_ns=arrival.at_ns,
        prompt_length=request.prompt_length,
        tokens=max(1, min(bounds)),
        leaves_after_ns=arrival.cancel_after_ns,
        leaves_after_tokens=arrival.cancel_after_tokens,
    )


def words_for(ask: Ask, seed: int) -> str:
    """Text of at least as many tokens as the prompt is to have: a word is one or more."""
    random = Random(f"{seed} {ask.number}")
    return " ".join(random.choices(WORDS, k=ask.prompt_length + 1))
