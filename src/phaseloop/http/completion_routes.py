"""The routes that generate: a request is checked, tokenised, posted and answered.

Everything that can be refused is refused before the answer begins, as a plain error: a bad field, a
prompt that does not fit, a full queue.  A streamed answer begins when the engine begins with the
prompt, or after a second of waiting; errors after that are events of the stream.
"""

from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import ASGIApp

from .answer_call import Answered
from .body import parse_object
from .chat_reasoning import start_of
from .errors import not_supported
from .request import Shape, Wanted, wanted_of
from .request_chat import conversation_of
from .request_fields import Fields
from .request_prompt import Prompt, check_fit, prompts_of, text_prompt
from .served import HttpOptions, Served, options_of, served_of
from .table import post


class Prepared(Struct, frozen=True):
    wanted: Wanted
    prompts: tuple[Prompt, ...]


async def native(request: Request) -> ASGIApp:
    return await generate(request, "native")


async def completion(request: Request) -> ASGIApp:
    return await generate(request, "completion")


async def chat(request: Request) -> ASGIApp:
    return await generate(request, "chat")


ROWS = (
    post(native, "/completion", "/completions"),
    post(completion, "/v1/completions"),
    post(chat, "/v1/chat/completions", "/chat/completions"),
)


async def generate(request: Request, shape: Shape) -> ASGIApp:
    served, http = served_of(request), options_of(request)
    if served.service.description.pooling is not None:
        raise not_supported("This server gives embeddings alone. Start it without `--embeddings`")
    raw = await request.body()
    now = datetime.now(tz=UTC).astimezone()
    prepared = await served.in_thread(prepare, raw, shape, served, http, now)
    answered = Answered(prepared.wanted, prepared.prompts, served, http.build)
    if prepared.wanted.stream:
        return answered.streamed
    return await answered.in_one_piece(request.receive)


def prepare(raw: bytes, shape: Shape, served: Served, http: HttpOptions, now: datetime) -> Prepared:
    """All that comes before posting.  Takes time in proportion to the text: runs in a thread."""
    fields = Fields(parse_object(raw))
    wanted = wanted_of(fields, shape, served, http)
    limits, tokenizer = served.service.limits, served.tokenizer
    if shape == "chat":
        prompts: tuple[Prompt, ...] = (chat_prompt(fields, wanted, served, now),)
    else:
        prompts = prompts_of(fields.raw.get("prompt"), tokenizer, limits)
    for prompt in prompts:
        check_fit(prompt, wanted.limit, limits, served.model.n_ctx_train)
    if shape == "native" or wanted.echo or wanted.verbose:
        prompts = tuple(replace(p, shown=tokenizer.decode(p.tokens)) for p in prompts)
    return Prepared(wanted, prompts)


def chat_prompt(fields: Fields, wanted: Wanted, served: Served, now: datetime) -> Prompt:
    conversation = conversation_of(fields, served, now)
    prompt = replace(text_prompt(conversation.text, served.tokenizer), said=conversation.said)
    if wanted.reasoning_format == "none" or served.template is None:
        return prompt
    is_thinking = conversation.is_thinking
    thought = "opened" if is_thinking else start_of(conversation.text, served.template.source)
    return replace(prompt, thought=thought)
