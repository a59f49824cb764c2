"""Tiny models of every family, and the CUDA backend over them on the host's shim."""

from pathlib import Path

import numpy as np
from hybrid_files import hybrid_file
from msgspec import Struct
from synthetic import VOCABULARY, ModelFile, decoder_file, gemma_file

from phaseloop.engine.cuda_load import subject_of
from phaseloop.kernels.device import HostDevice
from phaseloop.model.load import load_model
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.cuda import CudaBackend
from phaseloop.ops.cuda_prepare import Options
from phaseloop.ops.interface import Span
from phaseloop.ops.reference import ReferenceBackend


def hybrid(kind: str, **options: object) -> ModelFile:
    """One layer that recurs and one that attends."""
    return hybrid_file(kind, layers=2, full_attention_interval=2, **options)


FAMILIES = {
    "llama": lambda kind: decoder_file("llama", kind),
    "llama-scaled": lambda kind: decoder_file("llama", kind, rope_factors=True, biases=True),
    "qwen2": lambda kind: decoder_file("qwen2", kind, biases=True, tied=True),
    "qwen3": lambda kind: decoder_file("qwen3", kind, head_norms=True),
    "qwen3moe": lambda kind: decoder_file("qwen3moe", kind, head_norms=True, experts=True),
    "gemma3": lambda kind: gemma_file(
        kind, **{"attn_logit_softcapping": 20.0, "final_logit_softcapping": 3.0}
    ),
    "qwen35": hybrid,
    "qwen35-fused": lambda kind: hybrid(kind, fused=True, tied=True),
    "qwen35moe": lambda kind: hybrid(kind, mixture=True),
    "qwen35moe-fused": lambda kind: hybrid(kind, mixture=True, fused=True),
}


class Tiny(Struct, frozen=True):
    weights: Weights
    model: Model

    def cuda(self, device_count: int = 1, devices=None, **options) -> CudaBackend:
        chosen = {"region_count": 3, "capacity": 512} | options
        devices = devices or [HostDevice(index) for index in range(device_count)]
        return CudaBackend(
            subject_of(self.weights, self.model, (1.0,) * device_count), devices, Options(**chosen)
        )

    def reference(self, region_count: int = 3, capacity: int = 512) -> ReferenceBackend:
        return ReferenceBackend(
            self.model.network,
            self.weights.tensors,
            self.model.dimensions,
            region_count=region_count,
            capacity=capacity,
        )


def opened(file: ModelFile, folder: Path) -> Tiny:
    weights = open_weights(file.write(folder / "model.gguf"))
    return Tiny(weights, load_model(weights))


def tokens(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def prompt(region: int, start: int, ids, outputs: int = 1) -> Span:
    return Span(region, start, ids, outputs, False)


def generated(region: int, start: int, *ids: int) -> Span:
    return Span(region, start, ids, len(ids), True)
