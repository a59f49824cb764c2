"""A GGUF file's tokenizer keys, checked and turned into a Vocabulary.

Whatever a broken or hostile file may hold, the answer is a Vocabulary that can be trusted or a
VocabularyError that names the key, what is wrong with it and what helps.
"""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar, cast

import numpy as np

from .pretokenizers import PRE_TOKENIZERS
from .roles import end_ids, retyped, roles_by_text
from .vocabulary import Model, SpecialIds, TokenType, Vocabulary, VocabularyError

MODEL = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"
MERGES = "tokenizer.ggml.merges"
ADD_BOS = "tokenizer.ggml.add_bos_token"
ADD_EOS = "tokenizer.ggml.add_eos_token"
ADD_SEP = "tokenizer.ggml.add_sep_token"
ADD_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
TEMPLATE = "tokenizer.chat_template"
TEMPLATE_TOOLS = "tokenizer.chat_template.tool_use"
TEMPLATE_RERANK = "tokenizer.chat_template.rerank"
LOWERCASE = "tokenizer.ggml.normalizer.lowercase"
STRIP_ACCENTS = "tokenizer.ggml.normalizer.strip_accents"
ID_KEYS: dict[str, tuple[str, ...]] = {  # role -> its key, and what older files call it
    "bos": ("tokenizer.ggml.bos_token_id",),
    "eos": ("tokenizer.ggml.eos_token_id",),
    "eot": ("tokenizer.ggml.eot_token_id",),
    "eom": ("tokenizer.ggml.eom_token_id",),
    "unk": ("tokenizer.ggml.unknown_token_id",),
    "pad": ("tokenizer.ggml.padding_token_id",),
    "sep": ("tokenizer.ggml.seperator_token_id", "tokenizer.ggml.separator_token_id"),
    "fim_pre": ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"),
    "fim_suf": ("tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"),
    "fim_mid": ("tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"),
    "fim_pad": ("tokenizer.ggml.fim_pad_token_id",),
    "fim_rep": ("tokenizer.ggml.fim_rep_token_id",),
    "fim_sep": ("tokenizer.ggml.fim_sep_token_id",),
}
SILENT_IDS: dict[Model, dict[str, int]] = {  # what a file means that says nothing
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0},
}
NAMES: dict[Model, str] = {"llama": "SentencePiece", "gpt2": "BPE", "bert": "WordPiece"}
UNDEFINED = 0  # a type that old converters wrote for rows that pad the table

T = TypeVar("T", str, int, float)

CONVERT = "convert the model again with a current converter"
OTHER_MODEL = "use a model whose tokenizer is one of these"


def vocabulary_of(metadata: Mapping[str, object]) -> Vocabulary:
    """Build a Vocabulary from GGUF keys and their values as plain Python data.

    Raises VocabularyError.
    """
    model = _model(metadata)
    notes: list[str] = []
    pre = _pre(metadata, model, notes)
    tokens = _tokens(metadata, notes)
    ids = {text: token for token, text in enumerate(tokens)}
    special = roles_by_text(ids, _special_ids(metadata, model, len(tokens)))
    types = _types(metadata, tokens, ids, special)
    spm, is_wordpiece = model == "llama", model == "bert"
    add_bos = _flag(metadata, ADD_BOS, default=model != "gpt2" or PRE_TOKENIZERS[pre].add_bos)
    add_eos = _flag(metadata, ADD_EOS, default=False)
    _require_added(ADD_BOS, add_bos, ID_KEYS["bos"][0], special.bos)
    _require_added(ADD_EOS, add_eos, ID_KEYS["eos"][0], special.eos)
    add_sep = _flag(metadata, ADD_SEP, default=is_wordpiece)
    _require_added(ADD_SEP, add_sep, ID_KEYS["sep"][0], special.sep)
    lowercase = is_wordpiece and _flag(metadata, LOWERCASE, default=True)
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_scores(metadata, len(tokens)) if spm else (),
        merges=_merges(metadata) if model == "gpt2" else (),
        special=special,
        end_ids=end_ids(ids, special),
        strip_after=_strip_after(metadata, tokens, types),
        add_bos=add_bos,
        add_eos=add_eos,
        add_sep=add_sep,
        lowercase=lowercase,
        strip_accents=is_wordpiece and _flag(metadata, STRIP_ACCENTS, default=lowercase),
        add_space_prefix=spm and _flag(metadata, ADD_SPACE_PREFIX, default=True),
        chat_template=_text(metadata, TEMPLATE),
        chat_template_tools=_text(metadata, TEMPLATE_TOOLS),
        rerank_template=_text(metadata, TEMPLATE_RERANK),
        notes=tuple(notes),
    )


def _model(metadata: Mapping[str, object]) -> Model:
    name = _text(metadata, MODEL)
    if name is None:
        raise VocabularyError(MODEL, "missing", "this file has no tokenizer: " + CONVERT)
    if name not in NAMES:
        known = ", ".join(f"{model!r} ({kind})" for model, kind in NAMES.items())
        problem = f"{_shown(name)} is not supported, only {known}"
        raise VocabularyError(MODEL, problem, OTHER_MODEL)
    return name


def _pre(metadata: Mapping[str, object], model: Model, notes: list[str]) -> str:
    if model != "gpt2":
        return "default"
    name = _text(metadata, PRE)
    if name is None:
        notes.append(f"{PRE} is missing: texts are cut as by default, which may harm answers")
        return "default"
    if name not in PRE_TOKENIZERS:
        close = get_close_matches(name[:64], PRE_TOKENIZERS, n=1)
        hint = f", the nearest known is {close[0]!r}" if close else ""
        problem = f"{_shown(name)} is not a known pre-tokenizer{hint}"
        raise VocabularyError(PRE, problem, f"known are {', '.join(PRE_TOKENIZERS)}")
    return name


def _tokens(metadata: Mapping[str, object], notes: list[str]) -> tuple[str, ...]:
    texts = _array(metadata, TOKENS, str)
    if not texts:
        raise VocabularyError(TOKENS, "missing or empty", CONVERT)
    empty = sum(not text for text in texts)
    if empty:
        notes.append(f"{TOKENS}: {empty} tokens are empty and will not be used")
    named = tuple(text or f"[EMPTY_{token}]" for token, text in enumerate(texts))
    first: dict[str, int] = {}
    for token, text in enumerate(named):
        if first.setdefault(text, token) != token:
            problem = f"{_shown(text)} is both token {first[text]} and token {token}"
            raise VocabularyError(TOKENS, problem, CONVERT)
    return named


def _types(
    metadata: Mapping[str, object],
    tokens: tuple[str, ...],
    ids: dict[str, int],
    special: SpecialIds,
) -> tuple[TokenType, ...]:
    numbers = _array(metadata, TYPES, int)
    if not numbers:
        types = [TokenType.NORMAL if byte_of(text) is None else TokenType.BYTE for text in tokens]
    else:
        _require_length(TYPES, len(numbers), len(tokens))
        known = {int(kind): kind for kind in TokenType} | {UNDEFINED: TokenType.UNUSED}
        types = [known.get(number, TokenType.UNUSED) for number in numbers]
    for token, kind in retyped(ids, special).items():
        types[token] = kind
    for text, kind in zip(tokens, types, strict=True):
        if kind == TokenType.BYTE and byte_of(text) is None:
            problem = f"{_shown(text)} is typed as a byte but is not of the form <0x0A>"
            raise VocabularyError(TYPES, problem, CONVERT)
    return tuple(types)


def byte_of(text: str) -> int | None:
    """The byte that a token like <0x0A> stands for."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    digits = text[3:5]
    if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return None
    return int(digits, 16)


def _scores(metadata: Mapping[str, object], count: int) -> tuple[float, ...]:
    scores = _array(metadata, SCORES, float)
    if not scores:
        raise VocabularyError(SCORES, "missing, and SentencePiece merges by score", CONVERT)
    _require_length(SCORES, len(scores), count)
    for token, score in enumerate(scores):
        if not math.isfinite(score):
            raise VocabularyError(SCORES, f"token {token} has the score {score}", CONVERT)
    return tuple(map(float, scores))


def _merges(metadata: Mapping[str, object]) -> tuple[str, ...]:
    if MERGES not in metadata:
        raise VocabularyError(MERGES, "missing, and BPE cannot do without", CONVERT)
    merges = _array(metadata, MERGES, str)
    for index, merge in enumerate(merges):
        left, blank, right = merge.partition(" ")
        if not (left and blank and right) or " " in right:
            problem = f"entry {index}, {_shown(merge)}, is not two parts with a blank between"
            raise VocabularyError(MERGES, problem, CONVERT)
    return tuple(merges)


def _special_ids(metadata: Mapping[str, object], model: Model, count: int) -> SpecialIds:
    found = {role: token for role, token in SILENT_IDS[model].items() if token < count}
    for role, keys in ID_KEYS.items():
        for key in keys:
            value = metadata.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise VocabularyError(key, f"{_shown(value)} is not a token id", CONVERT)
            if not 0 <= value < count:
                problem = f"{_shown(value)} is no token of this vocabulary, which has {count}"
                raise VocabularyError(key, problem, CONVERT)
            found[role] = value
            break
    return SpecialIds(**found)


def _strip_after(
    metadata: Mapping[str, object], tokens: tuple[str, ...], types: tuple[TokenType, ...]
) -> tuple[int, ...]:
    """GGUF does not say which tokens swallow the blanks behind them; it is known of one family."""
    name = _text(metadata, "general.name") or ""
    if not any(part in name.lower() for part in ("phi-3", "phi3")):
        return ()
    special = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    return tuple(
        token
        for token, kind in enumerate(types)
        if (kind in special or tokens[token] == "</s>") and tokens[token] not in keeps
    )


def _require_added(key: str, added: bool, id_key: str, token: int | None) -> None:
    if added and token is None:
        raise VocabularyError(id_key, f"missing, but {key} asks for this token", CONVERT)


def _require_length(key: str, found: int, count: int) -> None:
    if found != count:
        raise VocabularyError(key, f"{found} entries for {count} tokens", CONVERT)


def _flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise VocabularyError(key, f"{_shown(value)} is neither true nor false", CONVERT)
    return value


def _text(metadata: Mapping[str, object], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise VocabularyError(key, f"{_shown(value)} is not a text", CONVERT)
    return value


def _array(metadata: Mapping[str, object], key: str, kind: type[T]) -> Sequence[T]:
    """The values of an array, each of the kind asked for; nothing if the key is missing."""
    value = metadata.get(key, ())
    if isinstance(value, np.ndarray):  # as readers give numbers
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise VocabularyError(key, f"{_shown(value)} is not an array", CONVERT)
    values = cast(Sequence[object], value)
    allowed = (float, int) if kind is float else kind
    for index, entry in enumerate(values):
        if not isinstance(entry, allowed) or isinstance(entry, bool):
            problem = f"entry {index}, {_shown(entry)}, is no {kind.__name__}"
            raise VocabularyError(key, problem, CONVERT)
    return cast(Sequence[T], values)


def _shown(value: object) -> str:
    """A value from the file as a message may show it: cut, and with everything odd escaped."""
    text = ascii(value[:64]) if isinstance(value, str) else type(value).__name__
    if isinstance(value, int | float):
        text = str(value) if abs(value) < 1 << 64 else "a huge number"
    return text
