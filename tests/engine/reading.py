"""What every drafter that reads along with a model has to hold, told once for all kinds of them."""

from answers import GREEDY
from test_cpu_engine import launch
from test_p3 import prompt

from phaseloop.core.vocabulary import Lane, SeatRequest
from phaseloop.engine.draft import Computed, Wish
from phaseloop.engine.draft_track import WAITING_MAX
from phaseloop.engine.protocol import Content
from phaseloop.engine.sampler import Draw

TEXT = prompt(90)
PENDING = 7


def computed(rows, start, end, slot=0, *, generated=False):
    return Computed(slot, TEXT[:end], start, generated, rows[start:end])


def wish(slot=0, length=90, count=5):
    tokens = (*TEXT[:length], PENDING)
    return Wish(slot, count, 0.0, Draw(1, 0, 7, len(tokens), tokens, GREEDY))


def drafts(drafter, **which):
    return drafter.propose([wish(**which)])[0]


def read_at_once(model):
    """Hidden rows of the text, and what a drafter says that read it in one go."""
    rows = model.rows(TEXT)
    drafter = model.drafter()
    drafter.follow([computed(rows, 0, len(TEXT))])
    return rows, drafts(drafter)


def check_that_drafts_do_not_depend_on_how_the_text_was_read(drafter, read):
    rows, expected = read
    assert len(expected) == 5
    for start, end, generated in ((0, 1, False), (1, 70, False), (70, 89, True), (89, 90, True)):
        drafter.follow([computed(rows, start, end, generated=generated)])
    assert drafts(drafter) == drafts(drafter) == expected  # and not on earlier drafts


def check_that_more_than_a_few_generated_tokens_are_read_without_a_wish(drafter, read):
    rows, expected = read
    drafter.follow([computed(rows, 0, 10)])
    for place in range(10, len(TEXT)):
        drafter.follow([computed(rows, place, place + 1, generated=True)])
        assert len(drafter.track(0).waiting) <= WAITING_MAX
    assert drafts(drafter) == expected


def check_that_all_holds_after_the_sequence_was_saved(model, job):
    """Of a drafter that knows the answer: saved and restored in other slots, three times."""
    expected = model.plain(job).ids[0]
    drafter = model.drafter()
    engine = model.engine(drafter)
    content = Content(job.prompt, job.seed, job.sampling)
    engine.seat(SeatRequest(1, 0, 0, None, "oldest"), content)
    end = len(job.prompt)
    launch(engine, "prefill", Lane(0, 1, 0, 0, end, 0))
    tokens = list(launch(engine, "sample", Lane(0, 1, 0, end, 0, 1)).tokens[0])
    for slot in (0, 1, 2):
        tokens += launch(engine, "decode", Lane(slot, 1, 0, end + len(tokens) - 1, 4, 4)).tokens[0]
        held = end + len(tokens) - 1
        launch(engine, "save", Lane(slot, 1, 0, 0, held, 0), reason="free_memory")
        engine.release(slot, 0, 1)
        engine.seat(SeatRequest(1, 0, slot + 1, None, "resume"), content)
        launch(engine, "restore", Lane(slot + 1, 1, 0, 0, held, 0), reason="resume_saved")
    assert tuple(tokens) == expected[:13]
    assert drafter.accepted == drafter.drafted == 9
