"""The CUDA backend: networks as launches of our kernels, on GPUs or on the host's shim.

Rows of prompts always take the kernels for many rows, generated ones, drafts among them, always
those for few.  Keys and values lie in pages of 256 positions; where a page lies, who shares it, how
a prompt was cut, who the neighbours are and how layers are split over devices shows in no bit.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.device import Device
from phaseloop.kernels.kv import Kind

from .checks import check_spans, output_rows, output_width
from .cuda_cache import CacheMover
from .cuda_limits import corners, input_words_max, limits_of
from .cuda_needs import Needs
from .cuda_pages import Pages, pages_for
from .cuda_plan import Planner, Subject, trial
from .cuda_shape import PassShape, groups_of, table_width
from .cuda_states import DeviceStates
from .cuda_store import Placed
from .delta_states import MARKS_MAX, NO_SHIFT, Leg, cell_count
from .gather import Gathered
from .interface import Aborted, BackendError, Region, Rows, Snapshot, Span
from .passes import Pass, fill

UBATCH_ROWS = 512


class CudaBackend:
    """Implements Backend.

    `page_count`: pages of all regions together.  `ubatch`: rows of a prompt computed in one pass.
    """

    generated_like_prompt = False

    def __init__(
        self,
        subject: Subject,
        devices: Sequence[Device],
        *,
        region_count: int,
        capacity: int,
        cache: Kind = "F16",
        page_count: int | None = None,
        ubatch: int = UBATCH_ROWS,
        marks_max: int = MARKS_MAX,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._subject, self._devices = subject, devices
        self._region_count, self._capacity, self._kind = region_count, capacity, cache
        self._limits = limits_of(subject, region_count, capacity, ubatch, cache)
        wanted = region_count * self._limits.pages_max if page_count is None else page_count
        needs = Needs(
            subject.weights,
            subject.dimensions,
            kind=cache,
            page_count=wanted + 1,  # one to shift into
            cell_count=cell_count(region_count),
            unpacked_count=self._limits.unpacked_max,
        )
        arenas = self._tried(needs)
        self._placed = Placed(devices, needs, progress)
        words = input_words_max(self._limits)
        self._planner = Planner(subject, devices, self._placed, arenas, words)
        self._pages = Pages(wanted + 1, region_count)
        dimensions = subject.dimensions
        self._mover = CacheMover(devices, self._placed, dimensions, self._limits.pages_max)
        self._states = (
            DeviceStates(devices, self._placed, region_count=region_count, marks_max=marks_max)
            if dimensions.recurrence
            else None
        )
        self._is_aborted = False

    def _tried(self, needs: Needs) -> list[int]:
        """The most that passes take of each device's arena."""
        most = [0] * len(self._devices)
        try:
            for shape in corners(self._limits):
                sizes, _ = trial(self._subject, needs, shape)
                most = [max(pair) for pair in zip(most, sizes, strict=True)]
        except KernelError as error:
            raise BackendError(f"the CUDA backend cannot run this model: {error}") from error
        return most

    @property
    def name(self) -> str:
        return f"cuda-{self._devices[0].architecture}-{self._kind.lower()}"

    @property
    def position_bytes(self) -> int:
        return self._mover.position_bytes

    @property
    def state_bytes(self) -> int:
        return 0 if self._states is None else self._states.state_bytes

    def positions(self, region: Region) -> tuple[int, ...] | None:
        return None if self._states is None else self._states.positions(region)

    def forward(self, spans: Sequence[Span]) -> Rows:
        dimensions = self._subject.dimensions
        check_spans(spans, dimensions, self._region_count, self._capacity)
        legs = {} if self._states is None else self._states.begin(spans)
        for span in spans:
            end = span.start + len(span.tokens)
            self._mover.copy(self._pages.extend(span.region, span.start, end))
        found = Gathered(spans, output_width(dimensions))
        for one in self._passes(spans):
            if self._is_aborted:
                raise Aborted
            found.take(one, self._run(one, legs), ())
            if self._states is not None:
                self._states.passed(legs, one.pieces)
        if self._states is not None:
            self._states.commit(legs)
        return found.logits

    def abort(self) -> None:
        self._is_aborted = True

    def resume(self) -> None:
        self._is_aborted = False

    def truncate(self, region: Region, length: int) -> None:
        self._pages.truncate(region, length)
        if self._states is not None:
            self._states.truncate(region, length)

    def copy(self, source: Region, target: Region, length: int) -> None:
        self._mover.copy(self._pages.share(source, target, length))
        if self._states is not None:
            self._states.restore(target, self._states.save(source, length), length)

    def save(self, region: Region, length: int) -> Snapshot:
        parts = self._mover.save(self._pages.table(region), length)
        states = None if self._states is None else self._states.save(region, length)
        return Snapshot(length, parts, states)

    def restore(self, region: Region, snapshot: Snapshot) -> None:
        self._pages.truncate(region, 0)
        self._pages.extend(region, 0, snapshot.length)
        self._mover.restore(self._pages.table(region), snapshot.parts, snapshot.length)
        if self._states is not None:
            self._states.restore(region, snapshot.states or (), snapshot.length)

    def shift(self, region: Region, start: int, count: int, length: int) -> None:
        if self._states is not None:
            raise BackendError(NO_SHIFT)
        self._mover.shift(self._pages, region, start, count, length)

    def close(self) -> None:
        self._planner.close()
        for device in self._devices:
            device.close()

    # --- one pass ---------------------------------------------------------------------------------

    def _passes(self, spans: Sequence[Span]) -> list[Pass]:
        numbered = sorted(enumerate(spans), key=lambda item: item[1].region)
        generated = [item for item in numbered if item[1].generated]
        prompts = [item for item in numbered if not item[1].generated]
        passes: list[Pass] = []
        if generated:
            pages = max(pages_for(one.start + len(one.tokens)) for _, one in generated)
            passes += [by_width(one) for one in fill(generated, self._limits.rows_max(pages))]
        if prompts:
            passes += self._prompt_passes(prompts)
        return passes

    def _prompt_passes(self, numbered: Sequence[tuple[int, Span]]) -> list[Pass]:
        limits = self._limits
        outputs = sum(span.outputs for _, span in numbered)
        rows = min(limits.ubatch, limits.outputs_max) if outputs > limits.outputs_max else (
            limits.ubatch
        )  # fmt: skip
        if self._kind == "F16":
            return fill(numbered, rows)
        return [one for item in numbered for one in fill([item], rows)]

    def _run(self, one: Pass, legs: dict[Region, Leg]) -> Rows:
        """Queue a pass; wait for it where logits are wanted."""
        shape = self._shape_of(one)
        plan = self._planner.plan(shape)
        self._planner.fill(plan.layout, self._inputs(one, shape, legs))
        plan.run()
        wanted = sum(piece.outputs for piece in one.pieces)
        logits: Rows = np.empty((wanted, output_width(self._subject.dimensions)), np.float32)
        if wanted:
            self._planner.logits(plan, logits)
        return logits

    def _shape_of(self, one: Pass) -> PassShape:
        pieces = one.pieces
        rows = sum(len(piece.tokens) for piece in pieces)
        wanted = sum(piece.outputs for piece in pieces)
        pages = max(pages_for(piece.start + len(piece.tokens)) for piece in pieces)
        width = table_width(pages, self._limits.pages_max)
        is_packed = self._kind == "Q8_0" and not pieces[0].generated
        return PassShape(
            generated=pieces[0].generated,
            groups=groups_of(pieces),
            taken=None if wanted == rows else wanted,
            pages=width,
            unpacked=width if is_packed else 0,
        )

    def _inputs(
        self, one: Pass, shape: PassShape, legs: dict[Region, Leg]
    ) -> dict[str, NDArray[np.int32]]:
        pieces = one.pieces
        counts = [len(piece.tokens) for piece in pieces]
        positions = np.concatenate(
            [np.arange(piece.start, piece.start + len(piece.tokens)) for piece in pieces]
        )
        tables = np.zeros((len(pieces), shape.pages), np.int64)
        for lane, piece in enumerate(pieces):
            pages = self._pages.table(piece.region)[: shape.pages]
            tables[lane, : len(pages)] = pages
        found: dict[str, Sequence[int] | NDArray[np.int64]] = {
            "tokens": [token for piece in pieces for token in piece.tokens],
            "positions": positions,
            "places": positions,
            "lanes": np.repeat(np.arange(len(pieces)), counts),
            "firsts": np.cumsum([0, *counts[:-1]]),
            "starts": [piece.start for piece in pieces],
            "counts": counts,
            "table": tables,
        }
        if shape.taken:
            found["wanted"] = output_rows(pieces)
        if legs:
            found["reads"] = [legs[piece.region].read for piece in pieces]
            found["writes"] = [legs[piece.region].write for piece in pieces]
        if shape.unpacked:
            found |= self._unpacked(pieces[0], shape.unpacked)
        return {name: np.asarray(values, np.int32) for name, values in found.items()}

    def _unpacked(self, piece: Span, count: int) -> dict[str, NDArray[np.int64]]:
        """Copies of one lane's pages, in order; the last is copied again where there are fewer."""
        pages = self._pages.table(piece.region)[: pages_for(piece.start + len(piece.tokens))]
        numbers = np.minimum(np.arange(count), len(pages) - 1)
        pairs = np.stack([np.array(pages)[numbers], numbers], axis=1)
        return {"pairs": pairs, "table_unpacked": numbers[None, :]}


def by_width(one: Pass) -> Pass:
    """Lanes of equally many rows beside each other, as they are attended together."""
    order = sorted(range(len(one.lanes)), key=lambda lane: len(one.pieces[lane].tokens))
    return Pass(tuple(one.pieces[lane] for lane in order), tuple(one.lanes[lane] for lane in order))
