"""Goal: what the policy makes of the engine is counted as it was, gap by gap and round by round.

Method: the shell in virtual time with rounds of one millisecond, so that each figure is arithmetic;
single steps where no run would come there.
"""

import pytest
from msgspec.structs import replace
from scripted import DESCRIPTION, MS, Shell, run_virtually

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import State, initial
from phaseloop.core.vocabulary import (
    ClientResumed,
    ClientStalled,
    DeliverTokens,
    Delivery,
    Lane,
    LaunchRound,
    PolicyChanged,
    Request,
    RoundCompleted,
)
from phaseloop.engine.protocol import limits_of
from phaseloop.runtime.tally import COUNTS, SECONDS, Distribution, Tally, seal_reason

FAIR = PRESETS["barrier-fair"]


def tally_of(*prompts: int) -> Tally:
    """Of a run of requests with three tokens each."""

    async def main():
        shell = Shell(watched=True)
        with shell.submit(*(Request(0, length) for length in prompts)) as call:
            for stream in call.streams:
                async for _ in stream:
                    pass
        await shell.shut_down()
        return shell.watch.tally

    return run_virtually(main())


def test_a_value_counts_up_to_the_bound_that_it_reaches():
    distribution = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        distribution.observe(value)
    distribution.observe(1.0, 3)
    assert distribution.counts == [5, 2, 1]
    assert distribution.sum == 17


def test_a_cohort_s_gaps_rounds_and_slots():
    """Prompts in two rounds, one sample, then decodes: of two lanes each on two slots."""
    tally = tally_of(100, 20)
    millisecond = SECONDS.index(0.001)
    assert tally.gaps_within.counts[millisecond] == sum(tally.gaps_within.counts)
    assert sum(tally.gaps_within.counts) == 2 * (3 - 1), "three tokens have two gaps"
    assert sum(tally.gaps_across.counts) == 0, "nothing interrupts a cohort"
    assert tally.cohorts.counts[COUNTS.index(2.0)] == sum(tally.cohorts.counts) == 1
    assert sum(tally.rounds["prefill"].counts) == 2
    assert sum(tally.rounds["sample"].counts) == 1
    assert tally.seals == {"prompt_finished": 1}
    assert tally.violations == 0


def test_slots_that_stood_by_are_lost():
    tally = tally_of(10)
    slots = DESCRIPTION.slot_count
    assert tally.decode_slot_ns == slots * tally.decode_lane_ns > 0
    assert tally.lost_slot_ns == (slots - 1) * tally.decode_lane_ns


def test_a_pause_for_prompts_is_a_gap_across_a_switch():
    """Tokens at 1, 2 and 9 ms, a prefill phase before the last; a second stream joins at 2 ms."""
    decode = replace(initial(limits_of(DESCRIPTION), PRESETS["quantum"]), phase="decode")
    prefill = replace(decode, phase="prefill")
    tally = Tally()

    def step(at_ms: int, before: State, after: State, *request_ids: int) -> None:
        delivered = DeliverTokens(tuple(Delivery(one, 0, 1) for one in request_ids), "generated")
        tally.observe(ClientResumed(at_ns=at_ms * MS, request_id=0), before, after, (delivered,))

    step(1, decode, decode, 0)
    step(2, decode, decode, 0, 1)
    step(3, decode, prefill)
    step(8, prefill, decode)
    step(9, decode, decode, 0, 1)
    assert (sum(tally.gaps_within.counts), tally.gaps_within.sum) == (1, 0.001)
    assert (sum(tally.gaps_across.counts), tally.gaps_across.sum) == (2, 0.014)


def test_an_ended_choice_is_forgotten():
    tally = tally_of(10, 20)
    assert not tally._delivered


@pytest.mark.parametrize(
    ("kind", "phase", "policy", "violations"),
    [
        ("prefill", "prefill", "barrier-fair", 0),
        ("decode", "prefill", "barrier-fair", 1),
        ("prefill", "decode", "quantum", 1),
        ("mixed", "decode", "no-cont-batching", 1),
        ("mixed", "decode", "mixed", 0),
    ],
)
def test_a_round_outside_its_phase_is_a_violation(kind, phase, policy, violations):
    state = replace(initial(limits_of(DESCRIPTION), PRESETS[policy]), phase=phase)
    launch = LaunchRound(1, kind, (Lane(0, 0, 0, 0, 1, 0),), "time_slice")
    tally = Tally()
    tally.observe(ClientResumed(at_ns=0, request_id=0), state, state, (launch,))
    assert tally.violations == violations


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (RoundCompleted(at_ns=0, round_id=1, results=(), duration_ns=1), "prompt_finished"),
        (ClientResumed(at_ns=0, request_id=0), "stream_resumed"),
        (PolicyChanged(at_ns=0, policy=FAIR), "policy_changed"),
        (ClientStalled(at_ns=0, request_id=0), "other"),
    ],
)
def test_what_sealed_a_cohort_is_told_by_the_event(event, reason):
    assert seal_reason(event) == reason
    state = initial(limits_of(DESCRIPTION), FAIR)
    tally = Tally()
    tally.observe(event, state, replace(state, sealed=True), ())
    assert tally.seals == {reason: 1}
