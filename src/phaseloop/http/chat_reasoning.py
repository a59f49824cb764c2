"""What a model thought before it answered, told apart from the answer.

Models whose chat template knows <think> begin with a thought between <think> and </think>, or go on
with one that the template has opened for them.  Only such a thought at the very beginning counts:
later tags are text that somebody wants to see.  Blanks around thought and answer belong to neither.
"""

from typing import Literal, TypeAlias

OPEN, CLOSE = "<think>", "</think>"

# Whether the prompt has opened a thought already, or leaves it to the model to begin with one.
Start: TypeAlias = Literal["opened", "possible"]


def start_of(prompt: str, template: str) -> Start | None:
    """How the answer to a rendered prompt begins; None where no thought is to be expected."""
    if OPEN not in template and CLOSE not in template:
        return None
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return "opened"
    return None if end.endswith(CLOSE) else "possible"


class Reasoning:
    """Splits one choice's text as it arrives: each part into (thought, answer)."""

    def __init__(self, start: Start | None) -> None:
        self._state: Literal["possible", "opened", "closed", "answer"] = start or "answer"
        self._held = ""
        self._has_begun = False  # the thought, with more than blanks

    def push(self, text: str) -> tuple[str, str]:
        """What this text adds to either; the beginnings of tags and blanks before one are held."""
        if self._state == "answer":
            return "", text
        text, self._held = self._held + text, ""
        if self._state == "possible":
            bare = text.lstrip()
            if len(bare) < len(OPEN) and OPEN.startswith(bare):
                self._held = text
                return "", ""
            if not bare.startswith(OPEN):
                self._state = "answer"
                return "", text
            self._state, text = "opened", bare.removeprefix(OPEN)
        if self._state == "opened":
            return self._thought(text)
        return "", self._answer(text)

    def finish(self) -> tuple[str, str]:
        """What was held, when nothing follows."""
        held, self._held = self._held, ""
        if self._state == "opened":
            return held.rstrip(), ""
        return "", ("" if self._state == "closed" else held)

    def _thought(self, text: str) -> tuple[str, str]:
        if not self._has_begun:
            text = text.lstrip()
        thought, tag, rest = text.partition(CLOSE)
        if tag:
            self._state = "closed"
            return thought.rstrip(), self._answer(rest)
        shown = thought[: len(thought) - _tag_length(thought)].rstrip()
        self._held = thought[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown, ""

    def _answer(self, text: str) -> str:
        """The text after the thought, once it is more than blanks."""
        text = text.lstrip()
        if text:
            self._state = "answer"
        return text


def _tag_length(text: str) -> int:
    """How many of the last characters may be the beginning of the closing tag."""
    for length in range(min(len(text), len(CLOSE) - 1), 0, -1):
        if text.endswith(CLOSE[:length]):
            return length
    return 0
