"""What a generation request wants, beside its prompt: every field of it, typed and checked."""

from typing import Any, Literal, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.vocabulary import Request
from phaseloop.engine.settings import Adapters, Sampling, Speculation
from phaseloop.text.stops import StopStrings

from .adapters import adapters_of
from .errors import invalid_field, not_supported
from .request_fields import INT_MAX, Fields, choice, is_empty, shown, texts, wrong
from .sampling_fields import PROBS_MAX, breaker_strings_of, sampling_of, seed_of
from .served import HttpOptions, ReasoningFormat, Served

Shape: TypeAlias = Literal["native", "completion", "chat"]  # of the answer, by the route

REASONING_FORMATS: dict[str, ReasoningFormat] = {"auto": "auto", "deepseek": "auto", "none": "none"}
STOPS_MAX = 1024
STOPS_CHARACTERS_MAX = 65_536  # together; each costs memory while the request lives
RESPONSE_FIELDS_MAX = 256
TOP_LOGPROBS_DEFAULT = 20  # of a chat request that says logprobs and no number
MS = 1_000_000


class Wanted(Struct, frozen=True):
    """A request without its prompt.  Times are nanoseconds, lengths tokens; None is no limit."""

    shape: Shape
    sampling: Sampling
    speculation: Speculation
    seed: int | None  # None: drawn for this request
    choices: int
    limit: int | None
    stops: StopStrings | None
    stop_texts: tuple[str, ...]
    breaker_texts: tuple[str, ...]
    ignore_eos: bool
    keep: int  # tokens that a context shift leaves alone; -1 the whole prompt
    shifts: bool  # whether there may be one
    cache_prompt: bool
    slot_hint: int | None
    priority: int
    deadline_after_ns: int | None
    queue_wait_ns_max: int | None
    newline_after_ns: int | None  # t_max_predict_ms: later than that, the next line ends it
    stream: bool
    include_usage: bool
    timings_per_token: bool
    return_progress: bool
    return_tokens: bool
    alternatives: int | None  # to show beside each token; None shows no likelihoods
    ping_interval_s: int  # of silence in a stream; 0 or below: never a comment
    response_fields: tuple[str, ...]
    verbose: bool
    timing_field: bool
    echo: bool
    reasoning_format: ReasoningFormat  # none: what a model thinks stays in its answer
    adapters: Adapters


def wanted_of(fields: Fields, shape: Shape, served: Served, http: HttpOptions) -> Wanted:
    """Raises ApiError, which names the field.  May take a while: call it in a thread."""
    refuse_what_comes_later(fields)
    limits = served.service.limits
    stop_texts = stops_of(fields)
    alternatives = alternatives_of(fields, shape)
    sampling = sampling_of(fields, served.defaults, served.tokenizer, served.breaker_texts)
    if alternatives is not None:  # the engine reports nothing for 0, so ask for one more
        sampling = replace(sampling, n_probs=max(1, alternatives))
    echo = shape == "completion" and fields.flag("echo", False)
    if echo and alternatives is not None:
        raise not_supported("echo: likelihoods of the prompt's tokens are not supported yet")
    no_limit = -1 if served.default_limit is None else served.default_limit
    limit = fields.bounded(
        "n_predict", "max_completion_tokens", "max_tokens", default=no_limit, low=-1
    )
    return Wanted(
        shape=shape,
        sampling=sampling,
        speculation=speculation_of(fields),
        seed=seed_of(fields, served.default_seed),
        choices=choices_of(fields, limits.slot_count),
        limit=None if limit < 0 else limit,
        stops=StopStrings(stop_texts) if stop_texts else None,
        stop_texts=stop_texts,
        breaker_texts=breaker_strings_of(fields, served.breaker_texts),
        ignore_eos=fields.flag("ignore_eos", False),
        keep=fields.bounded("n_keep", default=0, low=-1),
        shifts=served.context_shift,
        cache_prompt=fields.flag("cache_prompt", served.cache_prompt),
        slot_hint=slot_of(fields, limits.slot_count),
        priority=fields.bounded("priority", default=0, low=-INT_MAX),
        deadline_after_ns=milliseconds(fields, "deadline_ms"),
        queue_wait_ns_max=milliseconds(fields, "max_queue_ms", served.queue_wait_ns_max),
        newline_after_ns=milliseconds(fields, "t_max_predict_ms"),
        stream=fields.flag("stream", False),
        include_usage=fields.nested("stream_options").flag("include_usage", False),
        timings_per_token=fields.flag("timings_per_token", False),
        return_progress=fields.flag("return_progress", False),
        return_tokens=fields.flag("return_tokens", False),
        alternatives=alternatives,
        ping_interval_s=fields.bounded("sse_ping_interval", default=http.ping_interval_s, low=-1),
        response_fields=response_fields_of(fields, shape),
        verbose=fields.flag("verbose", False),
        timing_field=fields.flag("phaseloop", http.timing_field),
        echo=echo,
        reasoning_format=reasoning_format_of(fields, served.reasoning_format),
        adapters=adapters_of(fields, served.loras),
    )


def request_of(wanted: Wanted, prompt_length: int) -> Request:
    """As the scheduler sees it; the gateway gives it its id."""
    keep = prompt_length if wanted.keep < 0 else min(wanted.keep, prompt_length)
    return Request(
        0,
        prompt_length,
        output_limit=wanted.limit,
        choices=wanted.choices,
        priority=wanted.priority,
        deadline_after_ns=wanted.deadline_after_ns,
        queue_wait_ns_max=wanted.queue_wait_ns_max,
        slot_hint=wanted.slot_hint,
        shift_keep=keep if wanted.shifts else None,
        keep_cache=wanted.cache_prompt,
    )


def refuse_what_comes_later(fields: Fields) -> None:
    """Fields of llama-server and OpenAI that would change the answer, and cannot yet."""
    fields.refuse("grammar", is_harmless=is_empty)
    fields.refuse("json_schema", is_harmless=lambda _: False)
    fields.refuse("n_indent", is_harmless=is_empty)
    fields.refuse("functions", is_harmless=is_empty)
    fields.refuse("best_of", is_harmless=lambda best: best == (fields.raw.get("n") or 1))
    fields.refuse("modalities", is_harmless=lambda kinds: kinds == ["text"])
    if fields.raw.get("tool_choice") != "none":
        fields.refuse("tools", is_harmless=is_empty)
    place, form = fields.found("response_format")
    if form is None:
        return
    kind = cast(dict[str, Any], form).get("type") if isinstance(form, dict) else form
    if kind in ("json_object", "json_schema"):
        raise not_supported(f"{place}: {kind} is not supported yet; leave it out or say text")
    if kind != "text":
        known = "text, json_object or json_schema"
        raise invalid_field(f"{place}.type", f"must be {known}, not {shown(kind)}")


def speculation_of(fields: Fields) -> Speculation:
    """As llama-server took them while drafts could be asked for per request."""

    def count(name: str) -> int | None:
        _, value = fields.found(name)
        return None if value is None else fields.bounded(name, default=0, low=0)

    p_min: float | None = None
    if fields.found("speculative.p_min")[1] is not None:
        p_min = fields.held_real("speculative.p_min", default=0.0, low=0.0, high=1.0)
    return Speculation(count("speculative.n_max"), count("speculative.n_min"), p_min)


def stops_of(fields: Fields) -> tuple[str, ...]:
    place, value = fields.found("stop")
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise wrong(place, "a string or a list of strings", value)
    found = texts(
        place, cast(object, listed), count_max=STOPS_MAX, characters_max=STOPS_CHARACTERS_MAX
    )
    return tuple(stop for stop in found if stop)


def alternatives_of(fields: Fields, shape: Shape) -> int | None:
    """How many alternatives to show beside each token; None if nothing was asked for."""
    if shape == "chat" and isinstance(fields.raw.get("logprobs"), bool):
        if fields.raw["logprobs"]:
            default = TOP_LOGPROBS_DEFAULT
            return fields.bounded("top_logprobs", default=default, low=0, high=PROBS_MAX)
        names: tuple[str, ...] = ("n_probs",)
    else:
        names = ("n_probs", "logprobs")
    if shape == "chat" and fields.raw.get("top_logprobs") is not None:
        raise invalid_field("top_logprobs", "needs logprobs to be true")
    count = fields.bounded(*names, default=0, low=0, high=PROBS_MAX)
    return count or None


def choices_of(fields: Fields, slot_count: int) -> int:
    name, value = fields.found("n_cmpl", "n")
    choices = fields.bounded("n_cmpl", "n", default=1, low=1)
    if choices > slot_count:
        problem = f"{shown(value)} choices need as many slots, and this server has {slot_count}"
        raise invalid_field(name, f"{problem}; --parallel sets how many")
    return choices


def slot_of(fields: Fields, slot_count: int) -> int | None:
    slot = fields.bounded("id_slot", default=-1, low=-1, high=slot_count - 1)
    return None if slot < 0 else slot


def reasoning_format_of(fields: Fields, default: ReasoningFormat) -> ReasoningFormat:
    place, _ = fields.found("reasoning_format")
    name = fields.text("reasoning_format", default)
    if name == "deepseek-legacy":
        raise not_supported(f"{place}: {name} is not supported yet; there are auto and none")
    return choice(place, name, REASONING_FORMATS)


def milliseconds(fields: Fields, name: str, default_ns: int | None = None) -> int | None:
    """A duration in nanoseconds; 0 and -1 are no limit."""
    if fields.found(name)[1] is None:
        return default_ns
    duration = fields.bounded(name, default=0, low=-1, high=INT_MAX)
    return duration * MS if duration > 0 else None


def response_fields_of(fields: Fields, shape: Shape) -> tuple[str, ...]:
    names = fields.texts(
        "response_fields", count_max=RESPONSE_FIELDS_MAX, characters_max=STOPS_CHARACTERS_MAX
    )
    return (names or ()) if shape == "native" else ()
