"""Whole tiny models through the CUDA backend on a device: the formulas' logits, and stable bits."""

import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.device import Device

TESTS = Path(__file__).parent.parent / "tests"
FAMILIES = {"qwen3": "Q4_K", "gemma3": "Q8_0", "qwen3moe": "Q5_K", "qwen35": "Q6_K"}
# Squared error relative to the squared logits.  Halves leave 1e-6, and 1e-5 where rows recur.
TOLERANCE = 4e-5
TOKENS, CHUNK, GENERATED = 40, 17, 5


def engine(device: Device) -> str:
    """What was checked.  Raises KernelError for wrong logits, or bits that depend on company."""
    if find_spec("ggml") is None:
        return "not tried: it needs ggml-python, which packs the models' weights"
    for folder in (TESTS / "ops", TESTS / "model"):  # whose tiny models these are
        sys.path.append(str(folder))
    models: Any = import_module("cuda_models")
    worst = 0.0
    for family, kind in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny = models.opened(models.FAMILIES[family](kind), Path(folder))
        backend = tiny.cuda(devices=[device])
        ids = models.tokens(TOKENS)
        alone = answers(backend, models, 0, [ids])
        cut = answers(backend, models, 1, [ids[:CHUNK], ids[CHUNK:]])
        if not np.array_equal(alone, cut):
            raise KernelError(f"{family} {kind}: a prompt that was cut has other logits")
        exact = answers(tiny.reference(), models, 0, [ids])
        error = float(np.square(alone - exact).sum() / np.square(exact).sum())
        worst = max(worst, error)
        if not error < TOLERANCE:
            raise KernelError(f"{family} {kind}: logits are off by {error:.1e}, relative squares")
    told = ", ".join(f"{family} {kind}" for family, kind in FAMILIES.items())
    return f"{told}: within {worst:.0e} of the formulas (relative squares), whole or cut"


def answers(
    backend: Any,  # noqa: ANN401 - of either kind
    models: Any,  # noqa: ANN401
    region: int,
    chunks: list[list[int]],
) -> NDArray[np.float32]:
    """Logits of a prompt's last token and of tokens generated one by one, from replayed graphs."""
    rows: list[NDArray[np.float32]] = []
    start = 0
    for chunk in chunks:
        rows = [backend.forward([models.prompt(region, start, chunk)])]
        start += len(chunk)
    for token in range(GENERATED):
        rows.append(backend.forward([models.generated(region, start + token, token)]))
    return np.concatenate(rows)
