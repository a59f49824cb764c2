"""The routes that encode: texts become vectors, or documents are ranked by a query.

Everything that can be refused is refused before anything is posted.  All texts of a call are posted
together; the answer is complete, or an error as a whole.
"""

from typing import Literal, TypeAlias, cast

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import Kind
from phaseloop.core.vocabulary import Request as Promise
from phaseloop.runtime.gateway import Submission
from phaseloop.text.tokenizer import Tokenizer

from .body import parse_object
from .embedding_answer import Encoded, encoded
from .errors import invalid, invalid_field, json_response, not_supported
from .request import milliseconds
from .request_fields import INT_MAX, Fields, Json, shown, texts, wrong
from .request_prompt import Prompt, check_fit, prompts_of
from .served import HttpOptions, Served, options_of, served_of
from .sse import ClientLeft
from .table import post

Form: TypeAlias = Literal["float", "base64"]
NORMALISE_MAX = 1024  # the p of a p-norm; beyond, numbers only overflow
NO_OPENAI = "Pooling type 'none' is not OAI compatible. Please use a different pooling type"


class Embedding(Struct, frozen=True):
    submissions: tuple[Submission, ...]
    is_native: bool  # llama-server's own shape, otherwise OpenAI's
    form: Form
    normalise: int
    timing_field: bool


class Ranking(Struct, frozen=True):
    submissions: tuple[Submission, ...]
    documents: tuple[str, ...]
    is_tei: bool  # the shape of Text Embeddings Inference, otherwise Jina's
    top: int
    return_text: bool
    timing_field: bool


async def embeddings(request: Request) -> Response:
    return await embed(request, is_native=True)


async def openai_embeddings(request: Request) -> Response:
    return await embed(request, is_native=False)


async def embed(request: Request, *, is_native: bool) -> Response:
    served, http = served_of(request), options_of(request)
    pooling = served.service.description.pooling
    if pooling is None:
        raise not_supported("This server does not support embeddings. Start it with `--embeddings`")
    if pooling == "none" and not is_native:
        raise invalid(NO_OPENAI)
    raw = await request.body()
    wanted = await served.in_thread(prepare_embedding, raw, is_native, served, http)
    try:
        made = await encoded(wanted.submissions, served, request.receive)
    except ClientLeft:
        return Response(status_code=499)  # nobody reads it
    return json_response(await served.in_thread(embedding_body, wanted, made))


async def rerank(request: Request) -> Response:
    served, http = served_of(request), options_of(request)
    if served.service.description.pooling != "rank":
        raise not_supported("This server does not support reranking. Start it with `--reranking`")
    raw = await request.body()
    wanted = await served.in_thread(prepare_ranking, raw, served, http)
    try:
        made = await encoded(wanted.submissions, served, request.receive)
    except ClientLeft:
        return Response(status_code=499)
    return json_response(ranking_body(wanted, made))


ROWS = (
    post(embeddings, "/embedding", "/embeddings"),
    post(openai_embeddings, "/v1/embeddings"),
    post(rerank, "/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
)


# --- what is wanted -------------------------------------------------------------------------------


def prepare_embedding(raw: bytes, is_native: bool, served: Served, http: HttpOptions) -> Embedding:
    """Takes time in proportion to the text: runs in a thread.  Raises ApiError."""
    fields = Fields(parse_object(raw))
    place, given = fields.found("input", "content")
    if given is None:
        raise invalid('"input" or "content" must be provided')
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise invalid_field("encoding_format", f"must be float or base64, not {shown(form)}")
    check_dimensions(fields, served)
    tokenizer, limits = served.tokenizer, served.service.limits
    prompts = prompts_of(plain(place, given), tokenizer, limits, place)
    default = served.embd_normalize
    return Embedding(
        submissions=submissions_of(fields, "embedding", prompts, served),
        is_native=is_native or place == "content",
        form=form,
        normalise=fields.bounded("embd_normalize", default=default, low=-1, high=NORMALISE_MAX),
        timing_field=fields.flag("phaseloop", http.timing_field),
    )


def check_dimensions(fields: Fields, served: Served) -> None:
    """Vectors are not cut: those of most models would no longer say what they said."""
    place, wanted = fields.found("dimensions")
    width = served.model.n_embd
    if wanted is not None and fields.bounded("dimensions", default=width, low=1) != width:
        raise invalid_field(place, f"this model's vectors have {width}, not {shown(wanted)}")


def plain(place: str, given: object) -> object:
    """With objects that hold OpenAI's content parts, of which only text is known, as strings."""
    if isinstance(given, list):
        parts = cast(list[object], given)
        return [text_of(f"{place}[{index}]", one) for index, one in enumerate(parts)]
    return text_of(place, given)


def text_of(place: str, given: object) -> object:
    if not isinstance(given, dict):
        return given
    fields = Fields(cast(Json, given), f"{place}.")
    place, content = fields.found("content")
    if content is None:
        return fields.raw
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, "a string, or a list of parts", content)
    found: list[str] = []
    for index, part in enumerate(cast(list[object], content)):
        fields = Fields(cast(Json, part) if isinstance(part, dict) else {})
        if fields.text("type", "") != "text":
            raise not_supported(f"{place}[{index}].type: only text is supported")
        found.append(fields.text("text", ""))
    return "".join(found)


def prepare_ranking(raw: bytes, served: Served, http: HttpOptions) -> Ranking:
    """As prepare_embedding."""
    fields = Fields(parse_object(raw))
    if fields.found("query")[1] is None:
        raise invalid('"query" must be provided')
    query = fields.text("query", "")
    is_tei = fields.found("texts")[1] is not None
    place, given = fields.found("documents", "texts")
    limits = served.service.limits
    most = limits.queue_length_max + limits.slot_count
    if given is None or given == []:
        raise invalid('"documents" must be a non-empty string array')
    documents = texts(place, given, count_max=most, characters_max=http.body_bytes_max)
    tokenizer = served.tokenizer
    prompts = tuple(ranking_prompt(query, document, tokenizer) for document in documents)
    return Ranking(
        submissions=submissions_of(fields, "rerank", prompts, served),
        documents=documents,
        is_tei=is_tei,
        top=fields.bounded("top_n", default=len(documents), low=0),
        return_text=is_tei and fields.flag("return_text", False),
        timing_field=fields.flag("phaseloop", http.timing_field),
    )


def ranking_prompt(query: str, document: str, tokenizer: Tokenizer) -> Prompt:
    """As the model's file has it, or both texts with what it wants before, between and behind."""
    vocabulary, special = tokenizer.vocabulary, tokenizer.vocabulary.special
    if vocabulary.rerank_template is not None:
        before, *after = vocabulary.rerank_template.split("{query}")
        parts = [part.replace("{document}", document) for part in (before, *after)]
        text = query.join(parts)
        return Prompt(tokenizer.encode(text, parse_special=True), text)
    bos = special.bos if vocabulary.add_bos else None
    sep = special.sep if vocabulary.add_sep else None
    eos = (special.sep if special.eos is None else special.eos) if vocabulary.add_eos else None
    asked, found = tokenizer.encode(query), tokenizer.encode(document)
    middle = [token for token in (eos, sep) if token is not None]
    first, last = (() if token is None else (token,) for token in (bos, eos))
    return Prompt((*first, *asked, *middle, *found, *last), f"{query}\n{document}")


def submissions_of(
    fields: Fields, kind: Kind, prompts: tuple[Prompt, ...], served: Served
) -> tuple[Submission, ...]:
    """Nothing of them is left to later prompts, as nothing can be taken from earlier ones."""
    priority = fields.bounded("priority", default=0, low=-INT_MAX)
    deadline_ns = milliseconds(fields, "deadline_ms")
    wait_ns = milliseconds(fields, "max_queue_ms", served.queue_wait_ns_max)
    limits = served.service.limits
    submissions: list[Submission] = []
    for index, prompt in enumerate(prompts):
        check_fit(prompt, 0, limits, served.model.n_ctx_train)
        check_whole(index, len(prompt.tokens), limits)
        request = Promise(
            0,
            len(prompt.tokens),
            kind=kind,
            priority=priority,
            deadline_after_ns=deadline_ns,
            queue_wait_ns_max=wait_ns,
            keep_cache=False,
        )
        submissions.append(Submission(request, prompt.tokens, text=prompt.text))
    return tuple(submissions)


def check_whole(index: int, length: int, limits: Limits) -> None:
    if limits.whole_prompts and length > limits.batch_tokens:
        raise invalid(
            f"text {index} has {length} tokens, and a round holds {limits.batch_tokens}; this"
            " model reads a text as a whole: shorten it, or serve with a larger --batch-size"
        )


# --- what is answered -----------------------------------------------------------------------------


def embedding_body(wanted: Embedding, made: Encoded) -> object:
    rows = made.normalised(wanted.normalise)
    if wanted.is_native:
        return [{"index": index, "embedding": each} for index, each in enumerate(rows)]
    data: list[dict[str, object]] = []
    for index, each in enumerate(rows):
        if wanted.form == "base64":
            coded = {"embedding": made.base64(each[0]), "encoding_format": "base64"}
        else:
            coded = {"embedding": each[0]}
        data.append({**coded, "index": index, "object": "embedding"})
    body: dict[str, object] = {"model": made.model, "object": "list", "usage": made.usage()}
    return body | made.closing(timing_field=wanted.timing_field) | {"data": data}


def ranking_body(wanted: Ranking, made: Encoded) -> object:
    label = "score" if wanted.is_tei else "relevance_score"
    scores = made.scores()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: wanted.top]
    results: list[dict[str, object]] = []
    for index in order:
        found: dict[str, object] = {"index": index, label: scores[index]}
        if wanted.return_text:
            found["text"] = wanted.documents[index]
        results.append(found)
    if wanted.is_tei:
        return results
    body: dict[str, object] = {"model": made.model, "object": "list", "usage": made.usage()}
    return body | made.closing(timing_field=wanted.timing_field) | {"results": results}
