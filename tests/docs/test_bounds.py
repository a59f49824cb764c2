"""Goal: the bounds that docs/policy.md states for `quantum` hold whatever comes, and are not lax.

Method: seeded random workloads on an engine whose rounds take fixed times; every gap and every
prompt is held against the page's formulas, and over all runs the largest gap comes close to its
bound.
"""

from collections.abc import Iterator
from functools import cache
from random import Random

import pytest
from msgspec import Struct

from phaseloop.core.policy import MS, PRESETS
from phaseloop.core.state import Limits, State
from phaseloop.core.vocabulary import (
    PREFILL_CLASS,
    AnyEvent,
    DeliverTokens,
    Effects,
    Policy,
    Request,
    RequestId,
    RoundCompleted,
    SeatRequest,
)
from phaseloop.engine.sim import Capacity, SimModel
from phaseloop.engine.sim_cost import Cost
from phaseloop.sim.arrivals import Arrival
from phaseloop.sim.world import Scene, simulate


class Times(Struct, frozen=True):
    """A case, in nanoseconds; `groups` is a number of adapter sets."""

    prefill_quantum: int
    decode_quantum: int
    prefill_round: int
    decode_round: int
    sample_lane: int
    groups: int
    slots: int

    @property
    def sample_round(self) -> int:
        return self.slots * self.sample_lane

    @property
    def decode_phase(self) -> int:
        return self.decode_quantum + self.sample_round + self.groups * self.decode_round

    @property
    def gap(self) -> int:
        """q_p + r_p + r_s + g * r_d"""
        owed = self.sample_round + self.groups * self.decode_round
        return self.prefill_quantum + self.prefill_round + owed

    def prompt(self, prefill: int) -> int:
        """S + (1 + ceil(S / q_p)) * (q_d + r_s + g * r_d)"""
        return prefill + (1 + -(-prefill // self.prefill_quantum)) * self.decode_phase


def drawn(random: Random) -> Times:
    return Times(
        prefill_quantum=random.choice((1, 5, 30, 100)) * MS,
        decode_quantum=random.choice((0, 5, 40, 200)) * MS,
        prefill_round=random.randint(1, 30) * MS,
        decode_round=random.randint(1, 30) * MS,
        sample_lane=random.randint(0, 2) * MS,
        groups=random.choice((1, 1, 2, 3)),
        slots=random.choice((2, 3, 4, 6)),
    )


def scene_of(times: Times, batch: int) -> Scene:
    policy = Policy(
        "quantum",
        share=PRESETS["quantum"].share,
        switch="quantum",
        prefill_quantum_ns=times.prefill_quantum,
        decode_quantum_ns=times.decode_quantum,
    )
    cost = Cost(
        prefill_round_ns=times.prefill_round,
        decode_round_ns=times.decode_round,
        sample_lane_ns=times.sample_lane,
    )
    capacity = Capacity(
        slot_count=times.slots, batch_tokens=batch, context_length=4096, page_count=1 << 20
    )
    limits = Limits(
        slot_count=times.slots, batch_tokens=batch, context_length=4096, page_count=1 << 20
    )
    return Scene(limits=limits, policy=policy, model=SimModel("fixed", capacity, cost))


def crowd(random: Random, times: Times) -> Iterator[Arrival]:
    at_ns = 0
    for request_id in range(40):
        at_ns += random.choice((0, 1, 20, 200)) * MS
        length = random.choice((1, 5, 50, 200))
        request = Request(
            request_id,
            random.randint(1, 200),
            output_limit=length,
            adapter=random.randrange(times.groups),
        )
        yield Arrival(at_ns, request, (None,))


class Watch:
    """Measures gaps and prompts, and holds each against its bound."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.largest = 0.0  # gap, as a share of its bound
        self.prompts = 0
        self._delivered: dict[RequestId, int] = {}
        self._seated: dict[RequestId, int] = {}
        self._prefill: dict[RequestId, int] = {}

    def see(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        now_ns = event.at_ns
        flight = before.flight
        if isinstance(event, RoundCompleted) and flight and flight.kind in PREFILL_CLASS:
            for request_id in self._prefill:
                self._prefill[request_id] += event.duration_ns
        for s in after.slots:
            if s is not None and s.role in ("ready", "generating"):
                self._see_ready(s.request.request_id, now_ns)
        for effect in effects:
            if isinstance(effect, SeatRequest):
                self._seated[effect.request_id] = now_ns
                self._prefill[effect.request_id] = 0
            elif isinstance(effect, DeliverTokens):
                for delivery in effect.deliveries:
                    self._see_token(delivery.request_id, now_ns)

    def _see_ready(self, request_id: RequestId, now_ns: int) -> None:
        prefill = self._prefill.pop(request_id, None)
        if prefill is not None:
            assert now_ns - self._seated[request_id] <= self.times.prompt(prefill)
            self.prompts += 1

    def _see_token(self, request_id: RequestId, now_ns: int) -> None:
        last = self._delivered.get(request_id, now_ns)
        self._delivered[request_id] = now_ns
        assert now_ns - last <= self.times.gap
        self.largest = max(self.largest, (now_ns - last) / self.times.gap)


@cache
def run(seed: int) -> Watch:
    random = Random(seed)
    times = drawn(random)
    watch = Watch(times)
    simulate(scene_of(times, random.choice((8, 16, 64))), crowd(random, times), watch=watch.see)
    return watch


@pytest.mark.parametrize("seed", range(20))
def test_gaps_and_prompts_keep_their_bounds(seed):
    assert run(seed).prompts == 40


def test_the_bound_on_gaps_is_reached():
    assert max(run(seed).largest for seed in range(20)) > 0.95
