"""Bytes of a body to a typed request; every way to fail is a `ClientError` that says where."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from workmem.core.errors import ClientError

T = TypeVar("T")
_AT_BYTE = re.compile(r"^(.*) \(byte (\d+)\)$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_SHOWN_CHARS_MAX = 64
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


def convert(raw: Any, kind: type[T], *, at: str = "") -> T:
    """`raw` as a `kind`. Raises ClientError whose `param` is the path of the offending field.

    `at` is where in its body `raw` stands, such as `input[3]`.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message, described = str(error), ""
        found = _AT_PATH.search(message)
        missing = re.search(r"missing required field `([^`]+)`", message)
        path = found.group(1) if found else ""
        if missing:
            path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        elif choices := _choices(kind, path, raw):
            described = f"; choose one of {', '.join(choices)}"
        elif "got" not in message:
            described = _given(raw, path)
        if at:
            message = _AT_PATH.sub("", message) + f" - at `$.{joined(at, path)}`"
            path = joined(at, path)
        raise ClientError(f"Invalid request: {message}{described}.", param=path or None) from error


def joined(at: str, path: str) -> str:
    """The path of what stands at `path` of what stands at `at`."""
    return f"{at}{path}" if not path or path.startswith("[") else f"{at}.{path}"


def _given(raw: Any, path: str) -> str:
    """The value at `path`, where it is short enough to be told."""
    for name, index in _STEP.findall(path):
        try:
            raw = raw[int(index)] if index else raw[name]
        except (KeyError, IndexError, TypeError):
            return ""
    text = json.dumps(raw)
    return f", got {text}" if len(text) <= _SHOWN_CHARS_MAX else ""


def _choices(kind: Any, path: str, raw: Any) -> list[str]:
    """The words that may stand at `path` of a `kind`; none where it is no matter of words."""
    nodes: list[Any] = [inspect.type_info(kind)]
    for name, index in _STEP.findall(path):
        told = [node for node in _flat(nodes) if _may_be(node, raw, name)]
        nodes = [below for node in told for below in _below(node, name, is_index=bool(index))]
        try:
            raw = raw[int(index)] if index else raw[name]
        except (KeyError, IndexError, TypeError):
            raw = None
    words = [node.values for node in _flat(nodes) if isinstance(node, inspect.LiteralType)]
    return [repr(word) for values in words for word in values]


def _may_be(node: Any, raw: Any, name: str) -> bool:
    """Whether `raw` may be a `node`: of several structs its tag tells which, unless the tag is what is asked for."""
    field = getattr(node, "tag_field", None)
    return field is None or field == name or not isinstance(raw, dict) or raw.get(field) == node.tag


def _flat(nodes: list[Any]) -> list[Any]:
    return [one for node in nodes for one in (node.types if isinstance(node, inspect.UnionType) else (node,))]


def _below(node: Any, name: str, *, is_index: bool) -> list[Any]:
    if is_index:
        return [node.item_type] if isinstance(node, inspect.ListType) else []
    if not isinstance(node, inspect.StructType):
        return []
    if node.tag_field == name:
        return [inspect.LiteralType((node.tag,))]
    return [field.type for field in node.fields if field.encode_name == name]


def _place(message: str, body: bytes) -> str:
    found = _AT_BYTE.match(message)
    if found is None:
        return f"{message[:1].lower()}{message[1:]} ({len(body)} bytes read)"
    offset = int(found.group(2))
    line = body.count(b"\n", 0, offset) + 1
    column = offset - (body.rfind(b"\n", 0, offset) + 1) + 1
    reason = found.group(1).removeprefix("JSON is malformed: ")
    return f"{reason} at line {line}, column {column} (byte {offset})"
