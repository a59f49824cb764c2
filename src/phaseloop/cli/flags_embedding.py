"""The flags of `phaseloop serve` for servers that encode instead of generating."""

from phaseloop.engine.settings import POOLINGS

from .flags import SWITCH, Group, integer, one_of, used

NORMALISE_MAX = 1024

EMBEDDING = Group(
    "embeddings and ranking",
    (
        used(
            "--embedding --embeddings",
            SWITCH,
            "embedding",
            "give embeddings, and generate nothing",
            env="LLAMA_ARG_EMBEDDINGS",
        ),
        used(
            "--rerank --reranking",
            SWITCH,
            "reranking",
            "rank documents by a query; the model needs a classifier",
            env="LLAMA_ARG_RERANKING",
        ),
        used(
            "--pooling",
            one_of(*POOLINGS),
            "pooling",
            "what is made of a text's rows, instead of what the model's file says",
            env="LLAMA_ARG_POOLING",
        ),
        used(
            "--embd-normalize",
            integer(-1, NORMALISE_MAX),
            "embd_normalize",
            "-1: not at all; 0: for 16-bit integers; 1: sum of sizes; 2: length; p: p-norm",
        ),
    ),
)
