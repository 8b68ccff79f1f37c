"""Tools for chat templates that know none: rendered as plain text in plain messages.

The form is fixed and documented (`docs/internals/tools.md`), because it becomes part of cached
prefixes: changing a byte here makes every stored context of such a model a miss.

- The tools go to the end of the system message, which is created where there is none.
- A call in the history becomes `<tool_call>` text, exactly as the model is told to write it.
- Results become one user message of `<tool_response>` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

_INTRODUCTION = """You can call functions. These are the functions, as JSON, one per line, inside <tools></tools>:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as a JSON object inside <tool_call></tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}
</tool_call>
Results come back inside <tool_response></tool_response>. If no function is needed, answer directly."""


class PlainChat(msgspec.Struct, frozen=True):
    """Messages of roles system, user and assistant only, and where each came from."""

    messages: list[dict[str, Any]]
    paths: list[str]
    """Request field that message i renders, such as `messages[3].content` or `tools`."""
    passages: dict[str, list[tuple[str, str]]]
    """Of a message that renders several fields, by its path: (path, text) of each."""


def render_tools_as_system(tools: Sequence[dict[str, Any]]) -> str:
    """The text that tells a model which tools there are and how to call them."""
    return _INTRODUCTION.format(tools="\n".join(_compact(tool.get("function", tool)) for tool in tools))


def as_plain_chat(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> PlainChat:
    """`messages` without anything a template for plain chat would drop or refuse.

    Takes OpenAI messages whose content is text or None; changes none of them.
    """
    plain: list[dict[str, Any]] = []
    paths: list[str] = []
    passages: dict[str, list[tuple[str, str]]] = {}
    tool_run = False
    for index, message in enumerate(messages):
        role = message.get("role")
        path = f"messages[{index}].content"
        if role == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if tool_run:
                # One user message for parallel results: many templates refuse two in a row.
                plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
                paths.append(path)
            passages.setdefault(paths[-1], []).append((path, text))
            tool_run = True
            continue
        tool_run = False
        if role == "assistant" and message.get("tool_calls"):
            parts = [(path, str(message.get("content") or ""))]
            parts += [
                (
                    f"messages[{index}].tool_calls[{number}].function.arguments",
                    _call_text(call.get("function", {})),
                )
                for number, call in enumerate(message["tool_calls"])
            ]
            plain.append({"role": "assistant", "content": "\n".join(text for _, text in parts if text)})
            passages[path] = parts
        else:
            plain.append({**message, "content": message.get("content") or ""})
        paths.append(path)
    if tools:
        _add_system(plain, paths, passages, render_tools_as_system(tools))
    return PlainChat(plain, paths, passages)


def developer_as_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the developer role, which few templates know, replaced by system."""
    return [{**item, "role": "system"} if item.get("role") == "developer" else item for item in messages]


def late_system_as_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with instructions in the middle said by the user: some templates take a system message first only.

    They stay where they are: gathered at the beginning, each new one would change the prefix of all that follows.
    """
    return [
        {**item, "role": "user"} if index and item.get("role") == "system" else item
        for index, item in enumerate(messages)
    ]


def _add_system(
    plain: list[dict[str, Any]], paths: list[str], passages: dict[str, list[tuple[str, str]]], text: str
) -> None:
    if plain and plain[0].get("role") == "system":
        content = plain[0]["content"]
        plain[0] = {**plain[0], "content": f"{content}\n\n{text}" if content else text}
        passages[paths[0]] = [(paths[0], content), ("tools", text)]
        return
    plain.insert(0, {"role": "system", "content": text})
    paths.insert(0, "tools")


def _call_text(function: dict[str, Any]) -> str:
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str):
        # A history may hold a broken call; the model then sees what it once wrote.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return (
        f"<tool_call>\n{_compact({'name': function.get('name', ''), 'arguments': arguments})}\n</tool_call>"
    )


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
