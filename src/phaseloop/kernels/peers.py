"""Which devices may copy from each other's memory: allowed by name, and tried before it is used.

Some machines report that two GPUs reach each other and then deliver other bytes.  So a pair is used
only where the driver offers it, the operator allows it, and patterns arrive unharmed; any other
pair copies through the host's memory.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .contract import KernelError
from .cupy_device import Cupy, CupyDevice

PATTERN_BYTES = 4 << 20
ROUNDS = 4  # of all patterns; a bad link need not fail every time
ENABLED_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled
PAIRS = re.compile(r"\d+:\d+(,\d+:\d+)*", re.ASCII)
State: TypeAlias = Literal["used", "not allowed", "impossible", "corrupt", "failed"]
log = logging.getLogger(__name__)


class PeerAccess(Struct, frozen=True):
    """What the operator allows; pairs are ordered by index, and mean both directions."""

    allows_all: bool = False
    pairs: frozenset[tuple[int, int]] = frozenset()

    def allows(self, source: int, target: int) -> bool:
        return self.allows_all or (min(source, target), max(source, target)) in self.pairs


class Pair(Struct, frozen=True):
    """What became of copies from device `source` to device `target`."""

    source: int
    target: int
    state: State
    why: str


def parse_peer_access(text: str) -> PeerAccess:
    """`none`, `all`, or pairs: `0:1,2:3`.  Raises KernelError."""
    if text in ("none", "all"):
        return PeerAccess(allows_all=text == "all")
    if not PAIRS.fullmatch(text):
        raise KernelError(f"{text!r} is neither all, none, nor pairs of devices such as 0:1,2:3")
    pairs: set[tuple[int, int]] = set()
    for pair in text.split(","):
        source, target = sorted(map(int, pair.split(":")))
        if source == target:
            raise KernelError(f"{pair}: a device is no peer of itself")
        pairs.add((source, target))
    return PeerAccess(pairs=frozenset(pairs))


def connect(
    cupy: Cupy, devices: Sequence[CupyDevice], access: PeerAccess, *, size: int = PATTERN_BYTES
) -> list[Pair]:
    """Let devices copy from their peers where that can be trusted; -> what became of each pair.

    Tries `size` bytes per pattern.  Refused pairs are logged.  Raises KernelError for a pair whose
    devices are not there.
    """
    known = {device.index for device in devices}
    if unknown := sorted({one for pair in access.pairs for one in pair} - known):
        raise KernelError(f"peer access for device {unknown[0]}; there are {sorted(known)}")
    pairs: list[Pair] = []
    for source, target in permutations(devices, 2):
        state, why = judge(cupy, source, target, access, size)
        if state in ("corrupt", "failed"):
            log.warning(
                "device %d to device %d: %s; copies go through the host's memory",
                source.index, target.index, why,
            )  # fmt: skip
        pairs.append(Pair(source.index, target.index, state, why))
    return pairs


def judge(
    cupy: Cupy, source: CupyDevice, target: CupyDevice, access: PeerAccess, size: int
) -> tuple[State, str]:
    runtime = cupy.cuda.runtime
    with target.current("asking for its peers"):
        is_offered = runtime.deviceCanAccessPeer(target.index, source.index)
    if not is_offered:
        return "impossible", "the driver offers no access"
    if not access.allows(source.index, target.index):
        return "not allowed", f"--peer-access {source.index}:{target.index} would allow it"
    try:
        with target.current("enabling peer access"):
            enable(cupy, source.index)
        target.peers.add(source.index)  # so that the trial goes that way
        harmed = first_harm(source, target, size)
        if harmed is None:
            return "used", f"{ROUNDS} rounds of {size} bytes arrived unharmed"
        target.peers.discard(source.index)
        with target.current("disabling peer access"):
            runtime.deviceDisablePeerAccess(source.index)
    except KernelError as error:
        target.peers.discard(source.index)
        return "failed", str(error)
    return "corrupt", harmed


def enable(cupy: Cupy, source: int) -> None:
    try:
        cupy.cuda.runtime.deviceEnablePeerAccess(source)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != ENABLED_ALREADY:
            raise


def first_harm(source: CupyDevice, target: CupyDevice, size: int) -> str | None:
    """What arrived wrong, or None."""
    begin, end = source.allocate((size,), np.uint8), target.allocate((size,), np.uint8)
    arrived = np.empty(size, np.uint8)
    try:
        for name, content in patterns(size, source.index, target.index):
            source.upload(content, begin)
            target.zero(end)
            target.copy_from(source, begin, end)
            target.download(end, arrived)
            wrong = np.flatnonzero(arrived != content)
            if wrong.size:
                return f"{wrong.size} of {size} bytes arrive changed ({name}, from byte {wrong[0]})"
    finally:
        source.release(begin)
        target.release(end)
    return None


def patterns(size: int, source: int, target: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Words that say where they belong and whose they are, their complement, and random bytes."""
    counted = np.arange(size // 4 + 1, dtype=np.uint32) + np.uint32((source << 16 | target) << 8)
    rng = np.random.default_rng((source, target))
    for _ in range(ROUNDS):
        yield "counted words", counted.view(np.uint8)[:size]
        yield "inverted words", (~counted).view(np.uint8)[:size]
        yield "random bytes", rng.integers(0, 256, size, dtype=np.uint8)
