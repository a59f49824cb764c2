"""PEFT adapters as they come out of training: adapter_config.json and adapter_model.safetensors.

Names become those of GGUF files (peft_names.py), values F32, and the scale of each module follows
from the configuration: alpha / rank, or alpha / sqrt(rank) for rank-stabilised ones, either of them
perhaps of the module's own.  What is not applied is refused by the name that PEFT has for it.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import regex
from msgspec import Struct
from numpy.typing import NDArray
from safetensors import (
    SafetensorError,
    deserialize,  # pyright: ignore[reportUnknownVariableType]
)

from phaseloop.ops.adapters import LowRank
from phaseloop.ops.interface import Weight

from .gguf_file import ModelError
from .peft_names import Place, inputs_order, outputs_order, place_of
from .shape import Model
from .weights import Weights, aligned_copy

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
CONFIG_BYTES_MAX = 1 << 20
ROOT = "base_model.model."
ENDINGS = {".lora_A.weight": "a", ".lora_B.weight": "b"}
EMBEDDING_ENDINGS = {".lora_embedding_A": "a", ".lora_embedding_B": "b"}
MATCH_S_MAX = 1.0  # for a pattern of the configuration, which may be any regular expression
MERGE = "merge the adapter into the model, or train one without it"
# Keys that say nothing about what is computed, or that are read below.  All others must be empty,
# also those of later versions of PEFT: they would change what the tensors mean.
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type"),
        *("inference_mode", "target_modules", "exclude_modules", "lora_dropout"),
        *("layers_to_transform", "layers_pattern", "megatron_core", "loftq_config"),
        *("eva_config", "runtime_config", "qalora_group_size"),
    }
)
EMPTY: tuple[object, ...] = (None, False, [], {}, "", "none")
# Starting values of training.  Others replace the base's weights, which are then not the file's.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")

Rows = NDArray[np.float32]
Json = dict[str, Any]


class Pair(Struct):
    """A module's two factors as PEFT has them: a [R, D], b [N, R]."""

    is_embedding: bool
    a: Rows | None = None
    b: Rows | None = None


def open_peft(path: Path, base: Weights, model: Model) -> dict[str, LowRank]:
    """By names of the base's weights.  Raises ModelError; whether they fit is not yet checked."""
    folder = path if path.is_dir() else path.parent
    tensors = folder / TENSORS if path.is_dir() else path
    if tensors.suffix != ".safetensors" or not tensors.exists():
        what = f"no {TENSORS}; only safetensors are read, save it with safe_serialization"
        raise ModelError(f"{path}: {what}")
    config = read_config(folder / CONFIG)
    parts: dict[str, LowRank] = {}
    experts: dict[str, dict[int, tuple[Rows, Rows]]] = {}
    for module, pair in read_pairs(tensors).items():
        place = place_of(module)
        if place is None:
            what = f"module {module} is unknown to architecture {model.architecture}"
            raise ModelError(f"{tensors}: {what}; use an adapter that was made for this model")
        a, b = checked(tensors, module, pair)
        factor = factor_of(folder / CONFIG, config, module, a.shape[0])
        if place.expert is not None:
            experts.setdefault(place.weight, {})[place.expert] = (a, factor * b)
        elif place.weight in parts:
            raise ModelError(f"{tensors}: module {module} is there under two names; {MERGE}")
        else:
            a, b = arranged(a, b, place, pair, base, model)
            parts[place.weight] = low_rank(place.weight, a, b, factor)
    for name, each in experts.items():
        parts[name] = stacked(tensors, name, each, base)
    return parts


# --- the configuration ----------------------------------------------------------------------------


def read_config(path: Path) -> Json:
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ModelError(f"{path}: larger than {CONFIG_BYTES_MAX} bytes; download it again")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; a PEFT adapter has one") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}; download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object; download it again")
    config = cast(Json, config)
    if config.get("peft_type") != "LORA":
        what = f"key peft_type is {config.get('peft_type')!r}, only 'LORA' is supported"
        raise ModelError(f"{path}: {what}; {MERGE}")
    for key, value in config.items():
        is_fine = value in STARTS if key == "init_lora_weights" else value in EMPTY
        if key not in READ | HARMLESS and not is_fine:
            raise ModelError(f"{path}: key {key} is {shown(value)}: not supported; {MERGE}")
    if not isinstance(config.get("use_rslora", False), bool | None):
        raise ModelError(f"{path}: key use_rslora is {shown(config['use_rslora'])}, no truth value")
    return config


def factor_of(path: Path, config: Json, module: str, rank: int) -> float:
    """What b . a is scaled by; also that the rank is the one that the configuration has."""
    stated = pattern_value(path, config, "rank_pattern", "r", module)
    alpha = pattern_value(path, config, "alpha_pattern", "lora_alpha", module)
    if stated != rank:
        what = f"module {module} has rank {rank}, its configuration says {stated:g}"
        raise ModelError(f"{path}: {what}; configuration and tensors are of two adapters")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def pattern_value(path: Path, config: Json, patterns: str, default: str, module: str) -> float:
    """A module's own value, of the first pattern that the end of its name matches, or all's."""
    known: object = config.get(patterns) or {}
    if not isinstance(known, dict):
        raise ModelError(f"{path}: key {patterns} is {shown(known)}, no object; download it again")
    for pattern, value in cast(Json, known).items():
        try:
            found = regex.match(rf"(?:.*\.)?(?:{pattern})$", module, timeout=MATCH_S_MAX)
        except (regex.error, TimeoutError) as error:
            what = f"key {patterns}: {pattern!r} is no pattern that can be used ({error})"
            raise ModelError(f"{path}: {what}; name modules instead") from error
        if found is not None:
            return positive(path, f"{patterns}.{pattern}", value)
    return positive(path, default, config.get(default))


def positive(path: Path, key: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < cast(float, value) < 1e9:
        raise ModelError(
            f"{path}: key {key} is {shown(value)}, not a number above 0; download it again"
        )
    return float(cast(float, value))


def shown(value: object) -> str:
    return json.dumps(value)[:80]


# --- tensors --------------------------------------------------------------------------------------


def read_pairs(path: Path) -> dict[str, Pair]:
    try:
        found = cast(list[tuple[str, Json]], deserialize(path.read_bytes()))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; check the path") from error
    except SafetensorError as error:
        raise ModelError(f"{path}: no safetensors: {error}; download it again") from error
    pairs: dict[str, Pair] = {}
    for name, tensor in found:
        module, side, is_embedding = split_name(path, name)
        pair = pairs.setdefault(module, Pair(is_embedding))
        values = floats(path, name, tensor)
        if side == "a":
            pair.a = values
        else:
            pair.b = values
    return pairs


def split_name(path: Path, name: str) -> tuple[str, str, bool]:
    """The module, which of its factors, and whether it is an embedding."""
    for endings, is_embedding in ((ENDINGS, False), (EMBEDDING_ENDINGS, True)):
        for ending, side in endings.items():
            if name.endswith(ending):
                return name.removesuffix(ending).removeprefix(ROOT), side, is_embedding
    what = f"tensor {name} is no factor of LoRA, and nothing else is applied"
    raise ModelError(f"{path}: {what}; {MERGE}")


def floats(path: Path, name: str, tensor: Mapping[str, Any]) -> Rows:
    """A matrix in F32, whatever type of float it has."""
    data, kind, shape = bytes(tensor["data"]), tensor["dtype"], tensor["shape"]
    if len(shape) != 2 or 0 in shape:
        raise ModelError(f"{path}: tensor {name} has shape {list(shape)}, no matrix's; {MERGE}")
    if kind == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif kind in ("F16", "F32"):
        values = np.frombuffer(data, "<f2" if kind == "F16" else "<f4").astype(np.float32)
    else:
        raise ModelError(f"{path}: tensor {name} is {kind}; save it as F32, F16 or BF16")
    return values.reshape(shape)


def checked(path: Path, module: str, pair: Pair) -> tuple[Rows, Rows]:
    """Both factors, of one rank."""
    if pair.a is None or pair.b is None:
        missing = "A" if pair.a is None else "B"
        raise ModelError(f"{path}: module {module} has no factor {missing}; download it again")
    if pair.a.shape[0] != pair.b.shape[1]:
        ranks = f"rank {pair.a.shape[0]} in its factor A and {pair.b.shape[1]} in B"
        raise ModelError(f"{path}: module {module} has {ranks}; download it again")
    return pair.a, pair.b


def arranged(
    a: Rows, b: Rows, place: Place, pair: Pair, base: Weights, model: Model
) -> tuple[Rows, Rows]:
    """In the order of the file's weights.  What has another size than they is left as it is."""
    if pair.is_embedding:
        return a.T, b
    if place.weight in base.tensors:
        outputs = outputs_order(place.weight, base, model)
        inputs = inputs_order(place.weight, model)
        if outputs is not None and len(outputs) == len(b):
            b = b[outputs]
        if inputs is not None and len(inputs) == a.shape[1]:
            a = a[:, inputs]
    return a, b


def stacked(path: Path, name: str, each: Mapping[int, tuple[Rows, Rows]], base: Weights) -> LowRank:
    """One pair for all experts; those that the adapter leaves alone get zeros."""
    if name not in base.tensors:
        raise ModelError(f"{path}: the model has no {name}; use an adapter that was made for it")
    count = base.tensors[name].shape[0]
    if max(each) >= count:
        what = f"expert {max(each)} of {name}, the model has {count}"
        raise ModelError(f"{path}: {what}; use an adapter that was made for it")
    shapes = {(a.shape[1], b.shape[0]) for a, b in each.values()}
    if len(shapes) > 1:
        raise ModelError(f"{path}: experts of {name} have different sizes; download it again")
    ((width, outputs),) = shapes
    rank = max(a.shape[0] for a, _ in each.values())
    all_a = np.zeros((count, rank, width), np.float32)
    all_b = np.zeros((count, outputs, rank), np.float32)
    for expert, (a, b) in each.items():
        all_a[expert, : a.shape[0]], all_b[expert, :, : a.shape[0]] = a, b
    return low_rank(name, all_a, all_b, 1.0)


def low_rank(name: str, a: Rows, b: Rows, factor: float) -> LowRank:
    return LowRank(weight_of(f"{name}.lora_a", a), weight_of(f"{name}.lora_b", b), factor)


def weight_of(name: str, values: Rows) -> Weight:
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return Weight(name, "F32", values.shape, aligned_copy(data))
