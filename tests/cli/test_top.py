"""Goal: `phaseloop top` shows what it is told, and says what is wrong with whom it cannot watch.

Method: a server with answers known by heart, on the loopback interface; batches whose rates and
spans are arithmetic; every screen as the text that a terminal would show.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from rich.console import Console

from phaseloop.cli.main import main
from phaseloop.cli.top_board import PAST_NS, Board
from phaseloop.cli.top_screen import NAMES, SIGNS, screen
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, initial
from phaseloop.runtime.timeline import (
    LOOKS,
    Batch,
    End,
    Figures,
    Line,
    Recorder,
    Stretch,
    Turn,
    head_of,
)

SECOND = 1_000_000_000
STATE = initial(Limits(2, 64, 4096, 32), PRESETS["barrier-fair"])
OPENING = Batch(0, Recorder(STATE, 0).standing(0), head_of(STATE, "live"))


def sse(*batches: Batch) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(batch) + b"\n\n" for batch in batches)


@contextmanager
def answering(status: int, kind: str, body: bytes) -> Iterator[str]:
    """The address of a server that always answers so; what it was asked for is in `asked`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


asked: list[tuple[str, str | None]] = []


def text_of(board: Board, problem: str = "") -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(screen(board, "server:1", problem))
    return captured.get()


def board_of(*batches: Batch) -> Board:
    board = Board()
    for batch in (OPENING, *batches):
        board.take(batch)
    return board


# --- --once ---------------------------------------------------------------------------------------


def test_one_state_is_printed(capsys):
    with answering(200, "text/event-stream", sse(OPENING)) as url:
        asked.clear()
        assert main(["top", url + "/below", "--once", "--api-key", "secret"]) == 0
    assert asked == [("/below/phase/events", "Bearer secret")]
    shown = capsys.readouterr().out
    assert "seated 0 of 2" in shown
    assert "KV pages 0 of 32" in shown
    assert "barrier-fair" in shown


def refused(body: str) -> bytes:
    return json.dumps({"error": {"message": body}}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "body", "complaint"),
    [
        (404, "text/html", b"<h1>nothing</h1>", "is no phaseloop server: 404"),
        (200, "text/html", b"<h1>welcome</h1>", "is no phaseloop server"),
        (500, "application/json", b"[1]", "is no phaseloop server: 500"),
        (401, "application/json", refused("Invalid API Key"), "--api-key"),
        (503, "application/json", refused("Loading model"), "Loading model; try again"),
        (503, "text/plain", b"busy", "is no phaseloop server: 503"),
        (200, "text/event-stream", b"data: hello\n\n", "another version"),
        (200, "text/event-stream", b'data: {"now_ns":1,"records":[["x"]]}\n\n', "another version"),
        (200, "text/event-stream", sse(Batch(1, (Stretch(1, 0, "idle"),))), "does not have"),
        (200, "text/event-stream", sse(Batch(1, (), OPENING.head)), "how its slots stand"),
    ],
)
def test_what_is_no_phaseloop_is_named(status, kind, body, complaint, capsys):
    with answering(status, kind, body) as url:
        assert main(["top", url, "--once"]) == 1
    said = capsys.readouterr().err
    assert complaint in said
    assert said.startswith(f"phaseloop: {url}: ")
    assert said.count("\n") == 1


def test_a_server_that_is_not_there(capsys):
    with answering(200, "", b"") as url:
        pass
    assert main(["top", url, "--once"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://there", "http://", "http://host:port"])
def test_an_address_that_is_none(url, capsys):
    assert main(["top", url, "--once"]) == 1
    assert url in capsys.readouterr().err


def test_without_a_terminal_it_points_to_once(capsys):
    assert main(["top", "http://127.0.0.1:1"]) == 2
    assert "--once" in capsys.readouterr().err


# --- the board ------------------------------------------------------------------------------------


def test_rates_are_taken_over_two_seconds():
    """100 prompt and 10 generated tokens each half second."""
    half = SECOND // 2
    board = board_of(
        *(Batch(n * half, (Figures(n * half, 100 * n, 10 * n, 5, 2, 0),)) for n in range(1, 11))
    )
    rates = board.rates()
    assert rates is not None
    assert (rates.prompt, rates.generated) == (200, 20)
    assert [sample.generated for sample in board.samples] == [20] * 5
    assert "tokens/s: prompt 200, answers 20" in text_of(board)
    board.take(Batch(10 * SECOND, ()))
    quiet = board.rates()
    assert quiet is not None
    assert (quiet.prompt, quiet.generated) == (0, 0)


def test_rates_are_unknown_at_first():
    board = board_of(Batch(SECOND // 2, (Figures(SECOND // 2, 100, 10, 5, 2, 0),)))
    assert board.rates() is None


def test_a_strip_shows_the_past():
    """30 seconds in 6 signs: each stands for its middle, 2.5 s after it begins."""
    ready = Stretch(20 * SECOND, 1, "ready", "ready", "barrier", 7, 0, (3,))
    decode = Stretch(27 * SECOND, 1, "decode", "generating", "in_round", 7)
    board = board_of(Batch(30 * SECOND, (ready, decode)))
    assert list(board.looks(1, 6)) == ["idle", "idle", "idle", "idle", "ready", "decode"]
    late = Board()
    late.take(Batch(29 * SECOND, board_records(29 * SECOND), OPENING.head))
    late.take(Batch(30 * SECOND, ()))
    assert list(late.looks(1, 3)) == [None, None, None]
    assert list(late.looks(1, 30))[-1] == "idle"


def board_records(at_ns: int):
    return Recorder(STATE, at_ns).standing(at_ns)


def test_a_slot_says_since_when_and_why():
    stretch = Stretch(2 * SECOND, 1, "ready", "ready", "barrier", 7, 1, (3, 4))
    shown = text_of(board_of(Batch(5 * SECOND, (stretch,))))
    row = next(line for line in shown.splitlines() if line.startswith("1 "))
    assert "▌ ready" in row
    assert "#7.1" in row
    assert "3.0 s" in row and "3.0 s+" not in row
    assert "its prompt is done" in row


def test_what_began_before_is_marked():
    """A slot that was generating when one began to look."""
    records = tuple(
        Stretch(0, 0, "decode", "generating", "in_round", 1)
        if isinstance(record, Stretch) and record.slot == 0
        else record
        for record in OPENING.records
    )
    board = Board()
    board.take(Batch(0, records, OPENING.head))
    board.take(Batch(SECOND, ()))
    assert "1.0 s+" in text_of(board)


def test_phase_queue_and_ends_are_shown():
    shown = text_of(
        board_of(
            Batch(
                1,
                (
                    Turn(1, "prefill", 3, True, "barrier-fair"),
                    Line(1, 12, "cohort_sealed", 40),
                    End(1, 39, None, "deadline"),
                    End(1, 38, 0, "deadline"),
                ),
            )
        ),
        problem="the server has ended the stream; trying again",
    )
    assert "prefill   cohort 3, sealed   barrier-fair" in shown
    assert "queue 12   first #40: arrived after a member" in shown
    assert "ended early: deadline 2" in shown
    assert "the server has ended the stream" in shown


def test_the_past_is_forgotten():
    board = board_of()
    for second in range(1, 200):
        at_ns = second * SECOND
        look = "prefill" if second % 2 else "idle"
        figures = Figures(at_ns, second, second, 0, 0, 0)
        board.take(Batch(at_ns, (Stretch(at_ns, 0, look), figures)))
    assert len(list(board._pasts[0])) <= PAST_NS // SECOND + 2
    assert len(board._figures) <= 4
    assert len(board.samples) == 60


def test_every_look_has_its_own_sign():
    assert set(NAMES) == set(LOOKS) == set(SIGNS) - {None}
    busy = {look: sign for look, (sign, _) in SIGNS.items() if look not in (None, "leaving")}
    assert len(set(busy.values())) == len(busy)


def test_what_a_server_says_cannot_steer_the_terminal():
    board = board_of(Batch(1, (Turn(1, "idle", 0, False, "\x1b]0;pwned\x07[bold]x"),)))
    shown = text_of(board)
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert "[bold]x" in shown
