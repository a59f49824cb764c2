"""Whole answers from the model engine, through the service that a server is made of."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import FinishReason, Request
from phaseloop.engine.cpu import ModelEngine
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.settings import Adapters, Likelihood, Sampling, Speculation
from phaseloop.engine.snapshots import Snapshots
from phaseloop.runtime.gateway import Begun, Delivered, Stream, Submission
from phaseloop.runtime.prefixes import PrefixIndex
from phaseloop.runtime.service import Service

RUN_S_MAX = 600  # a run that hangs is a failure with a name, however busy the machine
SNAPSHOT_BYTES = 1 << 30
GREEDY = Sampling(temperature=0.0, n_probs=3)
SAMPLED = Sampling(temperature=0.9, n_probs=3)


class Job(Struct, frozen=True):
    """One request.  It reads to its end, or leaves: at once, when begun, or after some tokens."""

    prompt: tuple[int, ...]
    limit: int
    sampling: Sampling = GREEDY
    seed: int = 7
    reuse: bool = False
    slot: int | None = None
    leaves: Literal["queued", "begun"] | int | None = None
    choices: int = 1
    stop_points: tuple[int, ...] = ()
    adapters: Adapters = ()
    speculation: Speculation = Speculation()


class Answer(Struct, frozen=True):
    ids: tuple[tuple[int, ...], ...]  # by choice
    likelihoods: tuple[tuple[Likelihood, ...], ...]
    outcome: FinishReason | None
    cached: int
    slot: int | None

    @property
    def bits(self) -> tuple[object, object]:
        return self.ids, self.likelihoods


def serve(
    engine: ModelEngine, *stages: Sequence[Job], policy: str = "barrier-fair", **limits: Any
) -> list[Answer]:
    """The answers of the last stage.  Each stage is one call; it begins when the last has ended."""
    return asyncio.run(serve_stages(engine, stages, policy, limits))


async def serve_stages(
    engine: ModelEngine, stages: Sequence[Sequence[Job]], policy: str, limits: dict[str, Any]
) -> list[Answer]:
    forget(engine)
    description = engine.describe()
    bounds = replace(limits_of(description), **limits)
    prefixes = PrefixIndex(bounds, description, engine.snapshots, positions=engine.positions)
    answers: list[Answer] = []
    async with (
        asyncio.timeout(RUN_S_MAX),
        Service(engine, bounds, PRESETS[policy], prefixes=prefixes) as service,
    ):
        for jobs in stages:
            with service.gateway.submit([submission(job) for job in jobs]) as call:
                reads = map(read, call.streams, jobs)
                answers = list(await asyncio.gather(*reads))
        service.shut_down()
        await service.ended()
    return answers


def submission(job: Job) -> Submission:
    request = Request(
        0,
        len(job.prompt),
        output_limit=job.limit,
        keep_cache=job.reuse,
        slot_hint=job.slot,
        choices=job.choices,
        stop_points=job.stop_points,
    )
    return Submission(
        request,
        job.prompt,
        job.seed,
        job.sampling,
        speculation=job.speculation,
        adapters=job.adapters,
    )


async def read(stream: Stream, job: Job) -> Answer:
    ids: list[list[int]] = [[] for _ in range(job.choices)]
    likelihoods: list[list[Likelihood]] = [[] for _ in range(job.choices)]
    if job.leaves == "queued":
        stream.close()
    async for item in stream:
        if isinstance(item, Begun) and job.leaves == "begun":
            stream.close()
        if isinstance(item, Delivered):
            ids[item.choice] += item.ids
            likelihoods[item.choice] += item.likelihoods
            if isinstance(job.leaves, int) and len(ids[item.choice]) >= job.leaves:
                stream.close()
    return Answer(
        tuple(map(tuple, ids)),
        tuple(map(tuple, likelihoods)),
        stream.outcome,
        stream.timing.cached,
        stream.timing.slots.get(0),
    )


def forget(engine: ModelEngine) -> None:
    """Back to no prefixes at all; what regions held is left as it is, for nobody to see."""
    engine.snapshots = Snapshots(0)
    for slot in range(engine.describe().slot_count):
        engine.release(slot, 0, 0)
    engine.snapshots = Snapshots(SNAPSHOT_BYTES)
