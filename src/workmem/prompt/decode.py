"""Bytes of a body to a typed request; every way to fail is a `ClientError` that says where."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from workmem.core.errors import ClientError

T = TypeVar("T")
_AT_BYTE = re.compile(r"^(.*) \(byte (\d+)\)$", re.DOTALL)
_AT_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(.*?)`$", re.DOTALL)


def decode_json(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises ClientError naming line, column and byte of the first mistake."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise ClientError("The body is not usable: its JSON is nested too deeply.") from error
    except msgspec.DecodeError as error:
        raise ClientError(f"The body is not valid JSON: {_place(str(error), body)}.") from error
    if not isinstance(value, dict):
        raise ClientError("The body must be a JSON object.")
    return value


def convert(raw: dict[str, Any], kind: type[T]) -> T:
    """`raw` as a `kind`. Raises ClientError whose `param` is the path of the offending field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _AT_PATH.search(message)
        missing = re.search(r"missing required field `([^`]+)`", message)
        path = found.group(1) if found else ""
        if missing:
            path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        raise ClientError(f"Invalid request: {message}.", param=path or None) from error


def _place(message: str, body: bytes) -> str:
    found = _AT_BYTE.match(message)
    if found is None:
        return f"{message[:1].lower()}{message[1:]} ({len(body)} bytes read)"
    offset = int(found.group(2))
    line = body.count(b"\n", 0, offset) + 1
    column = offset - (body.rfind(b"\n", 0, offset) + 1) + 1
    reason = found.group(1).removeprefix("JSON is malformed: ")
    return f"{reason} at line {line}, column {column} (byte {offset})"
