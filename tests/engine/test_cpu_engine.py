"""Goal: the model engine keeps its contract, and an answer's bits do not depend on its company.

Method: a tiny model behind the real reducer, driven synchronously: every effect is done at once and
its completion posted.  The standard is a request alone; tokens and every row of logits must be the
same bytes under every policy, in company, in small chunks, from a cache, after a cancellation, and
on two threads.  The rest drives the engine by hand, round by round.
"""

from collections import deque

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from msgspec.structs import replace
from synthetic import VOCABULARY, decoder_file

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import (
    Failed,
    FinishRequest,
    Lane,
    LaunchRound,
    Produced,
    ReleaseSlot,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    SeatRequest,
)
from phaseloop.engine.cpu_load import CpuOptions, load_cpu_engine
from phaseloop.engine.protocol import Content, RoundError, limits_of
from phaseloop.engine.sampling import ChainSampler

RANDOM = np.random.default_rng(11)
PROMPTS = {
    1: tuple(RANDOM.integers(0, VOCABULARY, 150).tolist()),
    2: tuple(RANDOM.integers(0, VOCABULARY, 90).tolist()),
    3: tuple(RANDOM.integers(0, VOCABULARY, 7).tolist()),
    4: tuple(RANDOM.integers(0, VOCABULARY, 33).tolist()),
}
OUTPUTS = 12


class Recorder(ChainSampler):
    """Keeps every row it saw, by request."""

    def __init__(self):
        super().__init__()
        self.rows = {}
        self.positions = []
        self.fails = False

    def sample(self, logits, draws):
        if self.fails:
            raise ValueError("a sampler that fails")
        for row, draw in zip(logits, draws, strict=True):
            self.positions.append(draw.position)
            self.rows.setdefault((draw.request_id, draw.choice), []).append(row.tobytes())
        return super().sample(logits, draws)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = decoder_file("llama", "Q4_K")
    return file.write(tmp_path_factory.mktemp("engine") / "tiny.gguf")


def opened(path, **options):
    sampler = Recorder()
    options = {"slot_count": 4, "context_length": 512} | options
    engine, _ = load_cpu_engine(path, sampler, CpuOptions(**options))
    return engine, sampler


class World:
    """The reducer and an engine; effects are done as they come."""

    def __init__(self, engine, policy="barrier-fair", **limits):
        self.engine = engine
        self.state = initial(replace(limits_of(engine.describe()), **limits), PRESETS[policy])
        self.mailbox = deque()
        self.now_ns = 0
        self.finished = {}
        self.tokens = {}
        self.cached = {}
        self.cancel_after = {}  # round count -> request

    def ask(self, *ids, prompts=PROMPTS, **fields):
        self.prompts = prompts
        requests = tuple(Request(i, len(prompts[i]), output_limit=OUTPUTS, **fields) for i in ids)
        self.mailbox.append(RequestArrived(at_ns=self.now_ns, requests=requests))
        return self

    def run(self):
        rounds = 0
        while self.mailbox:
            event = self.mailbox.popleft()
            self.state, effects = reduce(self.state, event)
            for effect in effects:
                rounds += isinstance(effect, LaunchRound)
                if isinstance(effect, LaunchRound) and rounds in self.cancel_after:
                    request_id = self.cancel_after.pop(rounds)
                    self.mailbox.append(RequestCancelled(at_ns=self.now_ns, request_id=request_id))
                self.perform(effect)
        return self

    def perform(self, effect):
        self.now_ns += 1_000_000
        match effect:
            case SeatRequest(request_id, choice, slot):
                seated = self.engine.seat(effect, Content(self.prompts[request_id]))
                self.cached[request_id] = seated.cached_length
                self.mailbox.append(
                    RequestSeated(
                        at_ns=self.now_ns,
                        request_id=request_id,
                        choice=choice,
                        slot=slot,
                        cached_length=seated.cached_length,
                    )
                )
            case LaunchRound(round_id, _, lanes):
                outcome = self.engine.run(effect)
                for lane, ids in zip(lanes, outcome.tokens, strict=True):
                    self.tokens.setdefault((lane.request_id, lane.choice), []).extend(ids)
                self.mailbox.append(
                    RoundCompleted(
                        at_ns=self.now_ns,
                        round_id=round_id,
                        results=outcome.results,
                        duration_ns=1_000_000,
                    )
                )
            case ReleaseSlot(slot, keep, version):
                self.engine.release(slot, keep, version)
            case FinishRequest(request_id, reason):
                self.finished[request_id] = reason
            case _:
                pass


@pytest.fixture(scope="module", params=["F16", "Q8_0"])
def standard(request, path):
    """Tokens and rows of each request alone."""
    answers = {}
    for request_id in PROMPTS:
        engine, sampler = opened(path, cache=request.param)
        world = World(engine).ask(request_id).run()
        assert world.finished == {request_id: "length"}
        assert len(world.tokens[request_id, 0]) == OUTPUTS
        answers[request_id] = world.tokens[request_id, 0], sampler.rows[request_id, 0]
    return request.param, answers


def check(standard, world, sampler, *ids):
    for request_id in ids or PROMPTS:
        tokens, rows = standard[1][request_id]
        assert world.tokens[request_id, 0][:OUTPUTS] == tokens
        assert sampler.rows[request_id, 0] == rows


@pytest.mark.parametrize("policy", PRESETS)
def test_company_and_policy_do_not_show(path, standard, policy):
    engine, sampler = opened(path, cache=standard[0], threads=2)
    world = World(engine, policy, batch_tokens=64).ask(*PROMPTS).run()
    assert set(world.finished.values()) == {"length"}
    check(standard, world, sampler)


@pytest.mark.parametrize("batch_tokens", [32, 100, 2048])
def test_chunks_do_not_show(path, standard, batch_tokens):
    engine, sampler = opened(path, cache=standard[0])
    check(standard, World(engine, batch_tokens=batch_tokens).ask(*PROMPTS).run(), sampler)


@pytest.mark.parametrize("rounds", [2, 6, 12])
def test_a_cancelled_neighbour_does_not_show(path, standard, rounds):
    engine, sampler = opened(path, cache=standard[0])
    world = World(engine, batch_tokens=64)
    world.cancel_after = {rounds: 2}
    world.ask(*PROMPTS).run()
    assert world.finished.pop(2) == "cancelled"
    check(standard, world, sampler, 1, 3, 4)


def test_a_cache_hit_does_not_show(path, standard):
    engine, sampler = opened(path, cache=standard[0], slot_count=1)
    World(engine).ask(1).run()
    warm = {5: PROMPTS[1][:100] + PROMPTS[2], 6: PROMPTS[1]}
    world = World(engine).ask(5, prompts=warm).run()
    assert world.cached[5] == 100
    world.ask(6, prompts=warm).run()
    assert world.cached[6] == 100
    assert world.tokens[6, 0] == standard[1][1][0]
    assert sampler.rows[6, 0] == standard[1][1][1]


def test_reuse_of_an_answer_ends_where_its_bits_would_show(path, standard):
    """A next turn: the prompt, its answer, and more.  As if computed afresh, in either case."""
    cache, answers = standard
    turn = {9: (*PROMPTS[1], *answers[1][0], *PROMPTS[3])}
    engine, sampler = opened(path, cache=cache, slot_count=1)
    World(engine).ask(1).run()
    world = World(engine).ask(9, prompts=turn).run()
    held = len(PROMPTS[1]) + (OUTPUTS - 1 if cache == "Q8_0" else 0)
    assert world.cached[9] == held
    afresh, sampler_afresh = opened(path, cache=cache, slot_count=1)
    World(afresh).ask(9, prompts=turn).run()
    assert sampler.rows[9, 0] == sampler_afresh.rows[9, 0]


def test_choices_share_their_prompt(path, standard):
    engine, sampler = opened(path, cache=standard[0])
    world = World(engine).ask(1, choices=3).run()
    for choice in range(3):
        assert world.tokens[1, choice][:OUTPUTS] == standard[1][1][0]
        assert sampler.rows[1, choice] == standard[1][1][1]


# --- by hand --------------------------------------------------------------------------------------


def seat(engine, slot, request_id, prompt, reason="oldest"):
    return engine.seat(SeatRequest(request_id, 0, slot, None, reason), Content(tuple(prompt)))


def launch(engine, kind, *lanes, reason="generate"):
    return engine.run(LaunchRound(1, kind, lanes, reason))


def begun(path, prompt=PROMPTS[1], **options):
    engine, sampler = opened(path, **options)
    seat(engine, 0, 1, prompt)
    launch(engine, "prefill", Lane(0, 1, 0, 0, len(prompt), 0))
    return engine, sampler


def continued(engine, slot, start, count=5):
    """Sample once, then decode; the tokens."""
    lane = Lane(slot, 1, 0, start, 0, 1)
    tokens = list(launch(engine, "sample", lane).tokens[0])
    for index in range(count):
        lane = Lane(slot, 1, 0, start + index, 1, 1)
        tokens += launch(engine, "decode", lane).tokens[0]
    return tokens


def test_the_first_token_waits_for_its_sample_round(path):
    engine, _ = opened(path)
    seat(engine, 0, 1, PROMPTS[1])
    outcome = launch(engine, "prefill", Lane(0, 1, 0, 0, 150, 0))
    assert outcome.results == (Produced(0),) and outcome.tokens == ((),)
    outcome = launch(engine, "sample", Lane(0, 1, 0, 150, 0, 1))
    assert outcome.results == (Produced(1),) and len(outcome.tokens[0]) == 1


def test_an_end_token_ends_and_is_not_delivered(tmp_path, path):
    engine, _ = begun(path)
    end = continued(engine, 0, 150, 0)[0]
    file = decoder_file("llama", "Q4_K")
    file.root["tokenizer.ggml.eos_token_id"] = end
    ending, _ = begun(file.write(tmp_path / "end.gguf"))
    outcome = launch(ending, "sample", Lane(0, 1, 0, 150, 0, 1))
    assert outcome.results == (Produced(0, finish=True),) and outcome.tokens == ((),)


def test_a_saved_sequence_goes_on_where_it_was(path):
    engine, _ = begun(path)
    expected = continued(engine, 0, 150, 8)
    engine, _ = begun(path)
    tokens = continued(engine, 0, 150, 3)
    launch(engine, "save", Lane(0, 1, 0, 0, 153, 0), reason="free_memory")
    engine.release(0, 0, 1)
    seat(engine, 2, 1, PROMPTS[1], "resume")
    launch(engine, "restore", Lane(2, 1, 0, 0, 153, 0), reason="resume_saved")
    for index in range(5):
        tokens += launch(engine, "decode", Lane(2, 1, 0, 153 + index, 1, 1)).tokens[0]
    assert tokens == expected


def test_a_dropped_sequence_is_gone(path):
    engine, _ = begun(path)
    launch(engine, "save", Lane(0, 1, 0, 0, 150, 0), reason="free_memory")
    engine.drop(1, 0)
    outcome = launch(engine, "restore", Lane(1, 1, 0, 0, 150, 0), reason="resume_saved")
    assert outcome.results == (Failed("nothing was saved of this sequence"),)


def test_an_aborted_round_leaves_lengths_as_they_were(path):
    engine, _ = begun(path)
    expected = continued(engine, 0, 150)
    engine, sampler = begun(path)
    seat(engine, 1, 2, PROMPTS[2])
    sampler.fails = True
    with pytest.raises(ValueError, match="a sampler that fails"):
        launch(engine, "sample", Lane(0, 1, 0, 150, 0, 1))
    sampler.fails = False
    engine._backend.abort()
    with pytest.raises(RoundError, match="aborted"):
        launch(engine, "prefill", Lane(1, 2, 0, 0, 90, 0))
    engine.abort(1)  # too late: no round runs
    launch(engine, "prefill", Lane(1, 2, 0, 0, 90, 0))
    assert continued(engine, 0, 150) == expected


def test_a_shift_turns_keys_to_their_new_positions(path):
    """A first layer's keys know only token and position: shifted, they are those of a cold run."""
    engine, _ = begun(path)
    launch(engine, "shift", Lane(0, 1, 0, 10, 50, 0), reason="context_full")
    cold, _ = begun(path, PROMPTS[1][:10] + PROMPTS[1][60:])
    shifted, afresh = (e._backend.save(0, 100).parts[0].view(np.float16) for e in (engine, cold))
    assert np.abs(shifted.astype(np.float32) - afresh.astype(np.float32)).max() < 0.02
    unturned = begun(path)[0]._backend.save(0, 150).parts[0].view(np.float16)[60:70]
    assert np.abs(unturned.astype(np.float32) - afresh[10:20].astype(np.float32)).max() > 0.2
    tokens = launch(engine, "sample", Lane(0, 1, 0, 100, 0, 1))
    assert tokens.results == (Produced(1),)


def test_no_two_draws_of_an_answer_have_one_position(path):
    """Their random numbers would be the same: a shift makes the sequence shorter, not younger."""
    engine, sampler = begun(path)
    launch(engine, "sample", Lane(0, 1, 0, 150, 0, 1))
    launch(engine, "decode", Lane(0, 1, 0, 150, 1, 1))
    launch(engine, "shift", Lane(0, 1, 0, 10, 50, 0), reason="context_full")
    launch(engine, "decode", Lane(0, 1, 0, 101, 1, 1))
    launch(engine, "save", Lane(0, 1, 0, 0, 102, 0), reason="free_memory")
    engine.release(0, 0, 1)
    seat(engine, 1, 1, PROMPTS[1], reason="resume")
    launch(engine, "restore", Lane(1, 1, 0, 0, 102, 0), reason="resume_saved")
    launch(engine, "decode", Lane(1, 1, 0, 102, 1, 1))
    assert sampler.positions == [150, 151, 152, 153]


def test_rounds_the_slots_cannot_serve_fail_their_lane_only(path):
    engine, _ = begun(path)
    seat(engine, 1, 2, PROMPTS[2])
    outcome = launch(
        engine,
        "prefill",
        Lane(0, 1, 0, 20, 5, 0),
        Lane(1, 2, 0, 0, 90, 0),
    )
    assert isinstance(outcome.results[0], Failed) and outcome.results[1] == Produced(0)
    outcome = launch(engine, "sample", Lane(3, 9, 0, 0, 0, 1))
    assert outcome.results == (Failed("no logits to sample"),)


def test_it_describes_itself(path):
    engine, _ = opened(path)
    description = engine.describe()
    assert description.slot_count == 4 and description.context_length == 512
    assert description.page_count == 8 and "tiled-f16" in description.name
    assert description.model is not None and len(description.model) == 32
