"""Goal: the page comes whole, from this server alone, and to everybody.

Method: every file of static/ over HTTP, and what the browser is told to hold it to; what the page
does is tested in a browser (tests/browser).
"""

import re

import pytest
from http_world import app_of, client_of, started, world

from phaseloop.http.app import create_app
from phaseloop.http.page import HEADERS, PARTS
from phaseloop.http.page_files import ASSETS, STATIC
from phaseloop.http.served import HttpOptions

pytestmark = pytest.mark.asyncio

LINKS = re.compile(r'(?:href|src)="([^"#]+)"|from "([^"]+)"')
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
ELSEWHERE = re.compile(r"https?://(?!www\.w3\.org/2000/svg)")


async def test_every_part_is_open_without_model_and_key():
    app = create_app(HttpOptions(api_keys=("secret",)), app_of)  # which has no model yet
    async with client_of(app) as client:
        for path in ("/", *PARTS):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_parts_are_what_they_are_called():
    async with world(options=HttpOptions(prefix="/below")) as here:
        for name, kind in (("main.js", "text/javascript"), ("page.css", "text/css")):
            answer = await here.client.get(f"/below/page/{name}")
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
            assert answer.content == (STATIC / name).read_bytes()
        assert (await here.client.get("/below/page/nothing.js")).status_code == 404
        assert (await here.client.get("/below/page/../main.js")).status_code == 404


async def test_what_a_browser_has_is_not_sent_again():
    async with world() as here:
        first = await here.client.get("/page/main.js")
        again = await here.client.get(
            "/page/main.js", headers={"If-None-Match": first.headers["etag"]}
        )
        other = await here.client.get("/page/main.js", headers={"If-None-Match": '"other"'})
    assert (again.status_code, again.content) == (304, b"")
    assert (other.status_code, other.content) == (200, first.content)


async def test_the_page_needs_nothing_from_elsewhere():
    assert "https:" not in HEADERS["Content-Security-Policy"]
    for name, asset in ASSETS.items():
        text = asset.content.decode()
        assert not ELSEWHERE.search(text), name
        for link in LINKS.findall(text):
            linked = (link[0] or link[1]).removeprefix("page/").removeprefix("./")
            assert linked in ASSETS or linked in ("phase", "slots", "props", "health"), name


async def test_no_text_becomes_markup():
    """What models and people write is set as text; the browser tests try it."""
    for name, asset in ASSETS.items():
        assert not MARKUP.search(asset.content.decode()), name


async def test_the_application_starts_with_the_page():
    app = app_of()
    async with started(app), client_of(app) as client:
        assert "<title>phaseloop</title>" in (await client.get("/")).text
