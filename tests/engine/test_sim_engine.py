"""Goal: every request gets the tokens its text has, whatever happens to its sequence on the way.

Method: the engine is called as a worker would, with a script of known lengths and prefixes.
"""

import pytest
from msgspec.structs import replace

from phaseloop.core.vocabulary import Failed, Lane, LaunchRound, Produced, SeatRequest
from phaseloop.engine.protocol import Content, EngineDied, RoundError
from phaseloop.engine.sim import Capacity, Prefix, SimEngine, SimModel
from phaseloop.engine.sim_cost import Cost
from phaseloop.engine.sim_faults import Faults, parse_failure, parse_slowness

MODEL = SimModel(
    "test",
    Capacity(slot_count=4, batch_tokens=64, step_tokens=16),
    Cost(prefill_token_ns=1000, decode_row_ns=2000, sample_lane_ns=300, move_token_ps=1000),
)


class Script:
    def __init__(self, end: int | None = None, prefixes: dict[int, Prefix] | None = None) -> None:
        self.end = end
        self.prefixes = prefixes or {}

    def output_length(self, request_id: int, choice: int) -> int | None:
        return None if self.end is None else self.end + 10 * choice

    def prefix(self, request_id: int) -> Prefix | None:
        return self.prefixes.get(request_id)


def seated(engine: SimEngine, slot: int = 0, choice: int = 0, reason: str = "oldest") -> SimEngine:
    engine.seat(SeatRequest(0, choice, slot, None, reason), Content())
    return engine


def decoded(engine: SimEngine, width: int = 1, slot: int = 0, choice: int = 0) -> Produced:
    lane = Lane(slot, 0, choice, 100, width, width)
    return engine.run(LaunchRound(1, "decode", (lane,), "generate")).results[0]


def tokens_until_the_end(engine: SimEngine, width: int = 1) -> list[int]:
    tokens = []
    for _ in range(1000):
        result = decoded(engine, width)
        tokens.append(result.tokens)
        if result.finish:
            return tokens
    raise AssertionError("the text never ends")


@pytest.mark.parametrize("end", [0, 1, 5])
def test_a_text_ends_by_itself(end):
    tokens = tokens_until_the_end(seated(SimEngine(MODEL, Script(end))))
    assert tokens == [1] * end + [0]


def test_a_text_without_an_end_goes_on():
    engine = seated(SimEngine(MODEL, Script(None)))
    assert all(decoded(engine) == Produced(1) for _ in range(500))


def test_choices_have_texts_of_their_own():
    engine = seated(seated(SimEngine(MODEL, Script(2))), slot=1, choice=1, reason="sibling")
    results = [decoded(engine, slot=1, choice=1) for _ in range(13)]
    assert [result.tokens for result in results] == [1] * 12 + [0]


@pytest.mark.parametrize("accept_ppm", [0, 500_000, 1_000_000])
@pytest.mark.parametrize("end", [1, 7, 64])
def test_drafts_change_the_rounds_and_not_the_tokens(accept_ppm, end):
    model = replace(MODEL, capacity=replace(MODEL.capacity, accept_ppm=accept_ppm))
    tokens = tokens_until_the_end(seated(SimEngine(model, Script(end))), width=4)
    assert sum(tokens) == end
    if accept_ppm == 0:
        assert tokens == [1] * end + [0]
    if accept_ppm == 1_000_000:
        assert len(tokens) == end // 4 + 1


def test_drafts_are_accepted_at_the_stated_rate():
    model = replace(MODEL, capacity=replace(MODEL.capacity, accept_ppm=735_300))
    tokens = tokens_until_the_end(seated(SimEngine(model, Script(2500))), width=4)
    accepted, drafted = 2500 - len(tokens), 3 * len(tokens)
    assert accepted / drafted == pytest.approx(159 / 285, abs=0.03)


def test_a_saved_sequence_goes_on_where_it_was():
    engine = seated(SimEngine(MODEL, Script(5)))
    assert [decoded(engine).tokens for _ in range(3)] == [1, 1, 1]
    engine.run(LaunchRound(2, "save", (Lane(0, 0, 0, 0, 103, 0),), "free_memory"))
    engine.release(0, keep=0, version=1)
    engine.seat(SeatRequest(0, 0, 2, None, "resume"), Content())
    engine.run(LaunchRound(3, "restore", (Lane(2, 0, 0, 0, 103, 0),), "resume_saved"))
    assert [decoded(engine, slot=2).tokens for _ in range(3)] == [1, 1, 0]


def test_a_dropped_sequence_is_forgotten():
    engine = seated(SimEngine(MODEL, Script(5)))
    decoded(engine)
    engine.run(LaunchRound(2, "save", (Lane(0, 0, 0, 0, 101, 0),), "free_memory"))
    engine.drop(0, 0)
    engine.seat(SeatRequest(0, 0, 1, None, "resume"), Content())
    engine.run(LaunchRound(3, "restore", (Lane(1, 0, 0, 0, 101, 0),), "resume_saved"))
    assert [decoded(engine, slot=1).tokens for _ in range(6)] == [1] * 5 + [0]


# --- cached prefixes ------------------------------------------------------------------------------

FAMILY = {0: Prefix(7, 100), 1: Prefix(7, 80), 2: Prefix(8, 100)}


def cached_after_release(next_id: int, keep: int, reason: str = "oldest") -> int:
    engine = seated(SimEngine(MODEL, Script(None, FAMILY)))
    engine.release(0, keep=keep, version=1)
    return engine.seat(SeatRequest(next_id, 0, 0, None, reason), Content()).cached_length


def test_a_seat_begins_with_the_common_prefix():
    assert cached_after_release(1, keep=500) == 80
    assert cached_after_release(0, keep=500) == 100
    assert cached_after_release(0, keep=60) == 60


def test_another_family_has_nothing_in_common():
    assert cached_after_release(2, keep=500) == 0
    assert cached_after_release(3, keep=500) == 0


def test_nothing_is_found_where_nothing_was_kept_or_may_be_used():
    assert cached_after_release(0, keep=0) == 0
    assert cached_after_release(0, keep=500, reason="sibling") == 0
    assert cached_after_release(0, keep=500, reason="resume") == 0


def test_a_taken_slot_has_no_cache():
    engine = seated(SimEngine(MODEL, Script(None, FAMILY)))
    engine.release(0, keep=500, version=1)
    seated(engine)
    assert engine.cached_length(0, 1) == 0


def test_an_evicted_cache_is_gone():
    engine = seated(SimEngine(MODEL, Script(None, FAMILY)))
    engine.release(0, keep=500, version=1)
    engine.release(0, keep=0, version=2)
    assert engine.cached_length(0, 1) == 0


# --- rounds ---------------------------------------------------------------------------------------


def prompt_round(engine: SimEngine, count: int = 40):
    lanes = (Lane(0, 0, 0, 0, count, 0), Lane(1, 0, 1, 0, 8, 0))
    return engine.run(LaunchRound(5, "prefill", lanes, "cohort_open"))


def two_seated(*fails: str, slows: tuple[str, ...] = ()) -> SimEngine:
    faults = Faults(tuple(map(parse_failure, fails)), tuple(map(parse_slowness, slows)))
    return seated(seated(SimEngine(MODEL, Script(9), 0, faults)), slot=1, choice=1)


def test_a_prompt_round_yields_no_tokens_and_states_its_time():
    outcome = prompt_round(two_seated())
    assert outcome.results == (Produced(), Produced())
    assert outcome.duration_ns == 48 * 1000
    assert outcome.step_ns == 16 * 1000  # 16 of its 48 rows between two looks


def test_one_lane_fails():
    assert prompt_round(two_seated("lane@5.1")).results == (Produced(), Failed("injected"))


def test_a_lane_that_the_round_does_not_have_does_not_fail():
    assert prompt_round(two_seated("lane@5.9")).results == (Produced(), Produced())


def test_a_round_fails_after_the_time_it_took():
    with pytest.raises(RoundError) as error:
        prompt_round(two_seated("round@5", slows=("3x@5",)))
    assert error.value.duration_ns == 3 * 48 * 1000


def test_the_engine_dies():
    with pytest.raises(EngineDied):
        prompt_round(two_seated("engine@5"))


def test_a_failed_save_keeps_nothing():
    engine = two_seated("lane@2")
    engine.run(LaunchRound(2, "save", (Lane(0, 0, 0, 0, 10, 0),), "free_memory"))
    decoded(engine)
    engine.seat(SeatRequest(0, 0, 2, None, "resume"), Content())
    engine.run(LaunchRound(3, "restore", (Lane(2, 0, 0, 0, 10, 0),), "resume_saved"))
    assert [decoded(engine, slot=2).tokens for _ in range(10)] == [1] * 9 + [0]


def test_the_engine_describes_itself():
    description = SimEngine(MODEL, Script()).describe()
    assert (description.name, description.slot_count, description.batch_tokens) == ("test", 4, 64)
