"""What stands between text and tokens in a server: tokenizer, chat template, default sampling."""

import math
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.engine.settings import Sampling
from phaseloop.text.budget import TemplateError
from phaseloop.text.chat_builtin import CHATML, template_source
from phaseloop.text.chat_template import ChatTemplate, surroundings_of
from phaseloop.text.tokenizer import Tokenizer
from phaseloop.text.vocabulary import Vocabulary

from .errors import UserError
from .serve_loaded import Reporter
from .serve_settings import Settings, sampling_of

NO_BREAKERS = "none"


class Words(Struct, frozen=True):
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: Sampling
    breaker_texts: tuple[str, ...]


def words_of(settings: Settings, vocabulary: Vocabulary, reporter: Reporter) -> Words:
    """Takes a fraction of a second for a large vocabulary.  Raises UserError."""
    texts = settings.dry_sequence_breaker
    return Words(
        tokenizer=Tokenizer(vocabulary),
        template=template_of(settings, vocabulary, reporter),
        defaults=defaults_of(settings, vocabulary),
        breaker_texts=() if NO_BREAKERS in texts else texts,
    )


def template_of(settings: Settings, vocabulary: Vocabulary, reporter: Reporter) -> ChatTemplate:
    """The operator's must work; a model's that does not is replaced by ChatML, with a warning."""
    surroundings = surroundings_of(vocabulary)
    named = named_source(settings)
    source = named or vocabulary.chat_template
    if source is None:
        reporter.warn("template", why="the model has none; ChatML is used")
        return ChatTemplate(CHATML, surroundings)
    try:
        return ChatTemplate(source, surroundings)
    except TemplateError as error:
        if named is not None:
            raise UserError(str(error)) from None
        reporter.warn("template", why=f"{error}; ChatML is used")
        return ChatTemplate(CHATML, surroundings)


def named_source(settings: Settings) -> str | None:
    if settings.chat_template_file is not None:
        path = settings.chat_template_file
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UserError(f"--chat-template-file {path}: {reason}") from None
    if settings.chat_template is None:
        return None
    try:
        return template_source(settings.chat_template)
    except TemplateError as error:
        raise UserError(str(error)) from None


def defaults_of(settings: Settings, vocabulary: Vocabulary) -> Sampling:
    sampling = sampling_of(settings)
    last = len(vocabulary.tokens) - 1
    for token, _ in sampling.logit_bias:
        if token > last:
            raise UserError(f"--logit-bias: token {token}; the model's are 0 to {last}")
    if not settings.ignore_eos:
        return sampling
    never = tuple((token, -math.inf) for token in vocabulary.end_ids)
    return replace(sampling, logit_bias=sampling.logit_bias + never)
