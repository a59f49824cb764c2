"""Goal: the frame of the server: what it answers before, while and after there is a model.

Method: the application with a scripted engine, spoken to as a client would, without a socket.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest
from http_world import Hold, TextEngine, client_of, started, until, until_loaded, world
from starlette.responses import Response

from phaseloop.core.vocabulary import Request
from phaseloop.engine.protocol import EngineDied
from phaseloop.http import app as app_module
from phaseloop.http.app import create_app
from phaseloop.http.guard import Exchange
from phaseloop.http.served import HttpOptions
from phaseloop.http.table import get, post
from phaseloop.runtime.gateway import Submission

pytestmark = pytest.mark.asyncio

LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
NOT_FOUND = {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}


class Loader:
    """A model that takes as long to load as the test likes, then fails if there is an `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.loaded = asyncio.Event()
        self.was_cancelled = False

    @asynccontextmanager
    async def open_served(self):
        try:
            await self.loaded.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        async with world() as inner:
            yield inner.served


# --- the life of a server -------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_a_healthy_server_says_so(path):
    async with world() as here:
        answer = await here.client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["content-type"] == "application/json; charset=utf-8"


async def test_every_route_but_the_page_is_unavailable_while_the_model_loads():
    loader = Loader()
    app = create_app(HttpOptions(), loader.open_served)
    async with started(app), client_of(app) as client:
        for path in ("/health", "/v1/models", "/slots", "/nothing"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (503, LOADING), path
        posted = await client.post("/tokenize", content=b"not even JSON")
        assert (posted.status_code, posted.json()) == (503, LOADING)
        assert (await client.get("/")).status_code == 200
        loader.loaded.set()
        await until_loaded(app)
        assert (await client.get("/health")).status_code == 200


async def test_a_shutdown_does_not_wait_for_the_model():
    loader = Loader()
    app = create_app(HttpOptions(), loader.open_served)
    async with started(app):
        await asyncio.sleep(0)  # the loading has begun
    assert loader.was_cancelled


async def test_who_runs_the_server_hears_that_the_model_cannot_be_loaded():
    loader = Loader(ValueError("the file is torn"))
    loader.loaded.set()
    heard = asyncio.get_running_loop().create_future()
    app = create_app(HttpOptions(), loader.open_served, on_failed=heard.set_result)
    async with started(app), client_of(app) as client:
        assert str(await heard) == "the file is torn"
        answer = await client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The model could not be loaded"
    assert "torn" not in answer.text, "what is wrong with a file is the operator's to know"


async def test_a_lost_engine_shows_in_health():
    engine = TextEngine()

    def die(_launch) -> None:
        raise EngineDied("the device is gone")

    engine.on_run = die
    async with world(engine) as here:
        with here.service.gateway.submit([Submission(Request(0, 8))]):
            await here.service.ended()
        answer = await here.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"] == {
        "code": 503, "message": "The engine is lost", "type": "unavailable_error"
    }  # fmt: skip


async def test_a_fault_of_the_loop_shows_in_health():
    async with world() as here:
        here.service.watch.counters = None  # the loop trips over it at the first tokens
        submission = Submission(Request(0, 8))
        with here.service.gateway.submit([submission]), pytest.raises(AttributeError):
            await here.service.ended()
        answer = await here.client.get("/health")
    assert answer.status_code == 503


async def test_a_server_within_its_grace_is_not_healthy_any_more():
    engine = TextEngine()
    async with world(engine) as here:
        hold = engine.on_run = Hold("prefill")
        with here.service.gateway.submit([Submission(Request(0, 8))]) as call:
            await hold.reached.wait()
            here.service.shut_down()
            await until(lambda: here.service.state.shutdown_at_ns is not None)
            answer = await here.client.get("/health")
            hold.let_go()
            (stream,) = call.streams
            assert [item async for item in stream], "who is seated may finish"
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The server is shutting down"


# --- routes that are none -------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nothing", "/health/", "/v1/models/x", "/%00"])
async def test_an_unknown_path_is_not_found(path):
    async with world() as here:
        answer = await here.client.get(path)
    assert (answer.status_code, answer.json()) == (404, NOT_FOUND)


async def test_a_wrong_method_is_told_the_right_ones():
    async with world() as here:
        answer = await here.client.post("/health", json={})
        of_two = await here.client.patch("/phase", json={})
    assert answer.status_code == 405
    assert answer.json()["error"] == {
        "code": 405, "message": "Method Not Allowed", "type": "invalid_request_error"
    }  # fmt: skip
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert set(of_two.headers["allow"].split(", ")) == {"GET", "HEAD", "PUT"}


@pytest.mark.parametrize("prefix", ["/api", "/api/", "api"])
async def test_everything_lies_below_the_prefix(prefix):
    async with world(options=HttpOptions(prefix=prefix, api_keys=("key",))) as here:
        assert (await here.client.get("/api/health")).status_code == 200
        assert (await here.client.get("/api/")).status_code == 200
        assert (await here.client.get("/api/slots")).status_code == 401
        key = {"X-Api-Key": "key"}
        for path in ("/health", "/slots", "/", "/api", "/api/nothing"):
            answer = await here.client.get(path, headers=key)
            assert (answer.status_code, answer.json()) == (404, NOT_FOUND), path


# --- faults and the envelope ----------------------------------------------------------------------


class HalfAnswer:
    """An answer that breaks in its middle."""

    async def __call__(self, _scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("secret of the house")


async def broken(_request):
    raise ValueError("secret of the house")


async def half_broken(_request):
    return HalfAnswer()


@pytest.fixture
def with_faults(monkeypatch):
    rows = (*app_module.ROWS, get(broken, "/broken"), post(half_broken, "/half"))
    monkeypatch.setattr(app_module, "ROWS", rows)


async def test_a_fault_of_ours_is_a_plain_error_without_its_insides(with_faults, capsys):
    async with world() as here:
        answer = await here.client.get("/broken", headers={"Origin": "http://a.example"})
        assert (await here.client.get("/health")).status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    assert "secret of the house" in capsys.readouterr().out, "the log says what happened"


async def test_an_answer_that_breaks_off_is_cut_and_not_rounded_off(with_faults, capsys):
    async with world() as here:
        with pytest.raises(ValueError, match="secret"):
            await here.client.post("/half", json={})
        assert (await here.client.get("/health")).status_code == 200
    assert "secret of the house" in capsys.readouterr().out


async def test_every_answer_names_the_server_and_the_request():
    async with world(options=HttpOptions(api_keys=("key",))) as here:
        answers = [
            await here.client.get("/health"),
            await here.client.get("/slots"),
            await here.client.options("/slots"),
            await here.client.get("/nothing", headers={"X-Api-Key": "key"}),
        ]
    assert {answer.headers["server"] for answer in answers} == {"phaseloop"}
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    assert all(name.startswith("req_") for name in ids)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a\tb", False)],
)
async def test_a_client_may_name_its_request(given, is_kept):
    async with world() as here:
        answer = await here.client.get("/health", headers={"X-Request-Id": given})
    assert (answer.headers["x-request-id"] == given) == is_kept


async def test_the_log_hears_how_each_request_went():
    heard: list[Exchange] = []
    loader = Loader()
    app = create_app(HttpOptions(), loader.open_served, on_exchange=heard.append)
    async with started(app), client_of(app) as client:
        await client.get("/health", headers={"X-Request-Id": "first"})
        await client.get("/")
    (refused, page) = heard
    assert (refused.request_id, refused.method, refused.path) == ("first", "GET", "/health")
    assert (refused.status, page.status, page.path) == (503, 200, "/")
    assert refused.duration_ns > 0
    assert refused.client == "127.0.0.1"


async def test_a_response_may_be_any_asgi_application(monkeypatch):
    async def plain(_request):
        return Response(b"as it is", media_type="text/plain")

    monkeypatch.setattr(app_module, "ROWS", (get(plain, "/plain"),))
    async with world() as here:
        answer = await here.client.get("/plain")
        head = await here.client.head("/plain")
    assert answer.text == "as it is"
    assert head.status_code == 200
