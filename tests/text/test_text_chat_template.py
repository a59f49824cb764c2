"""Goal: conversations become the prompts that models were trained on, whatever a template needs.

Method: small templates of each kind that models bring, with the prompts written out by hand from
the formats that their makers document; and requests that must be refused with their place named.
"""

from datetime import UTC, datetime

import msgspec
import pytest
from vocabularies import bpe_metadata

from phaseloop.text.budget import Limits, TemplateError
from phaseloop.text.chat_builtin import TEMPLATES, template_source
from phaseloop.text.chat_messages import MessageError, is_continued, parse_messages
from phaseloop.text.chat_template import ChatTemplate, Surroundings, surroundings_of, template_of
from phaseloop.text.metadata import vocabulary_of

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": " One & <two> "},
]
# As Qwen3 and others: reasoning before the answer, and a switch to go without.
THINKER = """\
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.role == 'assistant' %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content|trim + '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant>' }}
{%- if not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ONLY_PARTS = (
    "{% for m in messages %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
CALLS = """\
{%- for tool in tools or [] %}{{ tool|tojson }}{% endfor %}
{%- for m in messages %}
{{- '[' + m.role + ']' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- call.function.name }}{% for name, value in ARGUMENTS %}{{ name }}={{ value }}{% endfor %}
{%- endfor %}
{%- endfor %}
"""


def rendered(source, messages, surroundings=Surroundings(), **options):  # noqa: B008
    template = ChatTemplate(source, surroundings)
    return template.render(parse_messages(messages), now=NOW, **options)


def continued(source, messages, **variables):
    parsed = parse_messages(messages)
    return ChatTemplate(source).render(
        parsed, now=NOW, continue_final=is_continued(parsed), variables=variables
    )


# --- the built-in ones ----------------------------------------------------------------------------

FORMATS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n One & <two> <|im_end|>\n"
    "<|im_start|>assistant\n",
    "deepseek3": "<s>Be brief.\n\n<｜User｜>Hi<｜Assistant｜>Yes?<｜end▁of▁sentence｜>"  # noqa: RUF001
    "<｜User｜> One & <two> <｜Assistant｜>",  # noqa: RUF001
    "gemma": "<s><start_of_turn>user\nBe brief.\nHi<end_of_turn>\n"
    "<start_of_turn>model\nYes?<end_of_turn>\n"
    "<start_of_turn>user\nOne & <two><end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne & <two><|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-v7": "<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] Hi[/INST] Yes?</s>"
    "[INST]  One & <two> [/INST]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes?<|end|>\n"
    "<|user|>\n One & <two> <|end|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_built_in_templates_write_their_documented_formats(name):
    assert (
        rendered(template_source(name), CONVERSATION, Surroundings("<s>", "</s>"))
        == (FORMATS[name])
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_built_in_templates_leave_the_answer_open_only_if_asked(name):
    closed = rendered(
        template_source(name), CONVERSATION, Surroundings("<s>"), add_generation_prompt=False
    )
    assert FORMATS[name].startswith(closed)
    assert (closed == FORMATS[name]) == (name == "mistral-v7")  # which marks no beginning


def test_a_name_that_is_none_is_told_from_a_template():
    assert template_source("{{ 1 }}") == "{{ 1 }}"
    with pytest.raises(TemplateError, match="'llama-3' \\(is llama3 meant\\?\\)"):
        template_source("llama-3")
    with pytest.raises(TemplateError, match="there are chatml, deepseek3, gemma,"):
        template_source("wholly different")


# --- where the template comes from ----------------------------------------------------------------


def vocabulary(**changes):
    return msgspec.structs.replace(vocabulary_of(bpe_metadata()), **changes)


def test_the_models_own_template_unless_another_is_chosen():
    own = vocabulary(chat_template="own {{ 1 }}", chat_template_tools="tools {{ 1 }}")
    assert template_of(own).source == "own {{ 1 }}"
    assert template_of(own, "phi3").source == TEMPLATES["phi3"]
    assert template_of(own, "{{ 2 }}").source == "{{ 2 }}"
    only_tools = vocabulary(chat_template=None, chat_template_tools="tools {{ 1 }}")
    assert template_of(only_tools).source == "tools {{ 1 }}"
    assert template_of(vocabulary(chat_template=None)).source == TEMPLATES["chatml"]


def test_what_the_tokenizer_adds_is_left_off():
    source = "{{ bos_token }}text{{ eos_token }}"
    hi = [{"role": "user", "content": "Hi"}]
    assert rendered(source, hi, Surroundings("<s>", "</s>")) == "<s>text</s>"
    assert rendered(source, hi, Surroundings("<s>", "</s>", bos_is_added=True)) == "text</s>"
    assert rendered(source, hi, Surroundings("<s>", "</s>", eos_is_added=True)) == "<s>text"


def test_the_surroundings_are_the_vocabularys():
    known = vocabulary(add_bos=True, add_eos=False)
    expected = Surroundings(
        known.tokens[known.special.bos], known.tokens[known.special.eos], bos_is_added=True
    )
    assert surroundings_of(known) == expected


# --- what templates cannot do ---------------------------------------------------------------------


def test_a_system_message_is_put_in_front_of_the_user_where_there_is_no_such_role():
    assert rendered(NO_SYSTEM, CONVERSATION) == (
        "[user]Be brief.\nHi[assistant]Yes?[user] One & <two> "
    )
    assert rendered(NO_SYSTEM, CONVERSATION[:1]) == "[user]Be brief."
    assert rendered(PLAIN, CONVERSATION[:2]) == "[system]Be brief.[user]Hi"


def test_developers_speak_as_the_system_where_they_have_no_role():
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert rendered(PLAIN, talk) == "[system]Be brief.[user]Hi"
    assert rendered("{# developer #}" + PLAIN, talk) == "[developer]Be brief.[user]Hi"
    assert rendered(NO_SYSTEM, talk) == "[user]Be brief.\nHi"


def test_parts_are_joined_for_templates_that_want_text():
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    assert rendered(PLAIN, [{"role": "user", "content": parts}]) == "[user]a\n\nb"
    assert rendered(PLAIN, [{"role": "user", "content": parts[1:]}]) == "[user]b"
    assert rendered(PLAIN, [{"role": "user", "content": []}]) == "[user]"


def test_parts_are_kept_for_templates_that_want_parts():
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    assert rendered(ONLY_PARTS, [{"role": "user", "content": parts}]) == "(a)(b)"
    assert rendered(ONLY_PARTS, [{"role": "user", "content": "ab"}]) == "(ab)"


ARGUMENTS = {
    "as a mapping": "call.function.arguments.items()",
    "as a text": "[['text', call.function.arguments + '']]",
}


@pytest.mark.parametrize("form", ARGUMENTS)
@pytest.mark.parametrize("sent", ['{"city": "Paris"}', {"city": "Paris"}])
def test_arguments_of_calls_take_the_form_that_the_template_wants(form, sent):
    source = CALLS.replace("ARGUMENTS", ARGUMENTS[form])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": sent}}
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    printed = "city=Paris" if form == "as a mapping" else 'text={"city": "Paris"}'
    assert rendered(source, talk) == f"[user]Hi[assistant]weather{printed}[tool]sunny"


def test_arguments_that_are_no_json_are_refused_where_a_mapping_is_wanted():
    call = {"type": "function", "function": {"name": "weather", "arguments": "{city"}}
    talk = [{"role": "assistant", "tool_calls": [call]}]
    source = CALLS.replace("ARGUMENTS", ARGUMENTS["as a mapping"])
    place = r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments: is no JSON"
    with pytest.raises(MessageError, match=place):
        rendered(source, talk)


def test_tools_are_passed_on_in_plain_json():
    source = CALLS.replace("ARGUMENTS", ARGUMENTS["as a text"])
    tools = [{"type": "function", "function": {"name": "größer"}}]
    assert rendered(source, [{"role": "user", "content": "<"}], tools=tools) == (
        '{"type": "function", "function": {"name": "größer"}}[user]<'
    )


def test_abilities_are_told_as_llama_server_tells_them():
    source = CALLS.replace("ARGUMENTS", ARGUMENTS["as a mapping"])
    assert ChatTemplate(source).abilities.as_caps() == {
        "supports_string_content": True,
        "supports_typed_content": False,
        "supports_system_role": True,
        "supports_tools": True,
        "supports_tool_calls": True,
        "supports_parallel_tool_calls": True,
        "supports_object_arguments": True,
        "supports_preserve_reasoning": False,
        "supports_reasoning_effort": False,
    }
    thinker = ChatTemplate(THINKER).abilities
    assert thinker.preserve_reasoning
    assert not thinker.tools
    assert ChatTemplate(PLAIN + "{{ reasoning_effort }}").abilities.reasoning_effort
    no_system = ChatTemplate(NO_SYSTEM).abilities
    assert (no_system.system_role, no_system.typed_content) == (False, False)
    only_parts = ChatTemplate(ONLY_PARTS).abilities
    assert (only_parts.string_content, only_parts.typed_content) == (False, True)


def test_abilities_of_a_template_that_needs_tools():
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + PLAIN
    able = ChatTemplate(source).abilities
    assert (able.system_role, able.tools, able.string_content) == (True, True, True)


# --- what requests set ----------------------------------------------------------------------------


def test_variables_of_the_request_reach_the_template():
    hi = [{"role": "user", "content": "Hi"}]
    assert rendered("{{ mood }}", hi, variables={"mood": "good"}) == "good"
    assert rendered("{{ enable_thinking }}{{ clear_thinking }}", hi) == "TrueFalse"
    variables = {"enable_thinking": False, "preserve_reasoning": False, "reasoning_effort": "low"}
    source = "{{ enable_thinking }}{{ clear_thinking }}{{ reasoning_strength }}"
    assert rendered(source, hi, variables=variables) == "FalseTruelow"
    for name in ("messages", "bos_token"):
        with pytest.raises(MessageError, match=rf"^chat_template_kwargs\.{name}: cannot be set"):
            rendered(PLAIN, hi, variables={name: "x"})


def test_the_date_is_the_one_given():
    source = "{{ strftime_now('%Y-%m-%d') }} {{ date_string }} {{ datetime }}"
    assert rendered(source, [{"role": "user", "content": "Hi"}]) == (
        "2026-01-02 02 Jan 2026 Jan 02 2026"
    )


def test_a_template_that_refuses_says_why():
    with pytest.raises(TemplateError, match="line 1: only hats") as caught:
        rendered("{{ raise_exception('only hats') }}", [{"role": "user", "content": "Hi"}])
    assert caught.value.refused


def test_limits_end_a_conversation_that_makes_too_much():
    template = ChatTemplate(PLAIN * 10, limits=Limits(volume_max=10_000))
    long = parse_messages([{"role": "user", "content": "a" * 2_000}])
    with pytest.raises(TemplateError, match="makes more than 10000 characters"):
        template.render(long, now=NOW)


# --- answers that are continued -------------------------------------------------------------------


def said(*texts):
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 9, texts, strict=False)
    ]


def test_an_assistants_message_at_the_end_is_continued():
    assert continued(TEMPLATES["chatml"], said("Hi", "Well, ")) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    )


def test_a_continued_answer_has_its_reasoning_behind_it():
    expected = "<user>Hi<end><assistant><think>\n\n</think>\n\nWell, "
    assert continued(THINKER, said("Hi", "Well, ")) == expected
    assert continued(THINKER, said("Hi", "Well, "), enable_thinking=False) == expected
    thought = [*said("Hi"), {"role": "assistant", "content": "A", "reasoning_content": "hm"}]
    assert continued(THINKER, thought) == "<user>Hi<end><assistant><think>\nhm\n</think>\n\nA"
    thought[-1]["content"] = None
    assert continued(THINKER, thought) == "<user>Hi<end><assistant><think>\nhm"


def test_a_template_that_opens_the_reasoning_itself_has_it_closed():
    source = PLAIN + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    assert continued(source, said("Hi", "Well, ")) == "[user]Hi[assistant]<think></think>Well, "


def test_a_users_words_are_not_taken_for_the_place_of_the_answer():
    talk = said("zqreasoning zqcontent", "A")
    assert continued(THINKER, talk) == (
        "<user>zqreasoning zqcontent<end><assistant><think>\n\n</think>\n\nA"
    )
