"""Loads mutated models and computes with those that load: `load_mutated.py FOLDER FIRST COUNT`.

FOLDER holds the sound ones.  Prints a line of JSON per seed, before and after; a process of its own
since an assertion of ggml's would end it.
"""

import json
import resource
import sys
import time
from pathlib import Path

from gguf_mutations import mutated
from gguf_parts import taken_apart

from phaseloop.core.vocabulary import Lane, LaunchRound, SeatRequest
from phaseloop.engine.cpu_load import CpuOptions, load_cpu_engine
from phaseloop.engine.protocol import Content, RoundError
from phaseloop.engine.sampling import ChainSampler
from phaseloop.model.gguf_file import ModelError
from phaseloop.ops.interface import BackendError

OPTIONS = CpuOptions(slot_count=1, batch_tokens=64, ubatch_tokens=64)


def answer(path: Path) -> None:
    """A prompt, its first token and one more."""
    engine, weights = load_cpu_engine(path, ChainSampler(), OPTIONS)
    vocabulary = weights.tensors["token_embd.weight"].shape[0]
    length = min(40, engine.describe().context_length - 1)
    if length < 1:
        return
    prompt = tuple(index % vocabulary for index in range(length))
    engine.seat(SeatRequest(0, 0, 0, None, "oldest"), Content(prompt))
    engine.run(LaunchRound(0, "prefill", (Lane(0, 0, 0, 0, length, 0),), "cohort_open"))
    engine.run(LaunchRound(1, "sample", (Lane(0, 0, 0, length, 0, 1),), "barrier_opened"))
    engine.run(LaunchRound(2, "decode", (Lane(0, 0, 0, length, 1, 1),), "generate"))


def outcome(path: Path) -> tuple[str, str]:
    try:
        answer(path)
        return "answered", ""
    except (ModelError, BackendError, RoundError) as error:
        return type(error).__name__, str(error)


def main(folder: Path, first: int, count: int) -> None:
    sound = [taken_apart(path) for path in sorted(folder.glob("*.gguf"))]
    path = folder / "mutated"
    for seed in range(first, first + count):
        sys.stdout.write(json.dumps({"begins": seed}) + "\n")
        sys.stdout.flush()
        path.write_bytes(mutated(sound[seed % len(sound)], seed))
        start_s, before = time.monotonic(), peak_bytes()
        what, message = outcome(path)
        line = {"seed": seed, "what": what, "message": message, "grown": peak_bytes() - before}
        line["took_s"] = time.monotonic() - start_s
        sys.stdout.write(json.dumps(line) + "\n")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
