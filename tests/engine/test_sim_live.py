"""Goal: the live sim engine serves like a real one: lengths, prefixes, texts and time are right.

Method: the engine by hand, with rounds written down; then under the shell that serves, where each
policy must yield the same answers.
"""

import math
import threading

import pytest
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Lane, LaunchRound, Produced, Request, SeatRequest
from phaseloop.engine.protocol import Content, RoundError, limits_of
from phaseloop.engine.settings import GREEDY
from phaseloop.engine.sim_live import SENTENCES_MAX, SENTENCES_MIN, LiveSimEngine, Prose
from phaseloop.engine.sim_presets import PRESETS as ENGINES
from phaseloop.runtime.gateway import Delivered, Ended, Submission
from phaseloop.runtime.service import Service

PROSE = Prose(sentences=((1, 2, 3), (4, 5), (6, 7, 8, 9)), end=0)
MODEL = ENGINES["cpu-smollm2"].model
ENDLESS = replace(GREEDY, logit_bias=((0, -math.inf),))


def live(speed: float = 0.0) -> LiveSimEngine:
    return LiveSimEngine(MODEL, PROSE, speed=speed)


def sit(engine, slot=0, prompt=(1, 1, 1), seed=0, choice=0, sampling=GREEDY, reason="oldest"):
    seat = SeatRequest(slot, choice, slot, None, reason)
    return engine.seat(seat, Content(tuple(prompt), seed, sampling))


def launch(kind, *lanes: Lane, round_id=0) -> LaunchRound:
    return LaunchRound(round_id, kind, lanes, "generate")


def next_tokens(engine, slot=0, outputs=1, kind="decode"):
    lane = Lane(slot, slot, 0, 10, outputs, outputs)
    outcome = engine.run(launch(kind, lane))
    return outcome.tokens[0], outcome.results[0]


def whole_text(engine, slot=0) -> list[int]:
    said: list[int] = []
    while True:
        ids, result = next_tokens(engine, slot)
        said += ids
        assert result.tokens == len(ids)
        if result.finish:
            return said


def sentences_in(text: list[int]) -> int:
    """How many of PROSE's sentences a text consists of."""
    count = 0
    while text:
        (sentence,) = (s for s in PROSE.sentences if tuple(text[: len(s)]) == s)
        text, count = text[len(sentence) :], count + 1
    return count


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_text_is_some_whole_sentences_and_then_ends(seed):
    engine = live()
    sit(engine, seed=seed)
    assert SENTENCES_MIN <= sentences_in(whole_text(engine)) <= SENTENCES_MAX


def test_the_seed_and_the_choice_decide_the_text_and_nothing_else_does():
    engine = live()
    texts = {}
    for slot, (seed, choice) in enumerate([(5, 0), (5, 1), (6, 0), (5, 0)]):
        sit(engine, slot, prompt=(slot,) * 4, seed=seed, choice=choice)
        texts[slot] = whole_text(engine, slot)
    assert texts[0] == texts[3]
    assert texts[0] != texts[1] and texts[0] != texts[2]


def test_a_text_without_an_end_token_never_ends():
    engine = live()
    sit(engine, sampling=ENDLESS)
    for _ in range(500):
        ids, result = next_tokens(engine)
        assert len(ids) == 1 and not result.finish


def test_drafts_are_part_of_the_same_text():
    engine = LiveSimEngine(ENGINES["v100x4-qwen27b-mtp"].model, PROSE, speed=0)
    sit(engine, 0, seed=9)
    sit(engine, 1, seed=9)
    said, counts = list[int](), set[int]()
    while True:
        ids, result = next_tokens(engine, 0, outputs=4)
        said += ids
        counts.add(len(ids))
        if result.finish:
            break
    assert said == whole_text(engine, 1)
    assert max(counts) > 1


def test_likelihoods_come_where_they_are_asked_for():
    engine = live()
    sit(engine, sampling=replace(GREEDY, n_probs=2))
    sit(engine, 1)
    lanes = (Lane(0, 0, 0, 3, 1, 1), Lane(1, 1, 0, 3, 1, 1))
    outcome = engine.run(launch("decode", *lanes))
    (asked,), others = outcome.likelihoods
    assert (asked.chosen, asked.top) == (0.0, ((outcome.tokens[0][0], 0.0),))
    assert others == ()


# --- what slots hold ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held, keep, wanted, cached",
    [
        ((1, 2, 3, 4), 4, (1, 2, 9), 2),
        ((1, 2, 3, 4), 4, (1, 2, 3, 4), 3),  # the last prompt token is always computed
        ((1, 2, 3, 4), 2, (1, 2, 3, 4), 2),  # truncated
        ((1, 2, 3, 4), 0, (1, 2, 3, 4), 0),
        ((1, 2), 2, (3, 2), 0),
    ],
)
def test_a_seat_keeps_what_its_prompt_has_in_common(held, keep, wanted, cached):
    engine = live()
    sit(engine, prompt=held)
    engine.release(0, keep, 1)
    assert sit(engine, prompt=wanted).cached_length == cached


def test_answers_can_be_found_again_too():
    engine = live()
    sit(engine, prompt=(1, 2), sampling=ENDLESS)
    said = [next_tokens(engine)[0][0] for _ in range(5)]
    engine.release(0, 7, 1)
    assert sit(engine, prompt=(1, 2, *said, 3)).cached_length == 7


def test_children_and_resumed_ones_begin_empty():
    engine = live()
    sit(engine, prompt=(1, 2, 3))
    engine.release(0, 3, 1)
    assert sit(engine, prompt=(1, 2, 3), reason="sibling").cached_length == 0


def test_a_saved_sequence_goes_on_in_another_slot():
    engine, other = live(), live()
    for one in (engine, other):
        sit(one, seed=3)
    head = [next_tokens(engine)[0][0] for _ in range(3)]
    engine.run(launch("save", Lane(0, 0, 0, 0, 5, 0)))
    engine.release(0, 0, 1)
    engine.seat(SeatRequest(0, 0, 2, None, "resume"), Content((1, 1, 1), 3, GREEDY))
    engine.run(launch("restore", Lane(2, 0, 0, 0, 5, 0)))
    assert head + whole_text(engine, 2) == whole_text(other)


def test_a_shift_drops_tokens_from_the_middle():
    engine = live()
    sit(engine, prompt=(1, 2, 3, 4, 5))
    assert engine.run(launch("shift", Lane(0, 0, 0, 1, 2, 0))).results == (Produced(),)
    engine.release(0, 3, 1)
    assert sit(engine, prompt=(1, 4, 5, 9)).cached_length == 3


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed, factor", [(1.0, 1.0), (10.0, 0.1)])
def test_a_round_takes_the_time_of_its_cost_divided_by_the_speed(monkeypatch, speed, factor):
    waits: list[float] = []
    record = lambda self, until, timeout: waits.append(timeout)  # noqa: E731
    monkeypatch.setattr(threading.Condition, "wait_for", record)
    engine = live(speed)
    sit(engine, prompt=(1,) * 100)
    engine.run(launch("prefill", Lane(0, 0, 0, 0, 100, 0)))
    cost = MODEL.cost
    pairs = 100 * 100 // 2
    expected_ns = cost.prefill_round_ns + 100 * cost.prefill_token_ns
    expected_ns += pairs * cost.prefill_pair_ps // 1000
    assert waits == pytest.approx([expected_ns / 1e9 * factor])


def test_an_abort_ends_the_round_and_nothing_has_moved():
    engine = live(speed=1e-6)  # a prompt would take weeks
    sit(engine, prompt=(1, 2, 3), seed=1)
    failures: list[str] = []

    def run() -> None:
        try:
            engine.run(launch("sample", Lane(0, 0, 0, 3, 0, 1), round_id=7))
        except RoundError as error:
            failures.append(error.reason)

    running = threading.Thread(target=run)
    running.start()
    engine.abort(6)  # another round's
    while running.is_alive():
        engine.abort(7)
        running.join(0.001)
    assert failures == ["aborted"]
    fresh = live()
    sit(fresh, seed=1)
    assert engine._slots[0].take(4) == fresh._slots[0].take(4)


def test_an_abort_of_a_round_that_is_over_harms_no_later_one():
    engine = live()
    sit(engine)
    engine.run(launch("prefill", Lane(0, 0, 0, 0, 3, 0), round_id=1))
    engine.abort(1)
    engine.run(launch("sample", Lane(0, 0, 0, 3, 0, 1), round_id=2))


# --- under the shell that serves ------------------------------------------------------------------


async def answers(policy: str) -> list[list[int]]:
    engine = live()
    limits = limits_of(engine.describe())
    async with Service(engine, limits, PRESETS[policy]) as service:
        submissions = [
            Submission(
                Request(0, 50 + 40 * seed, output_limit=60), (seed,) * (50 + 40 * seed), seed
            )
            for seed in range(7)
        ]
        with service.gateway.submit(submissions) as call:
            said: list[list[int]] = []
            for stream in call.streams:
                items = [item async for item in stream]
                assert isinstance(items[-1], Ended)
                said.append([t for item in items if isinstance(item, Delivered) for t in item.ids])
        return said


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", PRESETS)
async def test_every_policy_yields_the_same_answers(policy):
    alone = []
    for seed in range(7):
        engine = live()
        sit(engine, seed=seed)
        alone.append(whole_text(engine)[:60])
    assert await answers(policy) == alone
