"""Answers in Anthropic's shapes: usage, errors, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from workmem.core.generation import KnownOutcome, Usage
from workmem.gateway.replies import usage_body

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def is_anthropic(path: str) -> bool:
    """Whether whoever asks for `path` speaks Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_in_anthropic(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error object in Anthropic's shape. It has no field for a path, so the message says it."""
    error = body["error"]
    text, param = error["message"], error.get("param")
    if param and param not in text:
        text = f"{param}: {text}"
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def named_event(value: Mapping[str, Any]) -> bytes:
    """`value` as an event that is named by its type."""
    return b"event: " + value["type"].encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


def anthropic_usage(
    usage: Usage, canonical: Mapping[str, int], known: Sequence[KnownOutcome] = ()
) -> dict[str, Any]:
    """`usage`: what was computed and what was cached sum to the prompt.

    Nothing is said of what was written to a cache: tokens are kept where there is room, and how many were is
    not known by then. `canonical` and `known` as in `usage_body`.
    """
    body = usage_body({0: usage}, 1, canonical, known)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "workmem": body["workmem"],
    }


def stop_reason(finish_reason: str, stopped_by: str | None) -> str:
    """Why a turn ended, from the words of a chat. A call that is whole is to be run, whatever ended it."""
    if finish_reason == "stop" and stopped_by is not None:
        return "stop_sequence"
    return _REASONS.get(finish_reason, "end_turn")
