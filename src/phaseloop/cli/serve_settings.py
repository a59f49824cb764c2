"""What `phaseloop serve` was told, with its defaults, and what does not go together.

The defaults are llama-server's where it has the flag.
"""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from phaseloop.core.policy import DEFAULT, MS, PRESETS
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import Policy
from phaseloop.engine.settings import Pooling, Sampling
from phaseloop.runtime.trace_content import TraceContent

from .errors import UserError
from .flags import Group, Parsed, Reader
from .flags_foreign import FOREIGN
from .flags_serve import USED
from .serve_samplers import samplers_of
from .simulate_options import POLICY_OPTIONS, adjusted

SLOTS_AUTO = 4
ROUND_MS_CPU = 500
ROUND_MS_GPU = 1000
BREAKERS = ("\n", ":", '"', "*")


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields are those of the flags (cli/flags_serve.py).  None: left to whoever uses it."""

    model: str | None = None
    hf_repo: str | None = None
    hf_file: str | None = None
    hf_token: str | None = None
    offline: bool = False
    alias: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    sim: str | None = None
    sim_speed: float = 1.0

    lora: tuple[tuple[str, float], ...] = ()  # files, and how much of each by default
    lora_init_without_apply: bool = False

    device: str = "cpu"
    tensor_split: tuple[float, ...] = ()
    peer_access: str = "none"
    context: int = 0
    slots: int = -1
    batch: int = 2048
    ubatch: int = 512
    repack: bool = True
    threads: int = -1
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    fast_attention: bool = False
    reuse_generated: bool = False
    cache_ram: int | None = None
    slot_prompt_similarity: float = 0.1

    spec_type: tuple[str, ...] = ()
    spec_default: bool = False
    model_draft: str | None = None
    hf_repo_draft: str | None = None
    draft_n_max: int = 3
    draft_n_min: int = 0
    draft_p_min: float = 0.0
    draft_cost: float | None = None
    ngram_size_n: int = 12
    ngram_size_m: int = 48
    ngram_min_hits: int = 1

    policy: str | None = None
    tg_quantum_ms: int | None = None
    pp_quantum_ms: int | None = None
    seat_quantum_ms: int | None = None
    linger_ms: int | None = None
    serial_order: str | None = None
    max_round_ms: int | None = None
    phase_control: bool = False
    cont_batching: bool = True

    max_queued: int = 1024
    max_queue_ms: int = 0
    output_reserve: int = 512
    client_stall_ms: int = 30_000
    shutdown_grace_s: float = 3.0

    predict: int = -1
    seed: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breaker: tuple[str, ...] = BREAKERS
    samplers: str | None = None
    sampler_seq: str | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False

    chat_template: str | None = None
    chat_template_file: str | None = None
    template_variables: dict[str, object] = {}
    reasoning: str = "auto"
    reasoning_format: str = "auto"
    cache_prompt: bool = True
    context_shift: bool = False
    prefill_assistant: bool = True

    host: str = "127.0.0.1"
    port: int = 8080
    reuse_port: bool = False
    api_prefix: str = ""
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    cors_origins: str = "*"
    timeout: int = 3600
    sse_ping_interval: int = 30
    metrics: bool = False
    show_slots: bool = True
    slot_save_path: str | None = None

    embedding: bool = False
    reranking: bool = False
    pooling: Pooling | None = None
    embd_normalize: int = 2
    props: bool = False
    supervise: bool = False

    trace: str | None = None
    trace_content: TraceContent = "counts"
    log_file: str | None = None
    log_format: Literal["console", "json"] = "console"
    log_json: bool = False
    log_colors: str = "auto"
    log_disable: bool = False
    verbose: bool = False
    verbosity: str = "3"

    @property
    def drafters(self) -> tuple[str, ...]:
        """The kinds, in the order in which they are asked."""
        named = list(self.spec_type)
        if self.spec_default and "ngram-simple" not in named:
            named.insert(0, "ngram-simple")  # what costs nothing comes first, if nobody says
        if self.has_draft_model and not any(kind.startswith("draft-") for kind in named):
            named.append("draft-simple")  # or what the file turns out to be
        return tuple(named)

    @property
    def has_draft_model(self) -> bool:
        return self.model_draft is not None or self.hf_repo_draft is not None

    @property
    def on_gpu(self) -> bool:
        """Whether kernels for GPUs compute, wherever they run."""
        return self.device in ("cuda", "cuda-host")

    @property
    def encodes(self) -> bool:
        """Whether it gives embeddings or ranks, instead of generating."""
        return self.embedding or self.reranking

    @property
    def wanted_pooling(self) -> Pooling | None:
        """None: as the model's file says."""
        return "rank" if self.reranking else self.pooling

    @property
    def slot_count(self) -> int | None:
        """As stated; None where it is left to phaseloop."""
        return None if self.slots == -1 else self.slots


def read_settings(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Settings, tuple[str, ...]]:
    """The settings, and what to warn about.  Raises UserError."""
    parsed = Reader((*USED, Group("", FOREIGN)), environment).read(arguments)
    settings = msgspec.convert(parsed.values, Settings)
    check(settings, parsed)
    return settings, parsed.warnings


def check(settings: Settings, parsed: Parsed) -> None:
    """No setting is silently without effect, and none is noticed too late."""
    named = [settings.model, settings.hf_repo, settings.sim]
    if not any(named):
        raise UserError("no model: name one with -m FILE, -hf ORG/REPO, or pretend with --sim")
    if settings.sim is not None and (settings.model or settings.hf_repo):
        raise UserError("--sim goes without a model (-m, -hf)")
    if settings.hf_file is not None and settings.hf_repo is None:
        raise UserError("--hf-file goes with -hf ORG/REPO")
    if settings.sim is None and "--sim-speed" in parsed.given:
        raise UserError("--sim-speed goes with --sim")
    check_encoding(settings, parsed)
    check_lora(settings)
    check_device(settings, parsed)
    if settings.slot_save_path is not None:
        if settings.sim is not None:
            raise UserError("--slot-save-path goes with a model: --sim has no state to save")
        if not os.access(settings.slot_save_path, os.W_OK | os.X_OK):
            raise UserError(
                f"--slot-save-path {settings.slot_save_path}: no directory that can be written;"
                " make it first"
            )
    if settings.slots == 0:
        raise UserError("-np 0: one slot is the least; -1 leaves it to phaseloop")
    if settings.trace is None and "--trace-content" in parsed.given:
        raise UserError("--trace-content goes with --trace FILE")
    if settings.chat_template is not None and settings.chat_template_file is not None:
        raise UserError("--chat-template goes without --chat-template-file")
    if settings.ubatch > settings.batch and "--ubatch-size" in parsed.given:
        raise UserError(f"-ub {settings.ubatch} is above -b {settings.batch}; lower it")
    check_drafts(settings)
    policy_of(settings)
    sampling_of(settings)


def check_drafts(settings: Settings) -> None:
    if not settings.drafters:
        return
    if settings.sim is not None:
        raise UserError("--spec-type and -md go with a model: --sim drafts as its engine says")
    if settings.model_draft is not None and settings.hf_repo_draft is not None:
        raise UserError("-md and -hfd both name a draft model; give one")
    for kind in ("draft-simple", "draft-dflash"):
        if kind in settings.drafters and not settings.has_draft_model:
            raise UserError(f"--spec-type {kind}: name the draft model, with -md FILE")
    has_model = any(kind.startswith("draft-") for kind in settings.drafters)
    if settings.draft_n_min > settings.draft_n_max and has_model:
        raise UserError(
            f"--spec-draft-n-min {settings.draft_n_min} is above --spec-draft-n-max "
            f"{settings.draft_n_max}: no draft would be verified; lower it"
        )


def check_encoding(settings: Settings, parsed: Parsed) -> None:
    if not settings.encodes:
        for name in ("--pooling", "--embd-normalize"):
            if name in parsed.given:
                raise UserError(f"{name} goes with --embeddings")
        return
    if settings.reranking and settings.pooling not in (None, "rank"):
        raise UserError(f"--reranking is --pooling rank, it goes without {settings.pooling}")
    if settings.slot_save_path is not None:
        raise UserError("--slot-save-path: a server for embeddings keeps nothing in its slots")
    if settings.context_shift:
        raise UserError("--context-shift: a server for embeddings has no answers that could go on")


def check_lora(settings: Settings) -> None:
    if settings.lora and settings.sim is not None:
        raise UserError("--lora goes with a model, not with --sim")
    if settings.lora and settings.encodes:
        raise UserError("--lora: a server for embeddings has no adapters; merge it into the model")
    if settings.lora_init_without_apply and not settings.lora:
        raise UserError("--lora-init-without-apply goes with --lora")
    seen: set[Path] = set()
    for name, _ in settings.lora:
        path = Path(name).resolve()
        if path in seen:
            raise UserError(f"--lora {name}: named twice; it has one id, and a scale of any size")
        seen.add(path)


def check_device(settings: Settings, parsed: Parsed) -> None:
    """What goes with GPUs only, and what does not go with them yet."""
    if not settings.on_gpu:
        for name in ("--tensor-split", "--peer-access"):
            if name in parsed.given:
                raise UserError(f"{name} goes with --device cuda")
        return
    named = f"--device {settings.device}"
    if settings.sim is not None:
        raise UserError(f"{named} goes with a model, not with --sim")
    if settings.encodes or settings.lora:
        what = "--lora" if settings.lora else "--embeddings and --reranking"
        raise UserError(f"{what}: not on GPUs yet; use --device cpu")
    if any(kind != "ngram-simple" for kind in settings.drafters):
        raise UserError(f"{named}: no model drafts on GPUs yet; use --spec-type ngram-simple")
    for name in ("--threads", "--fast-attention", "--repack", "--no-repack"):
        if name in parsed.given:
            raise UserError(f"{name} is about the CPU, it goes without {named}")


# --- what the settings make -----------------------------------------------------------------------


def scales_of(settings: Settings) -> tuple[float, ...]:
    """Of each adapter, for requests that name none."""
    is_on = not settings.lora_init_without_apply
    return tuple(scale if is_on else 0.0 for _, scale in settings.lora)


def policy_of(settings: Settings) -> Policy:
    if not settings.cont_batching:
        if settings.policy not in (None, "no-cont-batching"):
            raise UserError(f"-nocb is a policy of its own, it goes without {settings.policy}")
        name = "no-cont-batching"
    else:
        name = settings.policy or DEFAULT
    args = Namespace(**{field: getattr(settings, field) for field in POLICY_OPTIONS})
    for field, names in POLICY_OPTIONS.items():
        if getattr(settings, field) is not None and name not in names:
            flag = f"--{field.replace('_', '-')}"
            raise UserError(f"{flag} is for {', '.join(names)}, not for {name}")
    return adjusted(PRESETS[name], args)


def limited(limits: Limits, settings: Settings, *, round_ms: int = ROUND_MS_CPU) -> Limits:
    """The engine's limits with the operator's; `round_ms` where these do not say."""
    if settings.max_round_ms is not None:
        round_ms = settings.max_round_ms
    return replace(
        limits,
        queue_length_max=settings.max_queued,
        output_reserve=settings.output_reserve,
        round_ns_max=round_ms * MS,
        client_stall_ns=settings.client_stall_ms * MS,
        shutdown_grace_ns=round(settings.shutdown_grace_s * 1000) * MS,
    )


def sampling_of(settings: Settings) -> Sampling:
    """Without what needs the tokenizer: breakers, and the tokens that --ignore-eos rules out."""
    values = asdict(settings)
    same = {name: values[name] for name in Sampling.__struct_fields__ if name in SAME_FIELDS}
    samplers = samplers_of(settings.samplers, settings.sampler_seq)
    return Sampling(**same, samplers=samplers, logit_bias=settings.logit_bias)


SAME_FIELDS = (set(Sampling.__struct_fields__) & set(Settings.__struct_fields__)) - {
    "samplers",
    "logit_bias",
}


def api_keys_of(settings: Settings) -> tuple[str, ...]:
    """Those of the flag and those of the file.  Raises UserError."""
    if settings.api_key_file is None:
        return settings.api_key
    path = settings.api_key_file
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--api-key-file {path}: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UserError(f"--api-key-file {path}: holds no key; the API would be open to all")
    return settings.api_key + keys


def threads_of(settings: Settings) -> int:
    """One per core that this process may use, unless stated."""
    if settings.threads > 0:
        return settings.threads
    return max(1, len(os.sched_getaffinity(0)))


def template_variables(settings: Settings) -> dict[str, object]:
    """--reasoning is the variable that templates have for it; one that is stated by name wins."""
    if settings.reasoning == "auto":
        return settings.template_variables
    return {"enable_thinking": settings.reasoning == "on"} | settings.template_variables


def queue_wait_ns(settings: Settings) -> int | None:
    return settings.max_queue_ms * MS or None
