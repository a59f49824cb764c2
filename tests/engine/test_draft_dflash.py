"""Goal: a DFlash drafter reads what it should, keeps step with its slots, and shows in no bit.

Method: tiny models behind the whole service.  One says a single token, which masks are made to
stand for: then every draft must hold.  One of random weights is mostly wrong, and answers are those
of the target alone; its drafts are compared with those of one that read the same text in one go.
"""

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, Job, serve
from dflash_files import MASK, SAID, agreeing, dflash_file, sure_file, with_token_ids
from hybrid_files import hybrid_file
from reading import (
    TEXT,
    check_that_drafts_do_not_depend_on_how_the_text_was_read,
    check_that_more_than_a_few_generated_tokens_are_read_without_a_wish,
    computed,
    drafts,
    read_at_once,
    wish,
)
from synthetic import VOCABULARY, decoder_file
from test_draft_mtp import Block
from test_p3 import SUBJECT, prompt
from test_speculation import HOT, Model, jobs

from phaseloop.model.drafts import draft_from
from phaseloop.model.weights import open_weights

pytestmark = pytest.mark.timeout(300)


class Flash(Block):
    """A model, and what drafts for it."""

    def __init__(self, target, file, folder):
        Model.__init__(self, target.write(folder / "target.gguf"))
        self.draft = draft_from(open_weights(file.write(folder / "draft.gguf")), self._weights)


@pytest.fixture(scope="module")
def sure(tmp_path_factory):
    return Flash(sure_file(), agreeing(dflash_file(), 0.1), tmp_path_factory.mktemp("sure"))


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def random(request, tmp_path_factory):
    dense = request.param == "dense"
    target = decoder_file("llama", "Q4_K", layers=4) if dense else hybrid_file("Q4_K")
    return Flash(target, dflash_file("Q8_0"), tmp_path_factory.mktemp(request.param))


def test_one_that_knows_guesses_all(sure):
    """Alone and beside others; there are as many drafts as a block has masks."""
    company = [Job(SUBJECT.greedy, 24, GREEDY, seed=1), Job(SUBJECT.sampled, 20, GREEDY, seed=2)]
    expected = [sure.plain(job).bits for job in company]
    assert set(sure.plain(company[0]).ids[0]) == {SAID}
    for policy in ("barrier-fair", "mixed"):
        drafter = sure.drafter(most=9)
        assert drafter.most == 5
        found = serve(sure.engine(drafter), company, batch_tokens=64, policy=policy)
        assert [answer.bits for answer in found] == expected
        assert drafter.accepted == drafter.drafted > 30


def test_one_of_any_weights_shows_in_no_bit(random):
    company = [*jobs()[::2], Job(prompt(33), 9, HOT, seed=8)]
    expected = [random.plain(job).bits for job in company]
    for policy, batch in (("barrier-fair", 64), ("quantum", 2048)):
        drafter = random.drafter()
        found = serve(random.engine(drafter), company, policy=policy, batch_tokens=batch)
        assert [answer.bits for answer in found] == expected
        assert drafter.drafted > drafter.accepted


def test_it_says_only_what_it_knows(tmp_path):
    few = list(range(20, 60))
    file = with_token_ids(dflash_file(ends=True), few)
    model = Flash(hybrid_file("Q4_K"), file, tmp_path)
    said = []
    drafter = model.drafter()
    propose = drafter.propose

    def listen(wishes):
        found = propose(wishes)
        said.extend(token for drafts in found for token in drafts)
        return found

    drafter.propose = listen
    job = jobs()[1]
    assert serve(model.engine(drafter), [job])[0].bits == model.plain(job).bits
    assert len(said) > 20 and set(said) <= set(few) and len(set(said)) > 3


def test_near_the_end_of_the_context_blocks_get_shorter(random):
    job = Job(SUBJECT.greedy, 400, HOT, seed=3)
    options = {"context_length": len(job.prompt) + 20}
    (plain,) = serve(random.engine(**options), [job])
    (found,) = serve(random.engine(random.drafter(**options), **options), [job])
    assert found.bits == plain.bits and len(found.ids[0]) in (20, 21)


# --- the drafter by itself ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def read(random):
    return read_at_once(random)


def test_drafts_do_not_depend_on_how_the_text_was_read(random, read):
    assert MASK < VOCABULARY
    check_that_drafts_do_not_depend_on_how_the_text_was_read(random.drafter(), read)


def test_more_than_a_few_generated_tokens_are_read_without_a_wish(random, read):
    check_that_more_than_a_few_generated_tokens_are_read_without_a_wish(random.drafter(), read)


def test_copies_and_many_slots_draft_the_same(random, read):
    """More blocks than one pass takes."""
    rows, expected = read
    drafter = random.drafter()
    drafter.follow([computed(rows, 0, 60)])
    drafter.follow([computed(rows, 60, 80, generated=True)])
    state = drafter.save(0, 80)
    for slot in range(1, 8):
        if slot % 2:
            drafter.fork(0, slot, 80)
        else:
            drafter.restore(slot, state, 80)
    slots = range(8)
    drafter.follow([computed(rows, 80, len(TEXT), slot, generated=True) for slot in slots])
    assert drafter.propose([wish(slot=slot) for slot in slots]) == [expected] * 8


def test_what_it_did_not_see_it_does_without(random, read):
    rows, expected = read
    drafter = random.drafter()
    assert drafts(drafter) == ()
    drafter.follow([computed(rows, 85, len(TEXT))])
    late = drafts(drafter)
    assert len(late) == 5 and late != expected
    drafter.truncate(0, 60)
    assert drafts(drafter, length=60) == ()
