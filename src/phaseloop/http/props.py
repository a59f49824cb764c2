"""The server's properties: what a client may want to know before its first request."""

from starlette.requests import Request
from starlette.responses import Response

from .errors import json_response
from .served import HttpOptions, Served, options_of, served_of
from .settings_json import settings_json
from .table import get


async def properties(request: Request) -> Response:
    return json_response(properties_of(served_of(request), options_of(request)))


def properties_of(served: Served, options: HttpOptions) -> dict[str, object]:
    card, vocabulary, template = served.model, served.tokenizer.vocabulary, served.template
    special, limits = vocabulary.special, served.service.limits
    params = settings_json(
        served.defaults,
        seed=served.default_seed,
        limit=served.default_limit,
        drafters=served.service.description.drafters,
        adapters=served.loras.default,
    )
    params |= {
        "n_keep": 0,
        "ignore_eos": False,
        "stream": False,
        "timings_per_token": False,
        "reasoning_format": served.reasoning_format,
    }
    made: dict[str, object] = {
        "default_generation_settings": {"params": params, "n_ctx": limits.context_length},
        "total_slots": limits.slot_count,
        "model_alias": card.name,
        "model_ftype": card.ftype,
        "model_path": card.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "",  # what would stand for a picture in a prompt
        "endpoint_slots": options.slots,
        "endpoint_props": options.props,
        "endpoint_metrics": options.metrics,
        "ui": True,
        "ui_settings": {},
        "chat_template": "" if template is None else template.source,
        "chat_template_caps": {} if template is None else template.abilities.as_caps(),
        "bos_token": "" if special.bos is None else vocabulary.tokens[special.bos],
        "eos_token": "" if special.eos is None else vocabulary.tokens[special.eos],
        "build_info": options.build,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
        "phaseloop": {
            "policy": served.service.state.policy.name,
            "phase_control": options.phase_control,
            "engine": served.service.description.name,
            "pooling": served.service.description.pooling,  # of embeddings; null: there are none
            # Why the bits of an answer may depend on its company; empty where they do not.
            "unstable": served.service.description.unstable,
        },
    }
    if vocabulary.chat_template_tools is not None:
        made["chat_template_tool_use"] = vocabulary.chat_template_tools
    return made


ROWS = (get(properties, "/props"),)
