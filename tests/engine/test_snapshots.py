"""Goal: a prompt finds the longest beginning that anybody holds, and never one that is not its own.

Method: the store by hand; then the model engine with a model whose cells are its tokens
(recall.py), so that a wrongly reused cell is a wrong answer: scenarios with their lengths stated,
and random runs in which requests are cancelled, stopped, stalled, evicted, saved and failed in
every role, each answer being compared with the one of a cold run.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall import GARBAGE, RecallBackend, Shell, answer, chance, recall_engine

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Candidate
from phaseloop.engine.snapshots import (
    MIB,
    Snapshots,
    budget_bytes,
    common_length,
    is_worth_keeping,
    memory_bytes,
    packed,
)
from phaseloop.ops.interface import Snapshot

RANDOM = np.random.default_rng(5)


def tokens(length):
    return tuple(RANDOM.integers(0, 64, length).tolist())


A, B, C = tokens(100), tokens(100), tokens(100)


# --- lengths and tokens ---------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_the_common_length_is_where_two_first_differ(common, left, right):
    head, tail = np.arange(common, dtype=np.int32), np.full(left, -1, np.int32)
    other = np.full(right, -2, np.int32)
    assert common_length(np.append(head, tail), np.append(head, other)) == common


@pytest.mark.parametrize(
    ("lost", "length", "is_worth"),
    [(31, 31, False), (32, 32, True), (32, 512, True), (32, 513, False), (100, 1601, False)],
)
def test_what_is_worth_a_copy(lost, length, is_worth):
    """At least 32 tokens, and a sixteenth of what would be copied."""
    assert is_worth_keeping(lost, length) == is_worth


# --- the store ------------------------------------------------------------------------------------


def put(store, ids, saved=None):
    """Cells of 8 bytes a token, as well as 4 for its id."""

    def save():
        if saved is not None:
            saved.append(len(store))
        return Snapshot(len(ids), (np.zeros((len(ids), 8), np.uint8),))

    return store.put(packed(ids), 8 * len(ids), save)


class Followed:
    size_bytes = 300


def test_what_a_drafter_keeps_counts_and_goes_with_it():
    store = Snapshots(3 * 1200)
    cells = Snapshot(100, (np.zeros((100, 8), np.uint8),))
    store.put(packed(A), 800 + 300, lambda: cells, Followed)
    assert store.size_bytes == 1200 + 300
    assert isinstance(store.find(packed(A)).kept.followed, Followed)
    put(store, B)
    put(store, C)
    assert found(store, A) is None and store.size_bytes == 2 * 1200


def found(store, prompt):
    one = store.find(packed(prompt))
    return None if one is None else (one.kept.snapshot_id, one.length)


def test_the_longest_common_beginning_is_found():
    store = Snapshots(1 << 20)
    put(store, A)
    put(store, A[:50] + B)
    put(store, C)
    assert found(store, A[:50] + B[:20] + C) == (1, 70)
    assert found(store, A) == (0, 100)
    assert found(store, ()) is None


def test_of_equals_the_one_used_last_is_found():
    store = Snapshots(1 << 20)
    put(store, A[:50] + B)
    put(store, A[:50] + C)
    assert found(store, A) == (1, 50)
    store.touch(store.find(packed(A[:50] + B)).kept)
    assert found(store, A) == (0, 50)


def test_a_snapshot_that_covers_another_is_the_only_one():
    store = Snapshots(1 << 20)
    saved = []
    assert put(store, A[:60], saved)
    assert put(store, A, saved), "the longer one replaces the shorter"
    assert len(store) == 1 and found(store, A) == (1, 100)
    assert not put(store, A[:80], saved), "it is there already"
    assert len(saved) == 2, "what is covered is not even copied"


def test_the_longest_unused_goes_first_and_before_the_copy_is_made():
    store = Snapshots(2 * 1200)
    put(store, A)
    put(store, B)
    assert store.size_bytes == 2 * 1200
    store.touch(store.find(packed(A)).kept)
    saved = []
    put(store, C, saved)
    assert saved == [1], "room was made before"
    assert found(store, B[:40] + A) is None and found(store, A) == (0, 100)
    assert store.size_bytes == 2 * 1200


def test_what_a_prompt_covers_counts_as_used():
    store = Snapshots(2 * 1200)
    put(store, A)
    put(store, B)
    put(store, A[:50])  # covered by A, which becomes the one used last
    put(store, C)
    assert found(store, A) == (0, 100) and found(store, B) is None


def test_nothing_over_the_budget_is_kept_and_nothing_is_lost_for_it():
    store = Snapshots(1300)
    put(store, A)
    assert not put(store, tokens(200))
    assert found(store, A) == (0, 100)
    assert not put(Snapshots(0), A)


def test_the_budget(tmp_path):
    assert budget_bytes(0) == 0
    assert budget_bytes(100) == 100 * MIB
    assert budget_bytes(-1) > 1 << 60
    assert 0 < budget_bytes(None) <= 8192 * MIB
    info, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    info.write_text("MemTotal: 900 kB\nMemAvailable:    500 kB\n")
    assert memory_bytes(info, (limit,)) == 500 * 1024
    limit.write_text("max\n")
    assert memory_bytes(info, (limit,)) == 500 * 1024
    limit.write_text("1000\n")
    assert memory_bytes(info, (limit,)) == 1000
    assert memory_bytes(tmp_path / "none", ()) == 0


# --- where a prompt finds its beginning -----------------------------------------------------------


SHELL_TAKES = ("policy", "save_idle", "share_length_min")


def shell(**options):
    limits = {name: options.pop(name) for name in SHELL_TAKES if name in options}
    engine, _ = recall_engine(**options)
    return Shell(engine, **limits)


def ask(shell, *prompts, **fields):
    """Served to the end, and rightly; how many tokens each found."""
    fields = {"output_limit": 5} | fields
    ids = shell.arrive(*prompts, **fields)
    shell.drain()
    like_prompt = shell.engine.describe().reuses_generated
    for request_id in ids:
        expected = answer(shell.prompts[request_id], 5, like_prompt=like_prompt)
        assert shell.given[request_id, 0] == expected[: fields["output_limit"]]
    return [shell.cached[request_id] for request_id in ids]


def held(shell):
    return [len(slot.kept) for slot in shell.engine._slots]


def test_a_next_turn_finds_its_slot_and_copies_nothing():
    served = shell()
    assert ask(served, A) == [0]
    turn = (*A, *answer(A, 5), *B[:20])
    assert ask(served, turn) == [100], "the answer's state is not a prompt's"
    assert ask(served, (*turn, *C)) == [len(turn)]
    assert len(served.engine.snapshots) == 0
    assert set(served.kinds) == {"prefill", "sample", "decode"}


def test_a_next_turn_finds_the_answer_too_where_its_bits_are_a_prompts():
    served = shell(reuse_generated=True)
    ask(served, A)
    given = answer(A, 5, like_prompt=True)
    assert ask(served, (*A, *given, *B)) == [104], "the last token drawn was never computed"


def test_the_same_prompt_again_computes_its_last_token():
    served = shell()
    ask(served, A)
    assert ask(served, A) == [99]
    assert ask(served, A[:50]) == [49]


def test_a_taken_slot_leaves_a_snapshot_that_is_used_and_stays():
    served = shell(slots=1)
    ask(served, A)
    assert ask(served, B) == [0]
    assert len(served.engine.snapshots) == 1 and held(served) == [100]
    assert ask(served, A[:80] + C) == [80]
    assert served.kinds.count("restore") == 1
    assert ask(served, A) == [99], "not consumed"
    assert ask(served, B) == [99], "nor was the other one lost"


def test_nothing_is_kept_without_a_budget():
    served = shell(slots=1, ram_bytes=0)
    ask(served, A)
    ask(served, B)
    assert ask(served, A) == [0]


def test_two_lines_with_one_beginning_both_go_on():
    """As eight agents with one system prompt do, a slot each."""
    served = shell(slots=3)
    ask(served, A + B)
    assert ask(served, A + C) == [100]
    assert served.slots == {0: 0, 1: 1}, "copied; the first line was left alone"
    assert held(served)[:2] == [200, 200]
    assert ask(served, A + B + C[:20]) == [200]
    assert ask(served, A + C + B[:20]) == [200]
    assert len(served.engine.snapshots) == 0, "a slot has it all"


def test_a_slot_that_loses_little_is_taken():
    served = shell(slots=3)
    ask(served, A + B[:10])
    assert ask(served, A + C) == [100]
    assert served.slots[1] == 0
    assert "restore" not in served.kinds


def test_a_prompt_that_wants_no_cache_takes_none_and_leaves_none():
    served = shell()
    ask(served, A)
    assert ask(served, A, keep_cache=False, slot_hint=0) == [0]
    assert held(served) == [0, 0, 0]
    assert len(served.engine.snapshots) == 1, "what it displaced is still somebody's"


@pytest.mark.parametrize(("ram_bytes", "computed"), [(1 << 20, 100), (0, 200)])
def test_a_beginning_whose_slot_is_taken_before_its_round(ram_bytes, computed):
    """Both sit down in one step: the first finds 100 tokens in the slot that the second takes.

    It finds them again in the snapshot that this leaves, or computes them.
    """
    served = shell(slots=2, ram_bytes=ram_bytes)
    ask(served, A[:15], slot_hint=1)
    ask(served, A + B, slot_hint=0)
    first, second = served.arrive(A + C, C, output_limit=5)
    served.drain()
    assert (served.slots[first], served.slots[second]) == (1, 0)
    assert served.cached[first] == 100 and served.computed[first] == computed
    assert served.given[first, 0] == answer(A + C, 5)
    assert served.given[second, 0] == answer(C, 5)


def test_a_longer_beginning_is_awaited_rather_than_a_shorter_one_copied():
    """Both begin with what a slot has 40 tokens of; one computes the next 60, the other forks."""
    served = shell(slots=3, share_length_min=50)
    ask(served, A[:40] + B)
    served.arrive(A + C, A + B, output_limit=5)
    served.drain()
    assert served.kinds.count("restore") == served.kinds.count("fork") == 1
    assert served.given[1, 0] == answer(A + C, 5) and served.given[2, 0] == answer(A + B, 5)


def test_what_another_slot_holds_is_not_copied_when_its_slot_is_taken():
    served = shell(slots=2)
    ask(served, A, slot_hint=0)
    ask(served, A + B, slot_hint=1)
    ask(served, C, slot_hint=0)
    assert len(served.engine.snapshots) == 0
    assert ask(served, A, slot_hint=0) == [99]


def shifted(**options):
    """Slot 0 generates with its first 100 tokens found in place, and its context was shifted."""
    served = shell(slots=2, context=128, policy="mixed", **options)
    ask(served, A, slot_hint=0)
    (request_id,) = served.arrive(A + B[:20], output_limit=20, shift_keep=4, slot_hint=0)
    while "shift" not in served.kinds or served.engine._slots[0].length != 70:
        served.complete()
    assert served.cached[request_id] == 100
    return served


def test_nobody_copies_from_a_slot_whose_context_was_shifted():
    """4 tokens are left as they were, too few to be copied."""
    assert ask(shifted(), A + C[:20]) == [0]


def test_of_a_shifted_sequence_no_more_than_its_head_becomes_a_snapshot():
    served = shifted(save_idle=True)  # what slot 0 was left with before is one already
    ask(served, C)  # and the shifted one ends
    stored = [one.ids.tolist() for one in served.engine.snapshots._kept]
    assert stored == [list(A), list(C)]


def test_an_evicted_slot_leaves_a_snapshot():
    """One page is 256 tokens, and there is but one: the second prompt evicts the first's cache."""
    served = shell(slots=2, pages=1)
    ask(served, A, slot_hint=0)
    ask(served, B, slot_hint=1)
    assert held(served) == [0, 100]
    assert ask(served, A + C) == [100]


def test_saving_each_idle_cache_is_for_who_asks_for_it():
    served = shell(slots=2, save_idle=True)
    ask(served, A)
    assert "save" in served.kinds and len(served.engine.snapshots) == 1
    ask(served, B, slot_hint=0)
    assert ask(served, A) == [99]


def test_a_snapshot_is_a_candidate_of_an_arrival():
    served = shell(slots=1)
    ask(served, A)
    ask(served, B)
    (request_id,) = served.arrive(A + C, output_limit=1)
    assert served.requests[request_id].candidates == (Candidate("snapshot", 0, 0, 100),)


def test_no_memory_for_a_snapshot_costs_the_snapshot(caplog):
    served = shell(slots=1)
    ask(served, A)

    def save(region, length):
        raise MemoryError

    served.engine._backend.save = save
    assert ask(served, B) == [0]
    assert len(served.engine.snapshots) == 0
    assert "--cache-ram" in caplog.text


# --- whatever happens -----------------------------------------------------------------------------

STEMS = [tokens(length) for length in (40, 70, 35)]


def a_prompt(source):
    """Few beginnings, cut anywhere, so that lines part and meet at all lengths."""
    stem = source.choice(STEMS)
    prompt = stem[: source.randrange(1, len(stem) + 1)]
    if chance(source, 60):
        other = source.choice(STEMS)
        prompt += other[: source.randrange(len(other))]
    return prompt


def arrive(served, source):
    fields = {
        "output_limit": source.choice((None, 0, 1, 5, 12)),
        "keep_cache": chance(source, 85),
        "slot_hint": source.choice((None, None, 0, 1)),
        "choices": source.choice((1, 1, 1, 2)),
        "priority": source.choice((0, 0, 1)),
        "shift_keep": source.choice((None, None, 0, 4, 50)),
    }
    if fields["output_limit"] == 0:
        fields["choices"] = 1
    served.arrive(*(a_prompt(source) for _ in range(source.choice((1, 1, 2)))), **fields)


def happen(served, backend, source, failures):
    """One thing that may happen now; of a hundred rounds, so many fail."""
    what = source.randrange(100)
    live = served.live()
    if what < 25:
        arrive(served, source)
    elif what < 45 and live:
        act = source.choice(
            (served.cancel, served.cancel, served.stop, served.stall, served.resume)
        )
        act(source.choice(live))
    elif served.is_busy:
        backend.fails = chance(source, failures)
        served.complete()


def wander(served, backend, drafter, source, failures):
    """Sixty things happen; then all that is left comes to its end."""
    for _ in range(60):
        drafter.fails = chance(source, failures)
        happen(served, backend, source, failures)
    drafter.fails = False
    for request_id in served.live():
        if served.requests[request_id].output_limit is None:
            served.cancel(request_id)
    served.drain()


def check(served):
    """Nobody was given a token that a cold run would not give."""
    like_prompt = served.engine.describe().reuses_generated
    for (request_id, choice), ids in served.given.items():
        request, prompt = served.requests[request_id], served.prompts[request_id]
        shifting = {"shift_keep": request.shift_keep, "context": served.state.limits.context_length}
        assert ids == answer(prompt, len(ids), like_prompt=like_prompt, **shifting)
        if served.ended[request_id, choice] == "length" and request.shift_keep is not None:
            assert len(ids) == request.output_limit
    assert not served.live()
    for slot, held_here in enumerate(served.index._slots):
        told = [] if held_here is None else served.index._ids(held_here).tolist()
        own = served.engine._slots[slot]
        assert told == own.kept.tolist(), "index and engine agree"
        beyond = served.engine._backend._cells[slot, own.length :]
        assert (beyond == GARBAGE).all(), "what is not held is given back"


@settings(max_examples=150)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(PRESETS)),
    st.booleans(),
    st.sampled_from([0, 700, 5000]),
    st.sampled_from([(None, False), (2, False), (3, True)]),
    st.sampled_from(["nobody", "right", "wrong"]),
)
def test_no_interleaving_makes_a_wrong_answer(
    seed, policy, reuse_generated, ram_bytes, memory, drafts
):
    """Nor with drafts: by the same model, or by one to which generated tokens are others."""
    source, (pages, save_idle) = random.Random(seed), memory
    failures = source.choice((0, 6))
    context = source.choice((64, 256))
    drafter = RecallBackend(3, context, like_prompt=reuse_generated == (drafts == "right"))
    engine, backend = recall_engine(
        slots=3,
        context=context,
        drafter=None if drafts == "nobody" else drafter,
        reuse_generated=reuse_generated,
        ram_bytes=ram_bytes,
        pages=pages,
    )
    served = Shell(
        engine,
        policy,
        batch_tokens=source.choice((8, 33, 64)),
        output_reserve=8,
        share_length_min=source.choice((8, 1024)),
        save_idle=save_idle,
    )
    wander(served, backend, drafter, source, failures)
    check(served)
    assert failures or "failed" not in served.ended.values()
    assert engine.snapshots.size_bytes <= ram_bytes
