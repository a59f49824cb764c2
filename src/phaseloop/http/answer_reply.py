"""One call of a client while it is answered: its prompts, each with a stream and its choices."""

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b

from msgspec import Struct, field

from phaseloop.runtime.gateway import Call, Stream, Submission

from .answer import Answer, Entry
from .request import Wanted, request_of
from .request_fields import Json
from .request_prompt import Prompt
from .served import Served
from .usage import Work, spans, usage, work_of

ID_BYTES = 16  # 32 characters
SECOND_NS = 1_000_000_000


class Whole(Struct):
    """All that a choice came to, where it is not streamed."""

    texts: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    entries: list[Entry] = field(default_factory=list[Entry])

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Part:
    """One prompt of a call."""

    def __init__(self, stream: Stream, prompt: Prompt, answers: tuple[Answer, ...]) -> None:
        self.stream = stream
        self.prompt = prompt
        self.answers = answers
        self.cohort: int | None = None  # known once it has begun, where the policy has cohorts

    def slot_of(self, answer: Answer) -> int:
        return self.stream.timing.slots.get(answer.choice, -1)

    def work(self, answers: Sequence[Answer]) -> Work:
        return work_of(self.stream.timing, (answer.predicted for answer in answers))


class Reply:
    """Posts the call when it is made; close `call` when done with it."""

    def __init__(
        self, wanted: Wanted, prompts: Sequence[Prompt], served: Served, build: str
    ) -> None:
        self.wanted = wanted
        self.served = served
        self.build = build
        self.call: Call = served.service.gateway.submit(
            [
                Submission(
                    request_of(wanted, len(prompt.tokens)),
                    prompt.tokens,
                    wanted.seed,
                    wanted.sampling,
                    prompt.text,
                    speculation=wanted.speculation,
                    adapters=wanted.adapters,
                )
                for prompt in prompts
            ]
        )
        self.parts = tuple(
            Part(stream, prompt, self._answers(place))
            for place, (stream, prompt) in enumerate(zip(self.call.streams, prompts, strict=True))
        )
        self.open_choices = len(prompts) * wanted.choices

    @cached_property
    def id(self) -> str:
        """From the server's seed and the request's id, so that a replay gives the same bytes."""
        text = f"{self.served.id_seed}:{self.call.streams[0].request.request_id}"
        return f"chatcmpl-{blake2b(text.encode(), digest_size=ID_BYTES).hexdigest()}"

    @cached_property
    def created(self) -> int:
        """Unix seconds of the call's arrival, by the loop's clock, which a trace records."""
        arrived_ns = self.call.streams[0].timing.arrived_ns
        return self.served.created + (arrived_ns or 0) // SECOND_NS

    @property
    def model(self) -> str:
        return self.served.model.name

    def begun(self, part: Part) -> None:
        state = self.served.service.state
        part.cohort = state.cohort if state.policy.switch == "barrier" else None

    def spans(self, part: Part) -> Json:
        service = self.served.service
        timing, policy = part.stream.timing, service.state.policy.name
        return spans(timing, service.clock.now_ns(), policy, part.cohort)

    # --- of the whole call, as OpenAI's shapes have it --------------------------------------------

    def usage(self) -> Json:
        """A prompt counts once, however many choices it has."""
        return usage(
            sum(part.stream.request.prompt_length for part in self.parts),
            sum(answer.predicted for part in self.parts for answer in part.answers),
            sum(part.stream.timing.cached for part in self.parts),
        )

    def closing(self) -> Json:
        """`timings` are sums over the prompts; `phaseloop` is of the prompt that was done last."""
        works = (part.work(part.answers) for part in self.parts)
        made: Json = {"timings": sum(works, Work()).as_timings()}
        if self.wanted.timing_field:
            made["phaseloop"] = self.spans(max(self.parts, key=_ended_ns))
        return made

    def _answers(self, place: int) -> tuple[Answer, ...]:
        wanted = self.wanted
        return tuple(
            Answer(place * wanted.choices + choice, choice, self.served.tokenizer, wanted.stops)
            for choice in range(wanted.choices)
        )


def _ended_ns(part: Part) -> int:
    return part.stream.timing.ended_ns or 0
