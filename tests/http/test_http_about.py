"""Goal: what the server says of itself and its model is what llama-server's clients read.

Method: members and values are spelt out as llama-server has them; what differs is named.
"""

import httpx
import openai
import pytest
from http_world import world
from msgspec.structs import replace
from vocabularies import bpe_tokenizer

from phaseloop.engine.settings import Sampling
from phaseloop.http.served import HttpOptions, Served
from phaseloop.text.chat_template import ChatTemplate

pytestmark = pytest.mark.asyncio


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_the_model_is_listed_for_openai_and_for_ollama_clients(path):
    async with world() as here:
        answer = (await here.client.get(path)).json()
    assert answer["object"] == "list"
    assert answer["data"] == [
        {
            "id": "tiny",
            "aliases": ["tiny", "small"],
            "tags": [],
            "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "created": 1_700_000_000,
            "owned_by": "llamacpp",
            "meta": {
                "vocab_type": 2,
                "n_vocab": 526,
                "n_ctx": 4096,
                "n_ctx_train": 8192,
                "n_embd": 64,
                "n_params": 2_000_000,
                "size": 1_000_000,
                "ftype": "Q4_0",
            },
        }
    ]
    (record,) = answer["models"]
    assert (record["name"], record["model"], record["type"]) == ("tiny", "tiny", "model")
    assert record["capabilities"] == ["completion"]
    assert set(record) == {
        "name", "model", "modified_at", "size", "digest", "type", "description", "tags",
        "capabilities", "parameters", "details",
    }  # fmt: skip
    assert record["details"]["quantization_level"] == "Q4_0"


async def test_the_openai_client_finds_the_model_and_understands_refusals():
    async with world(options=HttpOptions(api_keys=("key",))) as here:

        def client(key: str) -> openai.AsyncOpenAI:
            made = httpx.AsyncClient(transport=httpx.ASGITransport(here.app))
            return openai.AsyncOpenAI(
                api_key=key, base_url="http://server/v1", http_client=made, max_retries=0
            )

        async with client("key") as friend, client("other") as stranger:
            listed = await friend.models.list()
            assert [model.id for model in listed.data] == ["tiny"]
            with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
                await stranger.models.list()
            with pytest.raises(openai.NotFoundError):
                await friend.models.retrieve("tiny")
            with pytest.raises(openai.InternalServerError, match="embeddings") as refused:
                await friend.embeddings.create(model="tiny", input="hi")
            assert refused.value.status_code == 501
            assert refused.value.request_id.startswith("req_")


# --- props ----------------------------------------------------------------------------------------

PROPS = {
    "default_generation_settings", "total_slots", "model_alias", "model_ftype", "model_path",
    "modalities", "media_marker", "endpoint_slots", "endpoint_props", "endpoint_metrics", "ui",
    "ui_settings", "chat_template", "chat_template_caps", "bos_token", "eos_token", "build_info",
    "is_sleeping", "cors_proxy_enabled",
}  # fmt: skip
# What /props of llama-server lists of a sampler, but for those that phaseloop does not have.
PARAMS = {
    "seed": 4294967295, "temperature": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
    "top_k": 40, "top_p": 0.95, "min_p": 0.05, "top_n_sigma": -1.0, "xtc_probability": 0.0,
    "xtc_threshold": 0.1, "typical_p": 1.0, "repeat_last_n": 64, "repeat_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_penalty_last_n": 64, "max_tokens": -1, "n_predict": -1,
    "n_probs": 0, "min_keep": 0, "post_sampling_probs": False,
    "samplers": [
        "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"
    ],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "ignore_eos": False,
    "stream": False,
    "chat_format": "Content-only",
    "reasoning_format": "auto",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "timings_per_token": False,
    "backend_sampling": False,
    "lora": [],
}  # fmt: skip


async def test_properties_are_those_of_llama_server():
    async with world(options=HttpOptions(metrics=True)) as here:
        props = (await here.client.get("/props")).json()
    assert set(props) == PROPS | {"phaseloop"}
    assert props["default_generation_settings"] == {"params": PARAMS, "n_ctx": 4096}
    assert props["total_slots"] == 2
    assert props["model_alias"] == "tiny"
    assert props["model_path"] == "models/tiny.gguf"
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert (props["endpoint_slots"], props["endpoint_props"]) == (True, False)
    assert props["endpoint_metrics"] is True
    assert props["build_info"].startswith("b")
    assert props["phaseloop"] == {
        "policy": "barrier-fair", "phase_control": False, "engine": "scripted", "pooling": None,
        "unstable": []
    }  # fmt: skip


async def test_properties_show_what_the_operator_chose():
    chosen = {
        "defaults": Sampling(temperature=0.0, top_k=7),
        "default_limit": 99,
        "default_seed": 5,
    }
    async with world(**chosen) as here:
        settings = (await here.client.get("/props")).json()["default_generation_settings"]
    assert settings["params"] == PARAMS | {
        "temperature": 0.0, "top_k": 7, "max_tokens": 99, "n_predict": 99, "seed": 5
    }  # fmt: skip


async def test_properties_show_the_template_and_what_it_can_do():
    source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    tokenizer = bpe_tokenizer()
    vocabulary = replace(tokenizer.vocabulary, chat_template_tools="for tools")
    tokenizer.vocabulary = vocabulary
    async with world(template=ChatTemplate(source), tokenizer=tokenizer) as here:
        props = (await here.client.get("/props")).json()
    assert props["chat_template"] == source
    assert props["chat_template_tool_use"] == "for tools"
    caps = props["chat_template_caps"]
    assert caps["supports_string_content"] is True
    assert caps["supports_system_role"] is True
    assert caps["supports_tools"] is False


async def test_properties_without_a_template():
    async with world() as here:
        props = (await here.client.get("/props")).json()
    assert (props["chat_template"], props["chat_template_caps"]) == ("", {})


@pytest.mark.parametrize(("allowed", "status"), [(True, 200), (False, 501)])
async def test_setting_properties_needs_its_flag(allowed, status):
    async with world(options=HttpOptions(props=allowed)) as here:
        answer = await here.client.post("/props", json={})
    assert answer.status_code == status
    if allowed:
        assert answer.json() == {"success": True}
    else:
        assert "--props" in answer.json()["error"]["message"]


# --- the page -------------------------------------------------------------------------------------


async def test_the_page_links_to_what_exists():
    async with world(options=HttpOptions(prefix="/below")) as here:
        page = await here.client.get("/below/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        links = [part.split('"')[0] for part in page.text.split('href="')[1:]]
        assert links
        for link in links:
            assert (await here.client.get(f"/below/{link}")).status_code == 200, link


# --- what is not there ----------------------------------------------------------------------------

NOT_YET = [
    ("POST", path)
    for path in (
        "/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank",
        "/v1/reranking", "/v1/responses", "/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/responses/input_tokens", "/responses/input_tokens", "/v1/chat/completions/control",
        "/infill", "/slots/0", "/v1/audio/transcriptions", "/v1/systemone", "/models",
        "/models/load", "/models/unload", "/v1/streams/lookup",
    )
]  # fmt: skip
NOT_YET += [("GET", "/models/sse"), ("DELETE", "/models")]
NOT_YET += [("GET", "/v1/stream"), ("DELETE", "/v1/stream")]


@pytest.mark.parametrize(("method", "path"), NOT_YET)
async def test_what_is_not_built_says_so(method, path):
    async with world() as here:
        answer = await here.client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (501, 501, "not_supported_error")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/tools", "/cors-proxy"])
async def test_what_is_off_says_so(method, path):
    async with world() as here:
        answer = await here.client.request(method, path)
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == "this feature is disabled"
    assert answer.json()["error"]["type"] == "feature_disabled"


async def test_there_are_no_adapters():
    async with world() as here:
        assert (await here.client.get("/lora-adapters")).json() == []


async def test_text_work_is_bounded_to_a_few_threads():
    async with world() as here:
        served: Served = here.served
        assert served.threads.total_tokens == 2
        assert await served.in_thread(divmod, 7, 2) == (3, 1)
