"""Draw which lane of a quad-pair holds what of an m8n8k4 product, for docs/kernels.md.

Usage: python benchmarks/fragments_drawing.py [--check]
The map is not written here: a kernel on the host's machine multiplies lane numbers by ones, and
what arrives in each accumulator says whose row and whose column it is.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels.contract import Launch, reads, writes
from phaseloop.kernels.host import Host

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "fragments.svg"
LANES = (0, 1, 2, 3, 16, 17, 18, 19)  # quad-pair 0
# Readable with black text; lanes r and r + 4 are the lighter and the darker of a pair.
COLOURS = ("#cfe3f7", "#d4efd0", "#fde4bf", "#f7d3d8", "#9cc4ea", "#a3d79a", "#f8c57c", "#eba0ab")
CELL, GAP, LABEL = 46, 40, 36
PROBE = """#include "common.cuh"
KERNEL(32, 1) probe(const half* a, const half* b, float* y) {
    const int lane = threadIdx.x;
    float c[8] = {};
    mma_row_col(c, pack2(load(a + lane), to_f16(0)), 0, pack2(load(b + lane), to_f16(0)), 0);
    for (int i = 0; i < 8; ++i) store(y + lane * 8 + i, c[i]);
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is old")
    args = parser.parse_args()
    drawing = draw()
    if args.check:
        return int(not IMAGE.is_file() or IMAGE.read_text() != drawing)
    IMAGE.write_text(drawing)
    sys.stdout.write(f"written to docs/images/{IMAGE.name}\n")
    return 0


def owners() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[lane, i]: the lane that holds the row, and the one that holds the column, of c_i."""
    numbers, ones = np.arange(1, 33).astype(np.float16), np.ones(32, np.float16)
    found: list[NDArray[np.int64]] = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "probe.cu").write_text(PROBE)
        host = Host(directory=Path(directory))
        for a, b in ((numbers, ones), (ones, numbers)):
            y = np.zeros((32, 8), np.float32)
            operands = (reads("a", a), reads("b", b), writes("y", y))
            host.run(Launch("probe", "probe", (1, 1, 1), (32, 1, 1), operands))
            found.append(y.astype(np.int64) - 1)
    return found[0], found[1]


def draw() -> str:
    row_of, column_of = owners()
    left, top = LABEL + 4 * CELL + GAP, 40 + LABEL + 4 * CELL + GAP
    parts: list[str] = []
    for r, lane in enumerate(LANES):
        for k in range(4):
            parts.append(cell(LABEL + k * CELL, top + r * CELL, r, str(lane), f"a{k}"))
            parts.append(cell(left + r * CELL, 40 + LABEL + k * CELL, r, str(lane), f"b{k}"))
        parts.append(text(LABEL - 6, top + r * CELL + CELL / 2 + 4, f"m{r}", "end"))
        parts.append(text(left + r * CELL + CELL / 2, 40 + LABEL - 8, f"n{r}"))
    for k in range(4):
        parts.append(text(LABEL + k * CELL + CELL / 2, top - 8, f"k{k}"))
        parts.append(text(left - 6, 40 + LABEL + k * CELL + CELL / 2 + 4, f"k{k}", "end"))
    for r, lane in enumerate(LANES):
        for i in range(8):
            m, n = LANES.index(int(row_of[lane, i])), LANES.index(int(column_of[lane, i]))
            parts.append(cell(left + n * CELL, top + m * CELL, r, str(lane), f"c{i}"))
    parts += [
        text(LABEL + 2 * CELL, top + 8 * CELL + 22, "A: activations, 8 by 4"),
        text(left + 4 * CELL, 24, "B: weights, 4 by 8; a lane owns a column"),
        text(left + 4 * CELL, top + 8 * CELL + 22, "C: sums, 8 by 8"),
    ]
    width, height = left + 8 * CELL + 12, top + 8 * CELL + 36
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">\n'
        "<title>Which lane of quad-pair 0 holds what: a cell has the lane, and which of its "
        "elements it is</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def cell(x: float, y: float, colour: int, lane: str, element: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{COLOURS[colour]}" '
        f'stroke="#555555"/>'
        + text(x + CELL / 2, y + CELL / 2 - 3, lane)
        + text(x + CELL / 2, y + CELL / 2 + 14, element)
    )


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#111111">{words}</text>'


if __name__ == "__main__":
    sys.exit(main())
