"""A probe's request, in the terms of the API that the server speaks."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec

_MARK = {"type": "ephemeral"}


class Tool(NamedTuple):
    """A tool that is never called."""

    name: str
    description: str
    properties: tuple[str, ...] = ("path", "limit")

    @property
    def schema(self) -> dict[str, Any]:
        """Its properties in the order in which they are named here."""
        kinds = {name: {"type": "string", "description": f"The {name}."} for name in self.properties}
        return {"type": "object", "properties": kinds}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `messages` are those of a chat completion, without instructions."""

    system: str
    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    max_tokens: int = 1
    more: dict[str, Any] = {}
    """Further fields of the body."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says. None where it does not say."""

    id: str
    text: str
    thinking: str
    prompt_tokens: int | None
    cached: int | None
    completion_tokens: int | None
    seconds: float


class Api(Protocol):
    """How to ask, and to read what comes back."""

    name: str
    path: str

    def body(self, model: str, ask: Ask) -> dict[str, Any]:
        """The request."""
        ...

    def read(self, answer: dict[str, Any], seconds: float) -> Reading:
        """The answer."""
        ...


class ChatApi:
    """OpenAI's Chat Completions."""

    name = "chat"
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.limit_key = "max_tokens"
        self.extra: dict[str, Any] = {"temperature": 0}
        self.choice: dict[str, Any] = {}

    def body(self, model: str, ask: Ask) -> dict[str, Any]:
        """The request."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "system", "content": ask.system}, *ask.messages],
            self.limit_key: ask.max_tokens,
        }
        if ask.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.schema,
                    },
                }
                for tool in ask.tools
            ]
            body |= self.choice
        return body | self.extra | ask.more

    def adapt(self, complaint: str) -> bool:
        """Whether the request can be put another way, after what the server said of it."""
        if "max_completion_tokens" in complaint and self.limit_key == "max_tokens":
            self.limit_key = "max_completion_tokens"
            return True
        if "temperature" in complaint and self.extra:
            self.extra = {}
            return True
        if ("tool choice" in complaint or "tool_choice" in complaint) and not self.choice:
            # VLLM without a parser of calls takes tools only where none may be called.
            self.choice = {"tool_choice": "none"}
            return True
        return False

    def read(self, answer: dict[str, Any], seconds: float) -> Reading:
        """The answer."""
        usage = object_of(answer.get("usage"))
        cached = count_of(object_of(usage.get("prompt_tokens_details")).get("cached_tokens"))
        if cached is None:
            # llama.cpp says it beside the usage, SGLang in a field of its own.
            cached = count_of(object_of(answer.get("timings")).get("cache_n"))
        choices = answer.get("choices")
        first = object_of(choices[0]) if isinstance(choices, list) and choices else {}
        message = object_of(first.get("message"))
        return Reading(
            id=text_of(answer.get("id")),
            text=text_of(message.get("content")),
            thinking=text_of(message.get("reasoning_content") or message.get("reasoning")),
            prompt_tokens=count_of(usage.get("prompt_tokens")),
            cached=cached,
            completion_tokens=count_of(usage.get("completion_tokens")),
            seconds=seconds,
        )


class MessagesApi:
    """Anthropic's Messages. Nothing is kept there unless it is marked."""

    name = "messages"
    path = "/v1/messages"

    def body(self, model: str, ask: Ask) -> dict[str, Any]:
        """The request."""
        messages = [
            {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]}
            for one in ask.messages
            if isinstance(one.get("content"), str) and one["content"]
        ]
        messages[-1]["content"][0]["cache_control"] = _MARK
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": ask.max_tokens,
            "system": [{"type": "text", "text": ask.system, "cache_control": _MARK}],
            "messages": messages,
        }
        if ask.tools:
            body["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
                for tool in ask.tools
            ]
        return body | ask.more

    def adapt(self, complaint: str) -> bool:
        """Whether the request can be put another way: it cannot."""
        del complaint
        return False

    def read(self, answer: dict[str, Any], seconds: float) -> Reading:
        """The answer. Its `input_tokens` are those that were neither read from a cache nor written to it."""
        usage = object_of(answer.get("usage"))
        cached = count_of(usage.get("cache_read_input_tokens"))
        fresh = count_of(usage.get("input_tokens"))
        kept = count_of(usage.get("cache_creation_input_tokens")) or 0
        blocks = [object_of(block) for block in answer.get("content") or ()]
        return Reading(
            id=text_of(answer.get("id")),
            text="".join(text_of(block.get("text")) for block in blocks),
            thinking="".join(text_of(block.get("thinking")) for block in blocks),
            prompt_tokens=None if fresh is None else fresh + (cached or 0) + kept,
            cached=cached,
            completion_tokens=count_of(usage.get("output_tokens")),
            seconds=seconds,
        )


def object_of(value: Any) -> dict[str, Any]:
    """`value` where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def count_of(value: Any) -> int | None:
    """`value` where it is a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text_of(value: Any) -> str:
    """`value` where it is a text, else nothing."""
    return value if isinstance(value, str) else ""
