"""Whether two models speak of the same tokens, so that one can draft for the other."""

from .metadata import NAMES
from .vocabulary import Vocabulary

# As llama.cpp has it: tables may be padded differently, and the first tokens are special ones whose
# texts converters chose differently.
PADDING_MAX = 128
FIRST_COMPARED = 5


def difference(target: Vocabulary, draft: Vocabulary) -> str | None:
    """What differs so much that drafts would mean something else; None if nothing does."""
    if target.model != draft.model:
        kinds = NAMES[target.model], NAMES[draft.model]
        return f"the model's tokenizer is {kinds[0]}, the draft's {kinds[1]}"
    counts = len(target.tokens), len(draft.tokens)
    if abs(counts[0] - counts[1]) > PADDING_MAX:
        return f"the model has {counts[0]} tokens, the draft {counts[1]}"
    for role in ("bos", "eos"):
        left, right = getattr(target.special, role), getattr(draft.special, role)
        if left != right:
            return f"the model's {role} is {named(left)}, the draft's {named(right)}"
    for token in range(FIRST_COMPARED, min(counts)):
        left, right = target.tokens[token], draft.tokens[token]
        if left != right:
            return f"token {token} is {left!r} to the model and {right!r} to the draft"
    return None


def named(token: int | None) -> str:
    return "none" if token is None else f"token {token}"
