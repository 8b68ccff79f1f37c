"""One line of a recording: the request in it, whichever way it was wrapped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from workmem.core.errors import ClientError
from workmem.prompt.decode import decode_json
from workmem.prompt.dialects.known import dialect_of_body, dialect_of_path
from workmem.prompt.dialects.places import Dialect

_BODY_KEYS = ("body_raw", "body", "request_body", "request", "payload", "requestBody", "postData", "content")
_PATH_KEYS = ("path", "url", "endpoint", "uri")
_WRAPPERS = ("request", "req", "http_request")
_NEST_MAX = 4
_VLLM_BODY = re.compile(r"Request (\S+) JSON body: (\{.*)$")
_VLLM_TOKENS = re.compile(r"Request (\S+) details: prompt: .*prompt_token_ids: \[([0-9, ]+)\]")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded request."""

    dialect: Dialect | None
    """None where only its tokens were recorded."""
    body: dict[str, Any]
    headers: dict[str, str] = {}
    """With names in lower case."""
    steps: tuple[str, ...] = ()
    """Keys that lead from the line's object to the body."""
    is_text: bool = False
    """Whether the body stands there as JSON text."""
    line: dict[str, Any] = {}
    """The whole object of the line."""
    token_ids: tuple[int, ...] = ()

    def with_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """The line's object with another body in the place of this one."""
        written: Any = json.dumps(body, ensure_ascii=False, separators=(",", ":")) if self.is_text else body
        return _replaced(self.line, self.steps, written)


def read_line(line: bytes) -> Entry | None:
    """The request of a line; None where the line is of a log that tells of something else.

    Raises ClientError that says what is wrong with it and what to do.
    """
    text = line.strip()
    if not text:
        return None
    if not text.startswith(b"{"):
        return _of_log(text.decode("utf-8", "replace"))
    value = decode_json(text)
    found = _find(value, (), _NEST_MAX)
    path = _path(value) or (_path(found[3]) if found is not None else "")
    if path.startswith("/v1/") and (dialect_of_path(path) is None or path.endswith("/count_tokens")):
        # Embeddings, counts and the like leave nothing in a prefix cache.
        return None
    if found is None:
        raise ClientError(
            "holds no request: neither messages nor input, also not in "
            f"{', '.join(_BODY_KEYS[:4])}; write one JSON body per line"
        )
    steps, body, is_text, holder = found
    dialect = dialect_of_path(path) or dialect_of_body(body)
    if dialect is None or not isinstance(body.get(dialect.history_key), list | str):
        dialect = dialect_of_body(body)
    if dialect is None:
        raise ClientError(
            "its messages are no list, or its input neither text nor list; see the API's reference"
        )
    headers = _headers(holder.get("headers") or value.get("headers"))
    return Entry(dialect=dialect, body=body, headers=headers, steps=steps, is_text=is_text, line=value)


def _find(
    value: Mapping[str, Any], steps: tuple[str, ...], nest: int
) -> tuple[tuple[str, ...], dict[str, Any], bool, Mapping[str, Any]] | None:
    """The body in `value`, the way to it, and the object that has its headers and path."""
    if dialect_of_body(value) is not None:
        return steps, dict(value), False, value
    if not nest:
        return None
    for key in (*_BODY_KEYS, *_WRAPPERS):
        inner = value.get(key)
        is_text = isinstance(inner, str) and inner.lstrip().startswith("{")
        body = (
            decode_json(inner.encode("utf-8", "surrogatepass"))
            if is_text and isinstance(inner, str)
            else inner
        )
        if not isinstance(body, dict):
            continue
        if dialect_of_body(body) is not None:
            return (*steps, key), body, is_text, value
        if not is_text and (found := _find(body, (*steps, key), nest - 1)) is not None:
            return found
    return None


def _path(holder: Mapping[str, Any]) -> str:
    for key in _PATH_KEYS:
        given = holder.get(key)
        if isinstance(given, str):
            at = given.find("/v1/")
            return given[max(at, 0) :].partition("?")[0]
    return ""


def _headers(given: Any) -> dict[str, str]:
    """From an object, or from a list of pairs or of objects with name and value."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list):
        for item in given:
            if isinstance(item, dict):
                pairs.append((item.get("name"), item.get("value")))
            elif isinstance(item, list | tuple) and len(item) == 2:
                pairs.append((item[0], item[1]))
    return {name.lower(): value for name, value in pairs if isinstance(name, str) and isinstance(value, str)}


def _of_log(text: str) -> Entry | None:
    """VLLM's log of requests (`--enable-log-requests` at level DEBUG): their bodies, or their tokens."""
    if match := _VLLM_BODY.search(text):
        try:
            return read_line(match[2].encode("utf-8", "surrogatepass"))
        except ClientError as error:
            raise ClientError(
                f"the body in this log line is not whole ({error}); start vLLM without --max-log-len"
            ) from error
    if match := _VLLM_TOKENS.search(text):
        return Entry(dialect=None, body={}, token_ids=tuple(int(one) for one in match[2].split(",")))
    return None


def _replaced(value: Mapping[str, Any], steps: Sequence[str], new: Any) -> dict[str, Any]:
    if not steps:
        return new
    inner = new if len(steps) == 1 else _replaced(value[steps[0]], steps[1:], new)
    return {**value, steps[0]: inner}
