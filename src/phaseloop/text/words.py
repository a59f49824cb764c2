"""Remember the tokens of words, since a text has few different ones."""

from collections.abc import Callable, Iterable


class WordCache:
    """Tokens of words, the longer ones worked out each time.  Threads may share it."""

    def __init__(
        self,
        encode: Callable[[str], tuple[int, ...]],
        *,
        words_max: int = 32_768,
        length_max: int = 64,
    ) -> None:
        """`length_max` is in characters.  A full cache is emptied: the common words soon return."""
        self._encode = encode
        self._known: dict[str, tuple[int, ...]] = {}
        self._words_max = words_max
        self._length_max = length_max

    def __len__(self) -> int:
        return len(self._known)

    def encode(self, words: Iterable[str]) -> list[int]:
        known = self._known
        tokens: list[int] = []
        for word in words:
            found = known.get(word)
            if found is None:
                found = self._encode(word)
                if len(word) <= self._length_max:
                    if len(known) >= self._words_max:
                        known.clear()
                    known[word] = found
            tokens += found
        return tokens
