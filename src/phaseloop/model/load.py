"""From weights to a model: which architecture a file holds, and who builds it."""

from collections.abc import Callable

from .bert import bert, nomic_bert
from .gemma3 import gemma3
from .llama import llama
from .qwen import qwen2, qwen3, qwen3moe
from .qwen35 import qwen35, qwen35moe
from .shape import Model
from .weights import OTHER, Weights

ARCHITECTURES: dict[str, Callable[[Weights], Model]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "gemma3": gemma3,
    "bert": bert,
    "nomic-bert": nomic_bert,
}


def load_model(weights: Weights) -> Model:
    """Raises ModelError for an unknown architecture and for tensors that do not fit it."""
    name = weights.get("general.architecture", str)
    build = ARCHITECTURES.get(name)
    if build is None:
        known = ", ".join(ARCHITECTURES)
        raise weights.error(f"architecture {name!r} is not supported, supported are {known}", OTHER)
    return build(weights)
