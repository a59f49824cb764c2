"""Goal: what a server has computed it does not compute again, and reuse never shows in an answer.

Method: the cache scenarios of the reference (F7-F14), told over HTTP to tiny models, one whose
cache can be cut anywhere and one with recurrent states.  `cache_n` and `prompt_n` of an answer's
timings are what was found and what was computed; the measure of an answer is a server without
caches.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file, with_words
from serve_process import ServeProcess, client
from synthetic import decoder_file

from phaseloop.engine.reuse import END_MARGIN

TOKENS = 8
FILES = {
    "llama": lambda: decoder_file("llama", "Q4_K"),
    "hybrid": lambda: hybrid_file("Q4_K"),
}
pytestmark = pytest.mark.timeout(180)


def prompt(name: str, count: int) -> list[int]:
    """Tokens that no prompt of another name shares from its first one on."""
    return [(ord(name) + 11 * index * index) % 97 for index in range(count)]


@pytest.fixture(scope="module", params=sorted(FILES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache") / f"{request.param}.gguf"
    file = with_words(FILES[request.param]())
    file.metadata["context_length"] = 4096
    return file.write(path)


class Chat:
    """A server's client that checks each answer's account."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, tokens: list[int], **fields: Any) -> dict[str, Any]:
        body = {"prompt": tokens, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True,
                "return_tokens": True} | fields  # fmt: skip
        answer = self._http.post("/completion", json=body).raise_for_status().json()
        timings = answer["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == len(tokens)
        return answer

    def cached(self, tokens: list[int], **fields: Any) -> int:
        return self.ask(tokens, **fields)["timings"]["cache_n"]

    def held(self) -> list[int]:
        return [slot["n_prompt_tokens_cache"] for slot in self._http.get("/slots").json()]


@pytest.fixture
def serve(model: Path) -> Iterator[Any]:
    opened: list[Any] = []

    def start(*flags: str) -> Chat:
        line = ("-m", str(model), "-c", "4096", "-np", "2", "-t", "1", *flags)
        server = ServeProcess(*line).__enter__()
        opened.append(server)
        http = client(server.ready())
        opened.append(http)
        return Chat(http)

    yield start
    for one in reversed(opened):
        one.__exit__(None, None, None)


def least(length: int) -> int:
    """What a prompt finds at least of a beginning of that length that was a whole prompt's."""
    return length - END_MARGIN


def test_a_prompt_whose_slots_were_taken_is_found_in_host_ram(serve):
    """F7: a long prompt, two others into both slots, then the long one again and its extension."""
    chat = serve()
    long = prompt("a", 400)
    cold = chat.ask(long, id_slot=0)
    for name in "bc":
        chat.ask(prompt(name, 300), id_slot=0)
        chat.ask(prompt(name.upper(), 300), id_slot=1)
    again = chat.ask(long, id_slot=0)
    assert again["timings"]["cache_n"] >= least(400)
    assert again["tokens"] == cold["tokens"]
    assert chat.cached([*long, *prompt("x", 50)], id_slot=0) >= 400, "the next turn, in place"


def test_without_host_ram_what_slots_lose_is_lost(serve):
    """F8, the feature off by its flag."""
    chat = serve("--cache-ram", "0")
    long = prompt("a", 400)
    chat.ask(long, id_slot=0)
    for slot in (0, 1):
        chat.ask(prompt("bc"[slot], 300), id_slot=slot)
    assert chat.cached(long, id_slot=0) == 0


@pytest.mark.parametrize("similarity", ["0", "0.1"])
def test_a_pinned_slot_is_filled_from_host_ram(serve, similarity):
    """F9, F11: the slot named in the request holds nothing of the prompt, and gets it."""
    chat = serve("-sps", similarity)
    long = prompt("a", 400)
    cold = chat.ask(long, id_slot=0)
    chat.ask(prompt("b", 300), id_slot=0)
    again = chat.ask(long, id_slot=1)
    assert again["timings"]["cache_n"] >= least(400) and again["tokens"] == cold["tokens"]


def test_a_budget_too_small_for_a_prompt_takes_nothing_from_its_slot(serve):
    """F10: what cannot be copied stays where it is until its slot is wanted."""
    chat = serve("--cache-ram", "1")
    long = prompt("a", 2000)
    chat.ask(long, id_slot=0)
    chat.ask(prompt("b", 100), id_slot=1)
    assert chat.held()[0] >= 2000
    assert chat.cached([*long, 1, 2, 3], id_slot=0) == 2000


def test_a_borrowed_beginning_is_not_consumed(serve):
    """F12: C takes the beginning that it shares with A; A goes on as if nobody had."""
    chat = serve("-np", "3")
    shared = prompt("p", 200)
    first = [*shared, *prompt("a", 100)]
    chat.ask(shared, id_slot=0)
    chat.ask(first, id_slot=0)
    assert chat.cached([*shared, *prompt("c", 100)], id_slot=1) == 200
    longer = [*first, *prompt("n", 40)]
    warm = chat.ask(longer, id_slot=0)
    assert warm["timings"]["cache_n"] == 300
    assert warm["tokens"] == chat.ask(longer, id_slot=2, cache_prompt=False)["tokens"]


def test_a_small_share_of_a_prompt_is_still_used(serve):
    """F13: 48 of 400 tokens."""
    chat = serve()
    head = prompt("h", 48)
    chat.ask(head, id_slot=0)
    assert chat.cached([*head, *prompt("t", 352)], id_slot=1) == 48


def test_who_wants_no_cache_leaves_none(serve):
    """F14, and a warm append makes no copy: what it leaves behind is in its slot alone."""
    chat = serve()
    chat.ask(prompt("a", 200), id_slot=0, cache_prompt=False)
    assert chat.held() == [0, 0]
    assert chat.cached(prompt("a", 200), id_slot=0) == 0


def test_an_agent_of_thirty_turns_computes_next_to_nothing_twice(serve):
    chat = serve()
    tokens = prompt("s", 200)
    computed = 0
    for turn in range(30):
        tokens += prompt(chr(33 + turn), 40)
        answer = chat.ask(tokens)
        computed += answer["timings"]["prompt_n"]
        tokens += answer["tokens"]
    tokens = tokens[: -len(answer["tokens"])]
    again = computed - len(tokens)
    assert again / len(tokens) < 0.03, f"{again} of {len(tokens)} tokens were computed again"
    warm = answer["tokens"]
    assert warm == chat.ask(tokens, cache_prompt=False)["tokens"]
