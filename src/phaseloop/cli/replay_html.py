"""A trace as a timeline: records that the live page can open, or a page that is one file.

The reducer says anew what each slot did and why; the recorder that feeds the live page puts it into
records.  The page is the live page itself with its parts put inside and the records beside them, so
it opens from a disk, without a server, and asks nobody for anything.
"""

import html
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec

from phaseloop.core.state import State
from phaseloop.http.page_files import ASSETS, INDEX
from phaseloop.runtime.timeline import Batch, Recorder, head_of
from phaseloop.sim.replay import Step

EVENTS_PER_LINE = 256
ENTRY = "main.js"
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
EXPORT_LIST = re.compile(r"^export \{([^}]*)\};\n", re.MULTILINE)

Write = Callable[[bytes], object]


class TimelineFile:
    """Watches a fold and writes a line of records for every few hundred events."""

    def __init__(self, write: Write, state: State, source: str) -> None:
        """`write` gets whole lines; `source` is the name that the page shows."""
        self._write = write
        self._recorder = Recorder(state, 0)
        self._now_ns = 0
        self._put(Batch(0, self._recorder.standing(0), head_of(state, source)))

    def see(self, step: Step) -> None:
        self._recorder.observe(step.event, step.before, step.after, step.effects)
        self._now_ns = step.event.at_ns
        if step.seq % EVENTS_PER_LINE == EVENTS_PER_LINE - 1:
            self._take()

    def close(self) -> None:
        self._take()

    def _take(self) -> None:
        records = self._recorder.take(self._now_ns)
        assert not self._recorder.has_overflowed, "so few events have fewer records"
        self._put(Batch(self._now_ns, records))

    def _put(self, batch: Batch) -> None:
        self._write(msgspec.json.encode(batch) + b"\n")


class TimelinePage:
    """The same, within a page."""

    def __init__(self, out: BinaryIO, state: State, source: str) -> None:
        """`out` is open for bytes, and the caller closes it."""
        self._out = out
        before, self._after = page_around(source)
        out.write(before)
        self._file = TimelineFile(self._write, state, source)
        self.see = self._file.see

    def close(self) -> None:
        self._file.close()
        self._out.write(self._after)

    def _write(self, line: bytes) -> None:
        # Nothing in a record may end the element that it stands in.
        self._out.write(line.replace(b"<", b"\\u003c"))


# --- the page -------------------------------------------------------------------------------------


def page_around(source: str) -> tuple[bytes, bytes]:
    """What comes before the records, and what after."""
    style, script = text_of("page.css"), bundle(ENTRY)
    page = text_of(INDEX)
    page = re.sub(r"<title>.*</title>", lambda _: f"<title>{html.escape(source)}</title>", page)
    page = re.sub(r'<link rel="icon".*>\n', "", page)
    page = re.sub(r'<link rel="stylesheet".*>\n', lambda _: f"<style>{style}</style>\n", page)
    page = re.sub(r"<script type=.*</script>\n", lambda _: policy(style, script), page)
    before, _, after = page.rpartition("</body>")
    data = '<script type="application/x-ndjson" id="timeline-data">\n'
    entry = f'</script>\n<script type="module">{script}</script>\n</body>'
    return (before + data).encode(), (entry + after).encode()


def policy(style: str, script: str) -> str:
    """The browser is held to what was put in here."""
    rules = f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}"
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'


def hashed(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def text_of(name: str) -> str:
    text = ASSETS[name].content.decode()
    assert Path(name).suffix == ".html" or "</" not in text, f"{name} would end its own element"
    return text


def bundle(entry: str) -> str:
    """Modules as one script: each a function that returns what it exports, in order of use."""
    return "".join(f"const {variable(name)} = {closure(name)};\n" for name in in_order(entry))


def in_order(entry: str) -> Iterator[str]:
    """Every module once, after those that it imports."""
    done: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name in done:
            return
        done.add(name)
        for _, imported in IMPORT.findall(text_of(name)):
            yield from visit(imported)
        yield name

    yield from visit(entry)


def closure(name: str) -> str:
    text = text_of(name)
    exported = EXPORT.findall(text)
    for names in EXPORT_LIST.findall(text):
        exported += [one.strip() for one in names.split(",") if one.strip()]
    text = EXPORT_LIST.sub("", text)
    text = IMPORT.sub(lambda found: f"const {{{found[1]}}} = {variable(found[2])};\n", text)
    text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
    return f"(() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})()"


def variable(name: str) -> str:
    return f"module_{Path(name).stem}"
