"""Goal: a block for multi-token prediction reads what it should, keeps step, shows in no bit.

Method: tiny hybrids behind the whole service.  In some the next token is a permutation of the last
and the block is made to know it: from the token, or from the hidden row alone.  Then every draft
must hold; one row out of step would be a wrong guess.  Blocks of random weights are mostly wrong,
and answers are still those of the target alone; their drafts are compared with those of a block
that read the same text in one go.
"""

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, Job, serve
from draft_files import TURN, knowing_file
from hybrid_files import hybrid_file
from msgspec.structs import replace
from reading import (
    TEXT,
    check_that_all_holds_after_the_sequence_was_saved,
    check_that_drafts_do_not_depend_on_how_the_text_was_read,
    check_that_more_than_a_few_generated_tokens_are_read_without_a_wish,
    computed,
    drafts,
    read_at_once,
)
from test_p3 import SUBJECT, prompt
from test_speculation import FREE, HOT, SLOTS, Model, jobs

from phaseloop.engine.cpu_hidden import check_hidden
from phaseloop.engine.cpu_load import CpuOptions, backend_over, engine_over
from phaseloop.engine.draft import NoDrafts
from phaseloop.engine.draft_load import draft_backend, hidden_drafter
from phaseloop.engine.sampling import ChainSampler
from phaseloop.model.drafts import own_draft
from phaseloop.ops.interface import BackendError, Span

pytestmark = pytest.mark.timeout(300)


class Block(Model):
    """A model, and the block in its file."""

    def __init__(self, path):
        super().__init__(path)
        self.draft = own_draft(self._weights)

    def drafter(self, most=5, **options):
        options = CpuOptions(**{"slot_count": SLOTS, "threads": 1} | options)
        drafter = hidden_drafter(
            self.draft,
            draft_backend(self.draft, options, 512),
            ChainSampler(),
            slot_count=SLOTS,
            context_length=512,
            most=most,
            end_tokens=frozenset(),
        )
        return counting(drafter)

    def engine(self, drafter=None, terms=FREE, ends=frozenset(), **options):
        options = {"slot_count": SLOTS, "context_length": 512, "threads": 1} | options
        return engine_over(
            self._weights,
            self._model,
            ChainSampler(),
            CpuOptions(**options),
            end_tokens=ends,
            drafting=lambda backend: (drafter, terms),
            taps=self.draft.taps,
        )

    def rows(self, tokens):
        """The target's hidden rows of a text."""
        options = CpuOptions(slot_count=1, context_length=512, threads=1)
        backend = backend_over(self._weights, self._model, options, self.draft.taps)
        return backend.forward_hidden([Span(0, 0, tokens, 0, False)])[1]


def counting(drafter):
    propose, follow = drafter.propose, drafter.follow
    drafter.drafted = drafter.accepted = 0

    def count_drafts(wishes):
        found = propose(wishes)
        drafter.drafted += sum(map(len, found))
        return found

    def count_accepted(computed):
        drafter.accepted += sum(
            len(one.sequence) - one.start - 1 for one in computed if one.generated
        )
        follow(computed)

    drafter.propose, drafter.follow = count_drafts, count_accepted
    return drafter


@pytest.fixture(scope="module", params=["token", "hidden"])
def knowing(request, tmp_path_factory):
    path = knowing_file(request.param).write(tmp_path_factory.mktemp("mtp") / "tiny.gguf")
    return Block(path)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def random(request, tmp_path_factory):
    file = hybrid_file("Q4_K", mixture=request.param, draft=True)
    return Block(file.write(tmp_path_factory.mktemp("mtp") / "tiny.gguf"))


# --- behind the service ---------------------------------------------------------------------------


GREEDY_JOBS = [
    Job(SUBJECT.greedy, 24, GREEDY, seed=1, choices=2),
    Job(SUBJECT.sampled, 20, GREEDY, seed=2),
    Job(prompt(33), 9, GREEDY, seed=3),
]


@pytest.mark.parametrize("policy", ["barrier-fair", "quantum", "mixed"])
def test_a_block_that_knows_guesses_all(knowing, policy):
    """Alone, in chunks beside others, forked."""
    expected = [knowing.plain(job).bits for job in GREEDY_JOBS]
    for stages in ([[job] for job in GREEDY_JOBS], [GREEDY_JOBS]):
        drafter = knowing.drafter()
        found = serve(knowing.engine(drafter), *stages, batch_tokens=64, policy=policy)
        assert [answer.bits for answer in found] == expected[-len(found) :]
        assert drafter.accepted == drafter.drafted > 30


def test_one_that_knows_from_the_token_guesses_what_is_drawn_by_chance(tmp_path):
    model = Block(knowing_file("token").write(tmp_path / "tiny.gguf"))
    job = Job(SUBJECT.greedy, 30, HOT, seed=5)
    drafter = model.drafter()
    (found,) = serve(model.engine(drafter), [job])
    assert found.bits == model.plain(job).bits
    turned = [TURN[a] == b for a, b in zip(found.ids[0], found.ids[0][1:], strict=False)]
    assert not all(turned) and drafter.accepted == drafter.drafted > 20


def test_it_guesses_all_after_a_prefix_was_found(knowing):
    """In the slot, in another slot, and in host RAM, where its own state was kept as well."""
    first = Job(SUBJECT.greedy, 6, GREEDY, reuse=True, slot=0)
    turn = Job((*SUBJECT.greedy, *prompt(12)), 20, GREEDY, reuse=True)
    elsewhere, taker = replace(turn, slot=3), Job(prompt(90), 2, GREEDY, slot=0)
    for stages in ([[first], [turn]], [[first], [elsewhere]], [[first], [taker], [turn]]):
        drafter = knowing.drafter()
        (found,) = serve(knowing.engine(drafter, cache_ram_bytes=1 << 30), *stages)
        assert found.bits == knowing.plain(replace(turn, reuse=False)).bits
        assert found.cached >= 130
        assert drafter.accepted == drafter.drafted > 16


def test_it_guesses_all_after_its_sequence_was_saved(knowing):
    check_that_all_holds_after_the_sequence_was_saved(
        knowing, Job(SUBJECT.greedy, 24, GREEDY, seed=1)
    )


def test_blocks_of_any_weights_show_in_no_bit(random):
    company = [replace(jobs()[1], choices=2), *jobs()[::2], Job(prompt(33), 9, HOT, seed=8)]
    expected = [random.plain(job).bits for job in company]
    for policy, batch in (("barrier-fair", 64), ("quantum", 2048)):
        drafter = random.drafter()
        found = serve(random.engine(drafter), company, policy=policy, batch_tokens=batch)
        assert [answer.bits for answer in found] == expected
        assert drafter.drafted > drafter.accepted


# --- the drafter by itself ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def read(random):
    return read_at_once(random)


def test_drafts_do_not_depend_on_how_the_text_was_read(random, read):
    check_that_drafts_do_not_depend_on_how_the_text_was_read(random.drafter(), read)


def test_more_than_a_few_generated_tokens_are_read_without_a_wish(random, read):
    check_that_more_than_a_few_generated_tokens_are_read_without_a_wish(random.drafter(), read)


def test_copies_draft_the_same(random, read):
    rows, expected = read
    drafter = random.drafter()
    drafter.follow([computed(rows, 0, 60)])
    drafter.follow([computed(rows, 60, 80, generated=True)])
    drafter.fork(0, 1, 80)
    state = drafter.save(0, 80)
    assert state.size_bytes > 0
    drafter.restore(2, state, 80)
    drafter.truncate(0, 0)
    for slot in (1, 2):
        drafter.follow([computed(rows, 80, len(TEXT), slot, generated=True)])
        assert drafts(drafter, slot=slot) == expected


def test_where_a_prompt_ended_it_goes_on_after_an_answer(random, read):
    rows, expected = read
    drafter = random.drafter()
    drafter.follow([computed(rows, 0, 60)])
    for place in range(60, 70):
        drafter.follow([computed(rows, place, place + 1, generated=True)])
    drafter.truncate(0, 60)
    drafter.follow([computed(rows, 60, len(TEXT))])
    assert drafts(drafter) == expected


def test_without_the_last_row_it_drafts_nothing(random, read):
    rows, _ = read
    drafter = random.drafter()
    assert drafts(drafter) == ()
    drafter.follow([computed(rows, 0, 60)])
    assert drafts(drafter) == ()
    drafter.truncate(0, 50)
    assert drafts(drafter, length=50) == ()


def test_what_it_did_not_see_it_does_without(random, read):
    """It comes in late, and drafts from the rest of the text, as if that were all."""
    rows, expected = read
    drafter = random.drafter()
    drafter.follow([computed(rows, 85, len(TEXT))])
    late = drafts(drafter)
    assert len(late) == 5 and late != expected
    drafter.shift(0, 10, 20)
    assert drafts(drafter) == ()


def test_a_backend_that_shows_no_hidden_rows_is_refused_at_the_start(random):
    options = CpuOptions(slot_count=1, context_length=512, threads=1)
    shows = backend_over(random._weights, random._model, options)

    class Silent:
        name, state_bytes = "silent", 0
        forward, positions = shows.forward, shows.positions

    with pytest.raises(BackendError, match="draft-mtp reads hidden rows, which silent does not"):
        check_hidden(Silent(), random.drafter())
    check_hidden(shows, random.drafter())
    check_hidden(Silent(), NoDrafts())
