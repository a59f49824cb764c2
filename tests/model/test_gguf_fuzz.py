"""Goal: whatever is wrong with a model file, the user reads what, where and what to do about it.

Method: small models of every family are written, taken apart, and put together wrong from seeds:
keys, types, shapes, offsets, counts, bits and lengths.  The reader sees most of them here; some are
loaded by the engine and computed with, in a process of its own, as ggml ends the one it asserts in.
"""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from gguf_mutations import MUTATIONS, mutated, other_data
from gguf_parts import Key, Parts, scalar, taken_apart
from hybrid_files import hybrid_file
from synthetic import decoder_file, gemma_file

from phaseloop.model.gguf_file import ModelError, open_gguf
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

HERE = Path(__file__).parent
READ = 500  # mutations that the reader sees
LOADED = 120  # mutations that the engine sees
GROWTH_BYTES_MAX = 300 << 20  # a sound model's graphs and logits take some
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    decoder_file("llama", "Q4_0", biases=True, layers=1).write(path / "llama.gguf")
    decoder_file("qwen2", "F16", biases=True, rope=YARN, layers=1).write(path / "qwen2.gguf")
    decoder_file("qwen3", "Q8_0", head_norms=True, tied=True, layers=1).write(path / "qwen3.gguf")
    moe = decoder_file("qwen3moe", "Q4_K", head_norms=True, experts=True, layers=1)
    moe.write(path / "qwen3moe.gguf")
    gemma_file("Q8_0").write(path / "gemma3.gguf")
    hybrid_file("Q8_0", layers=2, full_attention_interval=2).write(path / "qwen35.gguf")
    listed = {"attention.recurrent_layers": [False, True, False]}
    hybrid_file("Q4_K", mixture=True, draft=True, layers=2, **listed).write(path / "qwen35moe.gguf")
    return path


@pytest.fixture(scope="module")
def sound(folder) -> list[Parts]:
    return [taken_apart(path) for path in sorted(folder.glob("*.gguf"))]


def problem(path: Path) -> str | None:
    """What the reader says of a file; nothing but ModelError is let through."""
    try:
        load_model(open_weights(path))
    except ModelError as error:
        return str(error)
    return None


def check_message(message: str, path: Path) -> None:
    assert message.startswith(f"{path}: "), message
    assert "; " in message, f"no remedy: {message}"
    assert len(message) < 1000 and message.isprintable(), message


def test_the_reader_refuses_or_reads(folder, sound):
    path = folder / "read"
    refused = 0
    for seed in range(READ):
        path.write_bytes(mutated(sound[seed % len(sound)], seed))
        message = problem(path)
        if message is not None:
            refused += 1
            check_message(message, path)
    assert READ // 2 < refused < READ


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_way_of_being_wrong_is_refused_sometimes(folder, mutation):
    """Otherwise the test above could not fail."""
    path, refused = folder / "way", 0
    for seed in range(60):
        parts = taken_apart(folder / "llama.gguf")
        mutation(parts, Random(seed))
        path.write_bytes(parts.pack())
        refused += problem(path) is not None
    assert refused or mutation is other_data, "values are looked at when they are loaded"


def test_every_truncation_is_refused(folder):
    whole = (folder / "qwen3.gguf").read_bytes()
    parts = taken_apart(folder / "qwen3.gguf")
    header = len(whole) - len(parts.data)
    path = folder / "cut"
    for size in (*range(0, header, 7), *range(header, len(whole), 4099), len(whole) - 1):
        path.write_bytes(whole[:size])
        message = problem(path)
        assert message is not None, f"{size} of {len(whole)} bytes are no model"
        check_message(message, path)


@pytest.mark.parametrize("count", [1 << 24, 1 << 40, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("what", ["tensors", "keys", "text", "array", "axis"])
def test_absurd_counts_take_no_memory(folder, count, what):
    parts = taken_apart(folder / "llama.gguf")
    match what:
        case "tensors":
            parts.tensor_count = count
        case "keys":
            parts.key_count = count
        case "text":
            parts.keys.append(Key("k", 8, scalar(10, count)))
        case "array":
            parts.keys.append(Key("k", 9, scalar(4, 8) + scalar(10, count)))
        case _:
            parts.tensors[0].axes[0] = count
    path = folder / "absurd"
    path.write_bytes(parts.pack())
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_engine_refuses_or_computes(folder):
    command = [sys.executable, HERE / "load_mutated.py", folder, "0", str(LOADED)]
    environment = {"OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=120
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]} {done.stderr[-2000:]}"
    results = [line for line in lines if "seed" in line]
    assert len(results) == LOADED
    for line in results:
        if line["what"] == "ModelError":
            check_message(line["message"], folder / "mutated")
        assert line["grown"] < GROWTH_BYTES_MAX, line
    answered = sum(line["what"] == "answered" for line in results)
    assert answered >= LOADED // 20, "some are sound enough to compute with"
