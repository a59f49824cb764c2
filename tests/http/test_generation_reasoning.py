"""Goal: a thought is told apart from the answer, however the text is cut, and nothing gets lost.

Method: texts with their thoughts written down beside them, cut at every place and into all letters;
then the chat route, streamed and not.
"""

import json
from typing import Any

import pytest
from http_world import world
from hypothesis import given
from hypothesis import strategies as st
from storyteller import TOKENIZER, Storyteller

from phaseloop.http.chat_reasoning import Reasoning, Start, start_of
from phaseloop.text.chat_template import ChatTemplate

THINKING = """
{%- for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor -%}
<a>{% if not enable_thinking %}<think>

</think>

{% endif %}"""
OPENING = "{{ messages[0].content }}<a><think>\n"

CASES: list[tuple[Start | None, str, str, str]] = [
    ("possible", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    ("possible", "\n<think>hm</think>yes\n", "hm", "yes\n"),
    ("possible", "<think>\n\n</think>\n\nyes", "", "yes"),
    ("possible", "<think>a <b> </thin </think> c</think>d", "a <b> </thin", "c</think>d"),
    ("possible", "<think>never ends", "never ends", ""),
    ("possible", "<think>never ends</thi", "never ends</thi", ""),
    ("possible", "<think>only</think>", "only", ""),
    ("possible", " plain <think>text</think>", "", " plain <think>text</think>"),
    ("possible", "<thin", "", "<thin"),
    ("possible", "  ", "", "  "),
    ("possible", "", "", ""),
    ("opened", "hm\n</think>\n\nyes", "hm", "yes"),
    ("opened", "  hm  hm  </think>yes <think>", "hm  hm", "yes <think>"),
    ("opened", "</think>yes", "", "yes"),
    ("opened", "cut short \n", "cut short", ""),
    (None, "<think>hm</think>yes", "", "<think>hm</think>yes"),
]


def split(start: Start | None, parts: list[str]) -> tuple[str, str]:
    reasoning = Reasoning(start)
    pairs = [reasoning.push(part) for part in parts] + [reasoning.finish()]
    return "".join(thought for thought, _ in pairs), "".join(answer for _, answer in pairs)


@pytest.mark.parametrize(("start", "text", "thought", "answer"), CASES)
def test_thought_and_answer(start, text, thought, answer):
    assert split(start, [text]) == (thought, answer)
    assert split(start, list(text)) == (thought, answer)
    for place in range(len(text)):
        assert split(start, [text[:place], text[place:]]) == (thought, answer)


@given(
    start=st.sampled_from(["possible", "opened", None]),
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a"])),
)
def test_the_cuts_do_not_matter(start, parts):
    text = "".join(parts)
    whole = split(start, [text])
    assert split(start, parts) == whole
    assert split(start, list(text)) == whole
    for side in whole:
        assert side.strip() in text


@pytest.mark.parametrize(
    ("prompt", "template", "start"),
    [
        ("<a>", "...</think>...", "possible"),
        ("<a><think>\n", "...</think>...", "opened"),
        ("<a><think>\n\n</think>\n\n", "...</think>...", None),
        ("<a><think>\n", "knows no thoughts", None),
    ],
)
def test_how_the_answer_begins(prompt, template, start):
    assert start_of(prompt, template) == start


TEXT = "<think>\nhm hm\n</think>\n\nyes it is"
MESSAGES = [{"role": "user", "content": "x"}]


async def message(source: str = THINKING, text: str = TEXT, **body: Any) -> Any:
    async with world(Storyteller(text), template=ChatTemplate(source)) as here:
        body = {"messages": MESSAGES, **body}
        answer = await here.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def deltas(source: str = THINKING, text: str = TEXT, **body: Any) -> list[Any]:
    async with world(Storyteller(text), template=ChatTemplate(source)) as here:
        body = {"messages": MESSAGES, "stream": True, **body}
        answer = await here.client.post("/v1/chat/completions", json=body)
    lines = [line for line in answer.content.split(b"\n\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:])["choices"][0]["delta"] for line in lines]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wish", [{}, {"reasoning_format": "auto"}, {"reasoning_format": "deepseek"}]
)
async def test_a_message_with_a_thought(wish):
    expected = {"role": "assistant", "content": "yes it is", "reasoning_content": "hm hm"}
    assert await message(**wish) == expected
    first, *others = await deltas(**wish)
    assert first == {"role": "assistant", "content": None}
    thought = "".join(delta.get("reasoning_content", "") for delta in others)
    content = "".join(delta.get("content", "") for delta in others)
    assert (thought, content) == ("hm hm", "yes it is")
    assert "" not in [value for delta in others for value in delta.values()]


@pytest.mark.asyncio
async def test_a_thought_that_the_template_opens():
    text = TEXT.removeprefix("<think>\n")
    assert (await message(OPENING, text))["reasoning_content"] == "hm hm"


@pytest.mark.asyncio
async def test_a_thought_that_is_continued():
    begun = {"role": "assistant", "content": "", "reasoning_content": "I think"}
    made = await message(messages=[*MESSAGES, begun], text=" so</think>yes")
    assert (made["reasoning_content"], made["content"]) == ("so", "yes")


@pytest.mark.asyncio
async def test_nothing_is_split_where_nobody_wants_it():
    plain = {"role": "assistant", "content": TEXT}
    assert await message(reasoning_format="none") == plain
    assert await message(ChatTemplate().source) == plain
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    assert await message(**thinking) == plain


@pytest.mark.asyncio
async def test_every_token_has_its_likelihood_beside_a_thought():
    async with world(Storyteller(TEXT), template=ChatTemplate(THINKING)) as here:
        body = {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 0}
        answer = await here.client.post("/v1/chat/completions", json=body)
    lines = [line for line in answer.content.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    found = [one["id"] for c in choices for one in (c.get("logprobs") or {}).get("content", [])]
    assert found == list(TOKENIZER.encode(TEXT))


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["deepseek-legacy", "loud", 5])
async def test_other_formats_are_refused(value):
    async with world(Storyteller(), template=ChatTemplate(THINKING)) as here:
        body = {"messages": MESSAGES, "reasoning_format": value}
        answer = await here.client.post("/v1/chat/completions", json=body)
    assert answer.status_code in (400, 501)
    assert answer.json()["error"]["message"].startswith("reasoning_format: ")
