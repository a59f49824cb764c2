"""Takes the pictures of docs/images again: `python tests/browser/screenshots.py`.

A server that pretends is asked four prompts of different lengths, and one more in the chat; the
rest is what a visitor would see.
"""

import json
import shutil
import sys
import threading
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, Page, expect, sync_playwright
from visits import ask, until_idle, wait_until_live

from conftest import NAMES, Servers
from phaseloop.cli.main import main

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
TRACE = ROOT / "fixtures" / "traces" / "busy-barrier-fair.jsonl"
PROMPTS = ((300, 60), (1500, 40), (2200, 70), (500, 40), (900, 60))  # words, tokens
SIZE = {"width": 1280, "height": 720}


def complete(url: str, words: int, tokens: int) -> None:
    text = f"{words} " + "word " * words  # no two begin alike, so nothing is shared
    body = json.dumps({"prompt": text, "max_tokens": tokens}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body)).read()


def live(browser: Browser, url: str, scheme: str) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(url)
    wait_until_live(page)
    threads = [threading.Thread(target=complete, args=(url, *prompt)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    ask(page, "What does a request wait for?", max_tokens=60)
    page.locator("#ask summary").click()
    expect(page.locator("#chat-status")).to_contain_text("answer complete", timeout=60_000)
    for thread in threads:
        thread.join()
    until_idle(page)
    expect(page.locator("#count-phase")).to_have_text("idle")
    point_at_a_wait(page)
    page.screenshot(path=IMAGES / f"page-{scheme}.png")


def point_at_a_wait(page: Page) -> None:
    """Where a slot is ready and waits: found by the colour of its stripes."""
    place = page.evaluate(
        """() => {
             document.getElementById("pause").click();
             document.getElementById("fit").click();
             return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
               const canvas = document.getElementById("canvas");
               const { width, height } = canvas;
               const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
               for (let y = 110; y < height; y += 8) for (let x = 80; x < width; x++) {
                 const at = 4 * (y * width + x);
                 const isReady = data[at] > 200 && data[at + 1] > 140 && data[at + 2] < 80;
                 if (isReady) return done([x + 20, y]);
               }
               done(null);
             })));
           }"""
    )
    assert place is not None, "nobody waited"
    page.locator("#canvas").hover(position={"x": place[0], "y": place[1]})


def one_file(browser: Browser, folder: Path) -> None:
    path = folder / "trace.html"
    assert main(["replay", str(TRACE), "--html", str(path)]) == 0
    page = browser.new_page(viewport={"width": 1100, "height": 600})
    page.goto(path.as_uri())
    expect(page.locator("#source")).to_have_text(TRACE.name)
    page.locator("#canvas").hover(position={"x": 700, "y": 150})
    page.screenshot(path=IMAGES / "trace.png")


def take() -> None:
    IMAGES.mkdir(exist_ok=True)
    path = next(filter(None, map(shutil.which, NAMES)))
    servers = Servers()
    try:
        with sync_playwright() as playwright, TemporaryDirectory() as folder:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                live(browser, servers.start("--sim-speed", "3"), scheme)
            one_file(browser, Path(folder))
            browser.close()
    finally:
        servers.close()


if __name__ == "__main__":
    sys.exit(take())
