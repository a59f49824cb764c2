"""Goal: a round costs what the formula says, in integers, and jitter depends on the round alone.

Method: every parameter is given another power of ten, so that a sum shows how often each was
counted; then by hand.
"""

import pytest

from phaseloop.core.vocabulary import Lane, LaunchRound
from phaseloop.engine.sim_cost import Cost, duration_ns, jittered_ns, pairs_of

COST = Cost(
    prefill_round_ns=1_000_000_000,
    prefill_token_ns=1_000_000,
    prefill_pair_ps=1_000_000,  # 1,000 ns a pair
    prefill_lane_ns=10_000_000_000,
    decode_round_ns=1_000_000_000,
    decode_row_ns=1_000_000,
    decode_context_ps=1_000,  # 1 ns a token
    sample_lane_ns=7,
    copy_token_ps=3_000,
    move_token_ps=5_000,
)


def lane(start: int, count: int, slot: int = 0, outputs: int = 0) -> Lane:
    return Lane(slot, slot, 0, start, count, outputs)


def cost_of(kind: str, *lanes: Lane, begun: tuple[int, ...] = (), cost: Cost = COST) -> int:
    launch = LaunchRound(0, kind, lanes, "generate")
    return duration_ns(cost, launch, lambda one: one.slot in begun)


def test_pairs_count_every_earlier_token():
    chunk = lane(start=5, count=4)
    # Half of the own token counts, as on the diagonal of a matrix that is cut in two.
    assert pairs_of(chunk) == sum(range(5, 9)) + 4 // 2


def test_chunks_of_a_prompt_make_the_pairs_of_the_whole():
    whole = lane(0, 4096)
    parts = [lane(start, 512) for start in range(0, 4096, 512)]
    assert sum(map(pairs_of, parts)) == pairs_of(whole)


def test_prefill():
    cost = cost_of("prefill", lane(10, 4), lane(0, 2, slot=1))
    assert cost == 10_000_000_000 + 1_000_000_000 + 6 * 1_000_000 + (48 + 2) * 1_000


def test_embeddings_cost_as_prompts_do():
    assert cost_of("encode", lane(10, 4)) == cost_of("prefill", lane(10, 4))


def test_the_hook_is_a_share_of_the_whole_round():
    hooked = Cost(prefill_round_ns=1000, prefill_token_ns=10, prefill_hook_ppm=250_000)
    assert cost_of("prefill", lane(0, 100), cost=hooked) == (1000 + 1000) * 5 // 4


def test_decode():
    cost = cost_of("decode", lane(10, 1, outputs=1), lane(20, 4, slot=1, outputs=4))
    assert cost == 1_000_000_000 + 5 * 1_000_000 + (11 + 24)


def test_in_a_mixed_round_tokens_are_rows_and_lanes_of_the_prompts():
    token, chunk = lane(50, 1, slot=1, outputs=1), lane(10, 4)
    cost = cost_of("mixed", token, chunk, begun=(1,))
    assert cost == 10_000_000_000 + 1_000_000_000 + 5 * 1_000_000 + 48 * 1_000 + 51


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("sample", 2 * 7), ("fork", 30 * 3), ("save", 30 * 5), ("restore", 30 * 5)],
)
def test_rounds_that_do_not_compute(kind, expected):
    assert cost_of(kind, lane(0, 10), lane(0, 20, slot=1)) == expected


def test_a_shift_is_a_decode_round_without_rows():
    assert cost_of("shift", lane(4, 10)) == COST.decode_round_ns


def test_jitter_stays_within_its_bounds_and_depends_on_seed_and_round_alone():
    cost = Cost(jitter_ppm=100_000)
    lengths = [jittered_ns(cost, 1_000_000, seed=1, round_id=n) for n in range(2000)]
    assert min(lengths) >= 900_000
    assert max(lengths) <= 1_100_000
    assert min(lengths) < 905_000 < 1_095_000 < max(lengths)
    assert abs(sum(lengths) / 2000 - 1_000_000) < 5_000
    assert jittered_ns(cost, 1_000_000, seed=1, round_id=77) == lengths[77]
    assert [jittered_ns(cost, 1_000_000, seed=2, round_id=n) for n in range(2000)] != lengths


def test_without_jitter_nothing_is_drawn():
    assert jittered_ns(COST, 123_456_789, seed=1, round_id=5) == 123_456_789
