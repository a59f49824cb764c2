"""Goal: what a client may send as messages is taken, and all else is refused with its place named.

Method: requests as they come out of a JSON parser, and the answers llama-server gives to them.
"""

import pytest

from phaseloop.text.chat_messages import (
    Function,
    Message,
    MessageError,
    ToolCall,
    is_continued,
    parse_messages,
)

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Well"}


def test_messages_in_all_their_forms():
    assert parse_messages(
        [
            {"role": "system", "content": "s", "unknown": 1},
            {"role": "developer", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
            {"role": "user", "content": None, "name": "Ann"},
            {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "content": "", "tool_call_id": "1"},
        ]
    ) == (
        Message("system", ("s",)),
        Message("developer", ("a",)),
        Message("user", (), name="Ann"),
        Message(
            "assistant", (), reasoning_content="hm", tool_calls=(ToolCall(Function("f"), "1"),)
        ),
        Message("tool", ("",), tool_call_id="1"),
    )


REFUSED = {
    "no list": ({}, r"messages: Expected `array`, got `object`"),
    "none": ([], r"messages: there is none"),
    "no role": ([{"content": "a"}], r"messages\[0\]: Object missing required field `role`"),
    "another role": ([USER, {"role": "x", "content": ""}], r"messages\[1\]\.role: Invalid enum"),
    "no content": ([{"role": "user"}], r"messages\[0\]\.content: missing"),
    "nothing said": ([{"role": "assistant"}], r"messages\[0\]\.content: missing"),
    "a number": ([{"role": "user", "content": 1}], r"messages\[0\]\.content: Expected"),
    "a picture": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        r"messages\[0\]\.content\[0\]\.type: 'image_url' is not supported, only 'text'",
    ),
    "a part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        r"messages\[0\]\.content\[0\]\.text: missing",
    ),
    "a part without type": (
        [{"role": "user", "content": [{"text": "a"}]}],
        r"messages\[0\]\.content\[0\]: Object missing required field `type`",
    ),
    "calls of a user": (
        [{"role": "user", "content": "a", "tool_calls": [CALL]}],
        r"messages\[0\]\.tool_calls: a message of role user cannot call tools",
    ),
    "a call of nothing": (
        [{"role": "assistant", "tool_calls": [{"type": "function"}]}],
        r"messages\[0\]\.tool_calls\[0\]: Object missing required field `function`",
    ),
}


@pytest.mark.parametrize(("raw", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(raw, problem):
    with pytest.raises(MessageError, match=f"^{problem}") as caught:
        parse_messages(raw)
    assert str(caught.value).startswith(f"{caught.value.parameter}: ")


def continues(*raw, **options):
    return is_continued(parse_messages(list(raw)), **options)


def test_what_is_continued():
    assert continues(USER, ASSISTANT)
    assert continues(USER, ASSISTANT, continue_final_message=True)
    assert continues(USER, ASSISTANT, continue_final_message=True, prefill=False)
    assert continues(USER, ASSISTANT, add_generation_prompt=True)  # what is so by default anyway
    assert continues(ASSISTANT)


def test_what_is_answered():
    assert not continues(USER)
    assert not continues(USER, ASSISTANT, USER)
    assert not continues(USER, ASSISTANT, prefill=False)
    assert not continues(USER, ASSISTANT, continue_final_message=False)
    assert not continues(USER, ASSISTANT, ASSISTANT, prefill=False)


def test_what_cannot_be_continued():
    with pytest.raises(MessageError, match=r"^messages\[2\]: only one message of the assistant"):
        continues(USER, ASSISTANT, ASSISTANT)
    with pytest.raises(MessageError, match=r"^messages\[1\]\.tool_calls: a call of a tool cannot"):
        continues(USER, {**ASSISTANT, "tool_calls": [CALL]})
    with pytest.raises(MessageError, match=r"^continue_final_message: the final message is the us"):
        continues(USER, continue_final_message=True)
    with pytest.raises(MessageError, match=r"^continue_final_message: cannot be true together"):
        continues(USER, ASSISTANT, continue_final_message=True, add_generation_prompt=True)
