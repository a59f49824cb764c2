"""The file that `serve --trace` records into, so that no earlier record is lost.

A trace that is already there keeps its content under another name: `run.jsonl` becomes
`run.1.jsonl`, the next one `run.2.jsonl`.  A file that is no trace, or that another process is
writing, is left alone, with an error.
"""

from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

import structlog

from phaseloop import __version__
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.output import create, refuse_busy
from phaseloop.runtime.service import Recording
from phaseloop.runtime.trace import Header
from phaseloop.runtime.trace_content import TraceContent

from .errors import UserError
from .serve_load import Ready

BEGINNING = b'{"line":"header"'

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Trace:
    """The open file.  Use it as a context manager."""

    def __init__(self, path: Path, content: TraceContent) -> None:
        """Raises UserError."""
        self._path = path
        self._content: TraceContent = content
        try:
            moved = move_aside(path)
            self._out = create(path)
        except OSError as error:
            raise UserError(f"--trace {path}: {error.strerror or error}") from None
        if moved is not None:
            log.info("trace", file=str(path), earlier=str(moved))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk, of which the log has told
            self._out.close()

    def recording(self, ready: Ready) -> Recording:
        description = ready.engine.describe()
        header = Header(
            version=__version__,
            core=core_digest(),
            policy=ready.policy,
            limits=ready.limits,
            engine=description.name,
            model=description.model,
            adapters=description.adapters or None,
            seed=ready.seed,
            content=self._content,
            cache_ram_bytes=None if self._content == "counts" else description.cache_ram_bytes,
        )
        return Recording(self._out, header, self._on_lost)

    def _on_lost(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        log.error("the trace ends here, serving goes on", file=str(self._path), reason=reason)


def move_aside(path: Path) -> Path | None:
    """Where an earlier trace was moved.  Raises UserError for what is none, or OSError."""
    if not path.is_file() or path.stat().st_size == 0:
        return None  # nothing there, or a device
    refuse_busy(path)
    with path.open("rb") as file:
        if file.read(len(BEGINNING)) != BEGINNING:
            raise UserError(f"--trace {path} exists and is no trace; name another file")
    free = next(
        candidate
        for number in count(1)
        if not (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists()
    )
    return path.rename(free)
