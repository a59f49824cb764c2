"""Goal: people can chat, see what each slot did and why, and open a trace, by mouse or keyboard.

Method: headless Chromium on `phaseloop serve --sim`, and on files that `phaseloop replay` wrote.
What is on the timeline is read as a screen reader would hear it.
"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="no playwright: pip install 'phaseloop[dev]'")

from playwright.sync_api import expect
from visits import ask, ask_endlessly, complete, readouts, until_idle, wait_until_live

from phaseloop.cli.main import main

TRACES = Path(__file__).parents[2] / "fixtures" / "traces"
TRACE = TRACES / "busy-barrier-fair.jsonl"
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
COHORT, PHASE, QUEUE, SLOT_0 = range(4)  # lanes, from the top


# --- chat -----------------------------------------------------------------------------------------


def test_an_answer_is_streamed_with_its_figures(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    ask(page, "What is a phase?", max_tokens=6)
    expect(page.locator("#chat-status")).to_have_text("answer complete, 6 tokens")
    messages = page.locator("#messages li")
    expect(messages).to_have_count(2)
    expect(messages.first.locator(".text")).to_have_text("What is a phase?")
    expect(messages.last.locator(".text")).not_to_be_empty()
    figures = messages.last.locator(".figures").inner_text()
    for part in (r"6 tokens, [\d.]+/s", r"prompt \d+, [\d.]+/s", "queue", "prefill", "barrier"):
        assert re.search(part, figures), part
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_an_answer_can_be_stopped(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    ask_endlessly(page)
    expect(page.locator("#messages li").last.locator(".text")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_have_text("stopped")
    expect(page.locator("#messages li").last.locator(".figures")).to_have_text("stopped by you")
    until_idle(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_an_answer_can_be_asked_for_again(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    sent = []
    page.on("request", lambda request: sent.append(request.post_data))
    ask(page, "Say it.", max_tokens=5)
    expect(page.locator("#chat-status")).to_have_text("answer complete, 5 tokens")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#messages li")).to_have_count(2)
    expect(page.locator("#chat-status")).to_have_text("answer complete, 5 tokens")
    asked = [json.loads(body)["messages"] for body in sent if body]
    assert asked == [[{"role": "user", "content": "Say it."}]] * 2
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#messages li")).to_have_count(0)


def test_the_conversation_and_the_settings_are_sent(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    ask(page, "One.", max_tokens=3)
    expect(page.locator("#chat-status")).to_have_text("answer complete, 3 tokens")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Two.")
    body = json.loads(sent.value.post_data)
    assert [message["role"] for message in body["messages"]] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.5, 7, 3)


def test_enter_sends_and_shift_enter_does_not(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    prompt = page.get_by_label("Message", exact=True)
    prompt.fill("first")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("second")
    expect(page.locator("#messages li")).to_have_count(0)
    prompt.press("Enter")
    expect(page.locator("#messages li .text").first).to_have_text("first\nsecond")


def test_an_error_is_told(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    ask(page, "word " * 300_000)
    figures = page.locator("#messages li.failed .figures")
    expect(figures).to_contain_text("context", timeout=20_000)
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def test_a_message_that_got_no_answer_is_not_sent_again(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Lost.", max_tokens=3)
    expect(page.locator("#messages li.failed")).to_have_count(1)
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Found.")
    assert json.loads(sent.value.post_data)["messages"] == [{"role": "user", "content": "Found."}]
    expect(page.locator("#chat-status")).to_have_text("answer complete, 3 tokens")


def test_nothing_that_is_written_becomes_markup(server, open_page):
    """Neither by a person, nor by a model, nor by a server's error."""
    page = open_page(server)
    wait_until_live(page)
    delta = {"choices": [{"delta": {"reasoning_content": HOSTILE, "content": HOSTILE}}]}
    error = {"error": {"message": HOSTILE}}
    body = f"data: {json.dumps(delta)}\n\ndata: {json.dumps(error)}\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    ask(page, HOSTILE)
    answer = page.locator("#messages li").last
    expect(answer.locator(".figures")).to_have_text(HOSTILE)
    expect(answer.locator(".text").last).to_have_text(HOSTILE)
    expect(page.locator("#messages li").first.locator(".text")).to_have_text(HOSTILE)
    assert page.locator("#messages img, #messages script").count() == 0
    assert page.evaluate("window.pwned") is None


# --- the key --------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_the_tab(servers, open_page):
    page = open_page(servers.start("--api-key", "secret"))
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Use it").click()
    expect(dialog).to_be_visible()
    expect(page.locator("#connection")).to_have_text("wants a key")
    page.get_by_label("Key", exact=True).fill("secret")
    page.get_by_label("Key", exact=True).press("Enter")
    wait_until_live(page)
    ask(page, "Hello.", max_tokens=3)
    expect(page.locator("#chat-status")).to_have_text("answer complete, 3 tokens")
    page.reload()
    wait_until_live(page)
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


# --- the timeline ---------------------------------------------------------------------------------


def test_two_requests_go_through_prefill_wait_and_decode(servers, open_page):
    """The short prompt is done first and waits for the long one; then both generate."""
    page = open_page(servers.start("--sim-speed", "4"))
    wait_until_live(page)
    complete(page, (200, 20), (900, 20))
    until_idle(page)
    expect(page.locator("#count-phase")).to_have_text("idle")
    lanes = [readouts(page, SLOT_0), readouts(page, SLOT_0 + 1)]
    short = next(lane for lane in lanes if any("ready" in text for text in lane))
    looks = [re.match(r"slot \d: ([a-z ,]+) for", text)[1] for text in short]
    assert [look for look in looks if "turn" not in look] == [
        "idle", "prefill", "ready, waits", "decode", "idle",
    ]  # fmt: skip
    waits = next(text for text in short if "ready, waits" in text)
    assert "barrier: its prompt is done; all generate together" in waits
    assert re.search(r"waits for #\d", waits)
    phases = [text.split(" for ")[0] for text in readouts(page, PHASE)]
    assert list(dict.fromkeys(phases)) == ["idle", "prefill", "decode"]
    assert any("sealed" in text for text in readouts(page, COHORT))


def test_pointing_at_a_slot_says_what_it_does(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    canvas = page.locator("#canvas")
    right = canvas.evaluate("(canvas) => canvas.clientWidth") - 4
    canvas.hover(position={"x": right, "y": 140})
    tip = page.locator("#tip")
    expect(tip).to_contain_text("idle for")
    expect(tip).to_contain_text("nobody sits there")
    expect(tip).not_to_have_text(tip.inner_text())  # time runs on under a mouse that rests


def test_the_slots_are_also_a_table(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    page.get_by_text("Slots now").click()
    expect(page.locator("#slots tr")).to_have_count(4)
    ask_endlessly(page)
    expect(page.locator("#slots")).to_contain_text("decode")
    expect(page.locator("#slots")).to_contain_text("the engine works on it now")
    expect(page.locator("#count-seated")).to_have_text("1 of 4")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#slots")).not_to_contain_text("decode")


def test_it_pauses_zooms_and_follows(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    pause = page.locator("#pause")
    expect(pause).to_have_text("Pause")
    canvas = page.locator("#canvas")
    canvas.press(" ")
    expect(pause).to_have_text("Follow")
    expect(pause).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#span")).to_have_text("30.0 s in view")
    page.get_by_role("button", name="Zoom in").click()
    expect(page.locator("#span")).to_have_text("18.8 s in view")
    canvas.press("-")
    expect(page.locator("#span")).to_have_text("30.0 s in view")
    canvas.press("End")
    expect(pause).to_have_text("Pause")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 350, box["y"] + 100)
    page.mouse.up()
    expect(pause).to_have_text("Follow")


def test_the_page_works_before_the_model_does(servers, open_page):
    page = open_page(servers.start())
    wait_until_live(page)
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    page.route("**/phase/events", lambda route: route.fulfill(status=503, json=loading))
    page.reload()
    expect(page.locator("#connection")).to_have_text("the model is loading")
    page.unroute("**/phase/events")
    wait_until_live(page)


# --- traces ---------------------------------------------------------------------------------------


@pytest.fixture
def timeline(tmp_path, capsys) -> Path:
    path = tmp_path / "busy.timeline"
    assert main(["replay", str(TRACE), "--timeline", str(path)]) == 0
    return path


def test_a_timeline_is_opened(server, open_page, timeline):
    page = open_page(server)
    wait_until_live(page)
    page.get_by_label("Open a trace").set_input_files(timeline)
    expect(page.locator("#source")).to_have_text(TRACE.name)
    expect(page.locator("#span")).to_have_text("27.5 s in view")
    assert any("request 0" in text for text in readouts(page, SLOT_0))
    page.get_by_role("button", name="Back to live").click()
    expect(page.locator("#source")).to_have_text("")
    expect(page.locator("#pause")).to_be_visible()


def test_a_raw_trace_shows_rounds_and_names_the_command(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    drop(page, TRACE.name, TRACE.read_text())
    notice = page.locator("#notice")
    expect(notice).to_contain_text("129 events, 22 requests, 82 rounds, 86 tokens")
    command = f"phaseloop replay {TRACE.name} --html {TRACE.name}.html"
    expect(notice.locator("code")).to_have_text(command)
    lane = readouts(page, 0)
    assert any(text.startswith("engine: prefill") for text in lane)
    assert any(text.startswith("engine: decode") for text in lane)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ("hello", "line 1"),
        ('{"line":"header"}', "no trace's header"),
        ('{"now_ns":1,"records":[]}', "does not begin with a head"),
        (TRACE.read_text()[:2000] + "\nnonsense\n" + TRACE.read_text()[2000:], "line"),
        (f'{{"{HOSTILE}":1}}'.replace('"window.pwned=1"', ""), "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(server, open_page, content, complaint):
    page = open_page(server)
    wait_until_live(page)
    drop(page, "broken.jsonl", content)
    expect(page.locator("#notice")).to_contain_text(complaint)
    expect(page.locator("#loading")).to_be_hidden()
    assert page.locator("#notice img").count() == 0
    wait_until_live(page)


def test_a_torn_last_line_is_left_out(server, open_page, timeline):
    page = open_page(server)
    wait_until_live(page)
    drop(page, "torn.timeline", timeline.read_text()[:-40])
    expect(page.locator("#notice")).to_contain_text("last line is torn")
    expect(page.locator("#source")).to_have_text(TRACE.name)


def test_a_large_trace_is_read_in_pieces_and_can_be_given_up(server, open_page, tmp_path):
    """24 MB of events: the page goes on while it reads, so it can be told to stop."""
    header, *events = TRACE.read_text().splitlines()
    lines = [line for line in events if '"line":"event"' in line]
    path = tmp_path / "large.jsonl"
    path.write_text("\n".join([header, *lines * 800]))
    assert path.stat().st_size > 16 << 20
    page = open_page(server)
    wait_until_live(page)
    page.evaluate(
        """() => {
             window.shares = [];
             const bar = document.getElementById("loading-bar");
             new MutationObserver(() => window.shares.push(bar.value))
               .observe(bar, { attributes: true });
           }"""
    )
    page.get_by_label("Open a trace").set_input_files(path)
    expect(page.locator("#notice")).to_contain_text("17,600 requests", timeout=30_000)
    shares = page.evaluate("window.shares")
    assert len({share for share in shares if 0 < share < 1}) > 5
    page.evaluate(
        """() => {
             const bar = document.getElementById("loading-bar");
             const stop = document.getElementById("loading-stop");
             new MutationObserver(() => bar.value > 0 && bar.value < 1 && stop.click())
               .observe(bar, { attributes: true });
           }"""
    )
    page.get_by_role("button", name="Back to live").click()
    page.get_by_label("Open a trace").set_input_files(path)
    expect(page.locator("#loading")).to_be_hidden()
    expect(page.locator("#live")).to_be_hidden()  # it is still the live one that is shown


def test_a_page_of_one_file_shows_the_trace(open_page, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["replay", str(TRACE), "--html", str(path)]) == 0
    page = open_page(path.as_uri())
    expect(page.locator("#source")).to_have_text(TRACE.name)
    expect(page).to_have_title(TRACE.name)
    expect(page.locator("#chat")).to_be_hidden()
    assert any("request 0" in text for text in readouts(page, SLOT_0))
    assert any("is first: " in text for text in readouts(page, QUEUE))


def drop(page, name: str, content: str) -> None:
    """As if the file had been dragged onto the page."""
    page.evaluate(
        """([name, content]) => {
             const data = new DataTransfer();
             data.items.add(new File([content], name));
             for (const kind of ["dragover", "drop"]) {
               const event = new DragEvent(kind, { dataTransfer: data, bubbles: true });
               document.body.dispatchEvent(event);
             }
           }""",
        [name, content],
    )
