"""Flags of llama-server (build 11434) without a meaning here, and those that ask for what is not.

A flag without any effect on phaseloop costs a warning, as a start script should go on working.  One
that asks for other answers (an adapter, a grammar) is refused: to serve without it
would be wrong in silence.

One line is one flag: its spellings; those that unset it, with `!`; `$NAME` for the variable
LLAMA_ARG_NAME; VALUE, TWO or MAYBE for the words it takes (one, two, on|off|auto or none); `=` for
values that ask for nothing out of the way.
"""

from .flags import FOREIGN_PREFIX, MAYBE, SWITCH, Flag, Kind, Status

KINDS = {
    "VALUE": Kind("VALUE", str),
    "TWO": Kind("FIRST LAST", str, words=2),
    "MAYBE": MAYBE,
}

IGNORED: dict[str, str] = {
    "there is one number of threads for prompts and answers, that of --threads": """
        -tb --threads-batch VALUE
    """,
    "threads go where the operating system puts them": """
        -C --cpu-mask VALUE
        -Cr --cpu-range VALUE
        --cpu-strict VALUE =0
        --prio VALUE =0
        --poll VALUE
        -Cb --cpu-mask-batch VALUE
        -Crb --cpu-range-batch VALUE
        --cpu-strict-batch VALUE =0
        --prio-batch VALUE =0
        --poll-batch VALUE
        --numa VALUE $NUMA
    """,
    "GPUs compute all layers or none, see --device": """
        -ngl --gpu-layers --n-gpu-layers VALUE $N_GPU_LAYERS =0 =auto
        -sm --split-mode VALUE $SPLIT_MODE
        -mg --main-gpu VALUE $MAIN_GPU
        -ot --override-tensor VALUE $OVERRIDE_TENSOR
        -cmoe --cpu-moe $CPU_MOE
        -ncmoe --n-cpu-moe VALUE $N_CPU_MOE
        -ncffn --n-cpu-ffn VALUE $N_CPU_FFN
        --rpc VALUE $RPC
        -kvo --kv-offload !-nkvo !--no-kv-offload $KV_OFFLOAD
        --op-offload !--no-op-offload
        --no-host $NO_HOST
    """,
    "attention is always computed in one piece": """
        -fa --flash-attn MAYBE $FLASH_ATTN =on =auto
    """,
    "weights are always mapped from their file as they are": """
        -lm --load-mode VALUE $LOAD_MODE =auto =mmap
        -lzm --lazy-mode VALUE $LAZY_MODE
        --mlock $MLOCK
        --mmap !--no-mmap $MMAP =true
    """,
    "weights are always checked": """
        --check-tensors =true
    """,
    "a default context is cut to what fits, a stated one that does not fit is refused": """
        -fit --fit VALUE $FIT =on
        -fitt --fit-target VALUE $FIT_TARGET
        -fitc --fit-ctx VALUE $FIT_CTX
    """,
    "any slot may take the whole context, and all together have that of --ctx-size": """
        -kvu --kv-unified !-no-kvu !--no-kv-unified $KV_UNIFIED =true
        --kv-unified-per-slot VALUE $KV_UNIFIED_PER_SLOT
    """,
    "a request says so, in n_keep": """
        --keep VALUE =0
    """,
    "cells are never moved": """
        -dt --defrag-thold VALUE $DEFRAG_THOLD
    """,
    "whole prompts are kept instead, see --cache-ram": """
        --cache-idle-slots !--no-cache-idle-slots $CACHE_IDLE_SLOTS =true
        --swa-full $SWA_FULL
    """,
    "states of hybrids are kept every 2048 tokens and at prompts' ends, see --cache-ram": """
        -ctxcp --ctx-checkpoints --swa-checkpoints VALUE $CTX_CHECKPOINTS
        -cms --checkpoint-min-step VALUE $CHECKPOINT_MIN_SPACING_NT
    """,
    "only a common beginning is reused": """
        --cache-reuse VALUE $CACHE_REUSE =0
    """,
    "this program has no prompt of its own": """
        -e --escape !--no-escape =true =false
        -r --reverse-prompt VALUE
        --warmup !--no-warmup $WARMUP =true =false
        --perf !--no-perf $PERF =false
    """,
    "templates are always Jinja": """
        --jinja !--no-jinja $JINJA =true
    """,
    "answers are passed on as they are": """
        --skip-chat-parsing !--no-skip-chat-parsing $SKIP_CHAT_PARSING =true =false
        --reasoning-preserve !--no-reasoning-preserve $REASONING_PRESERVE
    """,
    "the application has threads of its own": """
        --threads-http VALUE $THREADS_HTTP
    """,
    "a client is told what it asked for, as llama-server does by default": """
        --cors-methods VALUE $CORS_METHODS
        --cors-headers VALUE $CORS_HEADERS
        --cors-credentials !--no-cors-credentials $CORS_CREDENTIALS =true
    """,
    "the page that is served needs no settings": """
        --ui --webui !--no-ui !--no-webui $UI =true
        --ui-config --webui-config VALUE $UI_CONFIG
        --ui-config-file --webui-config-file VALUE $UI_CONFIG_FILE
        --path VALUE $STATIC_PATH
    """,
    "log lines always have a time and a level": """
        --log-prefix !--no-log-prefix $LOG_PREFIX =true
        --log-timestamps !--no-log-timestamps $LOG_TIMESTAMPS =true
    """,
    "a draft model computes where and how the model does": """
        --spec-draft-threads -td --threads-draft VALUE
        --spec-draft-threads-batch -tbd --threads-batch-draft VALUE
        --spec-draft-cpu-mask -Cd --cpu-mask-draft VALUE
        --spec-draft-cpu-range -Crd --cpu-range-draft VALUE
        --spec-draft-cpu-strict --cpu-strict-draft VALUE
        --spec-draft-prio --prio-draft VALUE
        --spec-draft-poll --poll-draft VALUE
        --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft VALUE
        --spec-draft-cpu-strict-batch --cpu-strict-batch-draft VALUE
        --spec-draft-prio-batch --prio-batch-draft VALUE
        --spec-draft-poll-batch --poll-batch-draft VALUE
        --spec-draft-override-tensor -otd --override-tensor-draft VALUE
        --spec-draft-cpu-moe -cmoed --cpu-moe-draft $SPEC_DRAFT_CPU_MOE
        --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft VALUE \
            $SPEC_DRAFT_N_CPU_MOE
        --spec-draft-device -devd --device-draft VALUE
        --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft VALUE \
            $N_GPU_LAYERS_DRAFT
        --spec-draft-type-k -ctkd --cache-type-k-draft VALUE $SPEC_DRAFT_CACHE_TYPE_K
        --spec-draft-type-v -ctvd --cache-type-v-draft VALUE $SPEC_DRAFT_CACHE_TYPE_V
    """,
    "drafts are one text, drawn as the model will draw": """
        --spec-draft-p-split --draft-p-split VALUE $SPEC_DRAFT_P_SPLIT
        --spec-draft-backend-sampling !--no-spec-draft-backend-sampling \
            $SPEC_DRAFT_BACKEND_SAMPLING
        --spec-draft-sampling VALUE $SPEC_DRAFT_SAMPLING
    """,
    "of drafts out of the text there is ngram-simple": """
        --spec-ngram-mod-n-min VALUE
        --spec-ngram-mod-n-max VALUE
        --spec-ngram-mod-n-match VALUE
        --spec-ngram-map-k-size-n VALUE
        --spec-ngram-map-k-size-m VALUE
        --spec-ngram-map-k-min-hits VALUE
        --spec-ngram-map-k4v-size-n VALUE
        --spec-ngram-map-k4v-size-m VALUE
        --spec-ngram-map-k4v-min-hits VALUE
    """,
    "llama-server itself chooses where samplers run": """
        -bs --backend-sampling $BACKEND_SAMPLING
    """,
    "there are no images, sounds or videos in prompts": """
        --mmproj-auto !--no-mmproj !--no-mmproj-auto $MMPROJ_AUTO
        --mmproj-offload !--no-mmproj-offload $MMPROJ_OFFLOAD
        -mmdev --mmproj-device VALUE
        --image-min-tokens VALUE $IMAGE_MIN_TOKENS
        --image-max-tokens VALUE $IMAGE_MAX_TOKENS
        --mtmd-batch-max-tokens VALUE $MTMD_BATCH_MAX_TOKENS
        --video-fps VALUE $VIDEO_FPS
        --video-timestamp-interval VALUE $VIDEO_TIMESTAMP_INTERVAL
        --video-ffmpeg-dir VALUE $VIDEO_FFMPEG_DIR
        --media-path VALUE
    """,
    "there is one model per process, which is always loaded": """
        --models-max VALUE $MODELS_MAX
        --models-autoload !--no-models-autoload $MODELS_AUTOLOAD
        --sleep-idle-seconds VALUE =-1
    """,
    "nothing reads it without what it belongs to": """
        --spm-infill
        --adaptive-decay VALUE
        --mirostat-lr VALUE
        --mirostat-ent VALUE
        --tools-runtime VALUE $TOOLS_RUNTIME
    """,
}
REFUSED: dict[str, str] = {
    "pull the file first, or name a repository with -hf": """
        -mu --model-url VALUE $MODEL_URL
        -dr --docker-repo VALUE $DOCKER_REPO
        --embd-gemma-default
        --fim-qwen-1.5b-default
        --fim-qwen-3b-default
        --fim-qwen-7b-default
        --fim-qwen-7b-spec
        --fim-qwen-14b-spec
        --fim-qwen-30b-default
        --gpt-oss-20b-default
        --gpt-oss-120b-default
        --vision-gemma-4b-default
        --vision-gemma-12b-default
    """,
    "phaseloop pull --list shows what is there": """
        -cl --cache-list
    """,
    "drafts are accepted where they are right; leave it out": """
        --spec-synth-len VALUE $SPEC_SYNTH_LEN
        --spec-synth-rates VALUE $SPEC_SYNTH_RATES
    """,
    "drafts come out of the request's own text: --spec-type ngram-simple": """
        -lcs --lookup-cache-static VALUE
        -lcd --lookup-cache-dynamic VALUE
    """,
    "constrained answers come later": """
        --grammar VALUE
        --grammar-file VALUE
        -j --json-schema VALUE
        -jf --json-schema-file VALUE
    """,
    "this sampler is not built; use top-p, min-p or XTC": """
        --mirostat VALUE =0
        --adaptive-target VALUE =-1
    """,
    "control vectors are not built; leave it out": """
        --control-vector VALUE
        --control-vector-scaled VALUE
        --control-vector-layer-range TWO
    """,
    "models of text only": """
        -mm --mmproj VALUE $MMPROJ
        -mmu --mmproj-url VALUE $MMPROJ_URL
    """,
    "the model's file says how positions are turned; convert it with other values": """
        --rope-scaling VALUE $ROPE_SCALING_TYPE
        --rope-scale VALUE $ROPE_SCALE =1
        --rope-freq-base VALUE $ROPE_FREQ_BASE =0
        --rope-freq-scale VALUE $ROPE_FREQ_SCALE =1
        --yarn-orig-ctx VALUE $YARN_ORIG_CTX =0
        --yarn-ext-factor VALUE $YARN_EXT_FACTOR =-1
        --yarn-attn-factor VALUE $YARN_ATTN_FACTOR =-1
        --yarn-beta-slow VALUE $YARN_BETA_SLOW =-1
        --yarn-beta-fast VALUE $YARN_BETA_FAST =-1
        --override-kv VALUE
    """,
    "one model per process; put a router in front": """
        --models-dir VALUE $MODELS_DIR
        --models-preset VALUE $MODELS_PRESET
    """,
    "a server that runs programs for its clients is another one": """
        --tools VALUE $TOOLS
        --ui-mcp-proxy --webui-mcp-proxy !--no-ui-mcp-proxy !--no-webui-mcp-proxy \
            $UI_MCP_PROXY =false
        --mcp-servers-config VALUE $MCP_SERVERS_CONFIG
        --mcp-servers-json VALUE $MCP_SERVERS_JSON
        -ag --agent !-no-ag !--no-agent $AGENT =false
    """,
    "put a reverse proxy with TLS in front": """
        --ssl-key-file VALUE $SSL_KEY_FILE
        --ssl-cert-file VALUE $SSL_CERT_FILE
    """,
    "thinking is up to the model and its template; see --chat-template-kwargs": """
        --reasoning-effort VALUE $REASONING_EFFORT
        --reasoning-budget VALUE $THINK_BUDGET =-1
        --reasoning-budget-message VALUE $THINK_BUDGET_MESSAGE
    """,
    "special tokens are never part of a text": """
        -sp --special
    """,
    "prompts are not written to files; see --trace-content text": """
        --log-prompts-dir VALUE
    """,
    "it is for a program that runs once": """
        -p --prompt VALUE
        -f --file VALUE
        -bf --binary-file VALUE
        --list-devices
        --completion-bash
    """,
}


def flags_of(status: Status, table: dict[str, str]) -> tuple[Flag, ...]:
    return tuple(
        flag_of(status, why, line.split())
        for why, lines in table.items()
        for line in lines.strip().splitlines()
    )


def flag_of(status: Status, why: str, words: list[str]) -> Flag:
    names, off, fine = list[str](), list[str](), list[str]()
    kind, env = SWITCH, ""
    for word in words:
        mark, rest = word[0], word[1:]
        if mark == "-":
            names.append(word)
        elif mark == "!":
            off.append(rest)
        elif mark == "=":
            fine.append(rest)
        elif mark == "$":
            env = FOREIGN_PREFIX + rest
        else:
            kind = KINDS[word]
    return Flag(tuple(names), kind, why, env=env, off=tuple(off), status=status, fine=tuple(fine))


FOREIGN = (*flags_of("ignored", IGNORED), *flags_of("refused", REFUSED))
