"""Which model is served, in the forms that OpenAI's and ollama's clients ask for."""

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from .errors import json_response
from .served import Served, served_of
from .table import get

TEXT_ALONE = {"input_modalities": ["text"], "output_modalities": ["text"]}


async def models(request: Request) -> Response:
    served = served_of(request)
    return json_response(
        {"models": [ollama_record(served)], "object": "list", "data": [openai_record(served)]}
    )


def openai_record(served: Served) -> dict[str, object]:
    card, known = served.model, asdict(served.model)
    names = ("vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size", "ftype")
    return {
        "id": card.name,
        "aliases": card.aliases,
        "tags": card.tags,
        "object": "model",
        "architecture": TEXT_ALONE,
        "created": served.created,
        "owned_by": "llamacpp",  # clients tell the kind of server by it
        "meta": {name: known[name] for name in names},
    }


def ollama_record(served: Served) -> dict[str, object]:
    """Members are strings even where a number would do; what is not known is empty."""
    card, pooling = served.model, served.service.description.pooling
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": card.tags or [""],
        "capabilities": ["completion" if pooling is None else "embedding"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": card.architecture,
            "families": [card.architecture],
            "parameter_size": "",
            "quantization_level": card.ftype,
        },
    }


ROWS = (get(models, "/v1/models", "/models"),)
