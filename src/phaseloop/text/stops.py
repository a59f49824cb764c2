"""Stop strings, found wherever the borders between tokens fall.

A stop is found at the character that completes it, so the first to be complete wins, and of those
complete at one character the longest.  That makes the outcome depend on the text alone, not on the
portions in which it comes.  What could still be the beginning of a stop is held back: the longest
such ending of the text, and nothing else.

The search is an automaton over the beginnings of all stops (Aho and Corasick): its state is the
longest beginning that the text so far ends with, and each character takes it to the next.
"""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """A set of stops, ready to be searched for.  Immutable: the answers of a request share it."""

    def __init__(self, stops: Iterable[str]) -> None:
        """An empty string is no stop.  Takes time and room in proportion to all stops' length."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # characters of the beginning that a state stands for
        self._found: list[str | None] = [None]  # the longest stop that ends in a state
        for stop in stops:
            if stop:
                self._add(stop)
        self._fallback = self._fallbacks()

    def step(self, state: int, character: str) -> int:
        """The state after one more character; the first state is 0."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def depth(self, state: int) -> int:
        """How many of the last characters may be the beginning of a stop."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        """The stop that the text ends with."""
        return self._found[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = self._next[state].get(character)
            if child is None:
                child = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = child
        self._found[state] = stop

    def _fallbacks(self) -> list[int]:
        """For each state that of its longest proper ending, from the shortest to the longest."""
        fallback = [0] * len(self._next)
        self._fallback = fallback
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            shorter = fallback[state]
            if self._found[state] is None:
                self._found[state] = self._found[shorter]
            for character, child in self._next[state].items():
                fallback[child] = self.step(shorter, character)
                states.append(child)
        return fallback


class StopMatcher:
    """Follows the text of one answer."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.matched: str | None = None  # the stop that was found; nothing is emitted after it

    def push(self, text: str) -> str:
        """Take the next part of the text; returns what may be shown of it and of what was held."""
        if self.matched is not None:
            return ""
        stops, state = self._stops, self._state
        for index, character in enumerate(text):
            state = stops.step(state, character)
            stop = stops.found(state)
            if stop is not None:
                self.matched = stop
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole[: len(whole) - len(stop)]
        self._state = state
        whole = self._held + text
        shown = len(whole) - stops.depth(state)
        self._held = whole[shown:]
        return whole[:shown]

    def finish(self) -> str:
        """What was held, when nothing follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held
