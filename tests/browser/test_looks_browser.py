"""Goal: the page can be read in both colour schemes, on narrow screens, and without seeing it.

Method: headless Chromium; colours and places are asked of the browser.
"""

import pytest

pytest.importorskip("playwright", reason="no playwright: pip install 'phaseloop[dev]'")

from playwright.sync_api import expect
from visits import wait_until_live


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_colour_scheme_and_can_be_switched(server, open_page, scheme):
    page = open_page(server, color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    other = {"light": "dark", "dark": "light"}
    colours = {"light": "rgb(246, 247, 248)", "dark": "rgb(15, 19, 23)"}
    assert page.evaluate(background) == colours[scheme]
    page.get_by_role("button", name=f"{other[scheme].title()} colours").click()
    assert page.evaluate(background) == colours[other[scheme]]
    page.get_by_role("button", name=f"{scheme.title()} colours").click()
    assert page.evaluate(background) == colours[scheme]


def test_a_narrow_screen_shows_everything_below_each_other(server, open_page):
    page = open_page(server, viewport={"width": 360, "height": 700})
    wait_until_live(page)
    widths = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert widths[0] <= widths[1]
    chat, phases = page.locator("#chat").bounding_box(), page.locator("#phases").bounding_box()
    assert chat["y"] + chat["height"] <= phases["y"]


@pytest.mark.parametrize("width", [360, 1280])
def test_long_counters_keep_out_of_each_others_way(server, open_page, width):
    """All is written and measured at once, so that no figure of the server comes between."""
    page = open_page(server, viewport={"width": width, "height": 720})
    wait_until_live(page)
    spare = page.evaluate(
        """() => {
             for (const [id, text] of [["cohort", "123,456"], ["pages", "1,563 of 1,563"]])
               document.getElementById(`count-${id}`).textContent = text;
             document.getElementById("count-cohort-name").textContent = "Cohort, sealed";
             return [...document.querySelectorAll("#counters dt, #counters dd")].map((part) => {
               const text = document.createRange();
               text.selectNodeContents(part);
               const box = part.parentElement.getBoundingClientRect();
               return box.right - text.getBoundingClientRect().right;
             });
           }"""
    )
    assert len(spare) == 14
    assert min(spare) >= 0


def test_every_control_has_a_name_and_landmarks_lead_to_it(server, open_page):
    page = open_page(server)
    wait_until_live(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, canvas[tabindex]")]
             .filter((e) => e.offsetParent && !(e.getAttribute("aria-label") || e.labels?.length
                     || e.textContent.trim()))
             .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for name in ("Chat", "Timeline"):
        expect(page.get_by_role("region", name=name)).to_be_visible()
    expect(page.get_by_role("main")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the chat")
