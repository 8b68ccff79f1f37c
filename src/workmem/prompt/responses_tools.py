"""Tools of the Responses API as functions of a chat, and the way back from a call to the tool it is of.

- A function is a function.
- A custom tool takes text: a function of one argument, `input`. A grammar is told to the model, and not enforced.
- A namespace is opened: its tools become functions named `namespace__name`, which does not depend on what other tools
  there are, and calls of them go back with `namespace` and `name` apart, as the API has them.
- What a server would have to run (a web search, an MCP server) is left out and told: most clients offer it unasked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from workmem.core.errors import ClientError
from workmem.prompt.decode import convert
from workmem.prompt.responses import (
    ANY_TOOL,
    PLAIN_TOOL,
    AllowedTools,
    CustomTool,
    NamespaceTool,
    PlainTool,
    ToolName,
)

_OURS = frozenset({"function", "custom", "namespace"})
_OF_FUNCTIONS = ("name", "description", "parameters", "strict")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Which tool of the client a function stands for."""

    is_custom: bool
    name: str
    namespace: str | None = None


class LeftOut(msgspec.Struct, frozen=True):
    """Something of the request that the model does not see."""

    path: str
    type: str


class OfferedTools:
    """The tools of a request. Raises ClientError where one of them is wrong."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self.functions: list[dict[str, Any]] = []
        """As a chat completion has them."""
        self.paths: list[str] = []
        """Of each function, in the client's body."""
        self.shown: list[Any] = []
        """The client's tools, without those that are left out."""
        self.left_out: list[LeftOut] = []
        self._routes: dict[str, Route] = {}
        for index, tool in enumerate(tools):
            self._take(tool, f"tools[{index}]")

    def route(self, function: str) -> Route:
        """The tool that a call of `function` is of.

        A model may leave the namespace out; a name that is of no tool goes back as it is, for the client to refuse.
        """
        found = self._routes.get(function)
        if found is None:
            alike = [route for route in self._routes.values() if route.name == function]
            found = alike[0] if len(alike) == 1 else Route(is_custom=False, name=function)
        return found

    def choice(self, choice: Any) -> Any:
        """`tool_choice` as a chat completion has it."""
        if choice is None or choice in ("none", "auto", "required"):
            return choice
        if not isinstance(choice, dict):
            raise ClientError(
                f"tool_choice is {json.dumps(choice)[:64]}: send 'none', 'auto', 'required' or an object.",
                param="tool_choice",
            )
        if choice.get("type") == "allowed_tools":
            allowed = convert(choice, AllowedTools, at="tool_choice")
            names = [
                self._chosen(tool, f"tool_choice.tools[{index}]")
                for index, tool in enumerate(allowed.tools)
                if not _is_hosted(tool)
            ]
            if not names:
                raise ClientError(
                    "tool_choice.tools names none that is served here.", param="tool_choice.tools"
                )
            return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": names}}
        if _is_hosted(choice):
            raise ClientError(
                f"tool_choice demands {choice['type']!r}, which this server does not run: name a function.",
                param="tool_choice.type",
            )
        return self._chosen(choice, "tool_choice")

    def _chosen(self, choice: Any, path: str) -> dict[str, Any]:
        wanted = convert(choice, ToolName, at=path)
        name = function_name(wanted.name, wanted.namespace)
        if name not in self._routes:
            alike = [function for function, route in self._routes.items() if route.name == wanted.name]
            if wanted.namespace is not None or len(alike) != 1:
                text = f"{path} names the tool {wanted.name!r}, which is not among tools."
                raise ClientError(text, param=f"{path}.name")
            name = alike[0]
        return {"type": "function", "function": {"name": name}}

    def _take(self, raw: Any, path: str) -> None:
        if _is_hosted(raw):
            self.left_out.append(LeftOut(path, raw["type"]))
            return
        tool: PlainTool | NamespaceTool = convert(raw, ANY_TOOL, at=path)
        self.shown.append(raw)
        if not isinstance(tool, NamespaceTool):
            self._add(raw, tool, path, None)
            return
        described = tool.description
        for index, one in enumerate(tool.tools):
            here = f"{path}.tools[{index}]"
            inner: PlainTool = convert(one, PLAIN_TOOL, at=here)
            self._add(one, inner, here, tool.name, described)
            described = None

    def _add(
        self,
        raw: dict[str, Any],
        tool: PlainTool,
        path: str,
        namespace: str | None,
        described: str | None = None,
    ) -> None:
        name = function_name(tool.name, namespace)
        route = Route(is_custom=isinstance(tool, CustomTool), name=tool.name, namespace=namespace)
        if self._routes.setdefault(name, route) != route:
            raise ClientError(f"{path}.name: there is another tool {name!r}.", param=f"{path}.name")
        if isinstance(tool, CustomTool):
            function = _function_of_custom(tool)
        else:
            function = {key: raw[key] for key in raw if key in _OF_FUNCTIONS and raw[key] is not None}
        function["name"] = name
        if described:
            # What is said of all of them stands before the first: the model reads it once.
            function["description"] = "\n\n".join(filter(None, (described, function.get("description"))))
        self.functions.append({"type": "function", "function": function})
        self.paths.append(path)


def function_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    return name if not namespace else f"{namespace.rstrip('_')}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool, written as those of any call are."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text in the arguments of a call of a custom tool; all of them where the model did not keep to the form."""
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments)
        if isinstance(value, dict) and isinstance(value.get("input"), str):
            return value["input"]
    return arguments


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and bool(kind) and kind not in _OURS


def _function_of_custom(tool: CustomTool) -> dict[str, Any]:
    form = tool.format
    grammar = ""
    if form is not None and form.type == "grammar" and form.definition:
        grammar = f"The input must match this grammar ({form.syntax or 'lark'}):\n{form.definition}"
    described = "\n\n".join(filter(None, (tool.description, grammar)))
    return {
        "name": tool.name,
        **({"description": described} if described else {}),
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }
