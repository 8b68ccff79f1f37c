"""Schemas without what says nothing: which edition of JSON Schema they are written in, and `1.0` for `1`."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.canonical.schema_keywords import (
    DEPTH_MAX,
    ONE_SCHEMA,
    SCHEMAS_BY_NAME,
    SCHEMAS_IN_LIST,
    SCHEMAS_OF_TOOL,
)
from workmem.prompt.canonical.tool_rewriting import rewriter
from workmem.prompt.dialects.places import Dialect

_NAME = "schema_form"
_EDITIONS = ("http://json-schema.org/", "https://json-schema.org/")
_EXACT_MAX = 2**53
_NUMBERS = frozenset(
    {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minContains",
        "maxContains",
        "minProperties",
        "maxProperties",
    }
)
_BY_EDITION = frozenset(
    {"additionalItems", "dependencies", "id", "$recursiveRef", "$recursiveAnchor", "extends", "disallow"}
)
"""Keywords that not every edition knows, or knows as something else."""
_BESIDE_REF = frozenset(
    {"$schema", "$ref", "$defs", "definitions", "title", "description", "default", "examples"}
)
"""What may stand beside a `$ref` in any edition: older ones pass over all else."""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    formed: dict[str, Any] = {}
    for key, value in tool.items():
        if isinstance(value, dict) and key in SCHEMAS_OF_TOOL:
            formed[key] = _schema(_without_edition(value), 0)
        elif isinstance(value, dict) and key == "function":
            formed[key] = _tool(value)
        elif isinstance(value, list) and key == "tools":
            formed[key] = [_tool(item) if isinstance(item, dict) else item for item in value]
        else:
            formed[key] = value
    return formed


def _without_edition(schema: dict[str, Any]) -> dict[str, Any]:
    edition = schema.get("$schema")
    if not isinstance(edition, str) or not edition.startswith(_EDITIONS) or _needs_edition(schema, 0):
        return schema
    return {key: value for key, value in schema.items() if key != "$schema"}


def _needs_edition(schema: dict[str, Any], depth: int) -> bool:
    """Whether something in it means different things in different editions."""
    if depth > DEPTH_MAX or not _BY_EDITION.isdisjoint(schema) or isinstance(schema.get("items"), list):
        return True
    if any(isinstance(schema.get(key), bool) for key in ("exclusiveMinimum", "exclusiveMaximum", "required")):
        return True
    if "$ref" in schema and not schema.keys() <= _BESIDE_REF:
        return True
    return any(_needs_edition(inner, depth + 1) for inner in _inner(schema))


def _inner(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas directly in it."""
    found: list[Any] = []
    for key, value in schema.items():
        if isinstance(value, dict):
            found += value.values() if key in SCHEMAS_BY_NAME else [value] if key in ONE_SCHEMA else []
        elif isinstance(value, list) and key in SCHEMAS_IN_LIST:
            found += value
    return [one for one in found if isinstance(one, dict)]


def _schema(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return schema
    return {key: _of_schema(key, value, depth + 1) for key, value in schema.items()}


def _of_schema(key: str, value: Any, depth: int) -> Any:
    if isinstance(value, float):
        is_whole = key in _NUMBERS and value.is_integer() and abs(value) < _EXACT_MAX
        return int(value) if is_whole else value
    if isinstance(value, dict):
        if key in SCHEMAS_BY_NAME:
            return {name: _schema(inner, depth + 1) for name, inner in value.items()}
        return _schema(value, depth) if key in ONE_SCHEMA else value
    if isinstance(value, list) and key in SCHEMAS_IN_LIST:
        return [_schema(item, depth) for item in value]
    return value


_rewrite = rewriter(_tool)


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    del dialect
    paths = _rewrite(body)
    return Applied(_NAME, tuple(paths)) if paths else None


SCHEMA_FORM = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=(
        "Takes `$schema` out of a tool's schema where it names a published edition and nothing in the schema means "
        "something else in another one, and writes whole numbers of limits (`minimum`, `maxLength` and their like) "
        "as `1` rather than `1.0`. White space between the tokens of JSON is gone once it is read; texts keep theirs."
    ),
    why=(
        "A tool server's next version, or another library, adds `$schema` or writes `1.0`: the same tool, and "
        "everything behind it is computed anew."
    ),
    fix="Drop `$schema` from tool definitions, and write whole limits without a fraction.",
    apply=_apply,
)
