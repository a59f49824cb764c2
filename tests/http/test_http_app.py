"""Goal: the frame of the server: what it answers before, while and after there is a model.

Method: the application with a scripted engine, spoken to as a client would, without a socket.
"""

import pytest
from http_world import world

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_a_healthy_server_says_so(path):
    async with world() as here:
        answer = await here.client.get(path)
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok"}
    assert answer.headers["server"] == "phaseloop"
