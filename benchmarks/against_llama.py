"""Compares every architecture's logits with those of llama-server: `against_llama.py llama-server`.

Writes tiny models of random weights, has llama-server answer prompts with them, greedily, and gives
the same tokens to both backends here.  Whoever reads a convention of the files wrongly gets other
answers.  Rewrites the table of docs/compatibility.md.

The server is started with --no-repack: without, it rounds the activations of some types otherwise.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec import Struct

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "model"))

from hybrid_files import hybrid_file  # noqa: E402
from synthetic import VOCABULARY, ModelFile, decoder_file, gemma_file  # noqa: E402

from phaseloop.model.load import load_model  # noqa: E402
from phaseloop.model.weights import open_weights  # noqa: E402
from phaseloop.ops.ggml import GgmlBackend  # noqa: E402
from phaseloop.ops.interface import Backend, Span  # noqa: E402
from phaseloop.ops.reference import ReferenceBackend  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- against llama-server -->\n", "<!-- end -->\n"
PROMPT_LENGTHS, TOKENS, CANDIDATES = (5, 70, 200), 12, 10
CONTEXT, START_S_MAX = 512, 60.0
YARN: dict[str, object] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
CASES: dict[str, Callable[[], ModelFile]] = {
    "llama, F32": lambda: decoder_file("llama"),
    "llama, Q4_K": lambda: decoder_file("llama", "Q4_K"),
    "llama, YaRN": lambda: decoder_file("llama", rope=YARN),
    "qwen2, F32": lambda: decoder_file("qwen2", biases=True),
    "qwen2, Q8_0": lambda: decoder_file("qwen2", "Q8_0", biases=True),
    "qwen3, F32": lambda: decoder_file("qwen3", head_norms=True),
    "qwen3, Q6_K": lambda: decoder_file("qwen3", "Q6_K", head_norms=True),
    "qwen3moe, F32": lambda: decoder_file("qwen3moe", head_norms=True, experts=True),
    "qwen3moe, Q5_K": lambda: decoder_file("qwen3moe", "Q5_K", head_norms=True, experts=True),
    "gemma3, F32": gemma_file,
    "gemma3, Q4_0": lambda: gemma_file("Q4_0"),
    "qwen35, F32": hybrid_file,
    "qwen35, F16": lambda: hybrid_file("F16"),
    "qwen35, Q8_0": lambda: hybrid_file("Q8_0"),
    "qwen35, Q4_K, 8 layers": lambda: hybrid_file("Q4_K", layers=8),
    "qwen35, Q5_K, with a draft block": lambda: hybrid_file("Q5_K", draft=True),
    "qwen35, fused projections": lambda: hybrid_file(fused=True),
    "qwen35, other rope sections": lambda: hybrid_file(**{"rope.dimension_sections": [5, 1, 1, 1]}),
    "qwen35, layers listed": lambda: hybrid_file(
        **{"attention.recurrent_layers": [False, True, False, True]}
    ),
    "qwen35, tied, with a draft block": lambda: hybrid_file(draft=True, tied=True),
    "qwen35, YaRN": lambda: hybrid_file(**YARN),
    "qwen35moe, F32": lambda: hybrid_file(mixture=True),
    "qwen35moe, fused, with a draft block": lambda: hybrid_file(
        mixture=True, fused=True, draft=True
    ),
    "qwen35moe, Q4_K": lambda: hybrid_file("Q4_K", mixture=True),
    "qwen35moe, Q8_0": lambda: hybrid_file("Q8_0", mixture=True),
}


class Step(Struct, frozen=True):
    """A token that llama-server chose, and log-probabilities of the likeliest, by token."""

    token: int
    likely: dict[int, float]


class Difference(Struct):
    """Over all steps of a case."""

    steps: int = 0
    equal: int = 0  # greedy tokens
    parted: float = 0.0  # logits between the two, where tokens differ
    worst: float = 0.0  # of a likely token's log-probability


def with_tokenizer(file: ModelFile) -> ModelFile:
    """Token n is the text `tn`; prompts are sent as ids."""
    tokens = [*(f"t{index}" for index in range(VOCABULARY - 1)), "<end>"]
    file.root |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (VOCABULARY - 1) + [3],
        "tokenizer.ggml.merges": ["t 0"],
        "tokenizer.ggml.eos_token_id": VOCABULARY - 1,
    }
    return file


@contextmanager
def running(server: str, model: Path) -> Iterator[str]:
    """The address of a server that has loaded the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "-m", str(model), "--no-repack", "--port", str(port), "-c", str(CONTEXT)]
    command += ["-np", "1", "-t", "1", "--no-warmup"]
    address, give_up = f"http://127.0.0.1:{port}", time.monotonic() + START_S_MAX
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            while not is_healthy(address):
                if child.poll() is not None or time.monotonic() > give_up:
                    sys.exit(f"{' '.join(command)}: it does not start")
                time.sleep(0.1)
            yield address
        finally:
            child.terminate()


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health"):
            return True
    except OSError:
        return False


def answer(address: str, prompt: list[int]) -> list[Step]:
    wanted = {
        "prompt": prompt,
        "n_predict": TOKENS,
        "temperature": 0,
        "n_probs": CANDIDATES,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{address}/completion",
        json.dumps(wanted).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        steps = json.load(response)["completion_probabilities"]
    return [
        Step(step["id"], {one["id"]: one["logprob"] for one in step["top_logprobs"]})
        for step in steps
    ]


def compare(backend: Backend, prompt: list[int], steps: list[Step], found: Difference) -> None:
    backend.truncate(0, 0)
    row = backend.forward([Span(0, 0, prompt, 1, False)])[0].astype(np.float64)
    for index, step in enumerate(steps):
        likelihoods = row - row.max()
        likelihoods -= np.log(np.exp(likelihoods).sum())
        found.steps += 1
        found.equal += int(row.argmax()) == step.token
        found.parted = max(found.parted, float(row.max() - row[step.token]))
        errors = [abs(likelihoods[token] - likely) for token, likely in step.likely.items()]
        found.worst = max(found.worst, float(max(errors)))
        span = Span(0, len(prompt) + index, [step.token], 1, True)
        row = backend.forward([span])[0].astype(np.float64)


def differences(server: str, path: Path) -> list[Difference]:
    """ggml's, and the reference's."""
    random = np.random.default_rng(5)
    prompts = [random.integers(0, VOCABULARY - 1, length).tolist() for length in PROMPT_LENGTHS]
    with running(server, path) as address:
        answers = [answer(address, prompt) for prompt in prompts]
    weights = open_weights(path)
    model = load_model(weights)
    parts = (model.network, weights.tensors, model.dimensions)
    backends: list[Backend] = [
        GgmlBackend(*parts, region_count=1, capacity=CONTEXT, threads=1, repack=False),
        ReferenceBackend(*parts, region_count=1, capacity=CONTEXT),
    ]
    found = [Difference() for _ in backends]
    for backend, difference in zip(backends, found, strict=True):
        for prompt, steps in zip(prompts, answers, strict=True):
            compare(backend, prompt, steps, difference)
        backend.close()
    return found


def main(server: str) -> None:
    heads = (
        "| model | backend | greedy tokens equal | else parted by | log-probabilities within |\n"
    )
    table = f"{heads}|---|---|---:|---:|---:|\n"
    with TemporaryDirectory() as folder:
        for name, make in CASES.items():
            path = with_tokenizer(make()).write(Path(folder) / "model.gguf")
            for backend, one in zip(("ggml", "reference"), differences(server, path), strict=True):
                table += f"| {name} | {backend} | {one.equal} of {one.steps} | "
                table += f"{one.parted:.3f} | {one.worst:.4f} |\n"
            sys.stderr.write(f"{name}\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
