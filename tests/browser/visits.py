"""What a visitor does on the page, in the words of the tests."""

import json

from playwright.sync_api import Page, Route, expect

READOUTS_MAX = 60
LANES = 7  # three above those of four slots


def wait_until_live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")


def ask(page: Page, text: str, max_tokens: int | None = None) -> None:
    if max_tokens is not None:
        page.locator("#ask summary").click()
        page.get_by_label("Most tokens").fill(str(max_tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def ask_endlessly(page: Page) -> None:
    """For an answer that ends only when it is stopped."""
    page.route("**/v1/chat/completions", go_on_past_the_end)
    ask(page, "Go on for ever.", max_tokens=50_000)


def go_on_past_the_end(route: Route) -> None:
    body = json.loads(route.request.post_data or "") | {"ignore_eos": True}
    route.continue_(post_data=json.dumps(body))


def complete(page: Page, *prompts: tuple[int, int]) -> None:
    """Let the server answer prompts of so many words with so many tokens, all at once."""
    page.evaluate(
        """(prompts) => Promise.all(prompts.map(([words, tokens]) =>
             fetch("v1/completions", { method: "POST", body: JSON.stringify(
               { prompt: "word ".repeat(words), max_tokens: tokens }) })
             .then((answer) => answer.json())))""",
        [list(prompt) for prompt in prompts],
    )


def until_idle(page: Page) -> None:
    """Wait until the server has nothing to do."""
    page.wait_for_function(
        """async () => {
             const phase = await (await fetch("phase")).json();
             return phase.slots.every((slot) => slot.role === null) && !phase.queue_length;
           }"""
    )


def readouts(page: Page, lane: int) -> list[str]:
    """What the keyboard finds in a lane of the timeline, from its beginning to its end."""
    canvas = page.locator("#canvas")
    for _ in range(LANES):
        canvas.press("ArrowUp")
    for _ in range(lane):
        canvas.press("ArrowDown")
    canvas.press("Home")
    found = [page.locator("#readout").inner_text()]
    for _ in range(READOUTS_MAX):
        canvas.press("ArrowRight")
        text = page.locator("#readout").inner_text()
        if beginning(text) == beginning(found[-1]):
            break
        found.append(text)
    return found


def beginning(readout: str) -> str:
    return readout.partition("Begins at")[2]
