"""How prompts share rounds: the water-filling by its properties, whole cohorts by known counts.

The counts are worked out by hand from round size and prompt lengths, or were measured on the
reference server; none comes from this code.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run import Run

from phaseloop.core.plan import fair_shares, greedy_shares
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import Policy, Request, RequestArrived

needs_of_prompts = st.lists(st.integers(1, 60), min_size=1, max_size=8)
capacities = st.integers(1, 100)


@given(needs_of_prompts, capacities, st.integers(0, 1000))
def test_fair_shares_fill_the_round_and_differ_by_one(
    needs: list[int], capacity: int, rotation: int
) -> None:
    shares = fair_shares(needs, capacity, rotation)
    assert sum(shares) == min(capacity, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    wanting = [share for share, need in zip(shares, needs, strict=True) if share < need]
    if wanting:
        assert max(wanting) - min(wanting) <= 1
        assert max(shares) <= min(wanting) + 1, "nobody satisfied has more than those in want"


@given(needs_of_prompts, capacities, st.integers(0, 1000))
def test_fair_shares_do_not_depend_on_the_order_but_for_one_token(
    needs: list[int], capacity: int, rotation: int
) -> None:
    """What a prompt gets follows from its need, up to the token that the rotation hands out."""
    shares = fair_shares(needs, capacity, rotation)
    reversed_shares = fair_shares(needs[::-1], capacity, rotation)[::-1]
    assert all(abs(a - b) <= 1 for a, b in zip(shares, reversed_shares, strict=True))


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 40))
def test_rotation_is_an_exact_round_robin(prompts: int, capacity: int, rounds: int) -> None:
    """Endless prompts, each round rotated by the tokens served: totals never differ by more."""
    totals = [0] * prompts
    for _ in range(rounds):
        shares = fair_shares([10**6] * prompts, capacity, sum(totals))
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
        assert max(totals) - min(totals) <= 1
    assert sum(totals) == rounds * capacity


@pytest.mark.parametrize(
    ("needs", "capacity", "rotation", "shares"),
    [
        ([100, 100, 3], 32, 0, [15, 14, 3]),  # G8: 32 full, where forward-only sharing gives 25
        ([100, 100, 3], 32, 1, [14, 15, 3]),
        ([3, 100, 100], 32, 0, [3, 15, 14]),
        ([683, 683, 682], 2048, 0, [683, 683, 682]),
        ([5000, 5000, 5000], 2048, 0, [683, 683, 682]),
        ([5000, 5000, 5000], 2048, 2048, [683, 682, 683]),  # goes on after 0 and 1
        ([8, 8, 8, 8, 8], 4, 0, [1, 1, 1, 1, 0]),  # G7
        ([8, 8, 8, 8, 8], 4, 4, [1, 1, 1, 0, 1]),
        ([7], 100, 3, [7]),
        ([1, 1], 1, 0, [1, 0]),
        ([1, 1], 1, 1, [0, 1]),
    ],
)
def test_fair_shares_by_hand(
    needs: list[int], capacity: int, rotation: int, shares: list[int]
) -> None:
    assert fair_shares(needs, capacity, rotation) == shares


@given(needs_of_prompts, st.integers(0, 100))
def test_greedy_shares_satisfy_in_order(needs: list[int], capacity: int) -> None:
    shares = greedy_shares(needs, capacity)
    assert sum(shares) == min(capacity, sum(needs))
    short = [i for i, need in enumerate(needs) if shares[i] < need]
    assert all(shares[i] == 0 for i in short[1:]), "only the first in want may have a part"


# --- whole cohorts --------------------------------------------------------------------------------

B, UB = 2048, 1024
PAIR = (8192, 32768)  # the benchmark's pair of prompts
LIVE = (4247, 8339)  # the pair of the reference server's live acceptance
SWITCHES = ("barrier-fair", "barrier-greedy", "barrier-serial")


def checkpoint_stops(prompt: int) -> tuple[int, int]:
    """Where a server with checkpoints ends its chunks: 4 + UB and 4 tokens before the end."""
    return prompt - 4 - UB, prompt - 4


def prefill_rounds(policy: Policy, prompts: tuple[int, ...], *, stops: bool) -> list[int]:
    """The round in which each prompt is ready, counted from one."""
    run = Run(Limits(len(prompts), B, 40_000, 400), policy)
    requests = tuple(
        Request(i, length, output_limit=1, stop_points=checkpoint_stops(length) if stops else ())
        for i, length in enumerate(prompts)
    )
    run.post(RequestArrived(at_ns=0, requests=requests))
    while run.seats:
        run.answer_seat(run.seats[0])
    while run.state.phase == "prefill":
        run.complete()
    rounds = [one.step for one in run.log if one.what == "round" and one.detail == "prefill"]
    ready = {one.request_id: one.step for one in run.log if one.what == "ready"}
    return [sum(step < ready[i] for step in rounds) for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("policy", "short", "stops", "ready", "total"),
    [
        ("barrier-fair", 0, False, 8, 20),  # 40,960 tokens are 20 full rounds of 2,048
        ("barrier-greedy", 0, False, 4, 20),
        ("barrier-serial", 0, False, 4, 20),
        ("barrier-fair", 1, False, 8, 20),  # the short prompt comes second
        ("barrier-greedy", 1, False, 20, 20),
        ("barrier-serial", 1, False, 20, 20),
        ("barrier-fair", 0, True, 9, 22),  # each stop may leave a round short
        ("barrier-greedy", 0, True, 6, 22),
        ("barrier-serial", 0, True, 6, 24),
    ],
)
def test_the_benchmark_pair(policy: str, short: int, stops: bool, ready: int, total: int) -> None:
    prompts = PAIR if short == 0 else PAIR[::-1]
    rounds = prefill_rounds(PRESETS[policy], prompts, stops=stops)
    assert rounds[short] == ready
    assert max(rounds) == total


@pytest.mark.parametrize("prompts", [LIVE, LIVE[::-1]], ids=["short-first", "long-first"])
def test_the_live_pair(prompts: tuple[int, ...]) -> None:
    """6 and 8 rounds, as the reference server showed them, and in either order.

    There the order of slots cost a ninth round when the long prompt came first.
    """
    rounds = prefill_rounds(PRESETS["barrier-fair"], prompts, stops=True)
    assert sorted(rounds) == [6, 8]
    assert rounds[prompts.index(min(prompts))] == 6


@pytest.mark.parametrize("policy", SWITCHES)
@given(prompts=st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_a_cohort_takes_no_round_too_many(policy: str, prompts: list[int]) -> None:
    """Without stops every round but a serial owner's last is full."""
    run = Run(Limits(5, 64, 512, 100), PRESETS[policy])
    requests = tuple(Request(i, n, output_limit=1) for i, n in enumerate(prompts))
    run.post(RequestArrived(at_ns=0, requests=requests))
    while run.seats:
        run.answer_seat(run.seats[0])
    while run.state.phase == "prefill":
        run.complete()
    count = sum(one.what == "round" and one.detail == "prefill" for one in run.log)
    if policy == "barrier-serial":
        assert count == sum(-(-n // 64) for n in prompts)
    else:
        assert count == -(-sum(prompts) // 64)
