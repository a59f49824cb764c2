"""What a trace may hold beyond counts: prompts and generated ids, in lines of their own.

    prompt      one request's token ids, seed and sampling settings, and in a trace of `text` the
                prompt as the client sent it.  Those of a call stand directly before its
                RequestArrived.
    generated   the ids that each lane of a round produced, directly before its RoundCompleted.

The reducer sees none of it, so these lines have a chain of their own: `chain` is the digest of
(previous chain, the other fields), and the chain before the first is the digest of the header line.
A trace is thus the same with and without them, and an edited id is found while reading.
"""

import math
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, fields

from phaseloop.core.vocabulary import AnyEvent, RequestArrived, RequestId, RoundCompleted
from phaseloop.engine.protocol import Content
from phaseloop.engine.settings import Adapters, Sampling

from .digest import digest_of, encode
from .trace_decode import explain_decode_error

LINE_BYTES_MAX = 1 << 24

TraceContent: TypeAlias = Literal["counts", "ids", "text"]
TokenIds: TypeAlias = tuple[int, ...]


class ContentLine(Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="line"):
    """A line that no decision depends on."""


class PromptLine(ContentLine, frozen=True, gc=False, tag="prompt", omit_defaults=True):
    """What a request asks the engine to do.  `sampling` as spelled_sampling has it."""

    request_id: RequestId
    tokens: TokenIds
    seed: int
    sampling: dict[str, Any]
    reuse: bool  # whether the prompt might find state of earlier ones
    text: str | None  # None in a trace of ids, and where the client sent none
    chain: str
    adapters: Adapters = ()  # these three are left out, also of the chain, at their defaults
    brought: bool = False  # it came with the state of its prompt, from a slot's file
    forget: bool = False  # as Content has it

    def content(self) -> Content:
        """Raises ValueError for settings that do not exist or have no such value."""
        sampling = sampling_of(self.sampling)
        return Content(
            self.tokens,
            self.seed,
            sampling,
            self.reuse,
            adapters=self.adapters,
            forget=self.forget,
        )


class GeneratedLine(ContentLine, frozen=True, gc=False, tag="generated"):
    """What a round produced: per lane, in lane order, the ids before the end of the text."""

    round_id: int
    ids: tuple[TokenIds, ...]
    chain: str


AnyContentLine: TypeAlias = PromptLine | GeneratedLine


class ContentChain:
    """Makes content lines, or checks them, in file order."""

    def __init__(self, header_line: bytes, content: TraceContent) -> None:
        self._content = content
        self._chain = digest_of(header_line)
        self._prompts: list[RequestId] = []  # whose arrival is due
        self._round: int | None = None  # whose completion is due

    def prompt(self, request_id: RequestId, content: Content, text: str | None) -> bytes:
        """The line with its newline; nothing in a trace of counts.

        A text that would make the line unreadably long is left out.  What is no Unicode in it, as
        JSON's lone surrogates are not, is written as an escape.
        """
        if self._content == "counts":
            return b""
        if self._content == "ids":
            text = None
        if text is not None:
            text = text.encode("utf-8", "backslashreplace").decode()
        sampling = spelled_sampling(content.sampling)
        asked = (request_id, content.tokens, content.seed, sampling, content.reuse)
        brought = content.brought is not None
        line = PromptLine(*asked, text, "", content.adapters, brought, content.forget)
        if text is not None and len(encode(line)) > LINE_BYTES_MAX // 2:
            line = msgspec.structs.replace(line, text=None)
        return self._chained(line)

    def generated(self, round_id: int, ids: tuple[TokenIds, ...]) -> bytes:
        """The line with its newline; nothing in a trace of counts."""
        return b"" if self._content == "counts" else self._chained(GeneratedLine(round_id, ids, ""))

    def problem(self, line: AnyContentLine) -> tuple[str, str] | None:
        """(what is wrong, in which field) of the next line as it was read; None if nothing is."""
        if self._content == "counts":
            return "a trace of counts holds no such line", "line"
        if isinstance(line, PromptLine):
            if line.text is not None and self._content != "text":
                return "a trace of ids holds no text", "text"
            try:
                line.content()
            except ValueError as error:
                field, message = explain_decode_error(str(error))
                return message, ".".join(filter(None, ("sampling", field)))
            self._prompts.append(line.request_id)
        elif self._round is not None:
            return f"the ids of round {self._round} stand before it already", "line"
        else:
            self._round = line.round_id
        chain = chain_after(self._chain, line)
        if line.chain != chain:
            return "does not follow from this line and those before it", "chain"
        self._chain = chain
        return None

    def misplaced(self, event: AnyEvent | None) -> str | None:
        """What is wrong if `event` follows the content lines read last; None is the footer."""
        prompts, round_id = self._prompts, self._round
        self._prompts, self._round = [], None
        if prompts and not (
            isinstance(event, RequestArrived)
            and prompts == [request.request_id for request in event.requests]
        ):
            return f"the prompts before it are of requests {prompts}, which do not arrive with it"
        if round_id is not None and not (
            isinstance(event, RoundCompleted) and event.round_id == round_id
        ):
            return f"the ids before it are of round {round_id}, which does not end with it"
        return None

    def _chained(self, line: AnyContentLine) -> bytes:
        self._chain = chain_after(self._chain, line)
        return encode(msgspec.structs.replace(line, chain=self._chain)) + b"\n"


def chain_after(chain: str, line: AnyContentLine) -> str:
    values = asdict(line)
    del values["chain"]
    for later in ("adapters", "brought", "forget"):  # older traces have no such fields
        if not values.get(later):
            values.pop(later, None)
    return digest_of(encode((chain, *values.values())))


def spelled_sampling(sampling: Sampling) -> dict[str, Any]:
    """All fields by name, also at their defaults, as these may change.

    JSON has no infinities; the only one that settings have, the bias that forbids a token, is null.
    """
    spelled = asdict(sampling)
    spelled["logit_bias"] = [
        (token, None if bias == -math.inf else bias) for token, bias in sampling.logit_bias
    ]
    return spelled


def sampling_of(spelled: dict[str, Any]) -> Sampling:
    """The inverse.  Raises ValueError."""
    unknown = sorted(spelled.keys() - {field.name for field in fields(Sampling)})
    if unknown:
        raise ValueError(f"the setting {unknown[0]} is unknown to this version of phaseloop")
    biases = msgspec.convert(spelled.get("logit_bias", ()), tuple[tuple[int, float | None], ...])
    known = [(token, -math.inf if bias is None else bias) for token, bias in biases]
    return msgspec.convert({**spelled, "logit_bias": known}, Sampling)
