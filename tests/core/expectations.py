"""Facts that a transcript states by hand, each about the run up to the line where it stands.

Where somebody is now
    expect phase decode | sealed | open | idle | drained | flight none
    expect role 0 ready            or queued, saved, gone, seating, prefilling, ...
    expect flight prefill 0:3 1    the round in flight carries just these (`:3` its tokens)
    expect length 0 = 12, slot 0 = 1, out 0 = 4, pages 0 = 2
    expect pages-free = 10, free-slots = 2, cohort = 2, deadline = 30ms | none
    expect policy quantum, queued 2 3 (in this order), why 0 barrier [by 1 2]
What has happened (`X` is a word of Run.log: arrive, seat, prefill, ready, token, finish, ...;
with a request or choice, `token 0/1`, or without)
    expect X < Y                   the first X came before the first Y, and both came
    expect X with Y                in the same step
    expect never X, count X = 3, sum X = 7 (e.g. of tokens), finished 0 length, exit 70
    expect X within 20ms of Y      the first X came at most so long after the first Y
    expect gaps X <= 20ms          between each X and the next
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from run import Happening, Run
from words import UsageError, name_of, time_ns

from phaseloop.core.explain import explain
from phaseloop.core.ordered import keys
from phaseloop.core.reduce import deadline_next
from phaseloop.core.state import LIVE, Sequence
from phaseloop.core.transitions import live
from phaseloop.core.vocabulary import Stop

Words = list[str]


def holds(run: Run, line: str) -> Iterator[str]:
    """Why the expectation is not met; nothing where it is."""
    words = line.split()[1:]
    word = words[0]
    if word in NOW:
        yield from NOW[word](run, words[1:])
    elif word in QUANTITIES:
        yield from quantity(run, words)
    elif word in PAST:
        yield from PAST[word](run, words[1:])
    else:
        yield from relation(run, words)


# --- now ------------------------------------------------------------------------------------------


def find(run: Run, text: str) -> Sequence | None:
    """The live sequence of this name, seated or saved."""
    saved = (one.sequence for one in run.state.saved)
    for s in (*run.state.slots, *saved):
        if s is not None and (s.request.request_id, s.choice) == name_of(text):
            return s
    return None


def role(run: Run, text: str) -> str:
    if name_of(text)[0] in run.state.queue:
        return "queued"
    if any(one.sequence is find(run, text) for one in run.state.saved):
        return "saved"
    s = find(run, text)
    return "gone" if s is None else s.role


def differs(found: object, wanted: object) -> Iterator[str]:
    if found != wanted:
        yield f"it is {found}"


def now_role(run: Run, words: Words) -> Iterator[str]:
    yield from differs(role(run, words[0]), words[1])


def now_flight(run: Run, words: Words) -> Iterator[str]:
    flight = run.state.flight
    if words[0] == "none" or flight is None:
        yield from differs("none" if flight is None else flight.kind, words[0])
        return
    found = [flight.kind]
    for lane, wanted in zip(flight.lanes, words[1:], strict=False):
        who = f"{lane.request_id}/{lane.choice}" if "/" in wanted else str(lane.request_id)
        found.append(f"{who}:{lane.count}" if ":" in wanted else who)
    if len(flight.lanes) != len(words) - 1:
        yield f"it has {len(flight.lanes)} lanes"
    yield from differs(found, words)


def now_drained(run: Run, words: Words) -> Iterator[str]:
    state = run.state
    cached = sum(cache.pages for cache in state.caches)
    if live(state) or state.flight is not None or state.timers:
        yield f"requests {sorted(live(state))} are alive, or a round or a timer is"
    if any(state.slots) or state.pages_free + cached != state.limits.page_count:
        yield "a slot or a page is still taken"
    if state.phase != "idle":
        yield f"the phase is {state.phase}"


def now_why(run: Run, words: Words) -> Iterator[str]:
    request_id, choice = name_of(words[0])
    for one in explain(run.state, request_id, run.now_ns):
        if one.choice == choice:
            yield from differs(one.reason, words[1])
            if "by" in words:
                yield from differs(list(one.blocked_by), [int(w) for w in words[3:]])
            return
    yield "nobody of that name waits"


def now_queued(run: Run, words: Words) -> Iterator[str]:
    yield from differs([str(request_id) for _, request_id in keys(run.state.order)], words)


def now_deadline(run: Run, words: Words) -> Iterator[str]:
    wanted = None if words[-1] == "none" else time_ns(words[-1])
    yield from differs(deadline_next(run.state), wanted)


NOW: dict[str, Callable[[Run, Words], Iterator[str]]] = {
    "phase": lambda run, words: differs(run.state.phase, words[0]),
    "sealed": lambda run, words: differs(run.state.sealed, True),
    "open": lambda run, words: differs(run.state.sealed, False),
    "idle": lambda run, words: differs((run.state.phase, run.state.flight), ("idle", None)),
    "policy": lambda run, words: differs(run.state.policy.name, words[0]),
    "role": now_role,
    "flight": now_flight,
    "drained": now_drained,
    "why": now_why,
    "queued": now_queued,
    "deadline": now_deadline,
}


def seated(run: Run, text: str) -> Sequence:
    s = find(run, text)
    if s is None:
        raise UsageError(f"request {text} has no seat and is not saved")
    return s


QUANTITIES: dict[str, Callable[[Run, Words], int]] = {
    "length": lambda run, words: seated(run, words[0]).length,
    "cached": lambda run, words: seated(run, words[0]).cached,
    "out": lambda run, words: seated(run, words[0]).produced,
    "pages": lambda run, words: seated(run, words[0]).pages,
    "slot": lambda run, words: run.state.slots.index(seated(run, words[0])),
    "pages-free": lambda run, words: run.state.pages_free,
    "free-slots": lambda run, words: run.state.slots.count(None),
    "cohort": lambda run, words: run.state.cohort,
    "caches": lambda run, words: run.state.caches[int(words[0])].length,
    "live": lambda run, words: sum(s is not None and s.role in LIVE for s in run.state.slots),
    "count": lambda run, words: len(matching(run, words)),
    "sum": lambda run, words: sum(one.amount for one in matching(run, words)),
}


def quantity(run: Run, words: Words) -> Iterator[str]:
    if words[-2] != "=":
        raise UsageError("a number is compared with `= 3`")
    yield from differs(QUANTITIES[words[0]](run, words[1:-2]), int(words[-1]))


# --- the past -------------------------------------------------------------------------------------


def matching(run: Run, words: Words) -> list[Happening]:
    """`token`, `token 0`, `token 0/1`, `round decode`, `finish 0 stop`: all such in the log."""
    what, *rest = words
    request_id = choice = detail = None
    for word in rest:
        if word[0].isdigit():
            request_id = name_of(word)[0]
            choice = name_of(word)[1] if "/" in word else None
        else:
            detail = word
    return [
        one
        for one in run.log
        if one.what == what
        and request_id in (None, one.request_id)
        and choice in (None, one.choice)
        and detail in (None, one.detail)
    ]


def first(run: Run, words: Words) -> tuple[int, Happening]:
    found = matching(run, words)
    if not found:
        raise LookupError(" ".join(words))
    return run.log.index(found[0]), found[0]


def never(run: Run, words: Words) -> Iterator[str]:
    found = matching(run, words)
    if found:
        yield f"it happened in step {found[0].step}"


def finished(run: Run, words: Words) -> Iterator[str]:
    yield from differs([one.detail for one in matching(run, ["finish", words[0]])], words[1:])


def gaps(run: Run, words: Words) -> Iterator[str]:
    at = words.index("<=")
    times = [one.at_ns for one in matching(run, words[:at])]
    worst = max((b - a for a, b in pairwise(times)), default=None)
    if worst is None:
        yield "it did not happen twice"
    elif worst > time_ns(words[at + 1]):
        yield f"the longest is {worst} ns"


def exited(run: Run, words: Words) -> Iterator[str]:
    codes = [one.exit_code for step in run.effects for one in step if isinstance(one, Stop)]
    yield from differs(codes, [int(words[0])])


PAST: dict[str, Callable[[Run, Words], Iterator[str]]] = {
    "never": never,
    "finished": finished,
    "exit": exited,
    "gaps": gaps,
}


def relation(run: Run, words: Words) -> Iterator[str]:
    relations = [word for word in words if word in ("<", "with", "within")]
    if len(relations) != 1:
        raise UsageError("no such expectation; expectations.py lists them")
    at = words.index(relations[0])
    left, right = words[:at], words[at + 1 :]
    bound_ns = 0
    if relations[0] == "within":
        bound_ns, right = time_ns(right[0]), right[2:]
    try:
        a, b = first(run, left), first(run, right)
    except LookupError as missing:
        yield f"{missing} never happened"
        return
    match relations[0]:
        case "<" if a[0] >= b[0]:
            yield f"steps {a[1].step} and {b[1].step}"
        case "with" if a[1].step != b[1].step:
            yield f"steps {a[1].step} and {b[1].step}"
        case "within" if not 0 <= a[1].at_ns - b[1].at_ns <= bound_ns:
            yield f"it took {a[1].at_ns - b[1].at_ns} ns"
        case _:
            pass
