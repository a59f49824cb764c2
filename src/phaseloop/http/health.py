"""Whether the server can answer."""

from starlette.requests import Request
from starlette.responses import Response

from .errors import json_response, unavailable
from .served import served_of
from .table import get


async def health(request: Request) -> Response:
    """200 while new requests are taken; the gate answers while the model is loading."""
    service = served_of(request).service
    if service.state.shutdown_at_ns is not None:
        raise unavailable("The server is shutting down")
    if service.state.stopped or service.has_ended:
        raise unavailable("The engine is lost")
    return json_response({"status": "ok"})


ROWS = (get(health, "/health", "/v1/health"),)
