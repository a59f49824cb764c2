"""Goal: embeddings and rankings over HTTP, in the shapes and with the refusals of llama-server.

Method: the application on an engine whose vectors are arithmetic of the prompt's tokens, so that
every number can be said beforehand.  The vocabulary begins with the bytes that print: `!` is token
0, A is 32.
"""

import array
import asyncio
import base64
import math

import openai
import pytest
from http_world import Hold, until, world
from msgspec.structs import replace
from scripted import ScriptedEngine

from phaseloop.core.vocabulary import Failed, Produced
from phaseloop.engine.protocol import Outcome, limits_of
from phaseloop.engine.settings import Vectors
from phaseloop.http.embedding_answer import normalised
from phaseloop.http.served import HttpOptions

pytestmark = pytest.mark.asyncio


class VectorEngine(ScriptedEngine):
    """A prompt's vector is its first token, its last and their count; a score is the last."""

    def __init__(self, pooling="mean", **description):
        super().__init__()
        self._description = replace(super().describe(), pooling=pooling, **description)
        self._prompts = {}
        self.failing = ()

    def describe(self):
        return self._description

    def seat(self, seat, content):
        self._prompts[seat.slot] = content.tokens
        return super().seat(seat, content)

    def run(self, launch):
        self.launches.append(launch)
        self.on_run(launch)
        results, vectors = [], []
        for lane in launch.lanes:
            tokens = self._prompts[lane.slot]
            ends = lane.start + lane.count == len(tokens)
            fails = tokens in self.failing
            results.append(Failed("broken") if fails else Produced())
            vectors.append(self.vector(tokens) if ends and not fails else None)
        return Outcome(tuple(results), vectors=tuple(vectors), duration_ns=1000)

    def vector(self, tokens):
        match self._description.pooling:
            case "none":
                numbers, width = [value for token in tokens for value in (token, 1.0)], 2
            case "rank":
                numbers, width = [tokens[-1] / 8], 1
            case _:
                numbers, width = [tokens[0], tokens[-1], len(tokens)], 3
        return Vectors(width, array.array("f", numbers).tobytes())


async def posted(path, body, engine=None, **fields):
    async with world(engine or VectorEngine(), **fields) as here:
        answer = await here.client.post(path, json=body)
    return answer


def unit(*numbers):
    length = math.sqrt(sum(number**2 for number in numbers))
    return pytest.approx([number / length for number in numbers])


# --- OpenAI's shape -------------------------------------------------------------------------------


async def test_a_text_becomes_a_vector_of_length_one():
    answer = await posted("/v1/embeddings", {"input": [32, 33, 34]})
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"model", "object", "usage", "timings", "phaseloop", "data"}
    assert (body["model"], body["object"]) == ("tiny", "list")
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert body["data"] == [{"embedding": unit(32, 34, 3), "index": 0, "object": "embedding"}]
    assert (body["timings"]["prompt_n"], body["timings"]["predicted_n"]) == (3, 0)
    assert body["phaseloop"]["policy"] == "barrier-fair"
    assert body["phaseloop"]["cohort"] == 1


INPUTS = {
    "a text": ("C", [[34, 34, 1]]),
    "texts": (["A", "B"], [[32, 32, 1], [33, 33, 1]]),
    "tokens": ([1, 2, 3, 4], [[1, 4, 4]]),
    "lists of tokens": ([[1, 2], [3]], [[1, 2, 2], [3, 3, 1]]),
    "mixed": (["A", [7, "B", 9]], [[32, 32, 1], [7, 9, 3]]),
    "an object": ({"prompt_string": "A"}, [[32, 32, 1]]),
    "parts": ([{"content": [{"type": "text", "text": "A"}]}], [[32, 32, 1]]),
    "a content": ([{"content": "B"}], [[33, 33, 1]]),
}


@pytest.mark.parametrize("name", INPUTS)
async def test_every_form_of_input(name):
    given, expected = INPUTS[name]
    body = (await posted("/v1/embeddings", {"input": given, "embd_normalize": -1})).json()
    assert [one["embedding"] for one in body["data"]] == expected
    assert [one["index"] for one in body["data"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(vector[2] for vector in expected)


async def test_base64_holds_float32():
    wanted = {"input": [3, 4], "encoding_format": "base64", "embd_normalize": -1}
    (one,) = (await posted("/v1/embeddings", wanted)).json()["data"]
    assert one["encoding_format"] == "base64"
    assert array.array("f", base64.b64decode(one["embedding"])).tolist() == [3.0, 4.0, 2.0]


async def test_the_openai_client_reads_it():
    async with world(VectorEngine()) as here:
        friend = openai.AsyncOpenAI(
            api_key="none", base_url="http://server/v1", http_client=here.client, max_retries=0
        )
        made = await friend.embeddings.create(model="tiny", input=["A", "BC"])  # asks for base64
        assert [one.embedding for one in made.data] == [unit(32, 32, 1), unit(33, 34, 2)]
        assert (made.model, made.usage.total_tokens) == ("tiny", 3)
        plain = await friend.embeddings.create(model="x", input=[[5, 6]], encoding_format="float")
        assert plain.data[0].embedding == unit(5, 6, 2)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await friend.embeddings.create(model="tiny", input="A", dimensions=5)
        same = await friend.embeddings.create(model="tiny", input="A", dimensions=64)
        assert same.data[0].embedding == unit(32, 32, 1)


# --- llama-server's own ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_the_native_shape_is_a_list(path):
    body = (await posted(path, {"content": ["A", "B"]})).json()
    assert body == [
        {"index": 0, "embedding": [unit(32, 32, 1)]},
        {"index": 1, "embedding": [unit(33, 33, 1)]},
    ]


async def test_content_makes_the_openai_route_native():
    body = (await posted("/v1/embeddings", {"content": "A"})).json()
    assert body == [{"index": 0, "embedding": [unit(32, 32, 1)]}]


async def test_without_pooling_each_token_has_a_row_as_it_is():
    engine = VectorEngine("none")
    body = (await posted("/embedding", {"content": [5, 6, 7]}, engine)).json()
    assert body == [{"index": 0, "embedding": [[5.0, 1.0], [6.0, 1.0], [7.0, 1.0]]}]
    refused = await posted("/v1/embeddings", {"input": "A"}, engine)
    assert refused.status_code == 400
    assert "not OAI compatible" in refused.json()["error"]["message"]


NORMS = {
    -1: [3.0, -4.0, 0.0],
    0: [24_570.0, -32_760.0, 0.0],
    1: [3 / 7, -4 / 7, 0.0],
    2: [0.6, -0.8, 0.0],
    3: [3 / 91 ** (1 / 3), -4 / 91 ** (1 / 3), 0.0],
    1024: [0.75, -1.0, 0.0],
}


@pytest.mark.parametrize("norm", NORMS)
async def test_norms(norm):
    assert normalised([3.0, -4.0, 0.0], norm) == pytest.approx(NORMS[norm])
    assert normalised([0.0, 0.0], norm) == [0.0, 0.0]


async def test_the_operator_s_norm_holds_where_a_request_says_nothing():
    body = (await posted("/embedding", {"content": [3, 4]}, embd_normalize=1)).json()
    assert body[0]["embedding"] == [pytest.approx([3 / 9, 4 / 9, 2 / 9])]
    body = (await posted("/embedding", {"content": [3, 4], "embd_normalize": 0})).json()
    assert body[0]["embedding"] == [pytest.approx([24_570.0, 32_760.0, 16_380.0])]


# --- ranking --------------------------------------------------------------------------------------

DOCUMENTS = ["ABC", "ABZ", "ABK"]  # a score is an eighth of the last token


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
async def test_documents_are_ranked(path):
    wanted = {"query": "A", "documents": DOCUMENTS}
    body = (await posted(path, wanted, VectorEngine("rank"))).json()
    assert set(body) == {"model", "object", "usage", "timings", "phaseloop", "results"}
    assert body["results"] == [
        {"index": 1, "relevance_score": 57 / 8},
        {"index": 2, "relevance_score": 42 / 8},
        {"index": 0, "relevance_score": 34 / 8},
    ]
    assert body["usage"]["prompt_tokens"] == body["timings"]["prompt_n"] > 9


@pytest.mark.parametrize(("top", "found"), [(2, [1, 2]), (0, []), (9, [1, 2, 0])])
async def test_the_best_alone(top, found):
    wanted = {"query": "A", "documents": DOCUMENTS, "top_n": top}
    body = (await posted("/rerank", wanted, VectorEngine("rank"))).json()
    assert [one["index"] for one in body["results"]] == found
    assert body["usage"]["prompt_tokens"] > 9


async def test_the_shape_of_text_embeddings_inference():
    wanted = {"query": "A", "texts": DOCUMENTS, "return_text": True, "top_n": 1}
    body = (await posted("/rerank", wanted, VectorEngine("rank"))).json()
    assert body == [{"index": 1, "score": 57 / 8, "text": "ABZ"}]
    wanted |= {"return_text": False}
    body = (await posted("/rerank", wanted, VectorEngine("rank"))).json()
    assert body == [{"index": 1, "score": 57 / 8}]


async def test_equal_scores_keep_their_order():
    wanted = {"query": "A", "documents": ["xA", "yA", "zA"]}
    body = (await posted("/rerank", wanted, VectorEngine("rank"))).json()
    assert [one["index"] for one in body["results"]] == [0, 1, 2]


# --- in the scheduler -----------------------------------------------------------------------------


async def test_texts_of_a_call_share_a_round_and_leave_nothing():
    engine = VectorEngine()
    async with world(engine) as here:
        await here.client.post("/v1/embeddings", json={"input": ["AB", "CDE"]})
        (launch,) = engine.launches
        assert launch.kind == "encode"
        assert sorted(lane.count for lane in launch.lanes) == [2, 3]
        await until(lambda: len(engine.releases) == 2)
        assert [keep for _, keep, _ in engine.releases] == [0, 0]
        assert not any(content.reuse for _, content in engine.seats)
        assert here.service.watch.counters.ends == {"stop": 2}
        assert here.service.watch.counters.prompt_tokens == 5
        assert here.service.watch.tally.seals == {}
        slots = (await here.client.get("/slots")).json()
        assert not any(slot["is_processing"] for slot in slots)


async def test_a_long_text_is_cut_where_the_engine_can():
    engine = VectorEngine()
    batch = engine.describe().batch_tokens
    answer = await posted("/embedding", {"content": [7] * (batch + 5)}, engine)
    assert answer.status_code == 200
    assert [lane.count for one in engine.launches for lane in one.lanes] == [batch, 5]


async def test_a_text_that_is_one_piece_is_refused_by_name_if_it_is_too_long():
    engine = VectorEngine(whole_prompts=True)
    batch = engine.describe().batch_tokens
    wanted = {"input": [[7] * batch, [7] * (batch + 1)]}
    answer = await posted("/v1/embeddings", wanted, engine)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"text 1 has {batch + 1} tokens, and a round holds {batch};")
    assert not engine.launches
    fits = await posted("/v1/embeddings", {"input": [7] * batch}, engine)
    assert fits.status_code == 200


async def test_who_leaves_is_cancelled():
    engine = VectorEngine()
    async with world(engine) as here:
        hold = Hold("encode")
        engine.on_run = hold
        asking = asyncio.create_task(here.client.post("/embedding", json={"content": "AB"}))
        await hold.reached.wait()
        asking.cancel()
        await until(lambda: here.service.watch.counters.ends == {"cancelled": 1})
        hold.let_go()
        engine.on_run = lambda launch: None
        again = await here.client.post("/embedding", json={"content": "AB"})
        assert again.status_code == 200


async def test_a_text_that_fails_fails_its_call_and_nobody_else_s():
    engine = VectorEngine()
    engine.failing = ((33,),)
    async with world(engine) as here:
        failed = await here.client.post("/v1/embeddings", json={"input": ["A", "B"]})
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        assert (await here.client.post("/embedding", json={"content": "A"})).status_code == 200


async def test_more_texts_than_can_wait_are_refused_together():
    engine = VectorEngine()
    limits = replace(limits_of(engine.describe()), queue_length_max=1)
    count = limits.slot_count + 2
    answer = await posted("/v1/embeddings", {"input": ["A"] * count}, engine, limits=limits)
    assert answer.status_code == 400
    assert f"{count} prompts, at most {count - 1} can wait" in answer.json()["error"]["message"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embedding", "/embeddings", "/v1/embeddings"])
async def test_a_server_that_generates_gives_no_embeddings(path):
    answer = await posted(path, {"input": "A"}, ScriptedEngine())
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (501, "not_supported_error")
    problem = "This server does not support embeddings. Start it with `--embeddings`"
    assert error["message"] == problem


@pytest.mark.parametrize("engine", [ScriptedEngine(), VectorEngine("mean")])
async def test_only_a_ranking_server_ranks(engine):
    answer = await posted("/rerank", {"query": "A", "documents": ["B"]}, engine)
    assert answer.status_code == 501
    assert "Start it with `--reranking`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
async def test_a_server_for_embeddings_generates_nothing(path):
    answer = await posted(path, {"prompt": "A", "messages": [{"role": "user", "content": "A"}]})
    assert answer.status_code == 501
    assert "Start it without `--embeddings`" in answer.json()["error"]["message"]


WRONG = {
    "nothing": ({}, '"input" or "content" must be provided'),
    "an empty list": ({"input": []}, "input: must not be an empty list"),
    "an empty text": ({"input": ""}, "input: holds no token"),
    "an empty one of several": ({"input": ["A", ""]}, "input[1]: holds no token"),
    "a number": ({"input": 5}, "input: must be a string"),
    "no token": ({"input": [10**6]}, "input[0]: 1000000 is no token"),
    "a format": ({"input": "A", "encoding_format": "hex"}, "encoding_format: must be float"),
    "a norm": ({"input": "A", "embd_normalize": -2}, "embd_normalize: must be between -1"),
    "a norm's type": ({"input": "A", "embd_normalize": "2"}, "embd_normalize: must be an integer"),
    "dimensions": ({"input": "A", "dimensions": 3}, "dimensions: this model's vectors have 64"),
    "too long": ({"input": [1] * 5000}, "the prompt has 5000 tokens"),
    "a picture": ({"input": {"content": [{"type": "image_url"}]}}, "only text is supported"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_is_named(name):
    body, problem = WRONG[name]
    answer = await posted("/v1/embeddings", body)
    assert answer.status_code == (501 if name == "a picture" else 400)
    assert problem in answer.json()["error"]["message"]


WRONG_RANKING = {
    "no query": ({"documents": ["A"]}, '"query" must be provided'),
    "a query": ({"query": 5, "documents": ["A"]}, "query: must be a string"),
    "no documents": ({"query": "A"}, '"documents" must be a non-empty string array'),
    "empty documents": ({"query": "A", "documents": []}, '"documents" must be a non-empty'),
    "a document": ({"query": "A", "documents": ["A", 5]}, "documents[1]: must be a string"),
    "a text": ({"query": "A", "texts": "A"}, "texts: must be a list of strings"),
    "a top": ({"query": "A", "documents": ["A"], "top_n": -1}, "top_n: must be between 0"),
}


@pytest.mark.parametrize("name", WRONG_RANKING)
async def test_what_is_wrong_with_a_ranking_is_named(name):
    body, problem = WRONG_RANKING[name]
    answer = await posted("/rerank", body, VectorEngine("rank"))
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


async def test_the_timing_member_can_be_left_out():
    wanted = {"input": "A", "phaseloop": False}
    assert "phaseloop" not in (await posted("/v1/embeddings", wanted)).json()
    off = HttpOptions(timing_field=False)
    assert "phaseloop" not in (await posted("/v1/embeddings", {"input": "A"}, options=off)).json()


async def test_properties_and_models_say_what_the_server_is_for():
    async with world(VectorEngine("cls")) as here:
        assert (await here.client.get("/props")).json()["phaseloop"]["pooling"] == "cls"
        listed = (await here.client.get("/v1/models")).json()
        assert listed["models"][0]["capabilities"] == ["embedding"]
    async with world() as here:
        assert (await here.client.get("/props")).json()["phaseloop"]["pooling"] is None
        listed = (await here.client.get("/v1/models")).json()
        assert listed["models"][0]["capabilities"] == ["completion"]
