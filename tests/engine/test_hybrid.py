"""Goal: sequences with recurrent states live as others do: reused, forked, saved, taken back.

Method: a tiny hybrid behind the whole service, and rounds by hand.  Answers after any of it have
the bits of a run that nothing came before; how much was computed is counted.
"""

import asyncio

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, SAMPLED, Job, forget, read, serve, submission
from hybrid_files import hybrid_file
from synthetic import VOCABULARY
from test_cpu_engine import begun, continued, launch, seat

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Failed, Lane
from phaseloop.engine.cpu_load import CpuOptions, load_cpu_engine
from phaseloop.engine.protocol import RoundError, limits_of
from phaseloop.engine.reuse import END_MARGIN
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.snapshots import Snapshots
from phaseloop.model.load import load_model
from phaseloop.model.plan import plan_memory
from phaseloop.model.weights import open_weights
from phaseloop.ops.delta_states import NEWEST_KEPT
from phaseloop.runtime.prefixes import PrefixIndex
from phaseloop.runtime.service import Service

RANDOM = np.random.default_rng(21)


def words(count):
    return tuple(RANDOM.integers(0, VOCABULARY, count).tolist())


PROMPT, OTHER = words(150), words(130)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return hybrid_file("Q4_K").write(tmp_path_factory.mktemp("hybrid") / "tiny.gguf")


def engine_of(path, **options):
    options = {"slot_count": 4, "context_length": 512, "cache_ram_bytes": 1 << 30} | options
    return load_cpu_engine(path, ChainSampler(), CpuOptions(**options), end_tokens=frozenset())[0]


def conversation(engine, jobs):
    """The answers of jobs that come one after the other."""

    async def all_of_them():
        forget(engine)
        description = engine.describe()
        prefixes = PrefixIndex(
            limits_of(description), description, engine.snapshots, positions=engine.positions
        )
        service = Service(
            engine, limits_of(description), PRESETS["barrier-fair"], prefixes=prefixes
        )
        answers = []
        async with service:
            for job in jobs:
                with service.gateway.submit([submission(job)]) as call:
                    answers.append(await read(call.streams[0], job))
            service.shut_down()
            await service.ended()
        return answers

    return asyncio.run(all_of_them())


def cold(path, job, **options):
    return serve(engine_of(path, **options), [job])[0].bits


# --- chats ----------------------------------------------------------------------------------------

TURNS, NEW, SAID = 30, 140, 4  # tokens per turn: what comes in, and what was answered before


def chat(tail=()):
    """Every prompt is the one before, the answer, and what is new; and then `tail`."""
    history, jobs = words(NEW), []
    for _ in range(TURNS):
        jobs.append(Job((*history, *tail), SAID, GREEDY, reuse=True))
        history = (*history, *words(SAID + NEW))
    return jobs


def computed(jobs, answers):
    return sum(len(job.prompt) - answer.cached for job, answer in zip(jobs, answers, strict=True))


def test_an_append_only_chat_computes_what_is_new(path):
    jobs = chat()
    answers = conversation(engine_of(path, context_length=8192, slot_count=1), jobs)
    ends = [len(job.prompt) for job in jobs]
    assert [answer.cached for answer in answers] == [0, *ends[:-1]]
    # Answers come back as prompts: they were generated, and are computed once more.
    again = computed(jobs, answers) + SAID * TURNS - ends[-1]
    assert again < 0.03 * ends[-1]
    assert answers[-1].bits == cold(path, jobs[-1], context_length=8192)


def test_a_chat_whose_answers_have_a_prompts_bits_computes_nothing_twice(path):
    """Row by row, generated tokens are as good as a prompt's: the whole answer is found."""
    options = {"context_length": 1024, "slot_count": 1, "attention": "rows"}
    first = Job(PROMPT, 8, GREEDY, reuse=True)
    answer = serve(engine_of(path, **options), [first])[0]
    second = Job((*PROMPT, *answer.ids[0], *OTHER), 8, GREEDY, reuse=True)
    _, found = conversation(engine_of(path, **options), [first, second])
    assert found.cached == len(PROMPT) + 7  # the last token was never computed
    assert found.bits == cold(path, second, **options)


def test_a_chat_whose_ends_are_rewritten_loses_a_margin_per_turn(path):
    jobs = chat(tail=words(5))[:4]
    answers = conversation(engine_of(path, context_length=1024, slot_count=1), jobs)
    ends = [len(job.prompt) for job in jobs]
    assert [answer.cached for answer in answers] == [0, *(end - END_MARGIN for end in ends[:-1])]
    assert answers[-1].bits == cold(path, jobs[-1], context_length=1024)


def test_a_branch_goes_on_from_a_stop_point(path):
    trunk = Job(PROMPT, 3, GREEDY, reuse=True, stop_points=(90,))
    branch = Job((*PROMPT[:100], *OTHER), 5, GREEDY, reuse=True)
    again = Job(PROMPT, 5, GREEDY, reuse=True)
    found = conversation(engine_of(path, slot_count=1), [trunk, branch, again])
    # The trunk left its slot to the branch, and a snapshot.
    assert [answer.cached for answer in found] == [0, 90, len(PROMPT) - END_MARGIN]
    assert found[1].bits == cold(path, branch) and found[2].bits == cold(path, again)


def test_states_are_kept_at_steps(path):
    trunk = Job(PROMPT, 0, GREEDY, reuse=True)
    branch = Job((*PROMPT[:100], *OTHER), 5, GREEDY, reuse=True)
    found = conversation(engine_of(path, slot_count=1, state_step=32), [trunk, branch])
    assert found[1].cached == 96
    assert found[1].bits == cold(path, branch)


def test_a_chat_that_lost_its_slot_finds_its_states_again(path):
    turn = Job((*PROMPT, *words(30)), 5, GREEDY, reuse=True)
    jobs = [Job(PROMPT, 3, reuse=True), Job(OTHER, 3, reuse=True), turn]
    engine = engine_of(path, slot_count=1)
    found = conversation(engine, jobs)
    assert [answer.cached for answer in found] == [0, 0, len(PROMPT)]
    assert found[-1].bits == cold(path, turn)
    kept = engine.snapshots.find(np.array(OTHER, np.int32))
    assert kept is not None and kept.kept.cells.positions == (len(OTHER) - END_MARGIN, len(OTHER))
    per_token, per_state = engine._backend.position_bytes, engine._backend.state_bytes
    assert kept.kept.cells.size_bytes == len(OTHER) * per_token + 2 * per_state


def test_a_snapshot_takes_the_last_states_along(path):
    engine = engine_of(path, slot_count=1, state_step=16)
    conversation(engine, [Job(PROMPT, 0, reuse=True), Job(OTHER, 0, reuse=True)])
    found = engine.snapshots.find(np.array(PROMPT, np.int32))
    assert found is not None and found.kept.cells.positions == (128, 134, 144, 150)


def test_a_snapshot_without_a_state_is_not_made(path):
    engine = engine_of(path, slot_count=1)
    engine.snapshots = Snapshots(1 << 30)
    seat(engine, 0, 1, PROMPT)
    launch(engine, "prefill", Lane(0, 1, 0, 0, 100, 0))
    engine.release(0, 90, 1)  # between states
    seat(engine, 0, 2, OTHER)
    assert len(engine.snapshots) == 0


# --- choices, failures, moves ---------------------------------------------------------------------


def test_choices_share_their_prompts_state(path):
    (together,) = serve(engine_of(path), [Job(PROMPT, 8, SAMPLED, choices=3)])
    alone = cold(path, Job(PROMPT, 8, SAMPLED))
    assert (together.ids[0], together.likelihoods[0]) == (alone[0][0], alone[1][0])
    assert len(set(together.ids)) == 3


def test_prompts_of_a_cohort_share_the_state_of_their_beginning(path):
    """One computes it, up to where they part; the others fork from it there."""
    prompts = [(*PROMPT[:100], *words(40)) for _ in range(3)]
    jobs = [Job(prompt, 5, GREEDY, reuse=True) for prompt in prompts]
    answers = serve(engine_of(path), jobs, share_length_min=50)
    assert sorted(answer.cached for answer in answers) == [0, 100, 100]
    assert [answer.bits for answer in answers] == [cold(path, job) for job in jobs]


@pytest.fixture
def expected(path):
    engine, _ = begun(path, PROMPT)
    return continued(engine, 0, len(PROMPT), 8)


def test_a_round_that_fails_after_computing_is_taken_back(path, expected):
    engine, sampler = begun(path, PROMPT)
    tokens = continued(engine, 0, len(PROMPT), 3)
    lane = Lane(0, 1, 0, len(PROMPT) + 3, 1, 1)
    sampler.fails = True
    for _ in range(2):
        with pytest.raises(ValueError, match="a sampler that fails"):
            launch(engine, "decode", lane)
    sampler.fails = False
    for index in range(5):
        lane = Lane(0, 1, 0, len(PROMPT) + 3 + index, 1, 1)
        tokens += launch(engine, "decode", lane).tokens[0]
    assert tokens == expected


def test_an_aborted_round_leaves_the_state_as_it_was(path, expected):
    engine, _ = begun(path, PROMPT)
    tokens = continued(engine, 0, len(PROMPT), 3)
    engine._backend.abort()
    with pytest.raises(RoundError, match="aborted"):
        launch(engine, "decode", Lane(0, 1, 0, len(PROMPT) + 3, 1, 1))
    for index in range(5):
        lane = Lane(0, 1, 0, len(PROMPT) + 3 + index, 1, 1)
        tokens += launch(engine, "decode", lane).tokens[0]
    assert tokens == expected


def test_a_saved_sequence_goes_on_elsewhere(path, expected):
    engine, _ = begun(path, PROMPT)
    tokens = continued(engine, 0, len(PROMPT), 3)
    length = len(PROMPT) + 3
    launch(engine, "save", Lane(0, 1, 0, 0, length, 0), reason="free_memory")
    engine.release(0, 0, 1)
    seat(engine, 2, 1, PROMPT, "resume")
    launch(engine, "restore", Lane(2, 1, 0, 0, length, 0), reason="resume_saved")
    for index in range(5):
        tokens += launch(engine, "decode", Lane(2, 1, 0, length + index, 1, 1)).tokens[0]
    assert tokens == expected


def test_a_prompt_that_was_saved_leaves_its_states_all_the_same(path):
    engine = engine_of(path)
    seat(engine, 0, 1, PROMPT)
    launch(engine, "prefill", Lane(0, 1, 0, 0, 100, 0))
    launch(engine, "save", Lane(0, 1, 0, 0, 100, 0), reason="free_memory")
    engine.release(0, 0, 1)
    seat(engine, 1, 1, PROMPT, "resume")
    launch(engine, "restore", Lane(1, 1, 0, 0, 100, 0), reason="resume_saved")
    launch(engine, "prefill", Lane(1, 1, 0, 100, 50, 0))
    assert engine.positions(1) == (100, len(PROMPT) - END_MARGIN, len(PROMPT))


def test_a_fork_where_there_is_no_state_is_refused(path):
    engine, _ = begun(path, PROMPT)
    assert not engine.describe().forks_anywhere
    seat(engine, 1, 2, PROMPT, "sibling")
    outcome = launch(engine, "fork", Lane(1, 2, 0, 0, 77, 0, 0), reason="share_prefix")
    assert outcome.results == (Failed("slot 0 has no state after 77 tokens"),)


def test_a_shift_is_refused_with_a_remedy(path):
    engine, _ = begun(path, PROMPT)
    assert not engine.describe().can_shift
    outcome = launch(engine, "shift", Lane(0, 1, 0, 10, 50, 0), reason="context_full")
    (failed,) = outcome.results
    assert "nothing can be dropped: use a larger context" in failed.reason


def test_who_leaves_nothing_to_others_keeps_no_states(path):
    engine = engine_of(path)
    serve(engine, [Job(PROMPT, 3, reuse=False)])
    assert [engine.positions(slot) for slot in range(4)] == [()] * 4


# --- memory ---------------------------------------------------------------------------------------


def test_the_plan_counts_states(path):
    weights = open_weights(path)
    model = load_model(weights)
    options = {"context": 1024, "cache": "F16", "ubatch": 512, "available_bytes": None}
    one, four = (plan_memory(weights, model, slot_count=n, **options) for n in (1, 4))
    state_bytes = engine_of(path)._backend.state_bytes
    assert one.states_bytes == (2 + NEWEST_KEPT) * state_bytes
    assert four.states_bytes == 4 * one.states_bytes
    assert four.total_bytes - one.total_bytes >= 3 * one.states_bytes
    assert "recurrent states" in four.describe()


def test_host_ram_bounds_the_states_of_slots(path):
    """With none to spare a slot keeps the newest alone."""
    trunk = Job(PROMPT, 0, GREEDY, reuse=True)
    counts = []
    for budget in (0, 1 << 30):
        engine = engine_of(path, slot_count=1, state_step=16, cache_ram_bytes=budget)
        conversation(engine, [trunk])
        counts.append(len(engine.positions(0)))
    assert counts == [NEWEST_KEPT, 11]
