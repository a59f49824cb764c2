"""What a client is told when something goes wrong: one shape, one exception, one renderer.

    {"error": {"code": 400, "message": "...", "type": "invalid_request_error"}}

Types, statuses and the shape are llama-server's, so that its clients find what they look for.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

ErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "server_error",
    "not_supported_error",
    "unavailable_error",
    "exceed_context_size_error",
    "feature_disabled",
]
STATUS: dict[ErrorType, int] = {
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
JSON_TYPE = "application/json; charset=utf-8"
NO_HEADERS: dict[str, str] = {}


class ApiError(Exception):
    """Raise it anywhere in a route; the client gets it as its answer.

    `extra` are further members of the error object; `status` only where it is not the type's own.
    """

    def __init__(
        self,
        kind: ErrorType,
        message: str,
        *,
        status: int | None = None,
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: ErrorType = kind
        self.message = message
        self.status = STATUS[kind] if status is None else status
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The object that goes over the wire, plain or within a stream."""
        error = {"code": self.status, "message": self.message, "type": self.kind}
        return {"error": error | self.extra}


def invalid(message: str) -> ApiError:
    return ApiError("invalid_request_error", message)


def invalid_field(field: str, problem: str) -> ApiError:
    """`field` as the client spelt it, with its place: `messages[0].content`."""
    return ApiError("invalid_request_error", f"{field}: {problem}")


def not_supported(message: str) -> ApiError:
    return ApiError("not_supported_error", message)


def unavailable(message: str, *, retry_after_s: int | None = None) -> ApiError:
    headers = NO_HEADERS if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError("unavailable_error", message, headers=headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Numbers that JSON has no word for (NaN, infinities) become null."""
    return Response(msgspec.json.encode(value), status, headers, media_type=JSON_TYPE)


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def render_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def render_http_exception(_request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    return error_response(of_status(error.status_code, error.headers))


def of_status(status: int, headers: Mapping[str, str] | None) -> ApiError:
    if status == HTTPStatus.NOT_FOUND:
        return ApiError("not_found_error", "File Not Found")
    kind: ErrorType = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(kind, HTTPStatus(status).phrase, status=status, headers=headers)
