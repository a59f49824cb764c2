"""Tokens known by their text: what ends an answer, and what fills in the middle.

Files rarely name all of them, so a token with one of these texts has the meaning that models give
it.  Where a file has several candidates for one role, the first of the list is taken.
"""

from msgspec.structs import asdict

from .vocabulary import SpecialIds, TokenType

TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  the bars are full-width
    "<end_of_utterance>",
)
ROLES: dict[str, tuple[str, ...]] = {
    "eot": TURN_ENDS,
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",  # noqa: RUF001
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",  # noqa: RUF001
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",  # noqa: RUF001
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
ENDS = (
    *TURN_ENDS,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
# A model that has the tokens on the left goes on after the one on the right.
NO_ENDS: tuple[tuple[tuple[str, ...], str, TokenType], ...] = (
    (("<|return|>", "<|call|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|return|>", "<|calls|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|flush|>", "<|call|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|flush|>", "<|calls|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|tool_response>",), "</s>", TokenType.NORMAL),
)
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # structure that clients parse


def roles_by_text(ids: dict[str, int], named: SpecialIds) -> SpecialIds:
    """Fill the roles that the file leaves open; `ids` maps a token's text to its id."""
    found: dict[str, int | None] = asdict(named)
    for role, texts in ROLES.items():
        if found[role] is None:
            found[role] = next((ids[text] for text in texts if text in ids), None)
    return SpecialIds(**found)


def end_ids(ids: dict[str, int], special: SpecialIds) -> tuple[int, ...]:
    """All tokens that end an answer, ascending."""
    known = {ids[text] for text in ENDS if text in ids}
    roles = (special.eos, special.eot, special.eom)
    files = (special.fim_pad, special.fim_rep, special.fim_sep)
    ends = known.union(token for token in (*roles, *files) if token is not None)
    for present, text, _ in NO_ENDS:
        if text in ids and all(other in ids for other in present):
            ends.discard(ids[text])
    return tuple(sorted(ends))


def retyped(ids: dict[str, int], special: SpecialIds) -> dict[int, TokenType]:
    """Tokens whose type follows from their text, whatever the file says."""
    taken = asdict(special)
    roles = {
        ids[text]
        for role, texts in ROLES.items()
        for text in texts
        if text in ids and ids[text] == taken[role]
    }
    ends = {ids[text] for text in ENDS if text in ids}
    types = dict.fromkeys(sorted(roles | ends), TokenType.CONTROL)
    types |= {ids[text]: TokenType.USER_DEFINED for text in SHOWN if text in ids}
    for present, text, kind in NO_ENDS:
        if text in ids and all(other in ids for other in present):
            types[ids[text]] = kind
    return types
