"""What a draft costs on this machine: measured once, when a drafter is loaded.

On a GPU a row more in a pass costs next to nothing, on a CPU it may cost half of what the pass
costs without it; and a draft model takes its time as well.  So how many drafts are worth it is not
to be said beforehand.
"""

import time

from phaseloop.ops.interface import Backend, Rows, Span

ROWS = 4
TRIES = 3  # the least counts: whatever disturbs a pass makes it longer


def row_cost(backend: Backend) -> float:
    """How much longer a pass of generated rows gets by one more, as a part of one with one row.

    Computes in region 0, which must be empty, and is left so.
    """
    one, more = (pass_seconds(backend, rows) for rows in (1, 1 + ROWS))
    return max(0.0, (more - one) / (ROWS * one))


def draft_cost(backend: Backend, drafter: Backend) -> float:
    """A pass of one row of a draft model, as a part of one of the model itself."""
    return pass_seconds(drafter, 1) / pass_seconds(backend, 1)


def pass_seconds(backend: Backend, rows: int, given: Rows | None = None) -> float:
    """The least of a few tries; `given` are rows that come along with the tokens."""
    least = float("inf")
    span = Span(0, 0, (0,) * rows, rows, True, given=given)
    for _ in range(1 + TRIES):  # the first builds a graph
        backend.truncate(0, 0)
        begun = time.perf_counter()
        backend.forward([span])
        least = min(least, time.perf_counter() - begun)
    backend.truncate(0, 0)
    return least
