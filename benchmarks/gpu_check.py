"""Check the kernels on this machine's GPU, and measure what they reach; under five minutes.

Usage: make gpu-check, or python benchmarks/gpu_check.py [--json FILE]
It needs NumPy, msgspec, gguf, pytest, and CuPy with its NVRTC: cupy-cuda12x, or cupy-cuda13x on
cards newer than Volta.  Exit code 0: all is right; 1: a check failed; 2: there is no usable GPU.
"""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = ("numpy", "msgspec", "gguf", "pytest")
EXIT_UNUSABLE = 2
SECONDS = 280.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="by default GPU 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S",
        help=f"what there is no time for is left out, and said; by default {SECONDS:.0f}",
    )  # fmt: skip
    parser.add_argument(
        "--peer-access", default="all", metavar="PAIRS",
        help="try copies between these GPUs: all, none, or pairs as 0:1,2:3; by default all",
    )  # fmt: skip
    args = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        sys.stderr.write(f"gpu-check: these are missing: pip install {names}\n")
        return EXIT_UNUSABLE
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    run = importlib.import_module("gpu_checks").run
    return run(args.device, args.seconds, args.peer_access, args.json)


if __name__ == "__main__":
    sys.exit(main())
