"""The JSON schema that an answer must satisfy when `tool_choice` demands a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workmem.core.errors import ClientError
from workmem.prompt.openai import AllowedToolsChoice, ChatRequest, NamedToolChoice

_STAYS_OPEN = frozenset(
    [
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
    ]
)


def offered_names(request: ChatRequest) -> list[str]:
    """Names of the tools the model may call now; none with `tool_choice: none`."""
    if request.tool_choice == "none":
        return []
    allowed = allowed_names(request)
    names = [tool.function.name for tool in request.tools or []]
    return names if allowed is None else [name for name in names if name in allowed]


def allowed_names(request: ChatRequest) -> frozenset[str] | None:
    """Names of the only tools that the model may call; None where nothing narrows them."""
    choice = request.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return None
    return frozenset(tool.function.name for tool in choice.allowed_tools.tools)


def forced_schema(request: ChatRequest, tools: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Schema of `{"name", "arguments"}`, or None where the model may answer freely.

    Raises ClientError if the choice names no offered tool.
    """
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return None
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
    allowed = allowed_names(request)
    if allowed is not None:
        unknown = sorted(allowed - {function["name"] for function in functions})
        if unknown:
            text = f"tool_choice allows the function {unknown[0]!r}, which is not among tools."
            raise ClientError(text, param="tool_choice.allowed_tools.tools")
        functions = [function for function in functions if function["name"] in allowed]
    if isinstance(choice, AllowedToolsChoice) and choice.allowed_tools.mode == "auto":
        return None
    if isinstance(choice, NamedToolChoice):
        wanted = choice.function.name
        functions = [function for function in functions if function["name"] == wanted][:1]
        if not functions:
            raise ClientError(
                f"tool_choice names the function {wanted!r}, which is not among tools.",
                param="tool_choice.function.name",
            )
    if not functions:
        raise ClientError("tool_choice 'required' needs at least one tool.", param="tool_choice")
    definitions: dict[str, Any] = {}
    variants = [_variant(function, f"t{i}", definitions) for i, function in enumerate(functions)]
    schema: dict[str, Any] = variants[0] if len(variants) == 1 else {"anyOf": variants}
    return {**schema, "$defs": definitions} if definitions else schema


def _variant(function: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters: Any = function.get("parameters") or {"type": "object"}
    if _has_reference(parameters):
        # References count from the root of a document, so a schema that has some moves as a whole.
        definitions[key] = _rebase(parameters, f"#/$defs/{key}")
        parameters = {"$ref": f"#/$defs/{key}"}
    else:
        parameters = _closed(parameters)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _closed(schema: Any) -> Any:
    """`schema` without arguments it does not list: a small model would go on inventing them.

    What satisfies the closed schema satisfies the open one. Composed schemas stay open, because
    closing their parts could leave nothing that satisfies all.
    """
    if not isinstance(schema, dict) or not _STAYS_OPEN.isdisjoint(schema):
        return schema
    if isinstance(schema.get("properties"), dict):
        properties = {name: _closed(value) for name, value in schema["properties"].items()}
        return {**schema, "properties": properties, "additionalProperties": False}
    if isinstance(schema.get("items"), dict):
        return {**schema, "items": _closed(schema["items"])}
    return schema


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("$ref"), str) or any(_has_reference(item) for item in value.values())
    return isinstance(value, list) and any(_has_reference(item) for item in value)


def _rebase(value: Any, root: str) -> Any:
    if isinstance(value, list):
        return [_rebase(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: _rebase(item, root) for key, item in value.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        out["$ref"] = root + reference[1:]
    return out
