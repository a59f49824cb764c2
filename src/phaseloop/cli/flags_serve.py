"""The flags of `phaseloop serve` that do something, in the groups of its help.

Spellings, variables and defaults are llama-server's (build 11434) where it has the flag; flags that
only phaseloop has read PHASELOOP_<NAME>.  Defaults stand in cli/serve_settings.py.
"""

from phaseloop.core.policy import DEFAULT, PRESETS

from .flags import (
    MAYBE,
    SWITCH,
    Group,
    Kind,
    fraction,
    integer,
    keys,
    one_of,
    own,
    prefix,
    text,
    text_list,
    used,
)
from .flags_answers import ANSWERS, CONTEXT_MAX
from .flags_device import DEVICE
from .flags_embedding import EMBEDDING
from .flags_lora import LORA
from .flags_speculation import SPECULATION

PORT_MAX = 65_535
MS_MAX = 10**9
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
LEVELS = tuple(map(str, range(6)))

MODEL = Group(
    "model",
    (
        used(
            "-m --model",
            text("FILE|NAME"),
            "model",
            "a GGUF file, or a name that was pulled",
            env="LLAMA_ARG_MODEL",
        ),
        used(
            "-hf -hfr --hf-repo",
            text("ORG/REPO[:QUANT]"),
            "hf_repo",
            "a model of the Hugging Face hub (extra `hub`); QUANT is Q4_K_M if left out",
            env="LLAMA_ARG_HF_REPO",
        ),
        used(
            "-hff --hf-file",
            text("FILE"),
            "hf_file",
            "this file of the repository instead of a QUANT",
            env="LLAMA_ARG_HF_FILE",
        ),
        used("-hft --hf-token", text("TOKEN"), "hf_token", "for the hub", env="HF_TOKEN"),
        used(
            "--offline", SWITCH, "offline", "only what was pulled before", env="LLAMA_ARG_OFFLINE"
        ),
        used(
            "-a --alias",
            text_list(),
            "alias",
            "names of the model in the API; answers carry the first",
            env="LLAMA_ARG_ALIAS",
        ),
        used("--tags", text_list(), "tags", "shown with the model", env="LLAMA_ARG_TAGS"),
        own(
            "sim", text("ENGINE"), "no model: an engine that pretends, see simulate --list-engines"
        ),
        own("sim-speed", fraction(0, 1e6), "how much faster than life it is; 0: it takes no time"),
    ),
)
ENGINE = Group(
    "engine and memory",
    (
        used(
            "-c --ctx-size",
            integer(0, CONTEXT_MAX),
            "context",
            "tokens of KV cache in all, of which one sequence may have as many as the model was "
            "trained for; 0: so many, or as fit into memory",
            env="LLAMA_ARG_CTX_SIZE",
        ),
        used(
            "-np --parallel",
            integer(-1, 4096),
            "slots",
            "slots: sequences at once; -1: 4",
            env="LLAMA_ARG_N_PARALLEL",
        ),
        used(
            "-b --batch-size",
            integer(1, 1 << 20),
            "batch",
            "the most tokens of one round",
            env="LLAMA_ARG_BATCH",
        ),
        used(
            "-ub --ubatch-size",
            integer(1, 1 << 16),
            "ubatch",
            "the most tokens of one pass in a round",
            env="LLAMA_ARG_UBATCH",
        ),
        used(
            "--repack",
            SWITCH,
            "repack",
            "copies of weights for ggml's wider kernels; they may take as much memory again",
            env="LLAMA_ARG_REPACK",
            off="-nr --no-repack",
        ),
        used(
            "-t --threads",
            integer(-1, 512),
            "threads",
            "threads that compute; -1: one per core",
            env="LLAMA_ARG_THREADS",
        ),
        used(
            "-ctk --cache-type-k",
            one_of(*CACHE_TYPES, metavar="TYPE"),
            "cache_type_k",
            "f16 or q8_0; keys and values have one type, others become the next better one",
            env="LLAMA_ARG_CACHE_TYPE_K",
        ),
        used(
            "-ctv --cache-type-v",
            one_of(*CACHE_TYPES, metavar="TYPE"),
            "cache_type_v",
            "as above",
            env="LLAMA_ARG_CACHE_TYPE_V",
        ),
        own("fast-attention", SWITCH, "faster on long prompts; answers' bits then may vary"),
        own("reuse-generated", SWITCH, "a prompt may reuse what was computed as answer, see docs"),
        used(
            "-cram --cache-ram",
            integer(-1, 1 << 24),
            "cache_ram",
            "MiB of host memory for the state of earlier prompts (8192, or half of what there is); "
            "-1: no limit, 0: none",
            env="LLAMA_ARG_CACHE_RAM",
        ),
        used(
            "-sps --slot-prompt-similarity",
            fraction(0, 1),
            "slot_prompt_similarity",
            "share of a slot's tokens that a prompt must begin with to be given that slot",
        ),
    ),
)
POLICY = Group(
    "phase policy",
    (
        own(
            "policy", one_of(*PRESETS, metavar="NAME"), f"{', '.join(PRESETS)} (default: {DEFAULT})"
        ),
        own("tg-quantum-ms", integer(0, MS_MAX), "quantum: tokens' turn while prompts wait (2000)"),
        own("pp-quantum-ms", integer(0, MS_MAX), "quantum: prompts' turn while tokens wait (1000)"),
        own(
            "seat-quantum-ms",
            integer(0, MS_MAX),
            "quantum: lend on a slot that was held so long (0: never)",
        ),
        own("linger-ms", integer(0, MS_MAX), "barrier-*: how long a cohort waits for company (0)"),
        own(
            "serial-order",
            one_of("fifo", "shortest"),
            "barrier-serial: whose prompt is next (fifo)",
        ),
        own(
            "max-round-ms", integer(0, MS_MAX), "longest prompt round; 0: by tokens alone (CPU 500)"
        ),
        own("phase-control", SWITCH, "PUT /phase may change the policy"),
        used(
            "-cb --cont-batching",
            SWITCH,
            "cont_batching",
            "off: --policy no-cont-batching",
            env="LLAMA_ARG_CONT_BATCHING",
            off="-nocb --no-cont-batching",
        ),
    ),
)
LIMITS = Group(
    "queue and limits",
    (
        own("max-queued", integer(0, 10**9), "requests that may wait"),
        own("max-queue-ms", integer(0, MS_MAX), "longest wait for a slot; 0: any"),
        own("output-reserve", integer(1, CONTEXT_MAX), "tokens held for who states no limit"),
        own("client-stall-ms", integer(0, MS_MAX), "how long a client may not read"),
        own("shutdown-grace-s", fraction(0, 3600), "for answers under way at the first signal"),
    ),
)
SERVER = Group(
    "server",
    (
        used("--host", text("HOST"), "host", "address, or path of a *.sock", env="LLAMA_ARG_HOST"),
        used("--port", integer(0, PORT_MAX), "port", "0: any free one", env="LLAMA_ARG_PORT"),
        used(
            "--reuse-port",
            SWITCH,
            "reuse_port",
            "several processes may share the port",
            env="LLAMA_ARG_REUSE_PORT",
        ),
        used(
            "--api-prefix",
            Kind("PATH", prefix),
            "api_prefix",
            "before every route",
            env="LLAMA_ARG_API_PREFIX",
        ),
        used(
            "--api-key",
            Kind("KEY,KEY", keys),
            "api_key",
            "only who has one may use the API",
            env="LLAMA_API_KEY",
            collects=True,
        ),
        used(
            "--api-key-file",
            text("FILE"),
            "api_key_file",
            "one key per line; # begins a comment",
            env="LLAMA_ARG_API_KEY_FILE",
        ),
        used(
            "--cors-origins",
            text("ORIGINS"),
            "cors_origins",
            "`*`, `localhost`, or a list",
            env="LLAMA_ARG_CORS_ORIGINS",
        ),
        used(
            "-to --timeout",
            integer(1, 10**7),
            "timeout",
            "seconds without a word from a client",
            env="LLAMA_ARG_TIMEOUT",
        ),
        used(
            "--sse-ping-interval",
            integer(-1, 10**7),
            "sse_ping_interval",
            "seconds of silence until a stream gets a comment; -1: never",
            env="LLAMA_ARG_SSE_PING_INTERVAL",
        ),
        used("--metrics", SWITCH, "metrics", "GET /metrics", env="LLAMA_ARG_ENDPOINT_METRICS"),
        used(
            "--slots",
            SWITCH,
            "show_slots",
            "GET /slots",
            env="LLAMA_ARG_ENDPOINT_SLOTS",
            off="--no-slots",
        ),
        used(
            "--slot-save-path",
            text("DIR"),
            "slot_save_path",
            "POST /slots/N?action=save and restore, as files in this directory",
        ),
        used("--props", SWITCH, "props", "POST /props", env="LLAMA_ARG_ENDPOINT_PROPS"),
        own("supervise", SWITCH, "a parent process starts the server again when it dies"),
    ),
)
RECORDS = Group(
    "logs and traces",
    (
        own("trace", text("FILE"), "record the run for phaseloop replay"),
        own("trace-content", one_of("counts", "ids", "text"), "what a trace holds of requests"),
        used(
            "--log-file", text("FILE"), "log_file", "logs go there, too", env="LLAMA_ARG_LOG_FILE"
        ),
        own("log-format", one_of("console", "json"), "lines for people, or one object per line"),
        used(
            "--log-jsonl --log-json",
            SWITCH,
            "log_json",
            "as --log-format json",
            env="LLAMA_ARG_LOG_JSONL",
            off="--no-log-jsonl",
        ),
        used(
            "--log-colors",
            MAYBE,
            "log_colors",
            env="LLAMA_ARG_LOG_COLORS",
        ),
        used("--log-disable", SWITCH, "log_disable", "no logs"),
        used("-v --log-verbose --verbose", SWITCH, "verbose", "log everything"),
        used(
            "-lv --log-verbosity --verbosity",
            one_of(*LEVELS, metavar="N"),
            "verbosity",
            "0 and 1 errors, 2 warnings, 3 one line per step, 4 and 5 everything",
            env="LLAMA_ARG_LOG_VERBOSITY",
        ),
    ),
)
USED = (
    *(MODEL, LORA, DEVICE, ENGINE, EMBEDDING, SPECULATION),
    *(POLICY, LIMITS, ANSWERS, SERVER, RECORDS),
)
