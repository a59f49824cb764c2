"""A headless Chromium and a server for it to visit; without a browser these tests are skipped."""

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phaseloop.cli.child import ChildServer

try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    sync_playwright = None

NAMES = ("chromium", "chromium-browser", "google-chrome")
ENGINE = "v100x4-qwen27b"
START_S = 30

sys.path.insert(0, str(Path(__file__).parent))


def path_of_browser() -> str:
    """Skips the test, saying why, if there is none."""
    if sync_playwright is None:
        pytest.skip("no playwright: pip install 'phaseloop[dev]'")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path")
    return found


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Per module, since until its end an event loop runs in this thread: others need theirs."""
    path = path_of_browser()
    # Chromium's own sandbox does not start for the superuser, as in containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: "Browser") -> "Iterator[Callable[..., Page]]":
    """A page in a context of its own; the arguments are those of the context.

    The test fails if the page had an error, or was refused something by its own policy.
    """
    with ExitStack() as contexts:
        problems: list[str] = []

        def opened(url: str, **options: object) -> "Page":
            context = browser.new_context(**options)
            contexts.callback(context.close)
            page = context.new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: note(message, problems))
            page.goto(url)
            return page

        yield opened
    assert not problems


def note(message: object, problems: list[str]) -> None:
    text = str(getattr(message, "text", message))
    if "Content Security Policy" in text:
        problems.append(text)


class Servers:
    """`phaseloop serve` processes, minded by an event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._children: list[ChildServer] = []

    def start(self, *arguments: str) -> str:
        """The address of one more, once it is ready."""
        child = ChildServer(["--sim", ENGINE, *arguments])
        future = asyncio.run_coroutine_threadsafe(child.__aenter__(), self._loop)
        address = future.result(START_S).address
        self._children.append(child)
        return f"http://{address.host}:{address.port}"

    def close(self) -> None:
        for child in self._children:
            end = asyncio.run_coroutine_threadsafe(child.__aexit__(None, None, None), self._loop)
            end.result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    path_of_browser()
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def server(servers: Servers) -> str:
    """One for the tests that leave it as it was: eight times as fast as the engine it pretends."""
    return servers.start("--sim-speed", "8")
