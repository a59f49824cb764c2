"""Goal: /completion answers as llama-server's clients expect, field by field and byte by byte.

Method: the whole application on an engine with a known text; shapes are literals, written down from
the interface's description, except for durations.
"""

import json
from typing import Any

import pytest
from http_world import world
from storyteller import CHOSEN, OTHER, SECOND, TOKENIZER, Storyteller
from vocabularies import bpe_tokenizer

pytestmark = pytest.mark.asyncio

TEXT = "the quick brown fox"
IDS = list(TOKENIZER.encode(TEXT))
PROMPT = "jumps over"
PROMPT_IDS = list(TOKENIZER.encode(PROMPT))


async def asked(engine: Storyteller | None = None, path: str = "/completion", **body: Any) -> Any:
    async with world(engine or Storyteller(TEXT)) as here:
        answer = await here.client.post(path, json={"prompt": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(engine: Storyteller | None = None, **body: Any) -> bytes:
    async with world(engine or Storyteller(TEXT)) as here:
        body = {"prompt": PROMPT, "stream": True, **body}
        answer = await here.client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


def events(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]


async def test_an_answer_in_one_piece():
    answer = await asked(seed=5, temperature=0.5, return_tokens=True)
    settings, timings = answer.pop("generation_settings"), answer.pop("timings")
    assert answer.pop("phaseloop").keys() == {
        "queue_ms", "prefill_ms", "barrier_wait_ms", "decode_ms", "cohort", "policy"
    }  # fmt: skip
    assert answer == {
        "index": 0,
        "content": TEXT,
        "tokens": IDS,
        "id_slot": 0,
        "stop": True,
        "model": "tiny",
        "tokens_predicted": len(IDS) + 1,  # the token that ended the text counts
        "tokens_evaluated": len(PROMPT_IDS),
        "prompt": PROMPT,
        "has_new_line": False,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": len(PROMPT_IDS) + len(IDS),
    }
    assert settings["seed"] == 5
    assert settings["temperature"] == 0.5
    assert settings["n_predict"] == settings["max_tokens"] == -1
    assert {"adaptive_target", "adaptive_decay", "samplers", "stop", "stream"} <= settings.keys()
    assert timings["cache_n"] == 0
    assert timings["prompt_n"] == len(PROMPT_IDS)
    assert timings["predicted_n"] == len(IDS) + 1


async def test_a_stream_byte_by_byte():
    raw = await streamed(
        Storyteller("fox"), phaseloop=False, response_fields=["content", "stop", "stop_type"]
    )
    fox = TOKENIZER.encode("fox")
    expected = b""
    text = b"fox"
    for count, token in enumerate(fox, start=1):
        piece = TOKENIZER.piece(token)
        assert text.startswith(piece)
        text = text[len(piece) :]
        expected += (
            b'data: {"index":0,"content":"%s","tokens":[%d],"stop":false,"id_slot":0,'
            b'"tokens_predicted":%d,"tokens_evaluated":%d}\n\n'
        ) % (piece, token, count, len(PROMPT_IDS))
    expected += b'data: {"content":"","stop":true,"stop_type":"eos"}\n\n'
    assert raw == expected


async def test_a_stream_is_marked_as_one():
    async with world(Storyteller(TEXT)) as here:
        answer = await here.client.post("/completion", json={"prompt": PROMPT, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers


async def test_streamed_or_not_the_text_is_the_same():
    parts = events(await streamed(seed=5))
    whole = await asked(seed=5, return_tokens=True)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * len(IDS) + [True]
    last = parts[-1]
    assert last["generation_settings"].pop("stream")
    assert not whole["generation_settings"].pop("stream")
    for varying in ("timings", "phaseloop", "content", "tokens"):
        del last[varying], whole[varying]
    assert last == whole


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, PROMPT_IDS, {"prompt_string": PROMPT}, ["jumps", *TOKENIZER.encode(" over")]],
    ids=["text", "tokens", "object", "mixed"],
)
async def test_forms_of_one_prompt(prompt):
    engine = Storyteller(TEXT)
    answer = await asked(engine, prompt=prompt)
    assert answer["content"] == TEXT
    assert list(engine.contents[0].tokens) == PROMPT_IDS


async def test_a_text_gets_what_the_model_wants_in_front_and_tokens_do_not():
    bos = TOKENIZER.vocabulary.special.bos
    with_bos = bpe_tokenizer(add_bos_token=True)
    engine = Storyteller(TEXT)
    async with world(engine, tokenizer=with_bos) as here:
        prompts = [PROMPT, PROMPT_IDS, ["jumps", *PROMPT_IDS], [*PROMPT_IDS, "jumps"]]
        answer = await here.client.post("/completion", json={"prompt": prompts})
    assert answer.status_code == 200, answer.text
    jumps = TOKENIZER.encode("jumps")
    assert [list(engine.contents[request_id].tokens) for request_id in range(4)] == [
        [bos, *PROMPT_IDS],
        PROMPT_IDS,
        [bos, *jumps, *PROMPT_IDS],
        [*PROMPT_IDS, *jumps],
    ]
    assert answer.json()[0]["prompt"] == "<s>" + PROMPT


async def test_several_prompts_and_choices_are_a_list_by_index():
    def tell(content, choice):
        return TOKENIZER.encode(f"{len(content.tokens)}-{choice}")

    answers = await asked(Storyteller(tell=tell), prompt=["jumps", [1, 2, 3]], n=2)
    jumps = len(TOKENIZER.encode("jumps"))
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    told = [f"{jumps}-0", f"{jumps}-1", "3-0", "3-1"]
    assert [answer["content"] for answer in answers] == told


async def test_several_prompts_in_one_stream():
    def tell(content, choice):
        return TOKENIZER.encode(f"{len(content.tokens)}-{choice}")

    parts = events(
        await streamed(Storyteller(tell=tell), prompt=[[1], [1, 2], [1, 2, 3]], n_cmpl=2)
    )
    texts = {
        index: "".join(part["content"] for part in parts if part["index"] == index)
        for index in range(6)
    }
    assert texts == {0: "1-0", 1: "1-1", 2: "2-0", 3: "2-1", 4: "3-0", 5: "3-1"}
    assert sorted(part["index"] for part in parts if part["stop"]) == [0, 1, 2, 3, 4, 5]


# --- the end of the text --------------------------------------------------------------------------


async def test_the_limit():
    answer = await asked(n_predict=2)
    assert answer["content"] == TOKENIZER.decode(IDS[:2])
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 2
    assert (answer["stop_type"], answer["truncated"]) == ("limit", False)


async def test_nothing_but_the_cache():
    answer = await asked(n_predict=0)
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    assert answer["timings"]["predicted_per_second"] == 0
    assert (answer["stop_type"], answer["truncated"]) == ("limit", False)


async def test_one_token_has_no_rate():
    """The first token comes from the prompt's own round: N tokens are N - 1 steps."""
    timings = (await asked(n_predict=1))["timings"]
    assert timings["predicted_n"] == 1
    assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0
    timings = (await asked(n_predict=3))["timings"]
    assert timings["predicted_per_second"] == pytest.approx(2 / timings["predicted_ms"] * 1e3)


async def test_a_full_context_truncates():
    engine = Storyteller(TEXT, ends=False, context_length=len(PROMPT_IDS) + 5)
    answer = await asked(engine)
    assert (answer["stop_type"], answer["truncated"]) == ("limit", True)


@pytest.mark.parametrize("stop", ["brown", ["zebra", "brown"], ["", "k b", "brown"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_shown(stop, stream):
    engine = Storyteller(TEXT, ends=False)
    if stream:
        parts = events(await streamed(engine, stop=stop))
        content, last = "".join(part["content"] for part in parts), parts[-1]
    else:
        last = await asked(engine, stop=stop)
        content = last["content"]
    word = "k b" if "k b" in stop else "brown"
    assert content == TEXT[: TEXT.index(word)]
    assert (last["stop_type"], last["stopping_word"]) == ("word", word)
    assert len(engine.launches) < 2 * len(IDS), "the engine is told"


async def test_what_might_have_been_a_stop_string_is_shown_in_the_end():
    answer = await asked(stop=["fox!"])
    assert (answer["content"], answer["stop_type"]) == (TEXT, "eos")


async def test_half_a_character_is_never_sent():
    text = "a👍b"
    parts = events(await streamed(Storyteller(text)))
    assert len(TOKENIZER.encode(text)) > 3, "the character has several tokens"
    shown = [part["content"] for part in parts if part["content"]]
    assert shown == ["a", "👍", "b"]
    assert sum(len(part["tokens"]) for part in parts) == len(TOKENIZER.encode(text))


async def test_a_character_that_stays_incomplete_is_replaced():
    cut = TOKENIZER.encode("👍")[:1]
    answer = await asked(Storyteller(tell=lambda content, choice: cut))
    assert answer["content"] == "\ufffd"


@pytest.mark.parametrize("text", ["👍", "</s>"], ids=["half a character", "no text at all"])
async def test_tokens_at_the_end_without_text_keep_their_likelihoods(text):
    last = TOKENIZER.encode(text, parse_special=True)[:1]
    story = [*IDS, *last]
    answer = await asked(Storyteller(tell=lambda content, choice: story), n_probs=1)
    assert [one["id"] for one in answer["completion_probabilities"]] == story
    parts = events(await streamed(Storyteller(tell=lambda content, choice: story), n_probs=1))
    found = [one["id"] for part in parts for one in part.get("completion_probabilities", [])]
    assert found == story


async def test_a_late_line_is_the_last():
    """t_max_predict_ms: a time limit that ends the text at the next new line."""
    engine = Storyteller("a\nb", ends=False)
    async with world(engine) as here:
        clock = here.service.clock
        now_ns, late_ns = clock.now_ns, 5_000_000_000
        # Time jumps between the launch of the round that samples and its first token.
        clock.now_ns = lambda: now_ns() + (late_ns if len(engine.launches) > 1 else 0)
        body = {"prompt": PROMPT, "t_max_predict_ms": 1000, "n_predict": 50}
        answer = (await here.client.post("/completion", json=body)).json()
    assert (answer["content"], answer["has_new_line"]) == ("a\n", True)
    assert (answer["stop_type"], answer["truncated"]) == ("limit", False)


# --- likelihoods ----------------------------------------------------------------------------------


def likely(token: int, logprob: float) -> dict[str, Any]:
    piece = TOKENIZER.piece(token)
    return {"id": token, "token": piece.decode(), "bytes": list(piece), "logprob": logprob}


async def test_n_probs():
    answer = await asked(n_probs=2)
    assert answer["completion_probabilities"] == [
        likely(token, CHOSEN) | {"top_logprobs": [likely(token, CHOSEN), likely(OTHER, SECOND)]}
        for token in IDS
    ]


async def test_n_probs_in_a_stream():
    parts = events(await streamed(n_probs=1))
    found = [part["completion_probabilities"] for part in parts if not part["stop"]]
    top = [[likely(token, CHOSEN) | {"top_logprobs": [likely(token, CHOSEN)]}] for token in IDS]
    assert found == top


async def test_probabilities_after_sampling():
    (first, *_) = (await asked(n_probs=2, post_sampling_probs=True))["completion_probabilities"]
    assert first["prob"] == pytest.approx(0.7788, abs=1e-4)  # e^-0.25
    assert [top["prob"] for top in first["top_probs"]] == pytest.approx([0.7788, 0.2231], abs=1e-4)
    assert "logprob" not in first


async def test_stop_strings_take_their_likelihoods_along():
    answer = await asked(Storyteller(TEXT, ends=False), n_probs=1, stop=" brown")
    assert len(TOKENIZER.encode(" brown")) > 1, "the stop string comes in parts"
    shown = [one["token"] for one in answer["completion_probabilities"]]
    assert "".join(shown) == answer["content"] == "the quick"


async def test_a_prompt_that_just_fits_and_one_that_does_not():
    engine = Storyteller(TEXT, context_length=4)
    async with world(engine) as here:

        async def status(**body: Any) -> int:
            return (await here.client.post("/completion", json=body)).status_code

        assert await status(prompt=[1, 2, 3]) == 200
        assert await status(prompt=[1, 2, 3, 4], n_predict=0) == 200
        assert sum(here.service.watch.counters.ends.values()) == 2
        assert await status(prompt=[1, 2, 3, 4], n_predict=1) == 400
        assert await status(prompt=[1, 2, 3, 4]) == 400
        assert await status(prompt=[1, 2, 3, 4, 5], n_predict=0) == 400
        assert sum(here.service.watch.counters.ends.values()) == 2, "the scheduler never saw them"


# --- what else a request may ask for --------------------------------------------------------------


async def test_response_fields():
    answer = await asked(response_fields=["content", "generation_settings/n_predict", "nothing/x"])
    assert answer == {"content": TEXT, "generation_settings/n_predict": -1}


async def test_progress():
    engine = Storyteller(TEXT, batch_tokens=4)
    ids = list(range(1, 11))
    parts = events(await streamed(engine, prompt=ids, return_progress=True))
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert progress[0] == {"total": 10, "cache": 0, "processed": 0, "time_ms": 0}
    assert progress[-1]["processed"] == 10
    assert {one["total"] for one in progress} == {10}


async def test_timings_with_every_token():
    parts = events(await streamed(timings_per_token=True))
    counts = [part["timings"]["predicted_n"] for part in parts]
    assert counts == list(range(1, len(IDS) + 2))


async def test_the_member_phaseloop_is_opt_out():
    assert "phaseloop" in await asked()
    assert "phaseloop" not in await asked(phaseloop=False)


async def test_the_engine_gets_what_was_asked_for():
    engine = Storyteller(TEXT)
    await asked(engine, seed=99, top_k=7, ignore_eos=True, logit_bias=[[5, -1], ["X", False]])
    content = engine.contents[0]
    assert content.seed == 99
    assert content.sampling.top_k == 7
    ends = {end: float("-inf") for end in TOKENIZER.end_ids}
    assert dict(content.sampling.logit_bias) == {5: -1.0, OTHER: float("-inf")} | ends
