"""Goal: behind a real server, broken HTTP is refused or dropped, and the next request is served.

Method: raw bytes to Hypercorn on a loopback socket: lengths that lie, bodies that never come, bytes
that are no HTTP.
"""

import httpx
import pytest
from http_world import DEFAULTS, app_of, until_loaded
from listening import listening, send_raw

from phaseloop.http.served import HttpOptions

pytestmark = pytest.mark.asyncio

POST = b"POST /tokenize HTTP/1.1\r\nHost: server\r\nConnection: close\r\n"


async def answer_to(raw: bytes, *, ends: bool = False, options: HttpOptions = DEFAULTS) -> bytes:
    """What raw bytes are answered with; afterwards the server must still be well."""
    app = app_of(options=options)
    async with listening(app) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}"
        await client.get(f"{url}/")  # an answer: so the lifespan has begun
        await until_loaded(app)
        answer = await send_raw(port, raw, ends=ends)
        assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
    return answer


async def test_a_whole_request_is_answered():
    raw = POST + b'Content-Length: 15\r\n\r\n{"content": ""}'
    answer = await answer_to(raw)
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b'{"tokens":[]}'
    names = [line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
    assert names.count(b"server") == 1
    assert b"server: phaseloop" in head.lower()


async def test_a_body_shorter_than_stated_is_no_request():
    raw = POST + b'Content-Length: 500\r\n\r\n{"content": ""}'
    answer = await answer_to(raw, ends=True)
    assert not answer.startswith(b"HTTP/1.1 200")


async def test_a_large_body_is_refused_before_it_is_sent():
    raw = POST + b"Content-Length: 1000000000\r\n\r\n"
    answer = await answer_to(raw)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"type":"invalid_request_error"' in answer


async def test_a_large_body_in_pieces_is_refused_as_it_comes():
    piece = b"400\r\n" + b"a" * 1024 + b"\r\n"
    raw = POST + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * piece
    answer = await answer_to(raw, options=HttpOptions(body_bytes_max=2000))
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff\x16\x03\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: ten\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    ],
)
async def test_what_is_no_http_is_no_request(raw):
    answer = await answer_to(raw, ends=True)
    assert not answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", [b"/%ff%fe", b"/%00", b"/..%2f..%2fetc", b"/" + b"a" * 2000])
async def test_strange_paths_are_not_found(path):
    raw = b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer = await answer_to(raw)
    assert answer.startswith(b"HTTP/1.1 404")
    assert b'"message":"File Not Found"' in answer


async def test_a_head_has_no_body():
    raw = b"HEAD /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer = await answer_to(raw)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")
