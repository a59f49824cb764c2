"""Writes tiny adapters of random, seeded factors for the tiny models, and folds them into these."""

import copy
import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import save_file
from synthetic import ModelFile, quantised

EMBEDDING = "token_embd.weight"


class AdapterFile:
    """`pairs` are (a, b) as a GGUF file has them; b . a has the size of the base's weights."""

    def __init__(
        self,
        base: ModelFile,
        names: list[str],
        *,
        rank: int = 4,
        alpha: float = 2.0,
        kind: str = "F32",
        seed: int = 11,
    ) -> None:
        self.base = base
        self.alpha, self.kind = alpha, kind
        self.metadata: dict[str, object] = {"general.type": "adapter", "adapter.type": "lora"}
        self.pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        random = np.random.default_rng(seed)
        for name in names:
            shape = base.tensors[name][0].shape
            *leading, outputs, width = shape if len(shape) > 1 else (1, *shape)
            sizes = (*leading, rank, width), (*leading, outputs, rank)
            if name == EMBEDDING:
                sizes = (outputs, rank), (width, rank)
            a, b = (random.standard_normal(size) for size in sizes)
            self.pairs[name] = a / np.sqrt(width), b / np.sqrt(rank)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.base.architecture)
        for key, value in self.metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_string(key, str(value))
        writer.add_float32("adapter.lora.alpha", self.alpha)
        for name, pair in self.pairs.items():
            for suffix, values in zip(("lora_a", "lora_b"), pair, strict=True):
                # A rank is too narrow for blocks of a quantised type.
                kind = self.kind if values.shape[-1] % 256 == 0 else "F32"
                number = GGMLQuantizationType[kind]
                writer.add_tensor(f"{name}.{suffix}", quantised(values, kind), raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def folded(self, scale: float = 1.0) -> ModelFile:
        """The base with what the adapter adds at this scale."""
        merged = copy.deepcopy(self.base)
        for name, (a, b) in self.pairs.items():
            values, kind = merged.tensors[name]
            change = a @ b.T if name == EMBEDDING else b @ a
            factor = scale * (self.alpha / b.shape[-1] if self.alpha else 1.0)
            merged.tensors[name] = values + factor * change.reshape(values.shape), kind
        return merged


def write_peft(
    folder: Path, tensors: dict[str, np.ndarray], *, rank: int = 4, alpha: float = 8.0, **config
) -> Path:
    """A PEFT adapter; tensors by the names of PEFT, without what all of them begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{name}": np.ascontiguousarray(values, np.float32)
        for name, values in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder
