"""One conversation, written in each API."""

import copy
import json
from dataclasses import dataclass, field

from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.dialects.responses import RESPONSES

DIALECTS = [CHAT, RESPONSES, MESSAGES]


@dataclass
class Call:
    name: str
    arguments: str
    id: str


@dataclass
class Turn:
    """A turn of `user`, `assistant` (with thinking and calls) or `tool` (the result of the call `id`)."""

    role: str
    text: str = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)
    id: str = ""


@dataclass
class Talk:
    system: str
    tools: list[dict]
    turns: list[Turn]

    def copy(self):
        return copy.deepcopy(self)

    def body(self, dialect):
        return {"chat": _chat, "responses": _responses, "messages": _messages}[dialect.name](self)


def tool(name, description, properties, required=()):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": description, "schema": schema}


def schema_key(dialect):
    return "input_schema" if dialect.name == "messages" else "parameters"


def function_path(dialect, number):
    return f"tools[{number}].function" if dialect.name == "chat" else f"tools[{number}]"


def system_path(dialect):
    return {"chat": "messages[0].content", "responses": "instructions", "messages": "system"}[dialect.name]


def _chat(talk):
    messages = [{"role": "system", "content": talk.system}] if talk.system else []
    for turn in talk.turns:
        message = {"role": turn.role, "content": turn.text}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in turn.calls
            ]
        if turn.role == "tool":
            message["tool_call_id"] = turn.id
        messages.append(message)
    tools = [
        {
            "type": "function",
            "function": {"name": t["name"], "description": t["description"], "parameters": t["schema"]},
        }
        for t in talk.tools
    ]
    return {"model": "m", "messages": messages, "tools": tools}


def _responses(talk):
    items = []
    for number, turn in enumerate(talk.turns):
        if turn.role == "tool":
            items.append({"type": "function_call_output", "call_id": turn.id, "output": turn.text})
            continue
        if turn.thinking:
            items.append(
                {
                    "type": "reasoning",
                    "id": f"rs_{number}",
                    "summary": [{"type": "summary_text", "text": turn.thinking}],
                }
            )
        if turn.text or not turn.calls:
            kind = "output_text" if turn.role == "assistant" else "input_text"
            items.append(
                {"type": "message", "role": turn.role, "content": [{"type": kind, "text": turn.text}]}
            )
        items += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in turn.calls
        ]
    tools = [
        {"type": "function", "name": t["name"], "description": t["description"], "parameters": t["schema"]}
        for t in talk.tools
    ]
    return {"model": "m", "instructions": talk.system, "input": items, "tools": tools}


def _messages(talk):
    messages = []
    for turn in talk.turns:
        blocks = []
        if turn.thinking:
            blocks.append({"type": "thinking", "thinking": turn.thinking, "signature": "s"})
        if turn.role == "tool":
            blocks.append({"type": "tool_result", "tool_use_id": turn.id, "content": turn.text})
        elif turn.text:
            blocks.append({"type": "text", "text": turn.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in turn.calls
        ]
        messages.append({"role": "assistant" if turn.role == "assistant" else "user", "content": blocks})
    tools = [
        {"name": t["name"], "description": t["description"], "input_schema": t["schema"]} for t in talk.tools
    ]
    return {"model": "m", "max_tokens": 256, "system": talk.system, "messages": messages, "tools": tools}
