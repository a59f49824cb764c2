"""The target's hidden rows, for a drafter that reads them."""

from collections.abc import Sequence

from phaseloop.ops.interface import Backend, BackendError, HiddenBackend, Rows, Span

from .cpu_slot import Slot
from .draft import Drafter


def check_hidden(backend: Backend, drafter: Drafter) -> None:
    """Raises BackendError where a drafter wants what the backend does not show."""
    if drafter.wants_hidden and not isinstance(backend, HiddenBackend):
        raise BackendError(
            f"{drafter.name} reads hidden rows, which {backend.name} does not show; use another "
            "--spec-type"
        )


def forward(backend: Backend, spans: Sequence[Span], drafter: Drafter) -> tuple[Rows, Rows | None]:
    """Logits as Backend.forward has them, and hidden rows of all tokens if the drafter wants."""
    if drafter.wants_hidden and isinstance(backend, HiddenBackend):
        return backend.forward_hidden(spans)
    return backend.forward(spans), None


def shown(
    hidden: Rows | None, spans: Sequence[Span], starts: Sequence[int], slots: Sequence[Slot]
) -> list[Rows | None]:
    """For each span the rows of what its slot took from `starts` on: no rejected draft's."""
    if hidden is None:
        return [None] * len(spans)
    found: list[Rows | None] = []
    first = 0
    for span, start, slot in zip(spans, starts, slots, strict=True):
        own = hidden[first : first + len(span.tokens)]
        found.append(own[start - span.start : slot.length - span.start])
        first += len(span.tokens)
    return found
