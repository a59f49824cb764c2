"""Goal: whatever is sent to whatever route, the answer is an answer, and the server serves on.

Method: random bytes, random JSON, and requests that are nearly right with members of wrong types,
to every POST and PUT route of the table, in bounded numbers; no answer may be a fault of ours
(500), and after each the same small request still gets the same answer.
"""

import asyncio
import itertools
from contextlib import AsyncExitStack

import httpx
import msgspec
import pytest
from http_world import TextEngine, World, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phaseloop.http import later
from phaseloop.http.app import ROWS
from phaseloop.http.errors import STATUS
from phaseloop.http.served import HttpOptions
from phaseloop.text.chat_template import ChatTemplate

EXAMPLES = 150
TIMEOUT_S = 20  # of one example: a hang fails, however busy the machine
OPTIONS = HttpOptions(metrics=True, props=True, phase_control=True, body_bytes_max=100_000)
PATHS = sorted(
    (row.method, path.replace("{id_slot}", "0"))
    for row in ROWS
    if row.method in ("POST", "PUT")
    for path in row.paths
)
ANSWERING = sorted(set(PATHS) - {(row.method, path) for row in later.ROWS for path in row.paths})
NAMES = (
    "content", "tokens", "add_special", "parse_special", "with_pieces", "messages", "tools",
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort",
    "policy", "tg_quantum_ms", "serial_order", "prompt", "n_predict", "max_tokens", "temperature",
    "top_k", "top_p", "n", "stop", "stream", "stream_options", "logit_bias", "logprobs", "n_probs",
    "top_logprobs", "seed", "id_slot", "samplers", "response_format", "tool_choice", "priority",
    "deadline_ms", "max_queue_ms", "phaseloop", "repeat_last_n", "dry_sequence_breakers", "echo",
    "dry_multiplier", "min_p", "ignore_eos", "cache_prompt", "n_keep", "response_fields", "grammar",
    "sse_ping_interval", "timings_per_token", "return_progress", "lora", "t_max_predict_ms",
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "system", "assistant", "tool", "king"))},
        optional={"content": st.one_of(st.text(max_size=8), st.none(), st.integers())},
    ),
    max_size=3,
)
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
VALUES = st.recursive(
    st.one_of(LEAVES, MESSAGES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
# Small answers keep an example short; what is drawn may still overrule it.
USUAL = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "n_predict": 2}
REQUESTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
KINDS = set(STATUS)


class Runner:
    """One server for all examples, whose loop runs while somebody waits for an answer."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()

    def __enter__(self) -> "Runner":
        self._runner.__enter__()
        made = world(TextEngine(), OPTIONS, template=TEMPLATE)
        self.world: World = self._runner.run(self._stack.enter_async_context(made))
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.__exit__(*error)

    def send(self, method: str, path: str, content: bytes, **headers: str) -> httpx.Response:
        async def sent() -> httpx.Response:
            async with asyncio.timeout(TIMEOUT_S):
                return await self.world.client.request(
                    method, path, content=content, headers=headers
                )

        return self._runner.run(sent())


@pytest.fixture(scope="module")
def server():
    with Runner() as runner:
        yield runner


def check(server: Runner, method: str, path: str, content: bytes, **headers: str) -> None:
    answer = server.send(method, path, content, **headers)
    where = f"{method} {path} {content[:200]!r} -> {answer.status_code} {answer.text[:300]}"
    assert answer.status_code != 500, where
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["code"] == answer.status_code, where
        assert error["type"] in KINDS and error["message"], where
    still = server.send("POST", "/detokenize", b'{"tokens": []}')
    assert (still.status_code, still.json()) == (200, {"content": ""}), f"after {where}"


bounded = settings(
    max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], deadline=None
)


@bounded
@given(st.sampled_from(PATHS), st.binary(max_size=60))
def test_random_bytes(server, route, raw):
    check(server, *route, raw)


@bounded
@given(st.sampled_from(PATHS), VALUES)
def test_random_json(server, route, value):
    check(server, *route, msgspec.json.encode(value))


@settings(bounded, max_examples=4 * EXAMPLES)
@given(st.sampled_from(PATHS), REQUESTS)
def test_nearly_right_requests(server, route, request):
    check(server, *route, msgspec.json.encode(USUAL | request))


@bounded
@given(st.sampled_from(PATHS), st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_right_requests_with_a_few_bytes_changed(server, route, place, noise):
    raw = msgspec.json.encode(USUAL | {"content": "hello", "tokens": [1, 2], "stream": True})
    place %= len(raw)
    check(server, *route, raw[:place] + noise + raw[place + len(noise) :])


@pytest.mark.parametrize(("method", "path"), ANSWERING)
def test_numbers_at_their_edges(server, method, path):
    """Every member that may be a number, as each of those that break parsers."""
    edges = (
        0,
        -1,
        1e308,
        -1e308,
        2**31,
        2**31 - 1,
        -(2**31) - 1,
        2**63,
        2**64,
        10**30,
        0.5,
        1e-320,
    )
    numeric = [name for name in NAMES if name not in ("prompt", "messages")]
    for name, edge in itertools.product(numeric, edges):
        answer = server.send(method, path, msgspec.json.encode(USUAL | {name: edge}))
        assert answer.status_code != 500, f"{path} {name}={edge}: {answer.text[:300]}"


def test_strange_headers(server):
    for name in ("content-length", "authorization", "x-api-key", "x-request-id", "origin"):
        for value in ("", "\xff", "a" * 10_000, "-1", "\t", "null"):
            check(server, "POST", "/tokenize", b"{}", **{name: value.encode("latin-1")})
