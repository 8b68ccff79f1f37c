"""Objects with their keys in one order: a few that read best first, the rest by the alphabet."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.schema_keywords import (
    DEPTH_MAX,
    ONE_SCHEMA,
    SCHEMAS_BY_NAME,
    SCHEMAS_IN_LIST,
    SCHEMAS_OF_TOOL,
    VALUES,
)

TOOL_KEYS = ("type", "function", "name", "description", "parameters", "input_schema", "strict")
SCHEMA_KEYS = ("$schema", "$id", "$ref", "type", "title", "description")


def ordered_tool(tool: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """A tool's definition, its schema included, in one order. It equals `tool`, apart from sets that were sorted."""
    if depth > DEPTH_MAX:
        return tool
    return {key: _of_tool(key, tool[key], depth + 1) for key in _sorted(tool, TOOL_KEYS)}


def ordered_schema(schema: Any, depth: int = 0) -> Any:
    """A JSON schema in one order. A list of schemas keeps its order, `required` is sorted as the set that it is."""
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return schema
    return {key: _of_schema(key, schema[key], depth + 1) for key in _sorted(schema, SCHEMA_KEYS)}


def ordered(value: Any, depth: int = 0) -> Any:
    """Any JSON with the keys of its objects by the alphabet, its lists as they are."""
    if depth > DEPTH_MAX:
        return value
    if isinstance(value, dict):
        return {key: ordered(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list):
        return [ordered(item, depth + 1) for item in value]
    return value


def _of_tool(key: str, value: Any, depth: int) -> Any:
    if not isinstance(value, (dict, list)) or key in ("examples", "input_examples"):
        return value
    if isinstance(value, dict):
        if key in SCHEMAS_OF_TOOL:
            return ordered_schema(value, depth)
        return ordered_tool(value, depth) if key == "function" else ordered(value, depth)
    if key == "tools":
        return [ordered_tool(item, depth) if isinstance(item, dict) else item for item in value]
    return ordered(value, depth)


def _of_schema(key: str, value: Any, depth: int) -> Any:
    if not isinstance(value, (dict, list)) or key in VALUES:
        return value
    if isinstance(value, dict):
        if key in SCHEMAS_BY_NAME:
            return {name: ordered_schema(value[name], depth + 1) for name in sorted(value)}
        if key == "dependentRequired":
            return {name: _as_set(value[name]) for name in sorted(value)}
        return ordered_schema(value, depth) if key in ONE_SCHEMA else ordered(value, depth)
    if key == "required":
        return _as_set(value)
    if key in SCHEMAS_IN_LIST:
        return [ordered_schema(item, depth) for item in value]
    return ordered(value, depth)


def _as_set(value: Any) -> Any:
    """Names without their order; anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return value
    return sorted(set(value))


def _sorted(held: dict[str, Any], first: tuple[str, ...]) -> list[str]:
    return [key for key in first if key in held] + sorted(key for key in held if key not in first)
