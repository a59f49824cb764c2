"""Compares drafts with llama-server's: `drafts_against_llama.py llama-server`.

Networks that draft from hidden rows, on tiny models whose next token is known, made to be right in
part.  Both sides serve them, answer the same prompts greedily and count: drafts that are made from
other rows, or at other positions, would hold another number of times.  Rewrites the second table of
docs/compatibility.md.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from against_llama import ROOT, START_S_MAX, is_healthy, with_tokenizer
from msgspec import Struct

sys.path.insert(0, str(ROOT / "tests" / "model"))

from dflash_files import agreeing, dflash_file, sure_file
from draft_files import knowing_file
from hybrid_files import hybrid_file
from synthetic import VOCABULARY, ModelFile

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- drafts against llama-server -->\n", "<!-- end of drafts -->\n"
PROMPT_LENGTHS, TOKENS, DRAFTS, CONTEXT = (5, 70, 200), 120, 4, 512
OWN = (sys.executable, "-m", "phaseloop", "serve", "--draft-cost", "0", "--draft-max", str(DRAFTS))


class Counts(Struct, frozen=True):
    text: str
    drafted: int
    accepted: int


def partly(source: str, share: float) -> ModelFile:
    """A block that knows the next token, and whose layer gets into the way of that."""
    file, other = knowing_file(source), hybrid_file(draft=True)
    for part in ("attn_output", "ffn_down"):
        name = f"blk.4.{part}.weight"
        file.tensors[name] = share * other.tensors[name][0], "F32"
    return file


def flash(share: float, **metadata: object) -> Callable[[], tuple[ModelFile, ModelFile]]:
    return lambda: (sure_file(), agreeing(dflash_file(**metadata), share))


CASES: dict[str, Callable[[], tuple[ModelFile, ModelFile | None]]] = {
    "draft-mtp, from the hidden row": lambda: (partly("hidden", 3.0), None),
    "draft-mtp, less sure": lambda: (partly("hidden", 6.0), None),
    "draft-mtp, from the token": lambda: (partly("token", 6.0), None),
    "draft-dflash": flash(4.0),
    "draft-dflash, less sure": flash(7.0),
    "draft-dflash, seldom sure": flash(7.4),
    "draft-dflash, in windows": flash(
        7.4,
        **{
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, False],
        },
    ),
}


def counted(command: list[str]) -> list[Counts]:
    """What a server makes of the prompts; its port is added to the command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, give_up = f"http://127.0.0.1:{port}", time.monotonic() + START_S_MAX
    command = [*command, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            while not is_healthy(address):
                if child.poll() is not None or time.monotonic() > give_up:
                    sys.exit(f"{' '.join(command)}: it does not start")
                time.sleep(0.1)
            random = np.random.default_rng(3)
            prompts = [random.integers(0, VOCABULARY - 1, size) for size in PROMPT_LENGTHS]
            return [answer(address, prompt.tolist()) for prompt in prompts]
        finally:
            child.terminate()


def answer(address: str, prompt: list[int]) -> Counts:
    wanted = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(
        f"{address}/completion",
        json.dumps(wanted | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        found = json.load(response)
    timings = found["timings"]
    return Counts(found["content"], timings["draft_n"], timings["draft_n_accepted"])


def row(server: str, name: str, folder: Path) -> str:
    target, draft = CASES[name]()
    model = with_tokenizer(target).write(folder / "model.gguf")
    flags = ["-m", str(model), "-c", str(CONTEXT), "-np", "1", "-t", "1", "--no-repack"]
    flags += ["--spec-type", name.split(",")[0]]
    if draft is not None:
        flags += ["-md", str(with_tokenizer(draft).write(folder / "draft.gguf"))]
    theirs = counted([server, *flags, "--no-warmup", "--spec-draft-n-max", str(DRAFTS)])
    ours = counted([*OWN, *flags])
    pairs = list(zip(theirs, ours, strict=True))
    same = sum(there.text == here.text for there, here in pairs)
    counts = (
        ", ".join(f"{one.accepted} of {one.drafted}" for one in side) for side in (theirs, ours)
    )
    return f"| {name} | {same} of {len(pairs)} | {' | '.join(counts)} |\n"


def main(server: str) -> None:
    table = "| drafter | texts equal | llama-server accepts | phaseloop accepts |\n"
    table += "|---|---:|---|---|\n"
    with TemporaryDirectory() as folder:
        for name in CASES:
            table += row(server, name, Path(folder))
            sys.stderr.write(f"{name}\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
