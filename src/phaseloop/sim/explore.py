"""A model checker for the reducer: every situation that can arise within bounds, each visited once.

`explore` goes breadth first, so the first violation found has the shortest script.  On every
transition it runs the invariants, takes the step twice, and compares what the environment was asked
for with what the state says is under way.  In every state it tries events about what is gone: they
must change nothing.

Then it looks at the answers alone (an engine and a shell that respond, timers that fire, no more
arrivals, no surprises): whichever order they come in, they must run out, after at most `bound` of
them, with nobody left.  A situation with requests but without answers is a deadlock, one from which
answers can go on for ever a livelock; both break I5.

The reducer is a parameter, so that a faulty one can be handed in to see whether it is caught.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from phaseloop.core.invariants import Violation, check
from phaseloop.core.reduce import reduce
from phaseloop.core.state import State
from phaseloop.core.transitions import check_step
from phaseloop.core.vocabulary import (
    AnyEffect,
    AnyEvent,
    Effects,
    FinishRequest,
    LaunchRound,
    ReleaseSlot,
    SeatRequest,
)

from .enabled import World, after, answers, enabled, live_ids, surprises
from .explore_canonical import LEFT_BYTES, Canon, Key
from .stale import stale

Reducer: TypeAlias = Callable[[State, AnyEvent], tuple[State, Effects]]
Script: TypeAlias = tuple[AnyEvent, ...]
Progress: TypeAlias = Callable[[int, int], None]  # situations and transitions so far

PROGRESS_EVERY = 1024  # situations


class Found(Struct, frozen=True):
    """A broken promise and the shortest way to it: the last event of the script breaks it."""

    invariant: str
    message: str
    script: Script


class Exploration(Struct, frozen=True):
    """What one exploration saw.

    complete     every reachable situation was visited: neither a violation nor a limit stopped it.
    depth        events on the longest of the shortest ways to a situation.
    steps        most answers that any situation needed until nobody was left; None if not complete.
    reached      how often each kind of effect came about, with its reason, in alphabetical order.
    mixed_round  the shortest way to a round that mixes prompts with tokens, if there is one.
    """

    complete: bool
    states: int
    transitions: int
    depth: int
    steps: int | None
    bound: int
    reached: dict[str, int]
    mixed_round: Script | None
    violation: Found | None


class Halt(Exception):
    """Stops the search: what was broken, and how."""

    def __init__(self, violation: Violation, script: Script) -> None:
        super().__init__(str(violation))
        self.violation, self.script = violation, script


def explore(
    state: State,
    world: World,
    bound: int,
    *,
    step: Reducer = reduce,
    limit_states: int | None = None,
    symmetric: bool = True,
    progress: Progress | None = None,
) -> Exploration:
    """Visit everything reachable from (state, world); `bound` is in answers.  See Exploration."""
    search = Search(state, world, step, symmetric=symmetric)
    steps: int | None = None
    violation: Found | None = None
    complete = False
    try:
        complete = search.run(limit_states, progress)
        if complete:
            steps = search.longest_completion(bound)
    except Halt as halt:
        complete = False
        name = halt.violation.invariant
        violation = Found(name, str(halt.violation).removeprefix(f"{name}: "), halt.script)
    mixed = search.mixed_round
    return Exploration(
        complete=complete,
        states=len(search.keys),
        transitions=search.transitions,
        depth=search.depth,
        steps=steps,
        bound=bound,
        reached=dict(sorted(search.reached.items())),
        mixed_round=None if mixed is None else search.script(*mixed),
        violation=violation,
    )


class Situation(NamedTuple):
    """One entry of the frontier.  `is_new`: the state was not seen with any other world either."""

    state: State
    world: World
    is_new: bool


class Search:
    """The frontier, and for every situation found how it was reached and where answers lead.

    Situations are numbered in the order they are found.  Of each only its key is kept, the number
    of the situation it was found from, and which of that one's events led here: scripts are
    recovered by folding those events again.
    """

    def __init__(self, state: State, world: World, step: Reducer, *, symmetric: bool) -> None:
        self.root = (state, world)
        self.step = step
        self.canon = Canon(state, world, symmetric=symmetric)
        self.keys: dict[Key, int] = {self.canon.key(state, world): 0}
        self.cases: set[Key] = set()  # keys without what may still happen
        self.parents = array("i", (-1,))
        self.choices = array("h", (-1,))
        self.owed_start = array("q")  # where the successors by answers begin in owed_nodes
        self.owed_nodes = array("i")
        self.transitions = 0
        self.depth = 0
        self.reached: Counter[str] = Counter()
        self.mixed_round: tuple[int, AnyEvent] | None = None

    def run(self, limit_states: int | None, progress: Progress | None) -> bool:
        """Visit layer by layer; False if `limit_states` was reached first."""
        layer = [Situation(*self.root, is_new=True)]
        node = 0
        while layer:
            found: list[Situation] = []
            for situation in layer:
                self.visit(node, situation, found)
                node += 1
                if limit_states is not None and len(self.keys) > limit_states:
                    return False
                if progress is not None and node % PROGRESS_EVERY == 0:
                    progress(len(self.keys), self.transitions)
            layer = found
            self.depth += bool(found)
        return True

    def visit(self, node: int, situation: Situation, found: list[Situation]) -> None:
        state, world = situation.state, situation.world
        choice = 0
        owed: dict[int, None] = {}  # as a set, in order
        for event in answers(state, world):
            owed[self.take(node, choice, state, world, event, found)] = None
            choice += 1
        self.owed_start.append(len(self.owed_nodes))
        self.owed_nodes.extend(owed)
        if choice == 0 and (alive := live_ids(state)):
            message = f"deadlock: requests {alive} wait, and nobody owes an answer"
            raise Halt(Violation("I5", message), self.script(node))
        for event in surprises(state, world):
            self.take(node, choice, state, world, event, found)
            choice += 1
        if situation.is_new:
            self.try_stale(node, state, world)

    def take(
        self,
        node: int,
        choice: int,
        state: State,
        world: World,
        event: AnyEvent,
        found: list[Situation],
    ) -> int:
        """One transition; the number of the situation it leads to."""
        self.transitions += 1
        state_after, effects = self.reduced(node, state, event)
        world_after = after(world, event, effects)
        try:
            check_step(state, event, state_after, effects)
            check(state_after)
            check_owed(state_after, world_after)
        except Violation as violation:
            raise Halt(violation, self.script(node, event)) from violation
        for effect in effects:
            name = name_of(effect)
            self.reached[name] += 1
            if self.mixed_round is None and name.startswith("mixed round"):
                self.mixed_round = (node, event)
        key = self.canon.key(state_after, world_after)
        target = self.keys.setdefault(key, len(self.parents))
        if target == len(self.parents):
            self.parents.append(node)
            self.choices.append(choice)
            case = key[LEFT_BYTES:]
            found.append(Situation(state_after, world_after, is_new=case not in self.cases))
            self.cases.add(case)
        return target

    def reduced(self, node: int, state: State, event: AnyEvent) -> tuple[State, Effects]:
        """The step, taken twice: it must neither raise nor waver."""
        try:
            step, again = self.step(state, event), self.step(state, event)
        except Exception as error:
            raise Halt(raised(event, error), self.script(node, event)) from error
        if step != again:
            message = f"{type(event).__name__} has two results: {step[1]} and {again[1]}"
            raise Halt(Violation("I10", message), self.script(node, event))
        return step

    def try_stale(self, node: int, state: State, world: World) -> None:
        """Events about what is gone must leave the situation as it is."""
        key: Key | None = None
        for event in stale(state, world):
            try:
                state_after, effects = self.step(state, event)
            except Exception as error:
                raise Halt(raised(event, error), self.script(node, event)) from error
            if state_after is state and not effects:
                continue
            key = key or self.canon.key(state, world)
            if effects or self.canon.key(state_after, world) != key:
                message = f"{type(event).__name__} about what is gone changed something: {effects}"
                raise Halt(Violation("core", message), self.script(node, event))

    # --- liveness ---------------------------------------------------------------------------------

    def longest_completion(self, bound: int) -> int:
        """The most answers from any situation until there are no more of them."""
        steps = self.steps_to_end()
        endless = steps.index(-1) if -1 in steps else None
        if endless is not None:
            message = "livelock: the engine answers for ever and somebody never ends"
            raise Halt(Violation("I5", message), self.completion(endless, steps))
        longest = max(steps)
        if longest > bound:
            message = f"{longest} answers until everybody has ended, at most {bound} were stated"
            script = self.completion(steps.index(longest), steps)
            raise Halt(Violation("I5", message), script)
        return longest

    def steps_to_end(self) -> "array[int]":
        """Per situation the longest run of answers, -1 where there is an endless one.

        A depth-first walk that settles a situation once all its successors are settled; what can
        reach a cycle is never settled.
        """
        count = len(self.parents)
        steps = array("i", (-1,)) * count
        opened = bytearray(count)
        for root in range(count):
            if opened[root]:
                continue
            opened[root] = 1
            stack = [root]
            while stack:
                node = stack[-1]
                fresh = [n for n in self.owed(node) if not opened[n]]
                if fresh:
                    opened[fresh[0]] = 1
                    stack.append(fresh[0])
                    continue
                stack.pop()
                ahead = [steps[n] for n in self.owed(node)]
                if -1 not in ahead:
                    steps[node] = 1 + max(ahead, default=-1)
        return steps

    def owed(self, node: int) -> "array[int]":
        starts = self.owed_start
        stop = starts[node + 1] if node + 1 < len(starts) else len(self.owed_nodes)
        return self.owed_nodes[starts[node] : stop]

    # --- scripts ----------------------------------------------------------------------------------

    def completion(self, node: int, steps: "array[int]") -> Script:
        """The way to a situation, then answers along the longest run, or once around a cycle."""
        events = list(self.script(node))
        state, world = self.folded(events)
        passed: set[int] = set()
        while node not in passed and steps[node]:
            passed.add(node)
            node, event = self.longest_answer(state, world, steps)
            state, world = self.stepped(state, world, event)
            events.append(event)
        return tuple(events)

    def longest_answer(
        self, state: State, world: World, steps: "array[int]"
    ) -> tuple[int, AnyEvent]:
        options: list[tuple[int, AnyEvent]] = []
        for event in answers(state, world):
            node = self.keys[self.canon.key(*self.stepped(state, world, event))]
            if steps[node] < 0:
                return node, event
            options.append((node, event))
        return max(options, key=lambda option: steps[option[0]])

    def script(self, node: int, *more: AnyEvent) -> Script:
        """The events from the root to a situation, and more."""
        choices: list[int] = []
        while node:
            choices.append(self.choices[node])
            node = self.parents[node]
        state, world = self.root
        events: list[AnyEvent] = []
        for choice in reversed(choices):
            event = next(islice(enabled(state, world), choice, None))
            state, world = self.stepped(state, world, event)
            events.append(event)
        return (*events, *more)

    def folded(self, events: Iterable[AnyEvent]) -> tuple[State, World]:
        state, world = self.root
        for event in events:
            state, world = self.stepped(state, world, event)
        return state, world

    def stepped(self, state: State, world: World, event: AnyEvent) -> tuple[State, World]:
        state, effects = self.step(state, event)
        return state, after(world, event, effects)


def raised(event: AnyEvent, error: Exception) -> Violation:
    """A reducer that raises is not total."""
    return Violation("core", f"{type(event).__name__} raised {type(error).__name__}: {error}")


def check_owed(state: State, world: World) -> None:
    """What the state takes to be under way is what the environment was asked for."""
    flight, launch = state.flight, world.launch
    if state.stopped:
        return
    if flight is None or launch is None:
        if flight is not None or launch is not None:
            raise Violation("core", f"flight {flight}, but the engine was given {launch}")
    elif (flight.round_id, flight.lanes) != (launch.round_id, launch.lanes):
        raise Violation("core", f"flight {flight}, but the engine was given {launch}")
    elif flight.aborted != world.aborted:
        raise Violation("core", f"round {flight.round_id} was aborted on one side only")
    for seat in world.seats:
        s = state.slots[seat.slot]
        if s is None or (s.request.request_id, s.choice) != (seat.request_id, seat.choice):
            raise Violation("core", f"slot {seat.slot} was given away before it was answered for")
    answered = {seat.slot for seat in world.seats}
    for slot, s in enumerate(state.slots):
        if s is not None and s.role == "seating" and slot not in answered:
            raise Violation("core", f"request {s.request.request_id} is seating, unasked for")


def name_of(effect: AnyEffect) -> str:
    """What an effect counts as in Exploration.reached."""
    match effect:
        case LaunchRound():
            return f"{effect.kind} round: {effect.reason}"
        case FinishRequest():
            return f"request ends: {effect.reason}"
        case SeatRequest():
            return f"seat: {effect.reason}"
        case ReleaseSlot():
            return f"slot released: {effect.reason}"
        case _:
            return f"{type(effect).__name__}: {effect.reason}"
