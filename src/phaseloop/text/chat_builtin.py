"""Chat templates by name, for models that bring none or a broken one.

Each follows the format that the model's makers document, in its simplest form: without tools.  The
tokenizer adds the beginning token where the vocabulary asks for it, so it is left off then.
"""

import difflib

from .budget import TemplateError

# What models get that bring no template; Qwen, SmolLM and many others speak it.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
DEEPSEEK3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- message.content + '\\n\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' -}}
{%- else -%}
{{- '<｜User｜>' + message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' -}}
{%- endif -%}
"""  # noqa: RUF001
# No system messages: they are put in front of what the user says next.
GEMMA = """\
{{- bos_token -}}
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + message.content|trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{{- message.content|trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
MISTRAL_V7 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '[SYSTEM_PROMPT] ' + message.content + '[/SYSTEM_PROMPT]' -}}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content + '</s>' -}}
{%- else -%}
{{- '[INST] ' + message.content + '[/INST]' -}}
{%- endif -%}
{%- endfor -%}
"""
PHI3 = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "deepseek3": DEEPSEEK3,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "mistral-v7": MISTRAL_V7,
    "phi3": PHI3,
}


def template_source(text: str) -> str:
    """The template that --chat-template means: one of those here by name, or itself.

    Raises TemplateError for what is no name and, without a brace in it, no template either.
    """
    if text in TEMPLATES or "{" in text:
        return TEMPLATES.get(text, text)
    near = difflib.get_close_matches(text, TEMPLATES, n=1)
    known = f"is {near[0]} meant?" if near else f"there are {', '.join(TEMPLATES)}"
    raise TemplateError(f"none is built in under the name {text[:80]!r} ({known})")
