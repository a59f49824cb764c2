"""A script of the explorer as a trace, so that `phaseloop replay` can open, explain and step it."""

from typing import BinaryIO

from phaseloop import __version__
from phaseloop.core.reduce import reduce
from phaseloop.core.state import State
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, TraceWriter

from .explore import Found, Script

ENGINE = "explorer"


def write_script(out: BinaryIO, state: State, found: Found) -> Script:
    """Write the script of a violation that starts in `state`; returns the events it wrote.

    Where the reducer raises there is no step to record: the trace ends before that event.  Raises
    OSError.
    """
    header = Header(
        version=__version__,
        core=core_digest(),
        policy=state.policy,
        limits=state.limits,
        engine=ENGINE,
    )
    writer = TraceWriter(out, header, state)
    for number, event in enumerate(found.script):
        try:
            after, effects = reduce(state, event)
        except Exception:
            script = found.script[:number]
            break
        writer.append(event, state, after, effects)
        state = after
    else:
        script = found.script
    writer.close(f"breaks {found.invariant}", 1)
    return script
