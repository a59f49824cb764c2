"""Goal: a draft model keeps step with its slots, whatever happens to them, and shows in no bit.

Method: tiny models behind the whole service.  A model that drafts for itself must guess every
token, at any temperature: one row out of step would be a wrong guess.  Another model drafts worse,
and answers are still those of the target alone.
"""

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

import numpy as np
from answers import GREEDY, Job, serve
from hybrid_files import hybrid_file
from msgspec.structs import replace
from reading import check_that_all_holds_after_the_sequence_was_saved
from synthetic import VOCABULARY, decoder_file
from test_p3 import SUBJECT, prompt
from test_speculation import HOT, PENALISED, SLOTS, TOKENS, Model, jobs

from phaseloop.engine.cpu_load import CpuOptions, backend_over
from phaseloop.engine.draft import Computed, Wish
from phaseloop.engine.draft_model import LAG_MAX, DraftModel
from phaseloop.engine.sampler import Draw
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import Speculation
from phaseloop.engine.speculate import Terms
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

pytestmark = pytest.mark.timeout(300)
FILES = {"dense": lambda: decoder_file("llama", "Q4_K"), "hybrid": lambda: hybrid_file("Q4_K")}


class Counting(DraftModel):
    """Counts drafts, and those that held."""

    drafted = accepted = 0

    def propose(self, wishes):
        found = super().propose(wishes)
        self.drafted += sum(map(len, found))
        return found

    def follow(self, computed):
        for one in computed:
            if one.generated:
                self.accepted += len(one.sequence) - one.start - 1
        super().follow(computed)


class Pair(Model):
    """A model, and one that drafts for it."""

    def __init__(self, path, draft_path):
        super().__init__(path)
        self._draft_weights = open_weights(draft_path)
        self._draft = load_model(self._draft_weights)

    def drafter(self, most=5, context_length=512, **options):
        options = {"slot_count": SLOTS, "context_length": 512, "threads": 1} | options
        return Counting(
            backend_over(self._draft_weights, self._draft, CpuOptions(**options)),
            ChainSampler(),
            slot_count=SLOTS,
            most=most,
            context_length=context_length,
            vocabulary=VOCABULARY,
            target_vocabulary=VOCABULARY,
            end_tokens=frozenset(),
        )


@pytest.fixture(scope="module", params=FILES)
def itself(request, tmp_path_factory):
    path = FILES[request.param]().write(tmp_path_factory.mktemp("itself") / "tiny.gguf")
    return Pair(path, path)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same model with coarser weights: it agrees often, and not always."""
    folder = tmp_path_factory.mktemp("other")
    target = decoder_file("llama", "F16").write(folder / "target.gguf")
    return Pair(target, decoder_file("llama", "Q8_0").write(folder / "draft.gguf"))


def test_a_model_guesses_all_that_it_would_say_itself(itself):
    for job in jobs():
        drafter = itself.drafter()
        (found,) = serve(itself.engine(drafter), [job])
        assert found.bits == itself.plain(job).bits
        assert drafter.accepted == drafter.drafted >= TOKENS - 6


def test_it_does_in_company_in_chunks_and_forked(itself):
    company = [replace(jobs()[1], choices=3), *jobs()[2:], Job(prompt(33), 9, HOT, seed=8)]
    expected = [itself.plain(job).bits for job in company]
    for policy in ("barrier-fair", "quantum", "mixed"):
        drafter = itself.drafter()
        found = serve(itself.engine(drafter), company, batch_tokens=64, policy=policy)
        assert [answer.bits for answer in found] == expected
        assert drafter.accepted == drafter.drafted > 60


def test_it_does_after_a_prefix_was_found(itself):
    """In the slot, in another slot, and in host RAM, where its own state was kept as well."""
    first = Job(SUBJECT.greedy, 6, GREEDY, reuse=True, slot=0)
    turn = Job((*SUBJECT.greedy, *prompt(12)), 20, HOT, reuse=True)
    expected = itself.plain(replace(turn, reuse=False))
    elsewhere = replace(turn, slot=3)
    taker = Job(prompt(90), 2, GREEDY, slot=0)
    for stages in ([[first], [turn]], [[first], [elsewhere]], [[first], [taker], [turn]]):
        drafter = itself.drafter()
        engine = itself.engine(drafter, cache_ram_bytes=1 << 30)
        (found,) = serve(engine, *stages)
        assert found.bits == expected.bits
        assert found.cached >= 130
        assert drafter.accepted == drafter.drafted > 16


def test_it_does_after_its_sequence_was_saved(itself):
    check_that_all_holds_after_the_sequence_was_saved(itself, jobs()[1])


def test_another_model_shows_in_no_bit(other):
    for sampling, seed in ((GREEDY, 1), (HOT, 2), (PENALISED, 3)):
        job = Job(SUBJECT.greedy, 60, sampling, seed=seed)
        drafter = other.drafter()
        (found,) = serve(other.engine(drafter), [job])
        assert found.bits == other.plain(job).bits
        assert 0.1 < drafter.accepted / drafter.drafted < 0.9


def test_it_shows_in_no_bit_beside_others_that_leave(other):
    expected = [other.plain(job).bits for job in jobs()[:3]]
    leaver = replace(jobs()[3], leaves=2)
    for policy in ("barrier-fair", "quantum"):
        engine = other.engine(other.drafter())
        found = serve(engine, [*jobs()[:3], leaver], batch_tokens=100, policy=policy)
        assert [answer.bits for answer in found[:3]] == expected


def test_drafts_end_before_one_that_the_model_holds_unlikely(other):
    job = jobs()[1]
    shares = []
    for p_min in (0.0, 0.05, 0.9999):
        drafter = other.drafter()
        said = Speculation(p_min=p_min)
        (found,) = serve(other.engine(drafter), [replace(job, speculation=said)])
        assert found.bits == other.plain(job).bits
        shares.append(drafter.drafted)
    assert shares[0] > shares[1] > shares[2] == 0


def test_behind_its_own_context_it_drafts_nothing(itself):
    job = jobs()[1]
    drafter = itself.drafter(context_length=len(job.prompt) + 10)
    (found,) = serve(itself.engine(drafter), [job])
    assert found.bits == itself.plain(job).bits
    assert 0 < drafter.accepted == drafter.drafted <= 10


def test_a_slow_start_is_made_good_while_it_drafts_one_at_a_time(itself):
    job = replace(jobs()[1], limit=40)
    drafter = itself.drafter()
    engine = itself.engine(drafter, terms=Terms(cost=1.0))  # never worth more than a trial
    (found,) = serve(engine, [job])
    assert found.bits == itself.plain(job).bits
    assert drafter.accepted == drafter.drafted > 0


# --- the drafter by itself ------------------------------------------------------------------------


def wish(tokens, count=3, slot=0):
    return Wish(slot, count, 0.0, Draw(1, 0, 7, len(tokens), tokens, GREEDY))


def test_what_it_has_not_read_it_reads_a_part_at_a_time(itself):
    text = prompt(2 * LAG_MAX + 10)
    read, late = itself.drafter(), itself.drafter()
    read.follow([Computed(0, text[:-1], 0, generated=True)])
    assert late.propose([wish(text)]) == [()] and late.propose([wish(text)]) == [()]
    assert len(late.propose([wish(text)])[0]) == 3


def test_after_a_wrong_guess_it_drafts_as_if_it_had_made_none(itself):
    """A recurrent state has gone over the guess, and goes back to where that began."""
    text = prompt(60)
    wrong, fresh = itself.drafter(), itself.drafter()
    for drafter in (wrong, fresh):
        drafter.follow([Computed(0, text[:-1], 0, generated=False)])
    for _ in range(3):
        (drafts,) = wrong.propose([wish(text)])
        text = (*text, drafts[0], (drafts[1] + 1) % VOCABULARY)
    assert len(drafts) == 3
    assert wrong.propose([wish(text)]) == fresh.propose([wish(text)])
    assert len(wrong.propose([wish(text)])[0]) == 3


def test_a_shift_keeps_what_it_read(other):
    """Keys are turned, not computed anew: no lag, so it drafts at once."""
    text = list(prompt(200))
    drafter = other.drafter()
    drafter.follow([Computed(0, text[:-1], 0, generated=False)])
    drafter.shift(0, 20, 100)
    assert len(drafter.propose([wish([*text[:20], *text[120:]])])[0]) == 3


def test_a_token_that_only_the_target_knows_is_no_obstacle(other):
    text = [*prompt(20), VOCABULARY + 3, *prompt(5)]
    drafter = other.drafter()
    drafter.follow([Computed(0, text[:-1], 0, generated=False)])
    first = drafter.propose([wish(text)])
    assert len(first[0]) == 3 and drafter.propose([wish(text)]) == first


def test_a_token_that_only_it_knows_is_no_draft(other):
    text = prompt(30)
    (drafts,) = other.drafter().propose([wish(text)])
    narrow = other.drafter()
    narrow._target_vocabulary = drafts[0]
    assert narrow.propose([wish(text)]) == [()]


def test_an_end_token_is_the_last_draft(other):
    text = prompt(30)
    (drafts,) = other.drafter().propose([wish(text)])
    ending = other.drafter()
    ending._end_tokens = frozenset({drafts[0]})
    assert ending.propose([wish(text)]) == [drafts[:1]]


def test_slots_are_drafted_for_together(other):
    """One pass per place in the drafts, not one per slot; and each as if alone."""
    texts = [prompt(40), prompt(25), prompt(33)]
    alone = [other.drafter().propose([wish(text, 4)])[0] for text in texts]
    drafter = other.drafter()
    passes = []
    forward = drafter._backend.forward

    def counted(spans):
        passes.append(len(spans))
        return forward(spans)

    drafter._backend.forward = counted
    wishes = [wish(text, 4, slot) for slot, text in enumerate(texts)]
    assert drafter.propose(wishes) == alone
    assert passes == [3, 3, 3, 3]


def test_what_it_saves_is_what_it_takes(other):
    text = prompt(60)
    drafter = other.drafter()
    drafter.follow([Computed(0, text[:-1], 0, generated=False)])
    saved = drafter.save(0, 50)
    assert saved is not None and saved.size_bytes == 50 * drafter.position_bytes
    drafter.restore(2, saved, 40)
    kept = drafter.save(2, 60)
    assert kept is not None and kept.tokens == text[:40]
    assert all(map(np.array_equal, kept.cells.parts, saved.cells.first(40).parts))
    drafter.restore(2, None, 40)
    assert drafter.save(2, 60) is None
