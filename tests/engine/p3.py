"""What an answer's bits must not depend on, as factors with levels, and runs of any choice of them.

Two requests are looked at in every run, a greedy one and a sampled one; others keep them company.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Literal, get_args

import numpy as np
from answers import GREEDY, SAMPLED, Answer, Job, serve
from msgspec import Struct
from msgspec.structs import asdict

from phaseloop.core.policy import PRESETS
from phaseloop.engine.cpu import ModelEngine

Cache = Literal["cold", "slot", "other slot", "snapshot"]
Leaver = Literal["nobody", "waiting", "prefilling", "generating"]
CACHED = 70  # tokens of each prompt that a cache holds; no multiple of anything
SLOTS = 8


class Setting(Struct, frozen=True):
    """One choice of levels.  The defaults are the baseline; the standard has one thread."""

    cohort: int = 2
    policy: str = "barrier-fair"
    batch_tokens: int = 2048
    threads: int = 2
    cache: Cache = "cold"
    leaver: Leaver = "nobody"


LEVELS: dict[str, tuple[object, ...]] = {
    "cohort": (2, 3, 4, 5, 6, 7, 8),
    "policy": tuple(PRESETS),
    "batch_tokens": (32, 100, 512, 2048),
    "threads": (1, 2),
    "cache": get_args(Cache),
    "leaver": get_args(Leaver),
}
BASELINE = Setting()


def one_at_a_time() -> list[Setting]:
    baseline = asdict(BASELINE)
    return [
        Setting(**{name: level})
        for name, levels in LEVELS.items()
        for level in levels
        if level != baseline[name]
    ]


def name_of(setting: Setting) -> str:
    """What is not as in the baseline."""
    baseline = asdict(BASELINE)
    other = [f"{name}={v}" for name, v in asdict(setting).items() if v != baseline[name]]
    return ",".join(other) or "baseline"


def grid(**levels: tuple[object, ...]) -> Iterator[Setting]:
    """Every choice of levels, some of them restricted."""
    chosen = LEVELS | levels
    for row in product(*chosen.values()):
        yield Setting(**dict(zip(chosen, row, strict=True)))


def pairwise(seed: int = 1, **levels: tuple[object, ...]) -> list[Setting]:
    """Rows in which every two levels of two factors meet at least once; few, but not the fewest."""
    chosen = LEVELS | levels
    random = np.random.default_rng(seed)
    left = {pair for row in grid(**levels) for pair in pairs(row)}
    rows: list[Setting] = []
    while left:
        drawn = [
            Setting(
                **{name: values[random.integers(len(values))] for name, values in chosen.items()}
            )
            for _ in range(300)
        ]
        best = max(drawn, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        rows.append(best)
    return rows


def pairs(row: Setting) -> set[tuple[tuple[str, object], ...]]:
    return set(combinations(asdict(row).items(), 2))


class Subject(Struct, frozen=True):
    """The two requests, and what surrounds them.  `others` are at least seven prompts."""

    greedy: tuple[int, ...]
    sampled: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    tokens: int  # generated

    def jobs(self, *, reuse: bool = False) -> list[Job]:
        return [
            Job(self.greedy, self.tokens, GREEDY, reuse=reuse),
            Job(self.sampled, self.tokens, SAMPLED, reuse=reuse),
        ]


def alone(engine: ModelEngine, subject: Subject) -> list[Answer]:
    return [serve(engine, [job])[0] for job in subject.jobs()]


def together(engine: ModelEngine, subject: Subject, setting: Setting) -> list[Answer]:
    """The answers to the two, in the setting."""
    is_cached = setting.cache != "cold"
    company = [
        Job(prompt, 1 + 3 * index, SAMPLED if index % 2 else GREEDY, seed=index)
        for index, prompt in enumerate(subject.others[: setting.cohort - 2])
    ]
    jobs = subject.jobs(reuse=is_cached) + company
    leaver = subject.others[-1]
    match setting.leaver:
        case "waiting":
            jobs.append(Job(leaver, 20, leaves="queued"))
        case "prefilling":
            jobs.append(Job(leaver, 20, leaves="begun"))
        case "generating":
            jobs.append(Job(leaver, 20, leaves=3))
        case "nobody":
            pass
    stages = [*preparation(subject, setting.cache), jobs]
    answers = serve(engine, *stages, policy=setting.policy, batch_tokens=setting.batch_tokens)
    for answer in answers[:2]:
        assert answer.cached == (CACHED if is_cached else 0), "the run is what it says it is"
        if setting.cache == "other slot":
            assert answer.slot not in (0, 1)
    return answers[:2]


def preparation(subject: Subject, cache: Cache) -> list[list[Job]]:
    """Stages after which CACHED tokens of both prompts are where the setting wants them.

    A slot goes to whom it serves if it loses little by that; if it holds much else, its beginning
    is copied.  A slot that was taken for another prompt has left a snapshot.
    """
    if cache == "cold":
        return []
    tail = sum(subject.others, ())[: 60 if cache == "other slot" else 3]
    prompts = (subject.greedy, subject.sampled)
    held = [
        Job(
            (*prompt[:CACHED], *differing(prompt[CACHED], tail)),
            0,
            reuse=True,
            slot=slot,
            stop_points=(CACHED,),  # where a recurrent state can be taken up
        )
        for slot, prompt in enumerate(prompts)
    ]
    takers = [Job(subject.others[1], 0, slot=slot) for slot in (0, 1)]
    return [held, takers] if cache == "snapshot" else [held]


def differing(token: int, tail: tuple[int, ...]) -> tuple[int, ...]:
    """A tail that does not begin with the token, so that the common part ends before it."""
    return (token + 1 if token == 0 else token - 1, *tail[1:])
