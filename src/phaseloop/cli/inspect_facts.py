"""What there is to say about a GGUF file; each part is tried by itself, and says why it failed."""

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from phaseloop.model.device_plan import DevicePlan, Wanted, advice, plan_devices
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.plan import CONTEXT_STEP, available_memory, plan_memory
from phaseloop.model.shape import HEAD, Model
from phaseloop.model.weights import Weights
from phaseloop.text.budget import TemplateError
from phaseloop.text.chat_template import ChatTemplate, surroundings_of
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.vocabulary import Vocabulary, VocabularyError

SLOTS_DEFAULT = 4
UBATCH = 512  # tokens of one pass, as phaseloop serve has it by default
CACHES = {"f16": "F16", "q8_0": "Q8_0"}
NO_FIT = "no split, cache type or context of at least a page would fit"
KEYS = {  # shown -> key after the architecture's name
    "layers": "block_count",
    "width": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "experts": "expert_count",
    "experts_used": "expert_used_count",
    "context": "context_length",
}


class Tensor(Struct, frozen=True):
    name: str
    kind: str
    shape: tuple[int, ...]  # row-major
    size_bytes: int


class Share(Struct, frozen=True):
    """The tensors of one type."""

    kind: str
    tensors: int
    size_bytes: int


class TokenizerFacts(Struct, frozen=True):
    model: str
    pre: str
    tokens: int
    merges: int
    special: dict[str, str]
    ends: tuple[int, ...]  # generation ends with any of these tokens
    adds_beginning: bool


class Memory(Struct, frozen=True):
    """Bytes; contexts are tokens."""

    slots: int
    context: int
    sequence: int
    cache_type: str
    weights_bytes: int
    cache_bytes: int
    states_bytes: int
    scratch_bytes: int
    total_bytes: int
    available_bytes: int | None
    fits: bool
    context_that_fits: int
    described: str


class Devices(Struct, frozen=True):
    """GPUs to plan for."""

    split: tuple[float, ...]
    memory: tuple[int, ...] | None  # bytes of each; None: nobody knows


class DeviceMemory(Struct, frozen=True):
    """Bytes of one GPU."""

    layers: int
    weights_bytes: int
    cache_bytes: int
    states_bytes: int
    scratch_bytes: int
    total_bytes: int
    available_bytes: int | None
    fits: bool
    described: str


class Facts(Struct, frozen=True):
    path: str
    name: str | None
    architecture: str | None
    parameters: int
    size_bytes: int
    bits_per_weight: float
    mix: tuple[Share, ...]  # the largest first
    shape: dict[str, int]
    tokenizer: TokenizerFacts | None
    template: dict[str, bool] | None  # what it can do
    memory: Memory | None
    devices: tuple[DeviceMemory, ...]  # empty unless asked for
    obstacles: tuple[str, ...]  # why it cannot be served
    notes: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def is_servable(self) -> bool:
        return not self.obstacles


def facts_of(
    weights: Weights, context: int | None, slots: int, cache: str, devices: Devices | None = None
) -> Facts:
    """`context`: tokens of all sequences; None for as many as the model was trained for."""
    obstacles: list[str] = []
    notes: list[str] = []
    model = tried_model(weights, obstacles)
    vocabulary = tried_vocabulary(weights, obstacles, notes)
    generates = model is None or model.generates
    template = tried_template(vocabulary, notes) if vocabulary and generates else None
    memory = None if model is None else memory_of(weights, model, context, slots, cache)
    if memory is not None and model is not None:
        notes += memory_notes(memory, model, context)
    planned: tuple[DeviceMemory, ...] = ()
    if devices is not None and model is not None:
        planned = planned_devices(weights, model, context, slots, cache, devices, obstacles, notes)
    parameters = sum(int(np.prod(one.shape)) for one in weights.tensors.values())
    if not generates:
        notes.append("an encoder: it gives embeddings (serve --embeddings), and generates nothing")
    elif HEAD not in weights.tensors:
        notes.append("the output head is the embedding")
    name, architecture = (text_of(weights, f"general.{key}") for key in ("name", "architecture"))
    return Facts(
        path=str(weights.path),
        name=name,
        architecture=architecture,
        parameters=parameters,
        size_bytes=weights.size_bytes,
        bits_per_weight=8 * weights.size_bytes / max(1, parameters),
        mix=mix_of(weights),
        shape=shape_of(weights, architecture),
        tokenizer=None if vocabulary is None else tokenizer_of(vocabulary),
        template=template,
        memory=memory,
        devices=planned,
        obstacles=tuple(obstacles),
        notes=tuple(notes),
        tensors=tuple(
            Tensor(readable(name), one.kind, tuple(one.shape), one.data.nbytes)
            for name, one in weights.tensors.items()
        ),
    )


# --- what is tried --------------------------------------------------------------------------------


def tried_model(weights: Weights, obstacles: list[str]) -> Model | None:
    try:
        return load_model(weights)
    except ModelError as error:
        obstacles.append(str(error))
        return None


def tried_vocabulary(weights: Weights, obstacles: list[str], notes: list[str]) -> Vocabulary | None:
    try:
        vocabulary = vocabulary_of(weights.metadata)
    except VocabularyError as error:
        obstacles.append(str(error))
        return None
    notes += vocabulary.notes
    return vocabulary


def tried_template(vocabulary: Vocabulary, notes: list[str]) -> dict[str, bool] | None:
    """A model whose template does not work is served with another one."""
    if vocabulary.chat_template is None:
        notes.append("no chat template; ChatML is used")
        return None
    try:
        template = ChatTemplate(vocabulary.chat_template, surroundings_of(vocabulary))
    except TemplateError as error:
        notes.append(f"chat template: {error}; ChatML is used")
        return None
    return asdict(template.abilities)


# --- what is read ---------------------------------------------------------------------------------


def text_of(weights: Weights, key: str) -> str | None:
    value = weights.metadata.get(key)
    return readable(value) if isinstance(value, str) else None


def mix_of(weights: Weights) -> tuple[Share, ...]:
    found: dict[str, list[int]] = {}
    for one in weights.tensors.values():
        found.setdefault(one.kind, []).append(one.data.nbytes)
    shares = [Share(kind, len(sizes), sum(sizes)) for kind, sizes in found.items()]
    return tuple(sorted(shares, key=lambda share: -share.size_bytes))


def shape_of(weights: Weights, architecture: str | None) -> dict[str, int]:
    """What the header says, whether or not the architecture is known."""
    found: dict[str, int] = {}
    for shown, key in KEYS.items():
        value = weights.metadata.get(f"{architecture}.{key}")
        if isinstance(value, int) and not isinstance(value, bool):
            found[shown] = value
    return found


def readable(text: str) -> str:
    """Bytes of the file that are no UTF-8 cannot be written again."""
    return text.encode("utf-8", "replace").decode()


def tokenizer_of(vocabulary: Vocabulary) -> TokenizerFacts:
    special: dict[str, int | None] = asdict(vocabulary.special)
    return TokenizerFacts(
        model=str(vocabulary.model),
        pre=vocabulary.pre,
        tokens=len(vocabulary.tokens),
        merges=len(vocabulary.merges),
        special={
            name: readable(vocabulary.tokens[token])
            for name, token in special.items()
            if token is not None
        },
        ends=vocabulary.end_ids,
        adds_beginning=vocabulary.add_bos,
    )


def memory_of(
    weights: Weights, model: Model, context: int | None, slots: int, cache: str
) -> Memory:
    plan = plan_memory(
        weights,
        model,
        context=context or model.context_length,
        cache=CACHES[cache],
        slot_count=slots,
        ubatch=UBATCH,
        available_bytes=available_memory(),
    )
    return Memory(
        slots=slots,
        context=plan.context,
        sequence=plan.sequence,
        cache_type=cache,
        weights_bytes=plan.weights_bytes,
        cache_bytes=plan.cache_bytes,
        states_bytes=plan.states_bytes,
        scratch_bytes=plan.scratch_bytes,
        total_bytes=plan.total_bytes,
        available_bytes=plan.available_bytes,
        fits=plan.fits,
        context_that_fits=plan.context_that_fits(),
        described=plan.describe(),
    )


def planned_devices(
    weights: Weights,
    model: Model,
    context: int | None,
    slots: int,
    cache: str,
    devices: Devices,
    obstacles: list[str],
    notes: list[str],
) -> tuple[DeviceMemory, ...]:
    tokens = context or model.context_length
    wanted = Wanted(devices.split, tokens, CACHES[cache], slots, UBATCH, devices.memory)
    planned = tuple(map(device_of, plan_devices(weights, model, wanted)))
    if model.dimensions.recurrence is not None:
        notes.append("GPUs hold two states per slot; those kept for later prompts are in host RAM")
    if not all(device.fits for device in planned):
        would = " or ".join(advice(weights, model, wanted))
        obstacles.append(f"the GPUs are too small; {f'{would} would fit' if would else NO_FIT}")
    return planned


def device_of(plan: DevicePlan) -> DeviceMemory:
    return DeviceMemory(
        layers=plan.layer_count,
        weights_bytes=plan.weights_bytes,
        cache_bytes=plan.cache_bytes,
        states_bytes=plan.states_bytes,
        scratch_bytes=plan.scratch_bytes,
        total_bytes=plan.total_bytes,
        available_bytes=plan.available_bytes,
        fits=plan.fits,
        described=plan.describe() + ("" if plan.fits else ", too much"),
    )


def memory_notes(memory: Memory, model: Model, context: int | None) -> list[str]:
    found: list[str] = []
    if context is not None and context > model.context_length:
        found.append(
            f"one sequence gets {model.context_length} tokens at most, as the model was trained for"
        )
    if memory.context < CONTEXT_STEP:
        found.append(f"memory comes in pages of {CONTEXT_STEP} tokens")
    if model.dimensions.recurrence is not None:
        found.append("recurrent layers: prompts go on from where a state was kept")
    return found
