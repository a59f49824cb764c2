"""Goal: every field of a request has its documented default, limits and errors; no body crashes.

Method: tables of what llama-server's and OpenAI's interfaces say of each field; then generated
bodies of any shape, which must be understood or refused by name, and leave the server able to
answer.
"""

import asyncio
import json
import math
from typing import Any

import pytest
from http_world import world
from hypothesis import given, settings
from hypothesis import strategies as st
from storyteller import TOKENIZER, Storyteller

from phaseloop.core.state import Limits
from phaseloop.engine.settings import SAMPLERS, Breaker, Sampling
from phaseloop.http.errors import ApiError
from phaseloop.http.request import Shape, Wanted, request_of, wanted_of
from phaseloop.http.request_fields import Fields
from phaseloop.http.request_prompt import Prompt, check_fit, prompts_of
from phaseloop.http.served import HttpOptions
from phaseloop.text.breakers import breakers
from phaseloop.text.chat_template import ChatTemplate

HTTP = HttpOptions()
MS = 1_000_000
SLOTS = 2  # of the scripted engine


def wanted(body: dict[str, Any], shape: Shape = "native", **fields: Any) -> Wanted:
    async def made() -> Wanted:
        async with world(Storyteller(), **fields) as here:
            return wanted_of(Fields(body), shape, here.served, HTTP)

    return asyncio.run(made())


def refused(body: dict[str, Any], shape: Shape = "native") -> ApiError:
    with pytest.raises(ApiError) as caught:
        wanted(body, shape)
    return caught.value


# --- defaults -------------------------------------------------------------------------------------


def test_an_empty_request_has_llama_servers_defaults():
    made = wanted({})
    assert made.sampling == Sampling(
        samplers=SAMPLERS,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        typical_p=1.0,
        top_n_sigma=-1.0,
        xtc_probability=0.0,
        xtc_threshold=0.1,
        dynatemp_range=0.0,
        dynatemp_exponent=1.0,
        repeat_penalty=1.0,
        repeat_last_n=64,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        dry_multiplier=0.0,
        dry_base=1.75,
        dry_allowed_length=2,
        dry_penalty_last_n=64,
        min_keep=0,
        n_probs=0,
    )
    assert (made.limit, made.choices, made.keep, made.cache_prompt) == (None, 1, 0, True)
    assert (made.stream, made.include_usage, made.ping_interval_s) == (False, False, 30)
    assert (made.seed, made.stops, made.slot_hint, made.alternatives) == (None, None, None, None)
    assert made.timing_field


def test_null_means_the_default():
    names = """n_predict max_tokens n_keep ignore_eos t_max_predict_ms stop stream stream_options
        timings_per_token return_progress return_tokens sse_ping_interval response_fields verbose
        temperature top_k top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold
        dynatemp_range dynatemp_exponent repeat_penalty repeat_last_n presence_penalty
        frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
        dry_sequence_breakers mirostat seed min_keep samplers n_probs post_sampling_probs
        logit_bias grammar json_schema cache_prompt id_slot n n_cmpl priority deadline_ms
        max_queue_ms phaseloop tools response_format lora echo logprobs top_logprobs"""
    nulls = dict.fromkeys(names.split())
    for shape in ("native", "completion", "chat"):
        without, with_nulls = wanted({}, shape), wanted(nulls, shape)
        assert without == with_nulls


def test_the_operators_defaults_come_first():
    defaults = Sampling(temperature=0.1, top_k=5, logit_bias=((3, 1.0),))
    made = wanted({"top_k": 6}, defaults=defaults, default_limit=77, default_seed=9)
    assert (made.sampling.temperature, made.sampling.top_k) == (0.1, 6)
    assert made.sampling.logit_bias == ((3, 1.0),)
    assert (made.limit, made.seed) == (77, 9)
    assert wanted({"n_predict": -1}, default_limit=77).limit is None


# --- numbers: held, or refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "given_value", "taken"),
    [
        ("temperature", -1, 0.0),
        ("top_p", 1.5, 1.0),
        ("top_p", -0.5, 0.0),
        ("min_p", 7, 1.0),
        ("min_p", -7, 0.0),
        ("top_k", -5, 0),
        ("top_k", 10**30, 2**31 - 1),
        ("top_k", 8.0, 8),
        ("xtc_probability", 2, 1.0),
        ("xtc_threshold", -2, 0.0),
        ("dry_base", 0.5, 1.75),
        ("repeat_last_n", -1, -1),
        ("typical_p", 3, 3.0),
        ("presence_penalty", -3.5, -3.5),
    ],
)
def test_numbers_that_are_held_within_limits(field, given_value, taken):
    assert getattr(wanted({field: given_value}).sampling, field) == taken


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predict", -2),
        ("max_tokens", -2),
        ("max_completion_tokens", 2**31),
        ("n_keep", -2),
        ("n", 0),
        ("n", SLOTS + 1),
        ("n_cmpl", -1),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("repeat_last_n", -2),
        ("repeat_penalty", 0),
        ("min_keep", -1),
        ("n_probs", -1),
        ("n_probs", 10**6),
        ("sse_ping_interval", -2),
        ("seed", -2),
        ("seed", 2**64),
        ("id_slot", SLOTS),
        ("deadline_ms", -2),
        ("t_max_predict_ms", -2),
        ("temperature", 1e39),
        ("priority", 10**30),
    ],
)
def test_numbers_that_are_refused_outside_limits(field, value):
    error = refused({field: value})
    assert (error.status, error.kind) == (400, "invalid_request_error")
    assert error.message.startswith(f"{field}: ")


INTEGERS = """n_predict max_tokens n_keep top_k repeat_last_n dry_allowed_length min_keep seed
    n_probs sse_ping_interval id_slot n priority deadline_ms max_queue_ms t_max_predict_ms"""
NUMBERS = """temperature top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold dry_base
    dynatemp_range dynatemp_exponent repeat_penalty presence_penalty frequency_penalty"""
FLAGS = """stream cache_prompt ignore_eos timings_per_token return_progress return_tokens verbose
    post_sampling_probs phaseloop"""


@pytest.mark.parametrize("field", INTEGERS.split())
@pytest.mark.parametrize("value", ["1", 1.5, True, [1], {}])
def test_integers_of_another_type(field, value):
    assert refused({field: value}).message.startswith(f"{field}: must be an integer, not ")


@pytest.mark.parametrize("field", NUMBERS.split())
@pytest.mark.parametrize("value", ["1", False, [1], {}])
def test_numbers_of_another_type(field, value):
    assert refused({field: value}).message.startswith(f"{field}: must be a number, not ")


@pytest.mark.parametrize("field", FLAGS.split())
@pytest.mark.parametrize("value", [1, "true", []])
def test_flags_of_another_type(field, value):
    assert refused({field: value}).message.startswith(f"{field}: must be true or false, not ")


def test_fields_of_objects_are_named_with_their_place():
    error = refused({"stream_options": {"include_usage": "yes"}})
    assert error.message.startswith("stream_options.include_usage: must be true or false")
    assert refused({"stream_options": []}).message.startswith("stream_options: must be an object")


# --- names, aliases, lists ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n_predict", "max_completion_tokens", "max_tokens"])
def test_names_of_the_limit(name):
    assert wanted({name: 5}).limit == 5
    assert wanted({name: -1}).limit is None
    assert wanted({name: 0}).limit == 0


def test_of_several_names_the_first_counts():
    assert wanted({"max_tokens": 7, "n_predict": 5}).limit == 5
    assert wanted({"max_tokens": 7, "n_predict": None}).limit == 7


@pytest.mark.parametrize("seed", [-1, 4294967295])  # the second is the first in 32 bits
def test_random_seeds(seed):
    assert wanted({"seed": seed}).seed is None
    assert wanted({"seed": 0}).seed == 0


@pytest.mark.parametrize(
    ("stop", "texts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), (["", "b"], ("b",)), ("", ()), ([], ())],
)
def test_stop_strings(stop, texts):
    made = wanted({"stop": stop})
    assert made.stop_texts == texts
    assert (made.stops is None) == (not texts)


@pytest.mark.parametrize(
    ("samplers", "order"),
    [
        (["top_k", "temperature"], ("top_k", "temperature")),
        (["Top-K", "topp", "typ_p", "temp"], ("top_k", "top_p", "typ_p", "temperature")),
        ("kpt", ("top_k", "top_p", "temperature")),
        ("edskypmxt", SAMPLERS),
        ([], ()),
        ("", ()),
    ],
)
def test_orders_of_samplers(samplers, order):
    assert wanted({"samplers": samplers}).sampling.samplers == order


@pytest.mark.parametrize(
    ("bias", "taken"),
    [
        ([[5, 1.5]], {5: 1.5}),
        ({"5": -100}, {5: -100.0}),
        ([["X", False]], {TOKENIZER.encode("X")[0]: -math.inf}),
        ([[5, 1], [5, 2]], {5: 3.0}),
        ({"over": 2}, dict.fromkeys(TOKENIZER.encode("over"), 2.0)),
    ],
)
def test_logit_bias(bias, taken):
    assert dict(wanted({"logit_bias": bias}).sampling.logit_bias) == taken


def test_breakers_are_looked_up_only_for_dry():
    assert wanted({"dry_sequence_breakers": ["x"]}).sampling.dry_breakers == ()
    made = wanted({"dry_multiplier": 0.8, "dry_sequence_breakers": ["x"]})
    expected = tuple(Breaker(head, tail) for head, tail in breakers(TOKENIZER, ("x",)))
    assert made.sampling.dry_breakers == expected != ()
    assert made.breaker_texts == ("x",)
    assert wanted({}).breaker_texts == ("\n", ":", '"', "*")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"samplers": ["top_k", "best"]}, "samplers[1]"),
        ({"samplers": "kq"}, "samplers"),
        ({"samplers": 5}, "samplers"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias[0]"),
        ({"logit_bias": [[5, True]]}, "logit_bias[0]"),
        ({"logit_bias": [[10**9, 1]]}, "logit_bias[0]"),
        ({"logit_bias": {"999999": 1}}, "logit_bias.'999999'"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"response_fields": [1]}, "response_fields[0]"),
        ({"stop": ["x" * 70_000]}, "stop"),
        ({"stop": ["x"] * 2000}, "stop"),
    ],
)
def test_lists_that_are_wrong(body, place):
    error = refused(body)
    assert (error.status, error.message.partition(": ")[0]) == (400, place)


# --- likelihoods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "body", "shown"),
    [
        ("native", {"n_probs": 3}, 3),
        ("native", {"logprobs": 3}, 3),
        ("native", {"n_probs": 2, "logprobs": 3}, 2),
        ("completion", {"logprobs": 0}, None),
        ("chat", {"logprobs": True}, 20),
        ("chat", {"logprobs": True, "top_logprobs": 3}, 3),
        ("chat", {"logprobs": True, "top_logprobs": 0}, 0),
        ("chat", {"logprobs": False}, None),
        ("chat", {"n_probs": 4}, 4),
    ],
)
def test_how_many_alternatives(shape, body, shown):
    made = wanted(body, shape)
    assert made.alternatives == shown
    assert made.sampling.n_probs == (0 if shown is None else max(1, shown))


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}])
def test_top_logprobs_need_logprobs(logprobs):
    error = refused({"top_logprobs": 3, **logprobs}, "chat")
    assert (error.status, error.message) == (400, "top_logprobs: needs logprobs to be true")


# --- what comes later -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"mirostat": 2}, "mirostat"),
        ({"adaptive_target": 0.5}, "adaptive_target"),
        ({"n_indent": 4}, "n_indent"),
        ({"best_of": 5}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"samplers": ["infill"]}, "samplers[0]"),
        ({"samplers": "a"}, "samplers"),
    ],
)
def test_what_is_not_built_yet_says_so(body, field):
    error = refused(body, "chat")
    assert (error.status, error.kind) == (501, "not_supported_error")
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body",
    [
        {"grammar": ""},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1},
        {"adaptive_target": -1, "adaptive_decay": 0.9},
        {"lora": []},
        {"best_of": 1},
        {"n": 2, "best_of": 2},
        {"modalities": ["text"]},
        {"suffix": "x", "user": "y", "never_heard_of": {"a": [1]}},
    ],
)
def test_what_asks_for_nothing_is_taken(body):
    wanted(body, "chat")


def test_an_unknown_response_format():
    error = refused({"response_format": {"type": "sound"}}, "chat")
    assert (error.status, error.message.partition(": ")[0]) == (400, "response_format.type")


# --- what the scheduler is told -------------------------------------------------------------------


def test_the_request_as_the_scheduler_sees_it():
    made = wanted(
        {
            "max_tokens": 5,
            "n": 2,
            "priority": -3,
            "deadline_ms": 1500,
            "max_queue_ms": 200,
            "id_slot": 1,
            "cache_prompt": False,
        }
    )
    request = request_of(made, 10)
    assert (request.prompt_length, request.output_limit, request.choices) == (10, 5, 2)
    assert (request.priority, request.slot_hint, request.keep_cache) == (-3, 1, False)
    assert request.deadline_after_ns == 1500 * MS
    assert request.queue_wait_ns_max == 200 * MS
    assert request.shift_keep is None


@pytest.mark.parametrize(("keep", "kept"), [(0, 0), (4, 4), (-1, 10), (99, 10)])
def test_a_context_shift_keeps_the_beginning_only_where_it_is_switched_on(keep, kept):
    made = wanted({"n_keep": keep}, context_shift=True)
    assert request_of(made, 10).shift_keep == kept
    assert request_of(wanted({"n_keep": keep}), 10).shift_keep is None


@pytest.mark.parametrize("name", ["deadline_ms", "max_queue_ms"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_limit_of_time(name, value):
    request = request_of(wanted({name: value}), 10)
    assert request.deadline_after_ns is request.queue_wait_ns_max is None


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (None, "prompt"),
        (5, "prompt"),
        (True, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["x", ""], "prompt[1]"),
        ([1, None], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 10**30], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([1, [2]], "prompt[1]"),
        (["x", [1, 999_999]], "prompt[1][1]"),
        (["x", None], "prompt[1]"),
        ({}, "prompt.prompt_string"),
        ({"prompt_string": 5}, "prompt.prompt_string"),
    ],
)
def test_prompts_that_are_none(prompt, place):
    async def main() -> None:
        async with world(Storyteller()) as here:
            with pytest.raises(ApiError) as caught:
                prompts_of(prompt, TOKENIZER, here.service.limits)
            assert caught.value.message.partition(": ")[0] == place
            answer = await here.client.post("/completion", json={"prompt": prompt})
            assert answer.status_code == 400

    asyncio.run(main())


def test_pictures_are_not_supported():
    async def main() -> None:
        async with world(Storyteller(), template=ChatTemplate()) as here:
            prompt = {"prompt_string": "x", "multimodal_data": ["aGk="]}
            answer = await here.client.post("/completion", json={"prompt": prompt})
            assert answer.status_code == 501
            part = {"type": "image_url", "image_url": {"url": "data:"}}
            body = {"messages": [{"role": "user", "content": [part]}]}
            answer = await here.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert "messages[0].content[0].type" in answer.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [],
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
        [
            {"role": "user", "content": "test"},
            {"role": "assistant", "content": "test"},
            {"role": "assistant", "content": "test"},
        ],
    ],
)
def test_messages_that_are_none(messages):
    async def main() -> None:
        async with world(Storyteller(), template=ChatTemplate()) as here:
            answer = await here.client.post("/chat/completions", json={"messages": messages})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("messages")

    asyncio.run(main())


# --- any body at all ------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
STRUCTURED = """prompt messages stop samplers logit_bias response_fields stream_options tools
    dry_sequence_breakers tool_choice response_format logprobs top_logprobs chat_template_kwargs
    reasoning_effort reasoning_format continue_final_message echo best_of"""
KNOWN = f"{INTEGERS} {NUMBERS} {FLAGS} {STRUCTURED}".split()
BODIES = st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=6)
VALID = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
PATHS = ("/completion", "/v1/completions", "/v1/chat/completions")


@settings(max_examples=150)
@given(body=BODIES, path=st.sampled_from(PATHS), complete=st.booleans())
def test_any_object_is_answered_or_refused(body, path, complete):
    async def main() -> None:
        async with world(Storyteller("a\nb"), template=ChatTemplate()) as here:
            sent = VALID | body if complete else body
            answer = await here.client.post(path, content=json.dumps(sent).encode())
            assert answer.status_code in (200, 400, 501, 503), answer.text
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["code"] == answer.status_code
                assert error["message"]
            again = await here.client.post("/completion", json={"prompt": "x"})
            assert again.status_code == 200
            assert not any(here.service.state.slots), "nothing stays behind"

    asyncio.run(main())


@settings(max_examples=60)
@given(raw=st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_are_refused(raw):
    async def main() -> None:
        async with world(Storyteller(), template=ChatTemplate()) as here:
            for path in PATHS:
                answer = await here.client.post(path, content=raw)
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["type"] == "invalid_request_error"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("trained", "limit", "said", "unsaid"),
    [
        (0, 1, "with the answer; shorten it, or serve a larger context", "trained"),
        (256, 1, "serve a larger context", "trained"),
        (128, 1, "shorten it: the model was trained for no more", "ctx-size"),
        (128, 0, "the context holds 128; shorten it", "answer"),
    ],
)
def test_a_remedy_is_one_that_can_help(trained, limit, said, unsaid):
    limits = Limits(slot_count=1, batch_tokens=64, context_length=128, page_count=1)
    with pytest.raises(ApiError) as refused:
        check_fit(Prompt((1,) * 200, ""), limit, limits, trained)
    assert said in refused.value.message
    assert unsaid not in refused.value.message
