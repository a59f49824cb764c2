"""Goal: browsers learn from llama-server's headers which pages may use the server.

Method: each kind of setting with origins that may and may not; the values are llama-server's.
"""

import pytest
from http_world import world

from phaseloop.http.cors import is_loopback
from phaseloop.http.served import HttpOptions

pytestmark = pytest.mark.asyncio

ORIGIN = "http://web.mydomain.fr"
ALLOW = "access-control-allow-origin"


@pytest.mark.parametrize(
    ("setting", "origin", "is_allowed"),
    [
        ("*", ORIGIN, True),
        ("*", "null", True),
        ("localhost", "http://localhost:8080", True),
        ("localhost", "http://127.0.0.1", True),
        ("localhost", "https://[::1]:9000", True),
        ("localhost", ORIGIN, False),
        ("localhost", "http://localhost.evil.example", False),
        ("localhost", "http://[", False),
        ("http://a.example, " + ORIGIN, ORIGIN, True),
        ("http://a.example", ORIGIN, False),
        ("http://a.example", "http://a.example.evil.example", False),
    ],
)
async def test_an_origin_that_may_is_echoed_and_no_other(setting, origin, is_allowed):
    async with world(options=HttpOptions(cors_origins=setting)) as here:
        answer = await here.client.get("/health", headers={"Origin": origin})
    assert answer.status_code == 200, "the browser keeps the answer from the page, not the server"
    assert answer.headers.get(ALLOW) == (origin if is_allowed else None)
    assert answer.headers["vary"] == "Origin"


async def test_who_states_no_origin_is_told_of_none():
    async with world() as here:
        answer = await here.client.get("/health")
    assert ALLOW not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/nothing"])
async def test_a_preflight_is_answered_on_any_path_without_a_key(path):
    async with world(options=HttpOptions(api_keys=("key",))) as here:
        answer = await here.client.options(
            path,
            headers={
                "Origin": ORIGIN,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "Authorization",
            },
        )
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers[ALLOW] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "*"


async def test_refusals_carry_the_headers_too():
    async with world(options=HttpOptions(api_keys=("key",))) as here:
        answer = await here.client.get("/slots", headers={"Origin": ORIGIN})
    assert answer.status_code == 401
    assert answer.headers[ALLOW] == ORIGIN, "a page could not read the error without"


@pytest.mark.parametrize("origin", ["localhost", "file://", "", "http://", "http://1.2.3.4"])
async def test_what_is_no_loopback_origin(origin):
    assert not is_loopback(origin)
