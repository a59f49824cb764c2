"""What `serve --sim` serves: a pretending engine, and a vocabulary made here to say something with.

The vocabulary is byte-level: one token per byte, so that every prompt has its tokens, and one per
word of the sentences that answers consist of.
"""

from msgspec.structs import replace

from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import SimModel
from phaseloop.engine.sim_fields import SettingError
from phaseloop.engine.sim_file import find_engine
from phaseloop.engine.sim_live import LiveSimEngine, Prose
from phaseloop.engine.sim_vectors import WIDTH
from phaseloop.engine.snapshots import Snapshots
from phaseloop.text.bpe import CHARACTER_OF
from phaseloop.text.chat_builtin import CHATML
from phaseloop.text.pretokenizers import splitter
from phaseloop.text.vocabulary import SpecialIds, TokenType, Vocabulary

from .errors import UserError
from .serve_loaded import Facts, Loaded, Reporter
from .serve_settings import Settings

PRE = "smaug-bpe"
SENTENCES = (
    "A prompt is read in one phase, and an answer is written in another.",
    "Nobody speaks before everybody has been heard.",
    "The cohort waits at the barrier until its last member is ready.",
    "Then all first tokens are drawn at once.",
    "Whoever arrives later waits until the others have finished.",
    "Every wait has a reason, and the trace can name it.",
    "A round never mixes prompts with tokens.",
    "Time passes here as it would on a real engine.",
    "Nothing of this was computed by a model.",
    "These words come from a list, and a seed chooses among them.",
    "Equal seeds give equal answers.",
    "The loop takes one event after the other and decides what follows.",
    "A client that does not read is parked, and disturbs nobody.",
    "What one request costs, another one does not pay.",
    "When the last answer is complete, the next prompts begin.",
    "Run it again, and it will say the same.",
)
PAGE_LENGTH = 256


def load(settings: Settings, reporter: Reporter) -> Loaded:
    """Raises UserError for an engine that is not known."""
    assert settings.sim is not None
    try:
        model = find_engine(settings.sim)
    except SettingError as error:
        raise UserError(str(error).replace("--engine", "--sim", 1)) from None
    model = sized(model, settings)
    vocabulary, prose = words()
    reporter.say("pretending", engine=model.name, speed=settings.sim_speed)
    pooling = (settings.wanted_pooling or "mean") if settings.encodes else None
    engine = LiveSimEngine(model, prose, speed=settings.sim_speed, pooling=pooling)
    facts = Facts(
        name=model.name,
        architecture="sim",
        width=0 if pooling is None else 1 if pooling == "rank" else WIDTH,
        context_trained=model.capacity.context_length,
    )
    limits = limits_of(engine.describe())
    return Loaded(engine, vocabulary, facts, model.capacity.round_ms, Snapshots(0), limits)


def sized(model: SimModel, settings: Settings) -> SimModel:
    """With the operator's slots, batch and context; the latter is all of the engine's memory."""
    capacity = model.capacity
    if settings.slot_count is not None:
        capacity = replace(capacity, slot_count=settings.slot_count)
    if settings.context:
        pages = -(-settings.context // PAGE_LENGTH)
        capacity = replace(
            capacity,
            context_length=max(2, settings.context),
            page_count=pages,
            page_length=PAGE_LENGTH,
        )
    capacity = replace(capacity, batch_tokens=min(capacity.batch_tokens, settings.batch))
    return replace(model, capacity=capacity)


def words() -> tuple[Vocabulary, Prose]:
    tokens = [CHARACTER_OF[byte] for byte in range(0x100)]
    ids: dict[str, int] = {}
    cut = splitter(PRE)
    sentences: list[tuple[int, ...]] = []
    for sentence in SENTENCES:
        pieces = ["".join(CHARACTER_OF[byte] for byte in p.encode()) for p in cut(f"{sentence} ")]
        for piece in pieces:
            if piece not in ids:
                ids[piece] = len(tokens)
                tokens.append(piece)
        sentences.append(tuple(ids[piece] for piece in pieces))
    types = [TokenType.NORMAL] * len(tokens)
    start, end = len(tokens), len(tokens) + 1
    tokens += ["<|im_start|>", "<|im_end|>"]
    types += [TokenType.CONTROL] * 2
    vocabulary = Vocabulary(
        model="gpt2",
        pre=PRE,
        tokens=tuple(tokens),
        types=tuple(types),
        special=SpecialIds(bos=start, eos=end),
        end_ids=(end,),
        chat_template=CHATML,
    )
    return vocabulary, Prose(tuple(sentences), end)
