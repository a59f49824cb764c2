"""Goal: no body is too large, too odd or too deep for a plain refusal.

Method: bodies by their bytes, sent in pieces too, with lengths that are true and that lie.
"""

import msgspec
import pytest
from http_world import world

from phaseloop.http.body import parse_object
from phaseloop.http.errors import STATUS, ApiError, error_response, unavailable
from phaseloop.http.guard import stated_bytes
from phaseloop.http.served import HttpOptions

SMALL = HttpOptions(body_bytes_max=100)


async def in_pieces(body: bytes, size: int):
    for start in range(0, len(body), size):
        yield body[start : start + size]


def body_of(count: int) -> bytes:
    """A valid request of so many bytes."""
    frame = b'{"content":""}'
    return frame[:-2] + b"a" * (count - len(frame)) + frame[-2:]


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("count", "status"), [(99, 200), (100, 200), (101, 413), (5000, 413)])
async def test_a_body_may_have_as_many_bytes_as_the_operator_allows(count, status):
    async with world(options=SMALL) as here:
        stated = await here.client.post("/tokenize", content=body_of(count))
        chunked = await here.client.post("/tokenize", content=in_pieces(body_of(count), 7))
    assert "content-length" not in chunked.request.headers
    assert (stated.status_code, chunked.status_code) == (status, status)
    if status == 413:
        error = {
            "code": 413,
            "message": "the body has more than the 100 bytes that this server takes",
            "type": "invalid_request_error",
        }
        assert stated.json() == chunked.json() == {"error": error}


@pytest.mark.asyncio
async def test_a_stated_length_is_believed_before_anything_is_read():
    async def body():
        raise AssertionError("it was read")
        yield b""

    async with world(options=SMALL) as here:
        headers = {"Content-Length": "101"}
        answer = await here.client.post("/tokenize", content=body(), headers=headers)
    assert answer.status_code == 413


@pytest.mark.asyncio
async def test_a_length_that_is_stated_too_low_does_not_let_more_in():
    async with world(options=SMALL) as here:
        content, headers = in_pieces(body_of(5000), 50), {"Content-Length": "5"}
        answer = await here.client.post("/tokenize", content=content, headers=headers)
    assert answer.status_code == 413


@pytest.mark.asyncio
@pytest.mark.parametrize("length", ["-1", "ten", "1e3", "", "9" * 40, "\u0661"])
async def test_a_length_that_is_none_is_refused(length):
    async with world() as here:
        headers = {"Content-Length": length.encode()}
        answer = await here.client.post("/tokenize", content=in_pieces(b"{}", 1), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("Content-Length: ")


def test_lengths():
    assert stated_bytes("0") == 0
    assert stated_bytes("67108864") == 64 << 20


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"not JSON", "no JSON"),
        (b"{} {}", "no JSON"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "no JSON"),
        (b'{"a": NaN}', "no JSON"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b"[" * 100_000, "must be a JSON object, not a list"),
        (b"[" * 1_000_000, "more than 500,000 objects and lists"),
        (b'{"a": 1, "b": "\xff"}', "UTF-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'"text"', "must be a JSON object, not a string"),
        (b"1", "must be a JSON object, not a number"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_what_is_no_request_is_refused_with_the_reason(raw, part):
    with pytest.raises(ApiError) as refused:
        parse_object(raw)["a"]
    assert refused.value.status == 400
    assert refused.value.kind == "invalid_request_error"
    assert part in refused.value.message
    assert len(refused.value.message) < 200


def test_a_body_is_read_as_it_stands():
    raw = (
        b' {"a": [1, 2.5, null, true, "\\u00e9\xc3\xa9"], "b": {}, "big": 123456789012345678901}\n'
    )
    assert dict(parse_object(raw)) == {
        "a": [1, 2.5, None, True, "éé"], "b": {}, "big": 123456789012345678901
    }  # fmt: skip


def test_members_that_nobody_asks_for_are_not_made_values():
    members = parse_object(b'{"known": [1], "junk": {"a": 1e999}}')
    assert members["known"] == [1]
    assert members.get("other") is None
    with pytest.raises(ApiError, match=r"junk: .*out of range"):
        members["junk"]


@pytest.mark.asyncio
async def test_the_body_counts_and_not_what_its_type_is_called():
    async with world() as here:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = await here.client.post("/tokenize", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"tokens": []})


# --- the shape of errors --------------------------------------------------------------------------


def test_types_have_the_statuses_that_clients_know():
    assert STATUS == {
        "invalid_request_error": 400,
        "authentication_error": 401,
        "permission_error": 403,
        "not_found_error": 404,
        "server_error": 500,
        "not_supported_error": 501,
        "unavailable_error": 503,
        "exceed_context_size_error": 400,
        "feature_disabled": 403,
    }


def test_an_error_has_one_shape_with_what_else_there_is_to_say():
    extra = {"n_prompt_tokens": 5000, "n_ctx": 4096}
    response = error_response(ApiError("exceed_context_size_error", "too long", extra=extra))
    assert response.status_code == 400
    assert msgspec.json.decode(response.body) == {
        "error": {
            "code": 400,
            "message": "too long",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 5000,
            "n_ctx": 4096,
        }
    }


def test_who_is_sent_away_for_now_is_told_when_to_come_back():
    assert error_response(unavailable("full", retry_after_s=7)).headers["retry-after"] == "7"
    assert "retry-after" not in error_response(unavailable("full")).headers
