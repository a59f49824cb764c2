"""Goal: the template that SmolLM2's file brings makes the prompts that its makers show.

Method: the real file's metadata; the prompts are written out from the model's card.
"""

from datetime import UTC, datetime

import pytest

from phaseloop.model.gguf_file import open_gguf
from phaseloop.text.chat_messages import is_continued, parse_messages
from phaseloop.text.chat_template import template_of
from phaseloop.text.metadata import vocabulary_of

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER = {"role": "user", "content": "What is gravity?"}
ASKED = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def template(smollm2):
    return template_of(vocabulary_of(open_gguf(smollm2).metadata))


def rendered(template, *messages):
    parsed = parse_messages(list(messages))
    return template.render(parsed, now=NOW, continue_final=is_continued(parsed))


def test_a_question(template):
    assert rendered(template, USER) == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{ASKED}"


def test_an_own_system_message_takes_the_place_of_the_usual_one(template):
    system = {"role": "system", "content": "Be brief."}
    assert rendered(template, system, USER) == f"<|im_start|>system\nBe brief.<|im_end|>\n{ASKED}"


def test_an_answer_that_is_continued(template):
    begun = {"role": "assistant", "content": "It is"}
    assert rendered(template, USER, begun) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{ASKED}It is"
    )


def test_what_it_is_able_to_do(template):
    able = template.abilities
    assert (able.string_content, able.system_role, able.typed_content) == (True, True, False)
    assert (able.tools, able.tool_calls, able.developer_role) == (False, False, False)
