"""How large passes can be, and which of them take the most memory."""

from msgspec import Struct

from phaseloop.kernels.kv import Kind
from phaseloop.kernels.skinny import ROWS_MAX

from .cuda_graph import Attended, CudaOps
from .cuda_pages import pages_for
from .cuda_plan import Subject, layout_of
from .cuda_shape import PAGES_STEPS, Group, PassShape, table_width

PARTITIONS_BYTES_MAX = 256 << 20  # what partitions of attention may take until they are merged
OUTPUTS_MAX = 64  # rows of a prompt's pass whose logits are wanted


class Limits(Struct, frozen=True):
    """`partition_bytes` is what a generated row takes of scratch for one page it sees."""

    lanes_max: int
    pages_max: int  # of a region
    ubatch: int
    outputs_max: int
    partition_bytes: int
    unpacked_max: int  # pages of Q8_0 that one pass unpacks; 0 for F16

    def rows_max(self, pages: int) -> int:
        """How many generated rows are computed together that see so many pages."""
        width = table_width(pages, self.pages_max)
        return max(1, min(ROWS_MAX, PARTITIONS_BYTES_MAX // (self.partition_bytes * width)))

    def widths(self) -> list[int]:
        """Of page tables."""
        return [*(step for step in PAGES_STEPS if step < self.pages_max), self.pages_max]


def limits_of(
    subject: Subject, region_count: int, capacity: int, ubatch: int, kind: Kind
) -> Limits:
    ops = CudaOps(subject.weights, subject.dimensions.recurrence, 1, None)
    subject.network(ops)
    shapes = [node.inputs[0].shape for node in ops.effects if isinstance(node, Attended)]
    elements = max((heads * (width + 2) for _, heads, width in shapes), default=1)
    pages_max = pages_for(capacity)
    return Limits(
        lanes_max=region_count,
        pages_max=pages_max,
        ubatch=ubatch,
        outputs_max=min(OUTPUTS_MAX, ubatch),
        partition_bytes=4 * elements,
        unpacked_max=pages_max if kind == "Q8_0" else 0,
    )


def corners(limits: Limits) -> list[PassShape]:
    """Passes of which one takes the most of anything that passes take."""
    shapes: list[PassShape] = []
    for width in limits.widths():
        rows = limits.rows_max(width)
        lanes = min(limits.lanes_max, rows)
        choices: tuple[Group, ...] = ((lanes, 1), (1, rows), (lanes, rows // lanes))
        shapes += [PassShape(True, (group,), None, width) for group in choices]
    most, outputs = limits.ubatch, limits.outputs_max
    for rows in (most, outputs):
        taken = outputs if outputs < rows else None
        group = (1, rows)
        shapes.append(PassShape(False, (group,), taken, limits.pages_max, limits.unpacked_max))
    return shapes


def input_words_max(limits: Limits) -> int:
    lanes, pages = limits.lanes_max, limits.pages_max
    rows = max(limits.ubatch, ROWS_MAX, lanes)
    groups = ((lanes, -(-rows // lanes)),)
    shape = PassShape(False, groups, limits.outputs_max, pages, limits.unpacked_max)
    return layout_of(shape).size
