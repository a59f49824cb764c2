"""Goal: docs/generation.md tells of every field that is read, with its default, and of every end.

Method: its tables against the parser, which is asked with each field's documented default and with
values of other types, and which notes the names that it looks for.
"""

import json
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pages import DOCS, codes, table

from phaseloop.cli.flags_speculation import KINDS
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import FinishReason, Request
from phaseloop.http.answer_ends import COMPLETE, failure
from phaseloop.http.errors import ApiError
from phaseloop.http.request import Shape, wanted_of
from phaseloop.http.request_fields import Fields
from phaseloop.http.served import HttpOptions, ModelCard, Served
from phaseloop.http.usage import spans
from phaseloop.runtime.timing import Timing
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

PAGE = (DOCS / "generation.md").read_text()
LIMITS = Limits(slot_count=4, batch_tokens=64, context_length=128, page_count=8)
SHAPES: tuple[Shape, ...] = get_args(Shape)
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 2,
}


def wanted(body: dict[str, Any], shape: Shape) -> Any:
    service: Any = SimpleNamespace(limits=LIMITS)
    tokenizer = Tokenizer(vocabulary_of(METADATA))
    served = Served(service=service, tokenizer=tokenizer, model=ModelCard(("tiny",)))
    return wanted_of(Fields(body), shape, served, HttpOptions())


def rows() -> list[tuple[str, Any, str]]:
    """Each name, its default, and what its limits are said to be."""
    found = []
    for names, default, limits, _ in table(PAGE, "fields"):
        found += [(name, json.loads(default), limits) for name in re.findall(r"`([\w.]+)`", names)]
    return found


NAMES = [name for name, _, _ in rows()]
LATER = codes(table(PAGE, "later"))


class Noted(dict[str, Any]):
    """An object that notes what it is asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default


def test_every_field_that_is_read_is_documented():
    read: set[str] = set()
    for shape in SHAPES:
        body = Noted()
        wanted(body, shape)
        read |= body.names
    assert read == {*NAMES, *LATER}
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize(("name", "default"), [(name, default) for name, default, _ in rows()])
def test_the_defaults_are_those_of_the_code(name, default):
    for shape in SHAPES:
        if shape == "chat" and name == "logprobs":
            continue  # there it is true or false
        assert wanted({name: default}, shape) == wanted({}, shape)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tool_choice"])
def test_a_value_of_another_type_is_refused_by_name(name):
    wrong = 5 if name in ("logit_bias", "stop", "stream_options") else {"a": 1}
    shape: Shape = {"response_fields": "native", "top_logprobs": "chat"}.get(name, "completion")
    body = {name: wrong} | ({"logprobs": True} if name == "top_logprobs" else {})
    with pytest.raises(ApiError) as caught:
        wanted(body, shape)
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "limits"), [(name, limits) for name, _, limits in rows()])
def test_the_limits_are_those_of_the_code(name, limits):
    shape: Shape = "chat" if name == "top_logprobs" else "native"
    more = {"logprobs": True} if name == "top_logprobs" else {}
    if found := re.search(r"refused below (-?\d+)", limits):
        wanted({name: int(found[1])}, shape)
        with pytest.raises(ApiError):
            wanted({name: int(found[1]) - 1}, shape)
    if found := re.search(r"refused above ([\d,]+)", limits):
        bound = int(found[1].replace(",", ""))
        wanted({name: bound, **more}, shape)
        with pytest.raises(ApiError):
            wanted({name: bound + 1, **more}, shape)
    if found := re.search(r"held (?:from|within) 0(?: and (1))?", limits):
        assert wanted({name: -3}, shape) == wanted({name: 0}, shape)
        if found[1]:
            assert wanted({name: 3}, shape) == wanted({name: 1}, shape)
            assert wanted({name: 3}, shape) != wanted({name: 0.5}, shape)


@pytest.mark.parametrize(("name", "nothing"), table(PAGE, "later"))
def test_what_comes_later_is_refused_unless_it_asks_for_nothing(name, nothing):
    name = name.strip("`")
    for shape in SHAPES:
        assert wanted({name: json.loads(nothing)}, shape) == wanted({}, shape)
        with pytest.raises(ApiError) as caught:
            wanted({name: {"type": "json_schema"}}, shape)
        assert caught.value.status == 501


def test_the_ends_are_those_of_the_scheduler():
    documented = {row[0].strip("`"): row[1:] for row in table(PAGE, "ends")}
    assert set(documented) == set(get_args(FinishReason)) - set(COMPLETE)
    for reason, (kind, status, retry) in documented.items():
        error = failure(reason, Request(0, 5), LIMITS)  # type: ignore[arg-type]
        assert (f"`{error.kind}`", str(error.status)) == (kind, status), reason
        assert error.headers.get("Retry-After", "") == retry, reason


def test_the_spans_are_those_of_the_answer():
    assert codes(table(PAGE, "spans")) == list(spans(Timing(), 0, "mixed", None))


def test_every_kind_of_draft_is_told_of():
    assert {kind.strip("`") for kind, *_ in table(PAGE, "drafts")} == set(KINDS) - {"none"}
