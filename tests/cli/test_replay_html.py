"""Goal: `replay --timeline` tells what the recorder tells, and `--html` is a page that is one file.

Method: the story of a fixture, as `replay --why` tells it, against the records; the page's text
against what a browser would refuse.  That it works in a browser is tested in tests/browser.
"""

import itertools
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest

from phaseloop.cli.main import main
from phaseloop.cli.replay_html import bundle, in_order

TRACES = Path(__file__).parents[2] / "fixtures" / "traces"
TRACE = TRACES / "pair-barrier-fair.jsonl"
DATA = re.compile(
    r'<script type="application/x-ndjson" id="timeline-data">\n(.*?)</script>', re.DOTALL
)


def records_of(text: str) -> list[list]:
    return [record for line in text.splitlines() for record in json.loads(line)["records"]]


def stretches(records: list[list], slot: int) -> list[tuple]:
    return [(r[1], r[5]) for r in records if r[0] == "slot" and r[2] == slot]


def test_a_timeline_has_the_story_of_the_request(tmp_path, capsys):
    """Two prompts side by side: the one that is done first waits at the barrier."""
    out = tmp_path / "pair.timeline"
    assert main(["replay", str(TRACE), "--timeline", str(out), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert written == [str(out)]
    lines = out.read_text().splitlines()
    assert json.loads(lines[0])["head"]["source"] == TRACE.name
    assert main(["replay", str(TRACE), "--why", "req:0", "--json"]) == 0
    why = json.loads(capsys.readouterr().out)["why"]
    told = [(span["since_ns"], span["reason"]) for span in why["spans"]]
    # The first token and those after it are decoded alike: one stretch.
    told = [told[0], *(b for a, b in itertools.pairwise(told) if a[1] != b[1])]
    shown = stretches(records_of(out.read_text()), 0)
    lasting = [one for one, after in itertools.pairwise(shown) if after[0] > one[0]]
    assert lasting == told


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_page_holds_the_same_records(path, tmp_path, capsys):
    page, lines = tmp_path / "page.html", tmp_path / "lines"
    assert main(["replay", str(path), "--html", str(page), "--timeline", str(lines)]) == 0
    (data,) = DATA.findall(page.read_text())
    assert records_of(data) == records_of(lines.read_text())


def test_a_page_asks_nobody_for_anything(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["replay", str(TRACE), "--html", str(page)]) == 0
    text = page.read_text()
    assert not re.search(r'(?:src|href)="(?!#)(?!phase|slots|props|health)', text)
    assert "\nimport " not in text and "\nexport " not in text
    rules = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[0]
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for part in (script, style):
        assert b64encode(sha256(part.encode()).digest()).decode() in rules
    assert "default-src 'none'" in rules


def test_a_name_cannot_break_out_of_the_page(tmp_path, capsys):
    trace = tmp_path / "</script><script>alert(1)<!--&.jsonl".replace("/", "\u2215")
    trace.write_bytes(TRACE.read_bytes())
    page = tmp_path / "page.html"
    assert main(["replay", str(trace), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script>alert" not in text
    (data,) = DATA.findall(text)
    assert json.loads(data.splitlines()[0])["head"]["source"] == trace.name


def test_an_output_may_not_be_the_trace(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(TRACE.read_bytes())
    for option in ("--html", "--timeline"):
        assert main(["replay", str(trace), option, str(trace)]) == 2
        assert "would overwrite the trace" in capsys.readouterr().err
    assert trace.read_bytes() == TRACE.read_bytes()


def test_a_directory_that_is_not_there_is_named(tmp_path, capsys):
    missing = tmp_path / "nowhere" / "page.html"
    assert main(["replay", str(TRACE), "--html", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err


def test_modules_come_after_what_they_import():
    names = list(in_order("main.js"))
    assert names[-1] == "main.js"
    assert len(names) == len(set(names))
    assert names.index("looks.js") < names.index("paint.js") < names.index("timeline.js")
    script = bundle("main.js")
    for name in names:
        assert script.count(f"const module_{name[:-3]} =") == 1
