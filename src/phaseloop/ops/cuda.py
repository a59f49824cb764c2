"""The CUDA backend: networks as launches of our kernels, on GPUs or on the host's shim.

Rows of prompts always take the kernels for many rows, generated ones, drafts among them, always
those for few.  Keys and values lie in pages of 256 positions; where a page lies, who shares it, how
a prompt was cut, who the neighbours are and how layers are split over devices shows in no bit.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels.device import Device

from .checks import check_spans, output_rows, output_width
from .cuda_cache import CacheMover
from .cuda_limits import input_words_max
from .cuda_pages import Pages, pages_for
from .cuda_plan import Planner, Subject
from .cuda_prepare import Options, Prepared, prepare
from .cuda_shape import PassShape, groups_of, table_width
from .cuda_states import DeviceStates
from .cuda_store import Placed
from .delta_states import MARKS_MAX, NO_SHIFT, Leg
from .gather import Gathered
from .interface import Aborted, BackendError, Region, Rows, Snapshot, Span
from .passes import Pass, fill


class CudaBackend:
    """Implements Backend.

    `prepared` is what `prepare` made of the same subject and options, if somebody has asked before.
    `marks_max`: how many marked recurrent states a region keeps.  `builds`: whether kernels are
    built now and not when they are first launched.
    """

    generated_like_prompt = False

    def __init__(
        self,
        subject: Subject,
        devices: Sequence[Device],
        options: Options,
        *,
        prepared: Prepared | None = None,
        marks_max: int = MARKS_MAX,
        builds: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._subject, self._devices, self._options = subject, devices, options
        ready = prepare(subject, options) if prepared is None else prepared
        self._limits = ready.limits
        if builds:
            build(devices, ready)
        self._placed = Placed(devices, ready.needs, progress)
        words = input_words_max(ready.limits)
        self._planner = Planner(subject, devices, self._placed, ready.arenas, words)
        self._pages = Pages(options.pages, options.region_count)
        dimensions = subject.dimensions
        self._mover = CacheMover(devices, self._placed, dimensions, ready.limits.pages_max)
        self._states = (
            DeviceStates(
                devices,
                self._placed,
                region_count=options.region_count,
                marks_max=marks_max,
            )
            if dimensions.recurrence
            else None
        )
        self._is_aborted = False

    @property
    def name(self) -> str:
        return f"cuda-{self._devices[0].architecture}-{self._options.cache.lower()}"

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
        check_spans(spans, dimensions, self._options.region_count, self._options.capacity)
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
        has_many = sum(span.outputs for _, span in numbered) > limits.outputs_max
        rows = limits.outputs_max if has_many else limits.ubatch
        if self._options.cache == "F16":
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
        is_packed = self._options.cache == "Q8_0" and not pieces[0].generated
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


def build(devices: Sequence[Device], prepared: Prepared) -> None:
    """Every kernel that passes are sure to launch; those of a source together."""
    for device, launches in zip(devices, prepared.launches, strict=True):
        for source in sorted({source for source, _ in launches}):
            device.load(source, sorted(entry for name, entry in launches if name == source))


def by_width(one: Pass) -> Pass:
    """Lanes of equally many rows beside each other, as they are attended together."""
    order = sorted(range(len(one.lanes)), key=lambda lane: len(one.pieces[lane].tokens))
    return Pass(tuple(one.pieces[lane] for lane in order), tuple(one.lanes[lane] for lane in order))
