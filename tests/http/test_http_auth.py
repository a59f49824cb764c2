"""Goal: with keys, nobody gets in without one; open paths stay open.

Method: each way to show a key, right and wrong, against the statuses of llama-server.
"""

import pytest
from http_world import world

from phaseloop.http.served import HttpOptions

pytestmark = pytest.mark.asyncio

OPTIONS = HttpOptions(api_keys=("first", "sécond"))
REFUSED = {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first"},
        {"Authorization": "bearer first"},
        {"Authorization": "first"},
        {"X-Api-Key": "first"},
        {"X-Api-Key": "sécond".encode()},
        {"X-Api-Key": "first", "Authorization": "Bearer other"},
    ],
)
async def test_a_key_opens(headers):
    async with world(options=OPTIONS) as here:
        answer = await here.client.get("/slots", headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Bearer FIRST"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer first, sécond".encode()},
        {"X-Api-Key": ""},
        {"X-Api-Key": "\xff".encode("latin-1")},
        {"Cookie": "first"},
    ],
)
@pytest.mark.parametrize("path", ["/slots", "/nothing"])
async def test_nothing_else_does(path, headers):
    async with world(options=OPTIONS) as here:
        answer = await here.client.get(path, headers=headers)
    assert (answer.status_code, answer.json()) == (401, REFUSED)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/health"])
async def test_open_paths_need_no_key(path):
    async with world(options=OPTIONS) as here:
        assert (await here.client.get(path)).status_code == 200


async def test_a_server_without_keys_asks_for_none():
    async with world() as here:
        answer = await here.client.get("/slots", headers={"Authorization": "Bearer whatever"})
    assert answer.status_code == 200


async def test_a_stranger_cannot_make_the_server_read_a_body():
    async def body():
        raise AssertionError("it was read")
        yield b""

    async with world(options=OPTIONS) as here:
        answer = await here.client.post("/tokenize", content=body())
    assert answer.status_code == 401
