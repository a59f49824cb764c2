"""What the routes serve, and how the operator wants it served."""

import time
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeAlias, TypeVar, cast

from anyio import CapacityLimiter, to_thread
from msgspec import Struct, field
from starlette.requests import HTTPConnection

from phaseloop import __version__
from phaseloop.engine.protocol import SlotFiles
from phaseloop.engine.settings import Sampling
from phaseloop.runtime.gateway import Stream
from phaseloop.runtime.service import Service
from phaseloop.runtime.watch import Counters
from phaseloop.text.chat_template import ChatTemplate
from phaseloop.text.tokenizer import Tokenizer

from .adapters import Loras
from .errors import unavailable
from .histograms import Durations
from .sampling_fields import BREAKERS_DEFAULT

P = ParamSpec("P")
T = TypeVar("T")

ReasoningFormat: TypeAlias = Literal["auto", "none"]  # a thought told apart, or left in the text

BLOCKING_THREADS = 2  # text work holds the interpreter's lock: more threads would not do more


class ModelCard(Struct, frozen=True):
    """What is told of the model; names as llama-server has them on the wire."""

    aliases: tuple[str, ...]  # at least one; answers carry the first
    path: str = ""
    size: int = 0  # bytes of all tensors
    ftype: str = ""  # as in "Q4_K - Medium"
    architecture: str = ""  # general.architecture
    vocab_type: int = 0  # llama.cpp's number: 1 SentencePiece, 2 byte-level BPE
    n_vocab: int = 0
    n_ctx: int = 0  # tokens of one sequence, as served
    n_ctx_train: int = 0
    n_embd: int = 0
    n_params: int = 0
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.aliases[0]


def ignore(_stream: Stream) -> None:
    """Nobody wants to hear of requests."""


class Served(Struct, frozen=True):
    """One loaded model with its engine, ready to answer.

    `began` and `ended` hear of every generation request, before its first and after its last item:
    for the two lines per request in the log.
    """

    service: Service
    tokenizer: Tokenizer
    model: ModelCard
    template: ChatTemplate | None = None
    defaults: Sampling = Sampling()
    default_limit: int | None = None  # tokens of an answer whose request states no limit
    began: Callable[[Stream], None] = ignore
    ended: Callable[[Stream], None] = ignore
    created: int = 0  # unix seconds
    id_seed: int = 0  # of the ids in answers; the same one gives a replay the same ids
    default_seed: int | None = None  # of requests that state none; None draws one for each
    breaker_texts: tuple[str, ...] = BREAKERS_DEFAULT  # of DRY, where a request names none
    cache_prompt: bool = True  # a prompt may begin with what was computed before
    queue_wait_ns_max: int | None = None  # the longest wait for a seat; None is any
    context_shift: bool = False  # an answer that fills the context goes on, its beginning dropped
    prefills: bool = True  # a last message of the assistant is continued unasked
    reasoning_format: ReasoningFormat = "auto"  # of requests that name none
    template_variables: Mapping[str, object] = {}  # beneath a request's chat_template_kwargs
    embd_normalize: int = 2  # of embeddings whose request does not say; 2: to length 1
    slot_files: SlotFiles | None = None  # None: slots are not saved to disk
    loras: Loras = field(default_factory=Loras)
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(BLOCKING_THREADS))

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """For work on text of unknown length, so that the event loop goes on meanwhile."""
        return await to_thread.run_sync(lambda: call(*args, **kwargs), limiter=self.threads)


class HttpOptions(Struct, frozen=True):
    api_keys: tuple[str, ...] = ()  # none: everybody may
    cors_origins: str = "*"  # "*" any, "localhost" loopback ones, else a comma-separated list
    prefix: str = ""  # of every path, as in "/api"
    body_bytes_max: int = 64 << 20
    metrics: bool = False
    slots: bool = True
    props: bool = False  # POST /props
    phase_control: bool = False  # PUT /phase
    ping_interval_s: int = 30  # of silence, then a comment keeps a stream alive
    timing_field: bool = True  # the member `phaseloop` in answers, unless a request says otherwise
    build: str = f"b{__version__}"  # build_info and system_fingerprint; clients expect the b


class Serving:
    """One application's life: nothing to serve yet, something, or nothing any more."""

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        self.served: Served | None = None
        self.failure: BaseException | None = None  # why there will never be anything
        self.started = int(time.time())  # unix seconds
        self.is_leaving = False
        self.scraped = Counters(ends={})  # as they were when /metrics was last asked for
        self.durations = Durations()

    def excuse(self) -> str:
        """Why there is nothing to serve."""
        if self.failure is not None:
            return "The model could not be loaded"
        return "The server is shutting down" if self.is_leaving else "Loading model"


def serving_of(connection: HTTPConnection) -> Serving:
    return cast(Serving, connection.app.state.serving)


def options_of(connection: HTTPConnection) -> HttpOptions:
    return serving_of(connection).options


def served_of(connection: HTTPConnection) -> Served:
    """For routes.  The gate lets nobody in before (guard.py), but a server may end meanwhile."""
    serving = serving_of(connection)
    if serving.served is None:
        raise unavailable(serving.excuse())
    return serving.served
