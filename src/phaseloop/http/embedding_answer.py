"""One call that encodes, from its posting to its vectors."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from sys import byteorder

from msgspec import Struct
from starlette.types import Receive

from phaseloop.engine.settings import Vectors
from phaseloop.runtime.gateway import Begun, Ended, Stream, Submission

from .answer_ends import COMPLETE, failure
from .errors import ApiError
from .request_fields import Json
from .served import Served
from .sse import ClientLeft
from .stream import closed_on_disconnect
from .usage import Work, spans, work_of

INT16 = 32_760.0  # what the largest number becomes where they are to be made integers


class One(Struct, frozen=True):
    """What came of one text."""

    stream: Stream
    vectors: Vectors
    cohort: int | None  # None where the policy has none


class Encoded:
    """What came of a call's texts, in their order."""

    def __init__(self, found: Sequence[One], served: Served) -> None:
        self.model = served.model.name
        self._found = found
        self._served = served

    def normalised(self, norm: int) -> list[list[list[float]]]:
        """Each text's rows; those of single tokens are left as they are, as llama-server does."""
        rows = [one.vectors.rows for one in self._found]
        if self._served.service.description.pooling == "none":
            return rows
        return [[normalised(row, norm) for row in each] for each in rows]

    def scores(self) -> list[float]:
        return [one.vectors.rows[0][0] for one in self._found]

    def base64(self, row: Sequence[float]) -> str:
        values = array("f", row)
        if byteorder == "big":
            values.byteswap()
        return base64.b64encode(values.tobytes()).decode()

    def usage(self) -> Json:
        count = sum(one.stream.request.prompt_length for one in self._found)
        return {"prompt_tokens": count, "total_tokens": count}

    def closing(self, *, timing_field: bool) -> Json:
        """As those of answers that generate: sums over the texts, and spans of the last one."""
        works = (work_of(one.stream.timing, ()) for one in self._found)
        made: Json = {"timings": sum(works, Work()).as_timings()}
        if timing_field:
            last = max(self._found, key=lambda one: one.stream.timing.ended_ns or 0)
            service = self._served.service
            policy, now_ns = service.state.policy.name, service.clock.now_ns()
            made["phaseloop"] = spans(last.stream.timing, now_ns, policy, last.cohort)
        return made


async def encoded(submissions: Sequence[Submission], served: Served, receive: Receive) -> Encoded:
    """Post them together and wait for all.  Raises ApiError, ClientLeft."""
    call = served.service.gateway.submit(submissions)
    async with closed_on_disconnect(call, receive):
        for stream in call.streams:
            served.began(stream)
        try:
            found = await asyncio.gather(*(one_of(stream, served) for stream in call.streams))
        finally:
            call.close()
            for stream in call.streams:
                served.ended(stream)
    return Encoded(found, served)


async def one_of(stream: Stream, served: Served) -> One:
    vectors: Vectors | None = None
    cohort: int | None = None
    async for item in stream:
        match item:
            case Begun():
                state = served.service.state
                cohort = state.cohort if state.policy.switch == "barrier" else None
            case Ended():
                vectors = item.vectors
            case _:
                pass
    if stream.outcome is None:
        raise ClientLeft
    if stream.outcome not in COMPLETE:
        raise failure(stream.outcome, stream.request, served.service.limits)
    if vectors is None:
        raise ApiError("server_error", "the engine gave no vectors")
    return One(stream, vectors, cohort)


def normalised(row: Sequence[float], norm: int) -> list[float]:
    """-1 as it is, 0 the largest becomes that of 16-bit integers, p by the p-norm; 2 is usual."""
    match norm:
        case -1:
            return list(row)
        case 0:
            length = max(map(abs, row), default=0.0) / INT16
        case 2:
            length = math.hypot(*row)
        case _:
            length = p_norm(row, norm)
    return [value / length for value in row] if length else [0.0] * len(row)


def p_norm(row: Sequence[float], p: int) -> float:
    """By way of the largest, so that no power is beyond what a float holds."""
    largest = max(map(abs, row), default=0.0)
    if not largest:
        return 0.0
    return largest * sum((abs(value) / largest) ** p for value in row) ** (1 / p)
