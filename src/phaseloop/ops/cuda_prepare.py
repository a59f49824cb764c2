"""Everything about a backend that can be known before a device is touched: above all, its bytes."""

from msgspec import Struct

from phaseloop.kernels.contract import KernelError, Launch
from phaseloop.kernels.kv import Kind

from .cuda_limits import Limits, corners, input_words_max, limits_of
from .cuda_needs import Needs
from .cuda_pages import pages_for
from .cuda_plan import WORD, Subject, trial
from .cuda_store import cache_bytes, constant_bytes, raw_bytes, state_bytes
from .delta_states import cell_count
from .interface import BackendError

UBATCH_ROWS = 512


class Options(Struct, frozen=True):
    """`page_count`: pages of all regions together; None: as many as they could use.

    `ubatch`: rows of a prompt computed in one pass.
    """

    region_count: int
    capacity: int  # positions of a region
    cache: Kind = "F16"
    page_count: int | None = None
    ubatch: int = UBATCH_ROWS

    @property
    def pages(self) -> int:
        """As many as are wanted, and one to shift into."""
        most = self.region_count * pages_for(self.capacity)
        return 1 + (most if self.page_count is None else min(most, self.page_count))


class DeviceBytes(Struct, frozen=True):
    """What a device has to hold; `loading` is given back when all weights lie there."""

    weights: int
    cache: int
    states: int
    scratch: int
    loading: int

    @property
    def total(self) -> int:
        """The most at any time: caches come after the weights."""
        return self.weights + max(self.loading, self.cache + self.states + self.scratch)


class Prepared(Struct, frozen=True):
    needs: Needs
    limits: Limits
    arenas: tuple[int, ...]  # bytes, by device
    launches: tuple[frozenset[tuple[str, str]], ...]  # by device, sources and entries that are sure

    def bytes_of(self, device: int) -> DeviceBytes:
        needs = self.needs
        raw = [raw_bytes(needs, key) for key in needs.matrices if key.device == device]
        return DeviceBytes(
            weights=constant_bytes(needs, device),
            cache=cache_bytes(needs, device),
            states=state_bytes(needs, device),
            scratch=self.arenas[device] + WORD * input_words_max(self.limits),
            loading=max(raw, default=0),
        )


def prepare(subject: Subject, options: Options) -> Prepared:
    """Raises BackendError for a model that the kernels cannot run."""
    limits = limits_of(
        subject, options.region_count, options.capacity, options.ubatch, options.cache
    )
    needs = Needs(
        subject.weights,
        subject.dimensions,
        kind=options.cache,
        page_count=options.pages,
        cell_count=cell_count(options.region_count),
        unpacked_count=limits.unpacked_max,
    )
    devices = range(subject.device_count)
    arenas = [0 for _ in devices]
    launches: list[set[tuple[str, str]]] = [set() for _ in devices]
    try:
        for shape in corners(limits):
            tried = trial(subject, needs, shape)
            for device in devices:
                arenas[device] = max(arenas[device], tried.sizes[device])
                launches[device] |= entries_of(tried.launches[device])
    except KernelError as error:
        raise BackendError(f"the CUDA backend cannot run this model: {error}") from error
    return Prepared(needs, limits, tuple(arenas), tuple(map(frozenset, launches)))


def entries_of(launches: list[Launch]) -> set[tuple[str, str]]:
    return {(launch.source, launch.entry) for launch in launches}
