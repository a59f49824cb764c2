"""The flags of `phaseloop serve` about drafts: guesses that one pass verifies several of."""

from .flags import SWITCH, Group, Kind, fraction, integer, listed, nearest, own, text, used

N_MAX = 64  # drafts of one lane: each has a row of logits
NGRAM_MAX = 1024
KINDS = ("none", "ngram-simple", "draft-mtp", "draft-dflash", "draft-simple")
# Kinds of llama-server that are not built, and what comes nearest.
OTHERS = {
    "draft-eagle3": "draft-simple",
    "draft-dspark": "draft-simple",
    "ngram-map-k": "ngram-simple",
    "ngram-map-k4v": "ngram-simple",
    "ngram-mod": "ngram-simple",
    "ngram-cache": "ngram-simple",
}


def kinds(text: str) -> tuple[str, ...]:
    """Those named, in the order in which they are asked; none for `none`."""
    found = listed(text)
    for name in found:
        if name in OTHERS and name not in KINDS:
            raise ValueError(f"{name} is not built; the nearest is {OTHERS[name]}")
        if name not in KINDS:
            raise ValueError(f"possible are {', '.join(KINDS)}{nearest(name, KINDS)}")
    return tuple(dict.fromkeys(name for name in found if name != "none"))


SPECULATION = Group(
    "speculation",
    (
        used(
            "--spec-type",
            Kind("KIND,KIND", kinds),
            "spec_type",
            f"who drafts: {', '.join(KINDS)}; of several the first that has an idea, asked in "
            "the order given",
            env="LLAMA_ARG_SPEC_TYPE",
        ),
        used("--spec-default", SWITCH, "spec_default", "as --spec-type ngram-simple"),
        used(
            "-md --model-draft --spec-draft-model",
            text("FILE|NAME"),
            "model_draft",
            "a smaller model with the same vocabulary: draft-simple; "
            "or what goes on from the model's hidden rows: draft-mtp, draft-dflash",
            env="LLAMA_ARG_SPEC_DRAFT_MODEL",
        ),
        used(
            "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
            text("ORG/REPO[:QUANT]"),
            "hf_repo_draft",
            "the same, of the Hugging Face hub",
            env="LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        ),
        used(
            "--draft --draft-n --draft-max --spec-draft-n-max",
            integer(0, N_MAX),
            "draft_n_max",
            "most drafts of a model per round; a request may lower it by speculative.n_max",
            env="LLAMA_ARG_SPEC_DRAFT_N_MAX",
        ),
        used(
            "--draft-min --draft-n-min --spec-draft-n-min",
            integer(0, N_MAX),
            "draft_n_min",
            "fewer drafts are not verified",
            env="LLAMA_ARG_SPEC_DRAFT_N_MIN",
        ),
        used(
            "--draft-p-min --spec-draft-p-min",
            fraction(0, 1),
            "draft_p_min",
            "a model's drafts end before one that it holds less likely",
            env="LLAMA_ARG_SPEC_DRAFT_P_MIN",
        ),
        own(
            "draft-cost",
            fraction(0, 100),
            "time of a draft more, as a part of a round without any, by which each request's "
            "number of drafts goes (measured at the start); 0: always the most",
        ),
        used(
            "--spec-ngram-size-n --spec-ngram-simple-size-n",
            integer(1, NGRAM_MAX),
            "ngram_size_n",
            "ngram-simple: so many last tokens must have stood before",
        ),
        used(
            "--spec-ngram-size-m --spec-ngram-simple-size-m",
            integer(1, N_MAX),
            "ngram_size_m",
            "ngram-simple: most drafts of a round",
        ),
        used(
            "--spec-ngram-min-hits --spec-ngram-simple-min-hits",
            integer(1, NGRAM_MAX),
            "ngram_min_hits",
            "ngram-simple: how often they must have",
        ),
    ),
)
