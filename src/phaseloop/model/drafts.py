"""Who drafts from a model's hidden rows: a block of its own file, or another file."""

from .dflash import dflash
from .draft import Draft
from .qwen35_draft import draft_of_file, draft_of_model
from .qwen35_file import has_only_draft
from .shape import EMBEDDING
from .weights import OTHER, Weights

HYBRIDS = ("qwen35", "qwen35moe")


def own_draft(weights: Weights) -> Draft | None:
    """The block of a model's file that drafts for it, if it has one.  The model has been loaded."""
    architecture = weights.get("general.architecture", str)
    return draft_of_model(weights, architecture) if architecture in HYBRIDS else None


def draft_from(weights: Weights, target: Weights) -> Draft | None:
    """What a file drafts with for a model; None where it holds a model in its own right.

    Raises ModelError where the two do not fit each other, or the file is not as it should be.
    """
    architecture = weights.get("general.architecture", str)
    if architecture == "dflash":
        return dflash(weights, target)
    if architecture not in HYBRIDS or not has_only_draft(weights, architecture):
        return None
    draft = draft_of_file(weights, architecture)
    check_fit(weights, target)
    return draft


def check_fit(weights: Weights, target: Weights) -> None:
    """The same tokens, and rows of the same width."""
    own, other = (one.tensors[EMBEDDING].shape for one in (weights, target))
    for what, here, there in zip(("tokens", "width"), own, other, strict=True):
        if here != there:
            raise weights.error(
                f"tensor {EMBEDDING} has {list(own)}, that of {target.path} {list(other)}: it "
                f"drafts for a model of other {what} ({here}, not {there})",
                OTHER,
            )
