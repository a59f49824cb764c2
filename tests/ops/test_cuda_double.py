"""Goal: the CUDA backend is right on devices that work late, by graphs and copies between them.

Method: two devices over a double of CuPy, whose streams do nothing until somebody waits for them.
Long prompts are many passes that are queued behind each other, generated tokens are graphs; layers
are split, with peer copies and through the host's memory.  The bits must be those of one device of
the host's shim, which does everything at once.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from cuda_models import FAMILIES, generated, opened, prompt, tokens

from phaseloop.kernels import cupy_device
from phaseloop.kernels.cupy_device import CupyDevice
from phaseloop.kernels.device import HostDevice
from phaseloop.kernels.peers import PeerAccess, connect

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

from cupy_double import Machine, fake_cubin

IDS = tokens(45, seed=4)
OPTIONS = {"ubatch": 16, "capacity": 300, "region_count": 3}


def run(backend):
    found = [backend.forward([prompt(0, 0, IDS, 1), prompt(1, 0, IDS[:10], 0)])]
    backend.copy(0, 2, 45)
    for index, token in enumerate((5, 9, 2)):
        spans = [generated(0, 45 + index, token), generated(2, 45 + index, token + 1)]
        found.append(backend.forward(spans))
    backend.restore(1, backend.save(2, 45))
    found.append(backend.forward([generated(1, 45, 6)]))
    return np.concatenate(found)


@pytest.mark.parametrize("family, peers", [("llama", False), ("qwen35moe", True)])
def test_late_devices_give_the_same_bits(tmp_path, monkeypatch, family, peers):
    monkeypatch.setattr(cupy_device, "cubin", fake_cubin)
    tiny = opened(FAMILIES[family]("Q8_0"), tmp_path)
    machine = Machine(2, reaches={(0, 1), (1, 0)})
    late = [CupyDevice(machine, index, staged_bytes=1 << 14) for index in (0, 1)]
    pairs = connect(machine, late, PeerAccess(allows_all=peers), size=1 << 12)
    assert {pair.state for pair in pairs} == {"used" if peers else "not allowed"}
    at_once = tiny.cuda(devices=[HostDevice()], **OPTIONS)
    split = tiny.cuda(2, devices=late, **OPTIONS)
    expected, found = run(at_once), run(split)
    assert np.isfinite(expected).all()
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert split.name.startswith("cuda-sm_")
    split.close()
