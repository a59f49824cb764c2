"""Low-rank adapters (LoRA) in files, and whether they fit the model they are to change.

A GGUF adapter has `general.type` adapter, `adapter.type` lora, the base's architecture, an alpha,
and for each matrix two tensors, `<its name>.lora_a` and `<its name>.lora_b`.  What it adds is
scaled by alpha / rank; without an alpha, not at all.  A PEFT adapter is a directory; see peft.py.

Everything in a file is applied or the file is refused: an adapter of which a part has no effect
would only show as bad answers.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from phaseloop.ops.adapters import Adapter, LowRank
from phaseloop.ops.interface import Weight

from .gguf_file import ModelError
from .peft import open_peft
from .scales import first_bad_value
from .shape import Model
from .targets import Targets
from .weights import NO_WEIGHTS, OTHER, Weights, open_weights

A, B = ".lora_a", ".lora_b"
SCALE_MAX = 1e9
OTHER_BASE = "use an adapter that was made for this model"
EXPORT = "convert the adapter again"


class LoadedAdapter(Struct, frozen=True):
    """`digest` covers every bit that has an effect, and no name of a file."""

    path: Path
    adapter: Adapter
    digest: str
    task_name: str = ""
    prompt_prefix: str = ""


def open_adapter(path: Path, base: Weights, model: Model) -> LoadedAdapter:
    """A GGUF file, or a PEFT directory or its safetensors.  Raises ModelError."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; check the path with --lora")
    if path.is_dir() or path.suffix in (".safetensors", ".bin"):
        return loaded(path, open_peft(path, base, model), base, model)
    weights = open_weights(path)
    check_header(weights, model)
    found = loaded(path, read_pairs(weights), base, model)
    return LoadedAdapter(
        path,
        found.adapter,
        found.digest,
        weights.get("adapter.lora.task_name", str, ""),
        weights.get("adapter.lora.prompt_prefix", str, ""),
    )


def check_header(weights: Weights, model: Model) -> None:
    kind = weights.get("general.type", str, "model")
    if kind != "adapter":
        raise weights.error(f"key general.type is {kind!r}, not 'adapter'", "name models with -m")
    kind = weights.get("adapter.type", str)
    if kind != "lora":
        raise weights.error(f"key adapter.type is {kind!r}, only 'lora' is supported", OTHER)
    architecture = weights.get("general.architecture", str)
    if architecture != model.architecture:
        what = f"it changes models of {architecture!r}, this one is {model.architecture!r}"
        raise weights.error(what, OTHER_BASE)
    if "adapter.alora.invocation_tokens" in weights.metadata:
        what = "key adapter.alora.invocation_tokens: activated adapters (aLoRA) are not supported"
        raise weights.error(what, "use a plain LoRA adapter")


def read_pairs(weights: Weights) -> dict[str, LowRank]:
    alpha = weights.number("adapter.lora.alpha", -SCALE_MAX, SCALE_MAX, 0.0)
    names = {name.removesuffix(A).removesuffix(B) for name in weights.tensors}
    found: dict[str, LowRank] = {}
    for name in sorted(names):
        if name in weights.tensors:
            what = f"tensor {name} replaces one of the model's, which is not supported"
            raise weights.error(what, "convert the adapter without it, or merge it into the model")
        pair = [weights.tensors.get(name + suffix) for suffix in (A, B)]
        a, b = pair
        if a is None or b is None:
            missing = name + (A if a is None else B)
            raise weights.error(f"tensor {missing} is missing", EXPORT)
        rank = b.shape[-1]
        found[name] = LowRank(a, b, alpha / rank if alpha else 1.0)
    return found


def loaded(path: Path, parts: Mapping[str, LowRank], base: Weights, model: Model) -> LoadedAdapter:
    """Raises ModelError unless each part fits its matrix and holds nothing but numbers."""
    if not parts:
        raise ModelError(f"{path}: it changes no matrix; {EXPORT}")
    targets = Targets(model.network)
    matrices: dict[str, LowRank] = {}
    embeddings: dict[str, LowRank] = {}
    for name, part in parts.items():
        if name in targets.embeddings:
            embeddings[name] = part
        elif name in targets.matrices | targets.expert_matrices:
            matrices[name] = part
        elif name in base.tensors:
            what = f"tensor {name}: this model does not multiply by it, so nothing can be added"
            raise ModelError(f"{path}: {what}; {EXPORT} without it")
        else:
            raise ModelError(f"{path}: tensor {name} is not in the model; {OTHER_BASE}")
        check_part(path, base.tensors[name], part, is_embedding=name in embeddings)
    return LoadedAdapter(path, Adapter(matrices, embeddings), digest_of(parts))


def check_part(path: Path, weight: Weight, part: LowRank, *, is_embedding: bool) -> None:
    """Shapes as LowRank has them, types that hold weights, finite values."""
    a, b, rank = part.a, part.b, part.b.shape[-1]
    *leading, outputs, width = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    if is_embedding:
        wanted = (outputs, rank), (width, rank)
    else:
        wanted = (*leading, rank, width), (*leading, outputs, rank)
    for factor, shape in zip((a, b), wanted, strict=True):
        if factor.shape != shape:
            raise ModelError(
                f"{path}: tensor {factor.name} has shape {list(factor.shape)}; beside "
                f"{list(weight.shape)} and at rank {rank} it would be {list(shape)}; {OTHER_BASE}"
            )
        if factor.kind in NO_WEIGHTS:
            what = f"tensor {factor.name} is {factor.kind}, which holds no weights"
            raise ModelError(f"{path}: {what}; {EXPORT}")
        if first_bad_value(factor) is not None:
            what = f"tensor {factor.name}: a value is NaN or infinite"
            raise ModelError(f"{path}: {what}; download it again, or train it again")


def digest_of(parts: Mapping[str, LowRank]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        part = parts[name]
        for factor in (part.a, part.b):
            digest.update(repr((name, factor.kind, factor.shape, part.factor)).encode())
            digest.update(factor.data.data)
    return digest.hexdigest()
