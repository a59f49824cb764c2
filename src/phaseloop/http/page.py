"""The page at the root: where a browser lands."""

from starlette.requests import Request
from starlette.responses import Response

from .table import get

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>phaseloop</title>
<style>body { font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto }</style>
<h1>phaseloop</h1>
<p>An LLM server in which prompt processing and token generation never share the engine.
Clients of OpenAI and of llama-server find their routes below this address.
<ul>
<li><a href="health">health</a>: whether it can answer
<li><a href="phase">phase</a>: what the engine does now, and why the others wait
<li><a href="slots">slots</a>: every seat at the engine
<li><a href="props">props</a>: the model and the server's settings
</ul>
</html>
"""


async def page(_request: Request) -> Response:
    """Open to everybody and at any time; it shows nothing of the server."""
    return Response(PAGE, media_type="text/html")


ROWS = (get(page, "/"),)
