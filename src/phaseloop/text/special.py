"""Find special tokens in a text: at each place the longest, and the leftmost first."""

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

Node: TypeAlias = dict[str, "Node | int"]
END = ""  # the key under which a node holds the token that ends there
SPACES = " \t\n\v\f\r"


class SpecialTokens:
    """A set of tokens, by their texts, ready to be searched for."""

    def __init__(self, tokens: Iterable[tuple[str, int]], strip_after: Iterable[int] = ()) -> None:
        """Blanks behind a token of `strip_after` belong to it and vanish."""
        self._root: Node = {}
        for text, token in tokens:
            node = self._root
            for character in text:
                child = node.setdefault(character, {})
                assert isinstance(child, dict)
                node = child
            node[END] = token
        firsts = "".join(map(re.escape, self._root))
        self._candidates = re.compile(f"[{firsts}]") if firsts else None
        self._strip_after = frozenset(strip_after)

    def partition(self, text: str) -> Iterator[str | int]:
        """The text's ordinary parts, none of them empty, and its special tokens, in order."""
        start = search = 0
        while self._candidates and (candidate := self._candidates.search(text, search)):
            place = candidate.start()
            found = self._longest(text, place)
            if found is None:
                search = place + 1
                continue
            token, stop = found
            if place > start:
                yield text[start:place]
            yield token
            if token in self._strip_after:
                while stop < len(text) and text[stop] in SPACES:
                    stop += 1
            start = search = stop
        if start < len(text):
            yield text[start:]

    def _longest(self, text: str, place: int) -> tuple[int, int] | None:
        """The token that begins at `place`, and where it ends."""
        node = self._root
        found = None
        for stop in range(place, len(text)):
            child = node.get(text[stop])
            if not isinstance(child, dict):
                break
            node = child
            token = node.get(END)
            if isinstance(token, int):
                found = (token, stop + 1)
        return found
