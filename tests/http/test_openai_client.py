"""Goal: the openai package works unchanged: answers, streams, choices, likelihoods, errors.

Method: its asynchronous client against the application behind Hypercorn, on an engine with a known
text.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from http_world import world
from msgspec.structs import replace
from socket_server import listening
from storyteller import CHOSEN, OTHER, TOKENIZER, Storyteller

from phaseloop.engine.protocol import limits_of
from phaseloop.http.served import HttpOptions
from phaseloop.text.chat_template import ChatTemplate

pytestmark = pytest.mark.asyncio

TEXT = "the quick brown fox"
LENGTH = len(TOKENIZER.encode(TEXT))
MESSAGES: Any = [{"role": "system", "content": "Book"}, {"role": "user", "content": "jumps"}]


@asynccontextmanager
async def client(
    engine: Storyteller | None = None, *, api_key: str = "none", **fields: Any
) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        listening(engine or Storyteller(TEXT), template=ChatTemplate(), **fields) as server,
        openai.AsyncOpenAI(
            api_key=api_key, base_url=f"{server.url}/v1", max_retries=0, timeout=20
        ) as made,
    ):
        yield made


async def test_a_chat():
    async with client() as ai:
        answer = await ai.chat.completions.create(
            model="gpt-4o", messages=MESSAGES, seed=42, temperature=0.8
        )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("b")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == LENGTH + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_chat_stream_with_usage():
    text, usage, reasons, ids = "", None, [], set()
    async with client() as ai:
        stream = await ai.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            ids.add(chunk.id)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
    assert text == TEXT
    assert usage is not None
    assert usage.completion_tokens == LENGTH + 1
    assert [reason for reason in reasons if reason] == ["stop"]
    assert len(ids) == 1


async def test_the_helper_that_collects_a_stream():
    async with (
        client() as ai,
        ai.chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream,
    ):
        whole = await stream.get_final_completion()
    assert [choice.message.content for choice in whole.choices] == [TEXT, TEXT]


async def test_choices_and_stop_strings():
    def tell(content, choice):
        return TOKENIZER.encode(f"choice {choice}; over")

    async with client(Storyteller(tell=tell)) as ai:
        answer = await ai.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, stop=["; o"]
        )
    assert [choice.message.content for choice in answer.choices] == ["choice 0", "choice 1"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


async def test_logprobs_of_a_chat():
    async with client() as ai:
        answer = await ai.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == TEXT
    for token in logprobs.content:
        assert token.logprob == CHOSEN
        assert token.bytes is not None
        assert bytes(token.bytes).decode() == token.token
        assert [top.token for top in token.top_logprobs] == [token.token, "X"]


async def test_logit_bias():
    engine = Storyteller(TEXT)
    async with client(engine) as ai:
        await ai.chat.completions.create(
            model="tiny", messages=MESSAGES, logit_bias={str(OTHER): -100}
        )
    assert engine.contents[0].sampling.logit_bias == ((OTHER, -100.0),)


async def test_a_completion():
    async with client() as ai:
        answer = await ai.completions.create(
            model="tiny", prompt=["jumps", "over"], max_tokens=2, logprobs=1
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [CHOSEN, CHOSEN]


async def test_a_completion_stream():
    async with client() as ai:
        stream = await ai.completions.create(model="tiny", prompt="jumps", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == TEXT


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_field(stream):
    async with client() as ai:
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=stream, extra_body={"top_k": "many"}
            )
    assert caught.value.type == "invalid_request_error"
    assert "top_k: must be an integer" in caught.value.message


async def test_a_prompt_that_does_not_fit():
    async with client(Storyteller(TEXT, context_length=16)) as ai:
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(model="tiny", messages=MESSAGES)
    error: Any = caught.value.body
    assert caught.value.type == "exceed_context_size_error"
    assert error["n_ctx"] == 16
    assert error["n_prompt_tokens"] > 16


async def test_more_choices_than_slots():
    async with client() as ai:
        with pytest.raises(openai.BadRequestError, match="n: 3 choices need as many slots"):
            await ai.chat.completions.create(model="tiny", messages=MESSAGES, n=3)


async def test_a_wrong_key():
    options = HttpOptions(api_keys=("secret",))
    async with client(api_key="guessed", options=options) as ai:
        with pytest.raises(openai.AuthenticationError):
            await ai.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_what_is_not_built_yet():
    async with client() as ai:
        with pytest.raises(openai.InternalServerError) as caught:
            await ai.chat.completions.create(
                model="tiny", messages=MESSAGES, response_format={"type": "json_object"}
            )
    assert caught.value.status_code == 501
    assert "response_format: json_object" in caught.value.message


async def test_a_full_queue():
    engine = Storyteller(TEXT)
    limits = replace(limits_of(engine.describe()), queue_length_max=1)
    async with client(engine, limits=limits) as ai:
        with pytest.raises(openai.InternalServerError) as caught:
            prompts = [[1], [2], [3]]  # three want a seat, and there are two
            await ai.completions.create(model="tiny", prompt=prompts)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_an_error_in_mid_stream():
    async with client(Storyteller(TEXT, fails="decode")) as ai:
        stream = await ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        seen = 0
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                seen += 1
    assert seen == 2  # the role, and the token before
    assert caught.value.type == "server_error"


async def test_an_error_of_the_engine_before_the_answer():
    async with client(Storyteller(TEXT, fails="decode")) as ai:
        with pytest.raises(openai.InternalServerError) as caught:
            await ai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.status_code == 500


async def test_fields_of_openai_that_mean_nothing_here_are_accepted():
    ignored: Any = {
        "user": "somebody",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "verbosity": "low",
        "modalities": ["text"],
        "tools": [],
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }
    async with world(Storyteller(TEXT), template=ChatTemplate()) as here:
        body = {"messages": MESSAGES, **ignored}
        answer = await here.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
