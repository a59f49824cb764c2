"""Goal: /tokenize, /detokenize and /apply-template answer as llama-server does.

Method: answers to the same bodies as a llama-server gave, on a small vocabulary whose tokens are
known; whatever is refused is refused with the field's name.
"""

import pytest
from http_world import world
from vocabularies import CONTROLS, bpe_tokenizer, trained

from phaseloop.http.served import Served
from phaseloop.text.chat_template import ChatTemplate

pytestmark = pytest.mark.asyncio

FIRST_CONTROL = len(trained()[0])
BOS, EOS, START, END, _ = range(FIRST_CONTROL, FIRST_CONTROL + len(CONTROLS))
TOKENIZER = bpe_tokenizer(add_bos_token=True)
COUNT = FIRST_CONTROL + len(CONTROLS) + 1


def ids(text: str) -> list[int]:
    """Of ordinary text, by the tokenizer, which has its own tests."""
    return list(TOKENIZER.encode(text))


async def post(path: str, body, **fields):
    async with world(tokenizer=TOKENIZER, **fields) as here:
        return await here.client.post(path, json=body)


async def refusal(path: str, body, **fields) -> str:
    answer = await post(path, body, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    return error["message"]


# --- tokenize -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, []),
        ({"content": None}, []),
        ({"content": ""}, []),
        ({"content": "The fox"}, ids("The fox")),
        ({"content": "a<|im_start|>b"}, [*ids("a"), START, *ids("b")]),
        ({"content": "<|im_start|>", "parse_special": False}, ids("<|im_start|>")),
        ({"content": "<|im_start|>", "parse_special": None}, [START]),
        ({"content": "fox", "add_special": True}, [BOS, *ids("fox")]),
        ({"content": ["fox", 5, "<|im_end|>"]}, [*ids("fox"), 5, END]),
        ({"content": ["fox", "fox"], "add_special": True}, [BOS, *ids("fox"), *ids("fox")]),
        ({"content": [5, "fox"], "add_special": True}, [5, *ids("fox")]),
        ({"content": [3.0]}, [3]),
        ({"content": [], "add_special": True}, []),
        ({"content": "fox", "unknown": 1}, ids("fox")),
    ],
)
async def test_text_becomes_tokens(body, tokens):
    answer = await post("/tokenize", body)
    assert (answer.status_code, answer.json()) == (200, {"tokens": tokens})


async def test_pieces_are_text_or_else_bytes():
    euro = "\N{EURO SIGN}".encode()
    split = ids("\N{EURO SIGN}")
    assert len(split) == 3, "the small vocabulary never saw it: a token per byte"
    answer = await post("/tokenize", {"content": "a\N{EURO SIGN}<|im_end|>", "with_pieces": True})
    assert answer.json()["tokens"] == [
        {"id": ids("a")[0], "piece": "a"},
        *({"id": token, "piece": [byte]} for token, byte in zip(split, euro, strict=True)),
        {"id": END, "piece": "<|im_end|>"},
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"content": 5}, "content: must be a string, or a list of strings and tokens, not 5"),
        ({"content": {}}, "content: must be a string, or a list of strings and tokens, not an"),
        ({"content": ["a", ["b"]]}, "content[1]: must be an integer, not a list"),
        ({"content": [None]}, "content[0]: must be an integer, not null"),
        ({"content": [True]}, "content[0]: must be an integer, not true"),
        ({"content": [1.5]}, "content[0]: must be an integer, not 1.5"),
        ({"content": [-1]}, f"content[0]: -1 is no token of this model, which has {COUNT}"),
        ({"content": [COUNT]}, f"content[0]: {COUNT} is no token of this model"),
        ({"content": [10**30]}, "content[0]: a huge number is no token of this model"),
        ({"content": "a", "add_special": 3}, "add_special: must be true or false, not 3"),
        ({"content": "a", "parse_special": "x"}, "parse_special: must be true or false, not 'x'"),
        ({"content": "a", "with_pieces": []}, "with_pieces: must be true or false, not a list"),
    ],
)
async def test_what_is_no_text_is_refused_by_its_field(body, message):
    assert (await refusal("/tokenize", body)).startswith(message)


# --- detokenize -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ({}, ""),
        ({"tokens": None}, ""),
        ({"tokens": []}, ""),
        ({"tokens": [*ids("The fox"), END]}, "The fox<|im_end|>"),
        ({"tokens": [float(ids("a")[0])]}, "a"),
        ({"tokens": ids("\N{EURO SIGN}")}, "\N{EURO SIGN}"),
        ({"tokens": ids("\N{EURO SIGN}")[:2]}, "\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_tokens_become_text(body, content):
    answer = await post("/detokenize", body)
    assert (answer.status_code, answer.json()) == (200, {"content": content})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tokens": "a"}, "tokens: must be a list of tokens, not 'a'"),
        ({"tokens": {"a": 1}}, "tokens: must be a list of tokens, not an object"),
        ({"tokens": [0, "a"]}, "tokens[1]: must be an integer, not 'a'"),
        ({"tokens": [0, COUNT]}, f"tokens[1]: {COUNT} is no token of this model"),
        ({"tokens": [-1]}, "tokens[0]: -1 is no token of this model"),
    ],
)
async def test_what_are_no_tokens_is_refused_by_its_place(body, message):
    assert (await refusal("/detokenize", body)).startswith(message)


async def test_there_and_back():
    text = "Größe, naïve café 你好 👍\n\n    def f():\n"
    async with world(tokenizer=TOKENIZER) as here:
        tokens = (await here.client.post("/tokenize", json={"content": text})).json()
        content = (await here.client.post("/detokenize", json=tokens)).json()
    assert content == {"content": text}


# --- apply-template -------------------------------------------------------------------------------

TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "well"}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": [USER]}, "[user]hi;[assistant]"),
        ({"messages": [USER], "add_generation_prompt": False}, "[user]hi;"),
        ({"messages": [USER, ASSISTANT]}, "[user]hi;[assistant]well"),
        ({"messages": [USER, ASSISTANT, USER]}, "[user]hi;[assistant]well;[user]hi;[assistant]"),
        ({"messages": [USER], "chat_template_kwargs": {"mood": "!"}}, "[user]hi;[assistant]!"),
    ],
)
async def test_a_conversation_becomes_a_prompt(body, prompt):
    answer = await post("/apply-template", body, template=TEMPLATE)
    assert (answer.status_code, answer.json()) == (200, {"prompt": prompt})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: missing"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "messages[2]"),
    ],
)
async def test_what_is_no_conversation_is_refused_by_its_place(body, message):
    assert (await refusal("/apply-template", body, template=TEMPLATE)).startswith(message)


async def test_a_template_that_refuses_is_the_clients_matter():
    source = "{{ raise_exception('only one at a time') }}"
    said = await refusal("/apply-template", {"messages": [USER]}, template=ChatTemplate(source))
    assert "only one at a time" in said


async def test_a_model_without_a_template_says_what_helps():
    answer = await post("/apply-template", {"messages": [USER]})
    assert answer.status_code == 501
    assert "--chat-template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_a_conversations_tokens_are_counted_with_what_the_model_wants_first(path):
    body = {"messages": [USER], "add_generation_prompt": False}
    answer = await post(f"{path}/input_tokens", body, template=TEMPLATE)
    assert answer.json() == {
        "object": "response.input_tokens",
        "input_tokens": 1 + len(ids("[user]hi;")),
    }


# --- off the event loop ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "fox"}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", {"messages": [USER]}),
        ("/chat/completions/input_tokens", {"messages": [USER]}),
    ],
)
async def test_text_is_worked_on_in_a_thread(path, body, monkeypatch):
    in_thread = Served.in_thread
    calls = []

    async def noted(self, call, *args, **kwargs):
        calls.append(call)
        return await in_thread(self, call, *args, **kwargs)

    monkeypatch.setattr(Served, "in_thread", noted)
    answer = await post(path, body, template=TEMPLATE)
    assert answer.status_code == 200
    assert len(calls) == 1
