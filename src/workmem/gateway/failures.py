"""Which HTTP answer an error becomes, in the shape of the API that was asked. The only place that knows status codes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from workmem.core.errors import (
    CapacityError,
    ClientError,
    ContextTooLong,
    QueueFull,
    UnknownModel,
    WorkmemError,
)
from workmem.gateway.anthropic_shapes import error_in_anthropic, is_anthropic


class Refusal(Exception):
    """A request refused by the gateway itself, with the answer it gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_body(message: str, *, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException, path: str = "") -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for `error`, where `path` was asked for."""
    status, body, headers = _described(error)
    return status, error_in_anthropic(status, body) if is_anthropic(path) else body, headers


def _described(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """In OpenAI's shape. What we did not foresee says nothing of its inside."""
    text = str(error)
    match error:
        case Refusal():
            told = error_body(text, kind=_kind(error.status), code=error.code, param=error.param)
            return error.status, told, error.headers
        case ContextTooLong():
            return 400, _client(error, "context_length_exceeded", "messages"), {}
        case UnknownModel():
            return 404, _client(error, "model_not_found", "model"), {}
        case ClientError():
            return 400, _client(error, None, None), {}
        case QueueFull():
            wait = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
            return 429, error_body(text, kind="rate_limit_error", code="queue_full"), wait
        case CapacityError():
            return 503, error_body(text, kind="server_error", code="no_capacity"), {"retry-after": "1"}
        case RecursionError():
            text = "The request is nested too deeply."
            return 400, error_body(text, kind="invalid_request_error", code=None), {}
        case TimeoutError():
            return 504, error_body(text or "The request timed out.", kind="server_error", code="timeout"), {}
        case WorkmemError():
            return 500, error_body(text, kind="server_error", code="engine_error"), {}
        case _:
            text = "Internal error; the server's log has the details under this request id."
            return 500, error_body(text, kind="server_error", code="internal_error"), {}


def error_response(error: BaseException, path: str = "") -> Response:
    """The answer to a request for `path` that failed before anything was sent."""
    status, body, headers = describe(error, path)
    return json_response(body, status, headers)


def _client(error: ClientError, code: str | None, param: str | None) -> dict[str, Any]:
    return error_body(str(error), kind="invalid_request_error", code=code, param=error.param or param)


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
