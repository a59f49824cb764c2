"""Routes of llama-server that phaseloop does not have: a plain answer instead of a riddle."""

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, error_response, json_response, not_supported
from .served import options_of
from .table import Endpoint, Row, delete, get, post


def refuse(what: str) -> Endpoint:
    async def refused(_request: Request) -> Response:
        return error_response(not_supported(what))

    return refused


async def feature_disabled(_request: Request) -> Response:
    return error_response(ApiError("feature_disabled", "this feature is disabled"))


async def set_properties(request: Request) -> Response:
    """As in llama-server, whose properties cannot be changed either, it only says so."""
    if not options_of(request).props:
        problem = "This server does not support changing global properties. Start it with `--props`"
        raise not_supported(problem)
    return json_response({"success": True})


RESPONSES = refuse("This server does not support the Responses API yet; use /v1/chat/completions")
MESSAGES = refuse("This server does not support the Messages API yet; use /v1/chat/completions")
COUNTING = refuse("This server does not count a request's tokens yet; use /tokenize")
ROUTER = refuse("This server serves one model, which it was started with; llama-swap serves many")
STREAMS = refuse("This server cannot resume a stream yet; send the request again")

ROWS: tuple[Row, ...] = (
    post(set_properties, "/props"),
    post(RESPONSES, "/v1/responses", "/responses"),
    post(MESSAGES, "/v1/messages"),
    post(COUNTING, "/v1/messages/count_tokens"),
    post(COUNTING, "/v1/responses/input_tokens", "/responses/input_tokens"),
    post(refuse("This server cannot end reasoning early"), "/v1/chat/completions/control"),
    post(refuse("This server does not support infilling yet"), "/infill"),
    post(
        refuse("This server does not support audio"),
        "/v1/audio/transcriptions",
        "/audio/transcriptions",
    ),
    post(refuse("This server does not support decision models"), "/v1/systemone"),
    post(ROUTER, "/models", "/models/load", "/models/unload"),
    get(ROUTER, "/models/sse"),
    delete(ROUTER, "/models"),
    get(STREAMS, "/v1/stream"),
    delete(STREAMS, "/v1/stream"),
    post(STREAMS, "/v1/streams/lookup"),
    get(feature_disabled, "/tools", "/cors-proxy"),
    post(feature_disabled, "/tools", "/cors-proxy"),
)
