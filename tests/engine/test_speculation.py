"""Goal: drafts save rounds, and no bit of an answer shows whether there were any.

Method: tiny models behind the whole service, a dense one and a hybrid.  The standard is each
request without a drafter.  Drafters know those answers, so they can be always right, always wrong,
or right by chance; tokens and likelihoods must be equal, and rounds are counted.
"""

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, SAMPLED, Job, serve
from drafters import Failing, Scripted, always, by_chance, never
from hybrid_files import hybrid_file
from msgspec.structs import replace
from p3 import SLOTS, pairwise, together
from synthetic import VOCABULARY, decoder_file
from test_cpu_engine import launch
from test_p3 import SUBJECT, prompt

from phaseloop.core.vocabulary import Lane, Produced, SeatRequest
from phaseloop.engine.cpu_load import CpuOptions, engine_over
from phaseloop.engine.protocol import Content
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import Breaker, Speculation
from phaseloop.engine.speculate import Terms
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

FREE = Terms(cost=0.0)  # drafts cost nothing: all are used that may be
KNACKS = {"right": always, "wrong": never, "chance": by_chance}
MODELS = {"dense": lambda: decoder_file("llama", "Q4_K"), "hybrid": lambda: hybrid_file("Q4_K")}
HOT = replace(SAMPLED, temperature=1.0)
PENALISED = replace(
    HOT,
    repeat_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    dry_multiplier=0.8,
    dry_allowed_length=1,
    dry_breakers=(Breaker(3),),
)
STRICT = replace(PENALISED, temperature=0.0)
TOKENS = SUBJECT.tokens

pytestmark = pytest.mark.timeout(300)


class Model:
    def __init__(self, path):
        self._weights = open_weights(path)
        self._model = load_model(self._weights)
        self.known = {}
        self._plain = {}

    def engine(self, drafter=None, terms=FREE, ends=frozenset(), **options):
        options = {"slot_count": SLOTS, "context_length": 512, "threads": 1} | options
        return engine_over(
            self._weights,
            self._model,
            ChainSampler(),
            CpuOptions(**options),
            end_tokens=ends,
            drafting=lambda backend: (drafter, terms),
        )

    def plain(self, job):
        """The answer without a drafter; drafters know it from then on."""
        key = (job.prompt, job.sampling, job.seed, job.choices, job.limit)
        if key not in self._plain:
            (answer,) = self._plain[key] = serve(self.engine(), [job])
            for choice, ids in enumerate(answer.ids):
                where = job.prompt, job.seed, choice
                self.known[where] = max(ids, self.known.get(where, ()), key=len)
        return self._plain[key][0]

    def scripted(self, knack, most=5):
        return Scripted(self.known, knack, VOCABULARY, most)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    file = MODELS[request.param]()
    return Model(file.write(tmp_path_factory.mktemp("speculation") / "tiny.gguf"))


def jobs():
    """Greedy and hot, with and without penalties; seeds keep apart what drafters know of them."""
    return [
        Job(SUBJECT.greedy, TOKENS, GREEDY, seed=1),
        Job(SUBJECT.greedy, TOKENS, HOT, seed=2),
        Job(SUBJECT.sampled, TOKENS, PENALISED, seed=3),
        Job(SUBJECT.sampled, TOKENS, STRICT, seed=4),
    ]


@pytest.mark.parametrize("knack", KNACKS)
def test_drafts_do_not_show(model, knack):
    expected = [model.plain(job).bits for job in jobs()]
    drafter = model.scripted(KNACKS[knack])
    engine = model.engine(drafter)
    for job, bits in zip(jobs(), expected, strict=True):
        assert serve(engine, [job])[0].bits == bits
    found = serve(engine, jobs(), batch_tokens=64)
    assert [answer.bits for answer in found] == expected
    assert drafter.drafted > 0
    if knack != "chance":
        assert drafter.accepted == (drafter.drafted if knack == "right" else 0)
    else:
        assert 0.2 < drafter.accepted / drafter.drafted < 0.8


def test_answers_could_differ(model):
    """Sampled ones are no constants, and penalties change them: so the comparison can fail."""
    greedy, hot, penalised, strict = (model.plain(job) for job in jobs())
    assert len({greedy.ids, hot.ids, penalised.ids, strict.ids}) == 4
    assert len(set(hot.ids[0])) > 8
    plain = model.plain(replace(jobs()[2], sampling=HOT, seed=5))
    assert plain.ids != penalised.ids


@pytest.mark.parametrize("knack", KNACKS)
def test_no_two_factors_show_beside_drafts(model, knack):
    """Policies, company, chunks, caches, leavers, as in P3."""
    expected = [model.plain(job).bits for job in SUBJECT.jobs()]
    engine = model.engine(model.scripted(KNACKS[knack]))
    rows = pairwise(seed=2, cohort=(2, 5), threads=(1,), batch_tokens=(64, 2048))
    for setting in rows[::3]:
        found = [answer.bits for answer in together(engine, SUBJECT, setting)]
        assert found == expected, setting


def test_right_drafts_save_rounds_and_wrong_ones_cost_none(model):
    job = jobs()[1]
    model.plain(job)
    # One token comes from the sample round; 23 are left, six to a round, or one.
    for knack, rounds in ((always, 4), (never, 22)):
        drafter = model.scripted(knack)
        serve(model.engine(drafter), [job])
        assert drafter.rounds == rounds


def test_no_draft_reaches_past_the_limit(model):
    """R14: with three tokens wanted, one is drawn at once, one may be guessed, one is drawn."""
    for limit, widths in ((1, []), (2, []), (3, [1]), (4, [2])):
        job = replace(jobs()[1], limit=limit)
        bits = model.plain(job).bits
        drafter = model.scripted(always)
        assert serve(model.engine(drafter), [job])[0].bits == bits
        assert drafter.widths == widths


def test_an_answer_ends_with_its_context_as_without_drafts(model):
    job = Job(prompt(502), 100, HOT)
    expected = model.plain(job)
    assert expected.outcome == "length" and len(expected.ids[0]) == 512 - 502
    for knack in KNACKS.values():
        (found,) = serve(model.engine(model.scripted(knack)), [job])
        assert (found.bits, found.outcome) == (expected.bits, "length")


def test_an_end_token_among_right_drafts_ends_the_answer(model):
    job = jobs()[1]
    ids = model.plain(job).ids[0]
    for place in range(1, 9):
        if ids[place] in ids[:place]:
            continue
        drafter = model.scripted(always)
        (found,) = serve(model.engine(drafter, ends=frozenset({ids[place]})), [job])
        assert (found.ids[0], found.outcome) == (ids[:place], "stop")


def test_choices_have_drafts_of_their_own(model):
    job = replace(jobs()[1], choices=3, seed=9)
    expected = model.plain(job)
    assert len(set(expected.ids)) == 3
    for knack in KNACKS.values():
        drafter = model.scripted(knack)
        (found,) = serve(model.engine(drafter), [job])
        assert found.bits == expected.bits
        assert knack is not always or drafter.accepted == drafter.drafted > 0


def test_whoever_leaves_among_accepted_drafts_harms_nobody(model):
    """It reads two tokens and goes, which cuts off what came with them, and what is in flight."""
    leaver, *others = jobs()
    expected = [model.plain(job).bits for job in others]
    model.plain(leaver)
    for knack in KNACKS.values():
        engine = model.engine(model.scripted(knack))
        found = serve(engine, [replace(leaver, leaves=2), *others])
        assert [answer.bits for answer in found[1:]] == expected


def test_what_an_answer_leaves_behind_is_as_good_as_cold(model):
    """The next prompt is the last with its answer and more, in the slot or out of a snapshot."""
    first = replace(jobs()[1], reuse=True, slot=0)
    ids = model.plain(jobs()[1]).ids[0]
    turn = Job((*first.prompt, *ids, *prompt(20)), 12, HOT, reuse=True)
    expected = model.plain(replace(turn, reuse=False))
    taker = Job(prompt(90), 2, GREEDY, slot=0)
    for knack in KNACKS.values():
        for stages in ([[first]], [[first], [taker]]):
            engine = model.engine(model.scripted(knack), cache_ram_bytes=1 << 30)
            (found,) = serve(engine, *stages, [turn])
            assert found.bits == expected.bits
            assert found.cached >= len(first.prompt)


def test_answers_with_a_prompts_bits_are_found_as_far_as_they_are_held(model):
    first = replace(jobs()[1], reuse=True, slot=0)
    options = {"attention": "rows", "slot_count": 2}
    (answer,) = serve(model.engine(**options), [first])
    known = {(first.prompt, first.seed, 0): answer.ids[0]}
    turn = Job((*first.prompt, *answer.ids[0], *prompt(20)), 12, HOT, reuse=True)
    (expected,) = serve(model.engine(**options), [replace(turn, reuse=False)])
    for knack in KNACKS.values():
        engine = model.engine(Scripted(known, knack, VOCABULARY), **options)
        (found,) = serve(engine, [first], [turn])
        assert found.bits == expected.bits
        assert found.cached >= len(first.prompt) + (TOKENS - 1 if knack is always else 0)


def test_a_drafter_that_fails_costs_drafts_alone(model, caplog):
    job = jobs()[1]
    (found,) = serve(model.engine(Failing()), [job])
    assert found.bits == model.plain(job).bits
    assert "there is no draft today" in caplog.text


def test_a_request_may_have_fewer_drafts_or_none(model):
    job = jobs()[1]
    bits = model.plain(job).bits
    for said, widths in (
        (Speculation(n_max=0), set()),
        (Speculation(n_max=2), {2, 1}),
        (Speculation(n_max=99), {5, 4, 3, 2, 1}),
    ):
        drafter = model.scripted(always)
        (found,) = serve(model.engine(drafter), [replace(job, speculation=said)])
        assert found.bits == bits
        assert set(drafter.widths) <= widths and max(drafter.widths, default=0) == max(
            widths, default=0
        )


def test_drafts_fewer_than_worth_it_are_not_verified(model):
    job = replace(jobs()[1], speculation=Speculation(n_min=6))
    drafter = model.scripted(always)
    (found,) = serve(model.engine(drafter), [job])
    assert found.bits == model.plain(jobs()[1]).bits
    assert drafter.drafted > 0 and drafter.accepted == 0


def test_wrong_drafts_become_few_where_they_cost(model):
    job = replace(jobs()[1], limit=60)
    model.plain(job)
    drafter = model.scripted(never)
    serve(model.engine(drafter, terms=Terms(cost=0.3)), [job])
    assert 3 <= drafter.rounds <= 10  # the credit is used up, then one is tried now and then
    assert drafter.widths[-1] == 1


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("knack", KNACKS)
def test_a_sequence_is_saved_and_goes_on_between_two_rounds_with_drafts(model, knack):
    """A hybrid's state lies before the last round then, and the tokens since are owed."""
    job = jobs()[1]
    expected = model.plain(job).ids[0]
    engine = model.engine(model.scripted(KNACKS[knack]))
    content = Content(job.prompt, job.seed, job.sampling)
    engine.seat(SeatRequest(1, 0, 0, None, "oldest"), content)
    end = len(job.prompt)
    launch(engine, "prefill", Lane(0, 1, 0, 0, end, 0))
    tokens = list(launch(engine, "sample", Lane(0, 1, 0, end, 0, 1)).tokens[0])
    slot = 0
    while len(tokens) < 16:
        start = end + len(tokens) - 1
        outcome = launch(engine, "decode", Lane(slot, 1, 0, start, 4, 4))
        assert outcome.results == (Produced(len(outcome.tokens[0])),)
        tokens += outcome.tokens[0]
        held = end + len(tokens) - 1
        launch(engine, "save", Lane(slot, 1, 0, 0, held, 0), reason="free_memory")
        engine.release(slot, 0, 1)
        slot = (slot + 1) % 3
        engine.seat(SeatRequest(1, 0, slot, None, "resume"), content)
        launch(engine, "restore", Lane(slot, 1, 0, 0, held, 0), reason="resume_saved")
    assert tuple(tokens) == expected[: len(tokens)]
