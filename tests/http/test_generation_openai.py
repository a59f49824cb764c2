"""Goal: the OpenAI routes answer in OpenAI's shapes, with llama-server's additions.

Method: the whole application on an engine with a known text; objects are literals, written down
from the interface's description, except for durations.
"""

import json
from typing import Any

import pytest
from http_world import World, world
from storyteller import CHOSEN, OTHER, SECOND, TOKENIZER, Storyteller
from vocabularies import bpe_tokenizer

from phaseloop.text.chat_template import ChatTemplate, template_of

pytestmark = pytest.mark.asyncio

TEXT = "the quick brown fox"
IDS = list(TOKENIZER.encode(TEXT))
PIECES = [TOKENIZER.decode([token]) for token in IDS]
MESSAGES = [{"role": "user", "content": "jumps"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RENDERED = "<|im_start|>user\njumps<|im_end|>\n<|im_start|>assistant\n"
CHAT_LENGTH = len(TOKENIZER.encode(RENDERED, parse_special=True))
ID = "chatcmpl-"


def talking(engine: Storyteller | None = None, **fields: Any) -> Any:
    return world(engine or Storyteller(TEXT), template=ChatTemplate(), **fields)


def body_of(path: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "jumps"}
    return {**asked, **more}


async def post(here: World, path: str, **more: Any) -> Any:
    answer = await here.client.post(path, json=body_of(path, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def asked(path: str, engine: Storyteller | None = None, **more: Any) -> Any:
    async with talking(engine) as here:
        return await post(here, path, **more)


async def streamed(path: str, engine: Storyteller | None = None, **more: Any) -> list[Any]:
    """The events of a stream that ends as it must."""
    async with talking(engine) as here:
        answer = await here.client.post(path, json=body_of(path, stream=True, **more))
    assert answer.status_code == 200, answer.text
    *parts, done, rest = answer.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(part.startswith(b"data: {") for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


# --- chat -----------------------------------------------------------------------------------------


async def test_a_chat_answer():
    answer = await asked(CHAT, model="gpt-4")
    assert answer.pop("id").startswith(ID)
    assert answer.pop("timings")["predicted_n"] == len(IDS) + 1
    assert answer.pop("phaseloop")["policy"] == "barrier-fair"
    assert answer == {
        "choices": [
            {
                "finish_reason": "stop",
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
            }
        ],
        "created": 1_700_000_000,
        "model": "tiny",  # the server's name for it, not the request's
        "system_fingerprint": "b0.1.0",
        "object": "chat.completion",
        "usage": usage(CHAT_LENGTH, len(IDS) + 1),
    }


async def test_a_chat_stream():
    first, *middle, last = await streamed(CHAT, phaseloop=False)
    envelope = {
        "created": 1_700_000_000,
        "id": first["id"],
        "model": "tiny",
        "system_fingerprint": "b0.1.0",
        "object": "chat.completion.chunk",
    }

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"finish_reason": finish_reason, "index": 0, "delta": delta}
        return {"choices": [choice], **envelope}

    assert first == chunk({"role": "assistant", "content": None})
    assert middle == [chunk({"content": piece}) for piece in PIECES]
    assert last.pop("timings")["predicted_n"] == len(IDS) + 1
    assert last == chunk({}, "stop")


async def test_the_second_path_of_chat():
    async with talking() as here:
        answer = await here.client.post("/chat/completions", json=body_of(CHAT))
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


async def test_usage_at_the_end_of_a_stream():
    *others, last = await streamed(CHAT, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == usage(CHAT_LENGTH, len(IDS) + 1)
    assert "timings" in last
    assert not any("usage" in part or "timings" in part for part in others)
    assert others[-1]["choices"][0]["finish_reason"] == "stop"


async def test_timings_of_every_chunk_but_the_first():
    first, *others = await streamed(CHAT, timings_per_token=True)
    assert "timings" not in first
    assert all("timings" in part for part in others)


async def test_deltas_are_never_empty():
    """Not even where a token is half a character or may begin a stop string."""
    parts = await streamed(CHAT, Storyteller("a👍 brown fox"), stop=["brown fog"])
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert all(delta.get("content") != "" for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "a👍 brown fox"


@pytest.mark.parametrize("n", [1, 2])
async def test_choices_of_a_chat(n):
    def tell(content, choice):
        return TOKENIZER.encode(f"choice {choice}")

    answer = await asked(CHAT, Storyteller(tell=tell), n=n)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [f"choice {choice}" for choice in range(n)]
    length = len(TOKENIZER.encode("choice 0"))
    assert answer["usage"] == usage(CHAT_LENGTH, n * (length + 1))  # the prompt counts once


async def test_choices_of_a_chat_stream():
    def tell(content, choice):
        return TOKENIZER.encode("ab" * (choice + 1))

    parts = await streamed(CHAT, Storyteller(tell=tell), n=2)
    for index in (0, 1):
        choices = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": None}
        assert not any("role" in delta for delta in deltas[1:])
        assert "".join(delta.get("content") or "" for delta in deltas) == "ab" * (index + 1)
        assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]
    assert ["timings" in part for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("more", [{"max_tokens": 2}, {"max_completion_tokens": 2}])
async def test_a_limit_is_a_reason(more):
    answer = await asked(CHAT, **more)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


def likely(token: int, logprob: float) -> dict[str, Any]:
    piece = TOKENIZER.piece(token)
    return {"id": token, "token": piece.decode(), "bytes": list(piece), "logprob": logprob}


LOGPROBS = [
    likely(token, CHOSEN) | {"top_logprobs": [likely(token, CHOSEN), likely(OTHER, SECOND)]}
    for token in IDS
]


async def test_logprobs_of_a_chat():
    answer = await asked(CHAT, logprobs=True, top_logprobs=2)
    assert answer["choices"][0]["logprobs"] == {"content": LOGPROBS}
    without = await asked(CHAT, logprobs=True, top_logprobs=0)
    content = without["choices"][0]["logprobs"]["content"]
    assert content == [likely(token, CHOSEN) | {"top_logprobs": []} for token in IDS]


async def test_logprobs_of_a_chat_stream():
    parts = await streamed(CHAT, logprobs=True, top_logprobs=2)
    found = [part["choices"][0]["logprobs"]["content"] for part in parts[1:-1]]
    assert found == [[one] for one in LOGPROBS]
    assert "logprobs" not in parts[-1]["choices"][0]


async def test_tokens_without_text_of_their_own_keep_their_logprobs():
    tokens = TOKENIZER.encode("a👍b")
    parts = await streamed(CHAT, Storyteller("a👍b"), logprobs=True, top_logprobs=0)
    choices = [part["choices"][0] for part in parts]
    found = [
        one["id"] for choice in choices for one in choice.get("logprobs", {}).get("content", [])
    ]
    assert found == list(tokens)


CONTINUED = [*MESSAGES, {"role": "assistant", "content": "over "}]
ASKED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("more", "content"),
    [({}, "over " + TEXT), (ASKED, TEXT), (ASKED | {"echo": True}, "over " + TEXT)],
    ids=["unasked", "asked", "asked to repeat"],
)
async def test_the_last_message_is_continued(more, content):
    engine = Storyteller(TEXT)
    answer = await asked(CHAT, engine, messages=CONTINUED, **more)
    assert TOKENIZER.decode(engine.contents[0].tokens) == RENDERED + "over "
    assert answer["choices"][0]["message"]["content"] == content
    first, *others = await streamed(CHAT, messages=CONTINUED, **more)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    deltas = [part["choices"][0]["delta"] for part in others]
    assert deltas[0] == {"content": content.partition(TEXT)[0] + PIECES[0]}
    assert "".join(delta.get("content", "") for delta in deltas) == content


async def test_a_message_with_nothing_added_is_repeated_all_the_same():
    parts = await streamed(CHAT, Storyteller(""), messages=CONTINUED)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas == [{"role": "assistant", "content": None}, {"content": "over "}, {}]


async def test_a_begun_text_gets_one_beginning_token():
    """The template prints BOS, and so would the tokenizer."""
    tokenizer = bpe_tokenizer(add_bos_token=True)
    source = "{{ bos_token }}{{ messages[0].content }}"
    engine = Storyteller(TEXT)
    template = template_of(tokenizer.vocabulary, source)
    async with world(engine, template=template, tokenizer=tokenizer) as here:
        await post(here, CHAT)
    bos = tokenizer.vocabulary.special.bos
    assert list(engine.contents[0].tokens) == [bos, *tokenizer.encode("jumps")]


async def test_ids_come_from_seed_and_request():
    async def ids(seed: int) -> list[str]:
        async with talking(id_seed=seed) as here:
            return [(await post(here, CHAT))["id"] for _ in range(2)]

    first, again, other = await ids(1), await ids(1), await ids(2)
    assert first == again, "a replay yields the same bytes"
    assert len({*first, *other}) == 4
    assert all(len(one.removeprefix(ID)) == 32 and one.startswith(ID) for one in first)


async def test_verbose_shows_the_native_answer():
    answer = await asked(CHAT, verbose=True)
    assert answer["__verbose"]["prompt"] == RENDERED
    assert "__verbose" not in await asked(CHAT, verbose=False)
    parts = await streamed(CHAT, verbose=True)
    assert parts[-1]["__verbose"]["stop_type"] == "eos"


# --- completions ----------------------------------------------------------------------------------

JUMPS_LENGTH = len(TOKENIZER.encode("jumps"))


async def test_a_completion():
    answer = await asked(COMPLETION)
    assert answer.pop("id").startswith(ID)
    assert answer.pop("timings")["prompt_n"] == JUMPS_LENGTH
    assert "phaseloop" in answer
    del answer["phaseloop"]
    assert answer == {
        "choices": [{"text": TEXT, "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "b0.1.0",
        "object": "text_completion",
        "usage": usage(JUMPS_LENGTH, len(IDS) + 1),
    }


async def test_a_completion_stream():
    *middle, last = await streamed(COMPLETION)
    choices = [part["choices"] for part in middle]
    assert choices == [
        [{"text": piece, "index": 0, "logprobs": None, "finish_reason": None}] for piece in PIECES
    ]
    ending = {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert last["choices"] == [ending]
    assert last["usage"] == usage(JUMPS_LENGTH, len(IDS) + 1)
    assert "timings" in last


async def test_usage_of_a_completion_stream_comes_once():
    parts = await streamed(COMPLETION, stream_options={"include_usage": True})
    assert ["usage" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["choices"] == []


async def test_prompts_and_choices_of_a_completion():
    def tell(content, choice):
        return TOKENIZER.encode(f"{len(content.tokens)}-{choice}")

    answer = await asked(COMPLETION, Storyteller(tell=tell), prompt=[[1], [2, 3]], n=2)
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, "1-0"), (1, "1-1"), (2, "2-0"), (3, "2-1")]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["timings"]["prompt_n"] == 3


async def test_logprobs_of_a_completion():
    answer = await asked(COMPLETION, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["content"] == LOGPROBS
    assert logprobs["tokens"] == PIECES
    assert logprobs["token_logprobs"] == [CHOSEN] * len(IDS)
    assert logprobs["top_logprobs"][0] == {PIECES[0]: CHOSEN, "X": SECOND}
    offsets = [len("".join(PIECES[:count])) for count in range(len(PIECES))]
    assert logprobs["text_offset"] == offsets
    parts = await streamed(COMPLETION, logprobs=2)
    in_stream = [part["choices"][0]["logprobs"]["text_offset"] for part in parts[:-1]]
    assert in_stream == [[offset] for offset in offsets]


@pytest.mark.parametrize("prompt", ["jumps", list(TOKENIZER.encode("jumps"))])
async def test_echo(prompt):
    answer = await asked(COMPLETION, prompt=prompt, echo=True)
    assert answer["choices"][0]["text"] == "jumps" + TEXT
    parts = await streamed(COMPLETION, prompt=prompt, echo=True)
    assert "".join(part["choices"][0]["text"] for part in parts) == "jumps" + TEXT


async def test_progress_of_a_chat():
    parts = await streamed(CHAT, Storyteller(TEXT, batch_tokens=8), return_progress=True)
    told = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert told[0]["processed"] == 0
    assert told[-1]["processed"] == told[-1]["total"] == CHAT_LENGTH
    roles = [part for part in parts if "role" in part["choices"][0]["delta"]]
    assert roles == parts[:1]
