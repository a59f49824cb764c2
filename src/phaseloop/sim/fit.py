"""Fits a cost model to the rounds of a recorded trace.

Every completed round gives one equation: its parameters times what the round carried is how long it
took (engine/sim_cost.py has the terms).  They are solved together by least squares with no
parameter below 0, on relative errors, so that a decode round of 20 ms counts as much as a prompt
round of a second.  Only sums of products are kept, so a trace may be as long as it likes.

Where a trace cannot tell two parameters apart, for instance a cost per round from a cost per token
when all rounds have the same number of tokens, some split that explains the rounds is found and the
parameters are named.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict
from numpy.typing import NDArray

from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import AnyEvent, LaunchRound, Produced, RoundCompleted, RoundKind
from phaseloop.engine.sim import Capacity, SimModel
from phaseloop.engine.sim_cost import PPM, PS, Cost, duration_ns, pairs_of
from phaseloop.runtime.trace import Recorded, open_trace

PARAMETERS = (
    "prefill_round_ns",
    "prefill_token_ns",
    "prefill_pair_ps",
    "prefill_lane_ns",
    "decode_round_ns",
    "decode_row_ns",
    "decode_context_ps",
    "sample_lane_ns",
    "copy_token_ps",
    "move_token_ps",
)
SAME_BELOW = 1e-9  # of the largest eigenvalue: directions that the rounds say nothing about

Vector = NDArray[np.float64]


class FitError(Exception):
    """The trace has nothing to fit to."""


class Round(Struct, frozen=True):
    """A completed round: what was launched, how long it took, what its lanes yielded."""

    launch: LaunchRound
    begun: tuple[bool, ...]  # per lane, whether its sequence had its first token before
    duration_ns: int
    accepted: int  # drafts of all lanes
    trials: int  # drafts that were looked at until the first that was not accepted


class Residual(Struct, frozen=True):
    """How well the rounds of one kind are explained; shares of the measured time."""

    kind: RoundKind
    rounds: int
    mean_ns: int
    rms: float
    worst: float


class Fit(Struct, frozen=True):
    model: SimModel
    residuals: tuple[Residual, ...]
    indistinct: tuple[str, ...]  # parameters whose split is arbitrary
    unseen: tuple[str, ...]  # parameters of which no round says anything


def fit_trace(path: Path, name: str) -> Fit:
    """Raises TraceError if the file is no trace, FitError if it has no round that took time."""
    gram = np.zeros((len(PARAMETERS), len(PARAMETERS)))
    target = np.zeros(len(PARAMETERS))
    accepted = trials = 0
    for one in rounds_of(path):
        terms = np.array(terms_of(one), dtype=np.float64) / one.duration_ns
        gram += np.outer(terms, terms)
        target += terms
        accepted += one.accepted
        trials += one.trials
    if not gram.any():
        raise FitError("no completed round in it took any time")
    cost = rounded(nonnegative_least_squares(gram, target))
    with open_trace(path) as reader:
        limits = reader.header.limits
    accept_ppm = accepted * PPM // trials if trials else 0
    model = SimModel(name, capacity_of(limits, accept_ppm), cost)
    seen = np.diag(gram) > 0
    unseen = tuple(p for p, is_seen in zip(PARAMETERS, seen, strict=True) if not is_seen)
    return Fit(model, residuals_of(path, cost), indistinct_of(gram, seen), unseen)


def rounds_of(path: Path) -> Iterator[Round]:
    """Folds the trace; the launches are decided again by the reducer, as they are not recorded."""
    with open_trace(path) as reader:
        state = initial(reader.header.limits, reader.header.policy)
        launched: LaunchRound | None = None
        begun: tuple[bool, ...] = ()
        for _, record in reader:
            if not isinstance(record, Recorded):
                continue
            event = record.event
            state, effects = reduce(state, event)
            if launched is not None and completes(event, launched):
                yield Round(launched, begun, event.duration_ns, *drafts_of(launched, event))
            for effect in effects:
                if isinstance(effect, LaunchRound):
                    launched = effect
                    seats = (state.slots[lane.slot] for lane in effect.lanes)
                    begun = tuple(s is not None and s.produced > 0 for s in seats)


def completes(event: AnyEvent, launched: LaunchRound) -> TypeGuard[RoundCompleted]:
    return (
        isinstance(event, RoundCompleted)
        and event.round_id == launched.round_id
        and event.duration_ns > 0
    )


def drafts_of(launch: LaunchRound, event: RoundCompleted) -> tuple[int, int]:
    """Accepted drafts, and trials; a lane whose text ended there is no evidence."""
    accepted = trials = 0
    for place, (lane, result) in enumerate(zip(launch.lanes, event.results, strict=False)):
        drafted = event.drafts(place, lane)
        if drafted and isinstance(result, Produced) and not result.finish:
            accepted += result.tokens - 1
            trials += min(result.tokens, drafted)
    return accepted, trials


def terms_of(one: Round) -> tuple[float, ...]:
    """What each parameter is multiplied with, in the order of PARAMETERS."""
    lanes = one.launch.lanes
    rows = sum(lane.count for lane in lanes)
    context = sum(
        lane.start + lane.count
        for lane, has_begun in zip(lanes, one.begun, strict=True)
        if has_begun
    )
    match one.launch.kind:
        case "prefill" | "encode" | "mixed":
            prompts = (x for x, has_begun in zip(lanes, one.begun, strict=True) if not has_begun)
            pairs = sum(map(pairs_of, prompts)) / PS
            return 1, rows, pairs, len(lanes) - 1, 0, 0, context / PS, 0, 0, 0
        case "decode":
            return 0, 0, 0, 0, 1, rows, context / PS, 0, 0, 0
        case "shift":
            return 0, 0, 0, 0, 1, 0, 0, 0, 0, 0
        case "sample":
            return 0, 0, 0, 0, 0, 0, 0, len(lanes), 0, 0
        case "fork":
            return 0, 0, 0, 0, 0, 0, 0, 0, rows / PS, 0
        case "save" | "restore":
            return 0, 0, 0, 0, 0, 0, 0, 0, 0, rows / PS


def nonnegative_least_squares(gram: Vector, target: Vector) -> Vector:
    """The x >= 0 that minimises x'Gx - 2t'x, by active sets (Lawson and Hanson's method)."""
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0
    gram, target = gram / np.outer(scale, scale), target / scale
    size = len(target)
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    for _ in range(3 * size):
        slope = target - gram @ x
        slope[free] = -np.inf
        enter = int(np.argmax(slope))
        if slope[enter] <= 1e-10 * max(1.0, float(np.abs(target).max())):
            break
        free[enter] = True
        while True:
            solved = np.zeros(size)
            inner = gram[np.ix_(free, free)]
            solved[free] = np.linalg.lstsq(inner, target[free], rcond=SAME_BELOW)[0]
            if (solved[free] >= 0).all():
                x = solved
                break
            falling = free & (solved < 0)
            step = float((x[falling] / (x[falling] - solved[falling])).min())
            x = x + step * (solved - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x / scale


def rounded(values: Vector) -> Cost:
    costs = {name: round(float(v)) for name, v in zip(PARAMETERS, values, strict=True)}
    return Cost(**costs)


def indistinct_of(gram: Vector, seen: NDArray[np.bool_]) -> tuple[str, ...]:
    names = [p for p, is_seen in zip(PARAMETERS, seen, strict=True) if is_seen]
    inner = gram[np.ix_(seen, seen)]
    scale = np.sqrt(np.diag(inner))
    values, vectors = np.linalg.eigh(inner / np.outer(scale, scale))
    idle = vectors[:, values < SAME_BELOW * values.max()]
    shares = np.abs(idle).max(axis=1, initial=0.0)
    return tuple(name for name, share in zip(names, shares, strict=True) if share > 1e-3)


def residuals_of(path: Path, cost: Cost) -> tuple[Residual, ...]:
    """A second pass: the error of every round, by kind."""
    squares: dict[RoundKind, list[float]] = {}
    totals: dict[RoundKind, list[int]] = {}
    for one in rounds_of(path):
        begun = {lane.slot: b for lane, b in zip(one.launch.lanes, one.begun, strict=True)}
        predicted = duration_ns(cost, one.launch, lambda lane, begun=begun: begun[lane.slot])
        error = (predicted - one.duration_ns) / one.duration_ns
        sums = squares.setdefault(one.launch.kind, [0.0, 0.0])
        sums[0] += error * error
        sums[1] = max(sums[1], abs(error))
        total = totals.setdefault(one.launch.kind, [0, 0])
        total[0] += 1
        total[1] += one.duration_ns
    return tuple(
        Residual(kind, rounds, total_ns // rounds, math.sqrt(squares[kind][0] / rounds), worst)
        for kind, (rounds, total_ns) in totals.items()
        for worst in squares[kind][1:]
    )


def capacity_of(limits: Limits, accept_ppm: int) -> Capacity:
    shared = {
        name: value for name, value in asdict(limits).items() if name in Capacity.__struct_fields__
    }
    return Capacity(**shared, accept_ppm=accept_ppm)
