"""The commands of a transcript, and how answers are written.

arrive 0 prompt=8 out=2 [+ 1 ...]    one call with one or more requests
    n=2 prio=1 adapter=1 embedding rerank slot=1 shift=2 nocache stops=3,6 deadline=50ms
    wait=20ms cache=slot1/v2/6 cache=ram3/v0/6 shared=0:6   (repeat cache and shared at will)
seated [0 | 0/1] [cached=4] [restore=4]   answer one SeatRequest, or all of them
done [x 3] [in 5ms] [0=3] [0/1=end] [1=1+end] [2=fail]   the round in flight completes:
    per choice, tokens produced, an end token (bare or after some), or a failed lane
completed 7 [fail | short]   an answer for some round: it completes, fails, or lacks results
round-fails, engine-lost, cancel 0, stop 0 | stop 0/1, stall 0, resume 0, shutdown
policy NAME [tg=..] [pp=..] [seat=..] [linger=..] [order=shortest]
at 30ms, wait 5ms        time passes
deadline                 time passes until the core's next deadline, which is then reported
tick                     DeadlineReached now, due or not
state, why 0             show where everybody is, and why
"""

from collections.abc import Callable

from msgspec.structs import replace
from render import NOTHING, render, render_state, render_waiting
from run import ROUND_NS, Run

from phaseloop.core.explain import explain
from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import deadline_next
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    AnyEvent,
    Candidate,
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    EngineLost,
    Failed,
    Policy,
    PolicyChanged,
    Produced,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    Result,
    RoundCompleted,
    RoundFailed,
    Shared,
    ShutdownRequested,
    StopMatched,
)

Lines = list[str]
MS = 1_000_000
LIMITS = {
    "slots": "slot_count",
    "batch": "batch_tokens",
    "context": "context_length",
    "pages": "page_count",
    "page": "page_length",
    "drafts": "draft_tokens",
    "reserve": "output_reserve",
    "queue": "queue_length_max",
    "share": "share_length_min",
}
TIMES = {"round": "round_ns_max", "stall": "client_stall_ns", "grace": "shutdown_grace_ns"}
FLAGS = ("can_save", "save_idle", "shares_pages", "forks_anywhere", "whole_prompts")
QUANTA = {
    "tg": "decode_quantum_ns",
    "pp": "prefill_quantum_ns",
    "seat": "seat_quantum_ns",
    "linger": "linger_ns",
}
SMALL = Limits(2, 8, 64, 64, page_length=4, output_reserve=4, share_length_min=4)


class UsageError(Exception):
    """A line that is no transcript: what is wrong with it."""


def begin(line: str) -> Run:
    _, name, *words = line.split()
    limits = SMALL
    options: Lines = []
    for word in words:
        key, _, value = word.partition("=")
        if key in LIMITS:
            limits = replace(limits, **{LIMITS[key]: int(value)})
        elif key in TIMES:
            limits = replace(limits, **{TIMES[key]: time_ns(value)})
        elif word in FLAGS:
            limits = replace(limits, **{word: True})
        else:
            options.append(word)
    return Run(limits, policy(name, options))


def policy(name: str, options: Lines) -> Policy:
    if name not in PRESETS:
        raise UsageError(f"no policy is named {name}; there are {', '.join(PRESETS)}")
    changed = PRESETS[name]
    for option in options:
        key, _, value = option.partition("=")
        if key in QUANTA:
            changed = replace(changed, **{QUANTA[key]: time_ns(value)})
        elif key == "order" and value in ("fifo", "shortest"):
            changed = replace(changed, serial_order=value)
        else:
            raise UsageError(f"{option} is neither a limit nor an option of a policy")
    return changed


def time_ns(text: str) -> int:
    for unit, scale in (("ms", MS), ("us", 1000), ("ns", 1), ("s", 1000 * MS)):
        if text.endswith(unit) and text[: -len(unit)].isdigit():
            return int(text[: -len(unit)]) * scale
    raise UsageError(f"{text} is no time: write 30ms, 2s, 5us or 7ns")


def name_of(text: str) -> tuple[int, int]:
    """`3` is choice 0 of request 3, `3/1` its choice 1."""
    request_id, _, choice = text.partition("/")
    if not request_id.isdigit() or not (choice or "0").isdigit():
        raise UsageError(f"{text} names no request: write 3, or 3/1 for its choice 1")
    return int(request_id), int(choice or 0)


# --- commands -------------------------------------------------------------------------------------


def command(run: Run, line: str) -> Lines:
    """Perform one command; the lines that show what came of it."""
    word, *words = line.split()
    handler = COMMANDS.get(word)
    if handler is not None:
        return handler(run, words)
    if word in EVENTS:
        return posted(run, EVENTS[word](run.now_ns, words))
    raise UsageError(f"{word} is no command; there are {', '.join([*COMMANDS, *EVENTS])}")


def posted(run: Run, event: AnyEvent) -> Lines:
    return [render(effect) for effect in run.post(event)] or [NOTHING]


EVENTS: dict[str, Callable[[int, Lines], AnyEvent]] = {
    "cancel": lambda now, w: RequestCancelled(at_ns=now, request_id=int(w[0])),
    "stop": lambda now, w: StopMatched(
        at_ns=now, request_id=name_of(w[0])[0], choice=name_of(w[0])[1]
    ),
    "stall": lambda now, w: ClientStalled(at_ns=now, request_id=int(w[0])),
    "resume": lambda now, w: ClientResumed(at_ns=now, request_id=int(w[0])),
    "shutdown": lambda now, w: ShutdownRequested(at_ns=now),
    "engine-lost": lambda now, w: EngineLost(at_ns=now, reason="gone"),
    "policy": lambda now, w: PolicyChanged(at_ns=now, policy=policy(w[0], w[1:])),
    "tick": lambda now, w: DeadlineReached(at_ns=now),
}


def arrive(run: Run, words: Lines) -> Lines:
    calls: list[Lines] = [[]]
    for word in words:
        if word == "+":
            calls.append([])
        else:
            calls[-1].append(word)
    requests = tuple(request(one) for one in calls)
    return posted(run, RequestArrived(at_ns=run.now_ns, requests=requests))


def request(words: Lines) -> Request:
    made = Request(int(words[0]), 0)
    for word in words[1:]:
        key, _, value = word.partition("=")
        match key:
            case "embedding" | "rerank":
                made = replace(made, kind=key)
            case "nocache":
                made = replace(made, keep_cache=False)
            case "cache":
                made = replace(made, candidates=(*made.candidates, candidate(value)))
            case "shared":
                leader, length = value.split(":")
                made = replace(made, shared=(*made.shared, Shared(int(leader), int(length))))
            case "stops":
                made = replace(made, stop_points=tuple(int(at) for at in value.split(",")))
            case "deadline":
                made = replace(made, deadline_after_ns=time_ns(value))
            case "wait":
                made = replace(made, queue_wait_ns_max=time_ns(value))
            case _ if key in COUNTS:
                made = replace(made, **{COUNTS[key]: int(value)})
            case _:
                raise UsageError(f"{word} is no property of a request")
    return made


COUNTS = {
    "prompt": "prompt_length",
    "out": "output_limit",
    "n": "choices",
    "prio": "priority",
    "adapter": "adapter",
    "slot": "slot_hint",
    "shift": "shift_keep",
}


def candidate(text: str) -> Candidate:
    """`slot1/v2/6`: six tokens in slot 1 as of version 2; `ram3/v0/6`: in snapshot 3."""
    place, version, length = text.split("/")
    in_ram = place.startswith("ram")
    index = int(place.removeprefix("ram" if in_ram else "slot"))
    source = "snapshot" if in_ram else "slot"
    return Candidate(source, index, int(version.removeprefix("v")), int(length))


def seated(run: Run, words: Lines) -> Lines:
    options = dict(word.split("=") for word in words if "=" in word)
    names = [name_of(word) for word in words if "=" not in word]
    restore = "restore" in options
    cached = int(options.get("restore", options.get("cached", "0")))
    wanted = [s for s in run.seats if not names or (s.request_id, s.choice) in names]
    if names and not wanted:  # a late or unasked answer, which the core must not mind
        event = RequestSeated(
            at_ns=run.now_ns,
            request_id=names[0][0],
            choice=names[0][1],
            slot=int(options.get("slot", "0")),
            cached_length=cached,
            restore=restore,
        )
        return posted(run, event)
    lines: Lines = []
    for seat in wanted:
        lines += [render(e) for e in run.answer_seat(seat, cached, restore=restore)]
    return lines or [NOTHING]


def done(run: Run, words: Lines) -> Lines:
    """Complete the round in flight, several times over after `x`."""
    times, duration_ns = 1, ROUND_NS
    results: dict[tuple[int, int], Result] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "x":
            times = int(rest.pop(0))
        elif word == "in":
            duration_ns = time_ns(rest.pop(0))
        else:
            name, _, result = word.partition("=")
            results[name_of(name)] = result_of(result)
    lines: Lines = []
    for _ in range(times):
        lines += complete(run, results, duration_ns)
    return lines or [NOTHING]


def result_of(text: str) -> Result:
    if text == "fail":
        return Failed("scripted")
    if text == "end":
        return Produced(0, True)
    tokens, _, end = text.partition("+")
    if not tokens.isdigit() or end not in ("", "end"):
        raise UsageError(f"{text} is no result: write 2, end, 1+end or fail")
    return Produced(int(tokens), end == "end")


def complete(run: Run, results: dict[tuple[int, int], Result], duration_ns: int) -> Lines:
    flight = run.state.flight
    if flight is None:
        raise UsageError("no round is in flight")
    run.now_ns += duration_ns
    asked = {(lane.request_id, lane.choice) for lane in flight.lanes}
    if not set(results) <= asked:
        raise UsageError(f"the round in flight carries {sorted(asked)}")
    event = RoundCompleted(
        at_ns=run.now_ns,
        round_id=flight.round_id,
        results=tuple(
            results.get((lane.request_id, lane.choice), Produced(min(1, lane.outputs)))
            for lane in flight.lanes
        ),
        duration_ns=duration_ns,
    )
    return [render(effect) for effect in run.post(event)]


def completed(run: Run, words: Lines) -> Lines:
    round_id = int(words[0])
    if "fail" in words:
        return posted(run, RoundFailed(at_ns=run.now_ns, round_id=round_id, reason="scripted"))
    flight = None if "short" in words else run.state.flight
    results = tuple(Produced(lane.outputs) for lane in flight.lanes) if flight else ()
    event = RoundCompleted(
        at_ns=run.now_ns, round_id=round_id, results=results, duration_ns=ROUND_NS
    )
    return posted(run, event)


def round_fails(run: Run, words: Lines) -> Lines:
    flight = run.state.flight
    if flight is None:
        raise UsageError("no round is in flight")
    run.now_ns += ROUND_NS
    return posted(run, RoundFailed(at_ns=run.now_ns, round_id=flight.round_id, reason="scripted"))


def at(run: Run, words: Lines) -> Lines:
    if time_ns(words[0]) < run.now_ns:
        raise UsageError(f"it is {run.now_ns // MS}ms already")
    run.now_ns = time_ns(words[0])
    return []


def wait(run: Run, words: Lines) -> Lines:
    run.now_ns += time_ns(words[0])
    return []


def deadline(run: Run, words: Lines) -> Lines:
    due_ns = deadline_next(run.state)
    if due_ns is None:
        raise UsageError("the core waits for no deadline")
    run.now_ns = max(run.now_ns, due_ns)
    return posted(run, DeadlineReached(at_ns=run.now_ns))


def why(run: Run, words: Lines) -> Lines:
    told = explain(run.state, int(words[0]), run.now_ns)
    return [render_waiting(int(words[0]), one) for one in told] or ["gone"]


COMMANDS: dict[str, Callable[[Run, Lines], Lines]] = {
    "arrive": arrive,
    "seated": seated,
    "done": done,
    "completed": completed,
    "round-fails": round_fails,
    "at": at,
    "wait": wait,
    "deadline": deadline,
    "state": lambda run, words: render_state(run.state),
    "why": why,
}
