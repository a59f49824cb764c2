"""One choice of an answer as it grows: tokens become text, and stop strings end it."""

from typing import Literal, TypeAlias

from phaseloop.core.vocabulary import FinishReason
from phaseloop.engine.settings import Likelihood
from phaseloop.runtime.gateway import Delivered
from phaseloop.text.detokenizer import Detokenizer
from phaseloop.text.stops import StopMatcher, StopStrings
from phaseloop.text.tokenizer import Tokenizer

StopType: TypeAlias = Literal["none", "eos", "limit", "word"]  # as llama-server names them
Entry: TypeAlias = tuple[int, Likelihood]  # a token, and how likely it was


class Answer:
    """`index` is its place among all choices of a call, `choice` among those of its request."""

    def __init__(
        self, index: int, choice: int, tokenizer: Tokenizer, stops: StopStrings | None
    ) -> None:
        self.index = index
        self.choice = choice
        self.predicted = 0  # tokens, one that ended the text among them
        self.stop_type: StopType = "none"
        self.stopping_word = ""
        self.truncated = False
        self.has_new_line = False
        self.is_over = False  # nothing is shown any more, whatever still arrives
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = None if stops is None else StopMatcher(stops)
        self._entries: list[Entry] = []  # of tokens that were shown, if only in part
        self._held: list[tuple[int, Entry]] = []  # of others, by where in the text they begin
        self._decoded_length = 0  # characters
        self._shown_length = 0

    def take(self, delivered: Delivered) -> str:
        """The text that may now be shown."""
        if self.is_over:
            return ""
        self.predicted += delivered.count
        if delivered.likelihoods:
            begin = self._decoded_length
            entries = zip(delivered.ids, delivered.likelihoods, strict=True)
            self._held += ((begin, entry) for entry in entries)
        text = self._shown(self._detokenizer.push(delivered.ids))
        if self._held:
            self._release()
        return text

    @property
    def has_entries(self) -> bool:
        return bool(self._entries)

    def take_entries(self) -> list[Entry]:
        """Likelihoods of tokens, once some of their text is shown; of a stop string it never is.

        A token without text of its own, as a part of a character has none, waits for the next.
        """
        entries, self._entries = self._entries, []
        return entries

    def stop_at_limit(self) -> None:
        """End it here, as if the limit were reached."""
        self.is_over = True
        self.stop_type = "limit"

    def end(self, reason: FinishReason, limit: int | None) -> str:
        """The last of it, `reason` being one of ends.COMPLETE: the rest of the text."""
        if self.is_over:
            return ""
        rest = self._shown(self._detokenizer.finish())
        if self._stops is not None and not self.is_over:
            rest += self._stops.finish()
        if self.is_over:  # the rest completed a stop string
            return rest
        self._entries += (entry for _, entry in self._held)
        self._held.clear()
        self.is_over = True
        if reason == "stop":
            self.stop_type = "eos"
            self.predicted += 1  # the engine delivers tokens up to the one that ends the text
        else:
            self.stop_type = "limit"
            self.truncated = limit is None or self.predicted < limit
        return rest

    def _release(self) -> None:
        held, self._held = self._held, []
        for begin, entry in held:
            if begin < self._shown_length:
                self._entries.append(entry)
            else:
                self._held.append((begin, entry))

    def _shown(self, text: str) -> str:
        self._decoded_length += len(text)
        if self._stops is not None and text:
            text = self._stops.push(text)
            if self._stops.matched is not None:
                self.is_over = True
                self.stop_type = "word"
                self.stopping_word = self._stops.matched
        self._shown_length += len(text)
        if "\n" in text:
            self.has_new_line = True
        return text
