"""GET and POST /lora-adapters: which there are, and what holds for requests that name none."""

from starlette.requests import Request
from starlette.responses import Response

from .body import parse_list
from .errors import json_response
from .served import served_of
from .table import get, post


async def adapters(request: Request) -> Response:
    return json_response(served_of(request).loras.as_json())


async def set_adapters(request: Request) -> Response:
    loras = served_of(request).loras
    loras.set_default("", parse_list(await request.body()))
    return json_response({"success": True})


ROWS = (get(adapters, "/lora-adapters"), post(set_adapters, "/lora-adapters"))
