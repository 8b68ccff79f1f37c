"""A request of Anthropic's Messages API as a chat completion, and where everything in it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from workmem.core.errors import ClientError
from workmem.prompt.anthropic import (
    AnyChoice,
    AssistantBlock,
    AssistantMessage,
    CacheControl,
    ChangedTool,
    CountRequest,
    DefinedTool,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    RedactedThinkingBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from workmem.prompt.decode import convert

CACHE_MARKS_MAX = 4
"""`cache_control` in one request, as the API has it."""
_KEPT = (
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "kv_transfer_params",
    "min_p",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "workmem",
)
"""Fields that are not Anthropic's, and mean here what they mean in a chat."""


class TranslatedChat(NamedTuple):
    """The body of a chat completion; `origins` and `passages` as `Prompt` has them."""

    body: dict[str, Any]
    origins: dict[str, str]
    passages: dict[str, list[str]]


def chat_of_messages(raw: dict[str, Any]) -> TranslatedChat:
    """The body of `/v1/messages` as a chat. Raises ClientError naming what is wrong, or cannot be served."""
    request = convert(raw, MessagesRequest)
    body, history = _prompt(request)
    if request.stop_sequences:
        history.origins["stop"] = "stop_sequences"
        body["stop"] = request.stop_sequences
    body["max_tokens"] = request.max_tokens
    for name in ("stream", "temperature", "top_p", "top_k"):
        value = getattr(request, name)
        if value is not None:
            body[name] = value
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema_}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        history.origins["response_format"] = "output_config.format"
    kept = {name: raw[name] for name in _KEPT if name in raw}
    if isinstance(kwargs := kept.get("chat_template_kwargs"), dict):
        kept["chat_template_kwargs"] = {**body.get("chat_template_kwargs", {}), **kwargs}
    return TranslatedChat(body | kept, history.origins, history.passages)


def chat_of_count(raw: dict[str, Any]) -> TranslatedChat:
    """The body of `/v1/messages/count_tokens` as a chat. Raises ClientError."""
    body, history = _prompt(convert(raw, CountRequest))
    return TranslatedChat(body, history.origins, history.passages)


def _prompt(request: CountRequest) -> tuple[dict[str, Any], _History]:
    marks = [path for path, mark in _marks(request) if mark is not None]
    if len(marks) > CACHE_MARKS_MAX:
        text = f"At most {CACHE_MARKS_MAX} blocks may have cache_control; there are {len(marks)}."
        raise ClientError(text, param=marks[CACHE_MARKS_MAX])
    history = _History()
    if request.system is not None:
        history.say("system", _texts(request.system, "system"))
    for turn, message in enumerate(request.messages):
        _add_message(history, request.messages, turn, message)
    if not history.messages:
        raise ClientError("No message has any text.", param="messages")
    if history.messages[-1]["role"] == "assistant":
        raise ClientError(
            "The last message is the assistant's. Going on with it (prefill) is not supported: end with a user's message.",
            param=f"messages[{len(request.messages) - 1}].role",
        )
    body: dict[str, Any] = {"model": request.model, "messages": history.messages}
    tools = list(_tools(request))
    if tools:
        body["tools"] = [function for _, function in tools]
        for number, (path, _) in enumerate(tools):
            history.origins[f"tools[{number}]"] = path
    body |= _choice(request, [function["function"]["name"] for _, function in tools])
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        # Templates that know no such switch pass over it.
        body["chat_template_kwargs"] = {"enable_thinking": request.thinking.type == "enabled"}
    return body, history


class _History:
    """Messages of a chat as they are said. What one role says in a row is one message, as the API reads it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self.passages: dict[str, list[str]] = {}

    def say(self, role: str, texts: Sequence[tuple[str, str]]) -> None:
        """`texts`: (path, text) of each. An assistant's are one text in pieces; others' stand in lines of their own."""
        given = [(path, text) for path, text in texts if text]
        if given:
            self._add(self._turn(role), "content", given, "" if role == "assistant" else "\n")

    def think(self, path: str, text: str) -> None:
        """The assistant thought."""
        if text:
            self._add(self._turn("assistant"), "reasoning_content", [(path, text)], "\n")

    def call(self, path: str, block: ToolUseBlock) -> None:
        """The assistant called a tool."""
        message = self._turn("assistant")
        calls = message.setdefault("tool_calls", [])
        here = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.origins |= {
            here: path,
            f"{here}.function.name": f"{path}.name",
            f"{here}.function.arguments": f"{path}.input",
        }
        arguments = json.dumps(block.input, ensure_ascii=False)
        calls.append(
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
        )

    def result(self, path: str, block: ToolResultBlock) -> None:
        """A call brought something."""
        texts = list(_result_texts(block, path))
        if block.is_error and "error" not in "".join(text for _, text in texts).lower():
            # Models read no flags.
            texts = [(f"{path}.is_error", "Error:"), *texts]
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": ""})
        # Templates write something even around nothing.
        self.origins[f"messages[{len(self.messages) - 1}].content"] = path
        if given := [(where, text) for where, text in texts if text]:
            self._add(self.messages[-1], "content", given, "\n")

    def _turn(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _add(self, message: dict[str, Any], key: str, texts: Sequence[tuple[str, str]], joint: str) -> None:
        field = f"messages[{len(self.messages) - 1}].{key}"
        before = self.passages.get(field, [])
        if not before:
            # Where one passage is all of it, and for whoever does not tell passages apart.
            self.origins[field] = texts[0][0]
        for number, (path, text) in enumerate(texts, len(before)):
            self.origins[f"{field}[{number}]"] = path
            before = [*before, text]
        self.passages[field] = before
        message[key] = joint.join(before)


def _add_message(
    history: _History,
    messages: Sequence[Any],
    turn: int,
    message: UserMessage | AssistantMessage | SystemMessage,
) -> None:
    path = f"messages[{turn}].content"
    match message:
        case UserMessage():
            # Results answer the calls before them; text beside them is what the user says then.
            for number, block in enumerate(message.content if isinstance(message.content, list) else ()):
                if isinstance(block, ToolResultBlock):
                    history.result(f"{path}[{number}]", block)
            history.say("user", _texts(message.content, path))
        case AssistantMessage():
            if isinstance(message.content, str):
                history.say("assistant", [(path, message.content)])
                return
            for number, block in enumerate(message.content):
                _add_block(history, f"{path}[{number}]", block)
        case SystemMessage():
            is_over = any(isinstance(later, UserMessage) for later in messages[turn + 1 :])
            if not (is_over and message.clear_at == "next_user_message"):
                history.say("system", _texts(message.content, path))


def _add_block(history: _History, path: str, block: AssistantBlock) -> None:
    match block:
        case ThinkingBlock():
            history.think(f"{path}.thinking", block.thinking)
        case ToolUseBlock():
            history.call(path, block)
        case TextBlock():
            history.say("assistant", [(f"{path}.text", block.text)])
        case RedactedThinkingBlock():
            pass


def _texts(content: Any, path: str) -> list[tuple[str, str]]:
    """(path, text) of each text of a content."""
    if isinstance(content, str):
        return [(path, content)]
    found: list[tuple[str, str]] = []
    for number, block in enumerate(content):
        here = f"{path}[{number}]"
        if isinstance(block, TextBlock):
            found.append((f"{here}.text", block.text))
        elif not isinstance(block, ToolResultBlock | ToolAdditionBlock | ToolRemovalBlock):
            raise _unread(block, here)
    return found


def _result_texts(block: ToolResultBlock, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(block.content, str):
        yield f"{path}.content", block.content
        return
    for number, part in enumerate(block.content or ()):
        here = f"{path}.content[{number}]"
        if isinstance(part, TextBlock):
            yield f"{here}.text", part.text
        elif isinstance(part, ToolReferenceBlock):
            yield f"{here}.tool_name", f"Tool loaded: {part.tool_name}"
        else:
            raise _unread(part, here)


def _unread(block: msgspec.Struct, path: str) -> ClientError:
    kind = str(type(block).__struct_config__.tag)
    return ClientError(f"{path} is of type {kind!r}; the served model reads text only.", param=f"{path}.type")


def _tools(request: CountRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, function tool) of each tool that the model may call after the last message."""
    loaded, removed, defined = _changes(request.messages)
    paths = [(f"tools[{number}]", tool) for number, tool in enumerate(request.tools or ())]
    seen: dict[str, tuple[str, Tool]] = {}
    for path, tool in [*paths, *defined]:
        # What Anthropic's servers run, or its models know by heart, is not here. Leaving it out would have a
        # model that was told to search answer as if it had.
        if tool.input_schema is None or tool.type not in (None, "custom"):
            kind = tool.type or "without input_schema"
            raise ClientError(
                f"{path} ({tool.name}, {kind}) is a tool of Anthropic's own and not served here: "
                "leave it out, or send it with an input_schema and no type.",
                param=path,
            )
        if tool.name in seen and path.startswith("tools"):
            raise ClientError(f"Two tools are called {tool.name!r}: names must differ.", param=f"{path}.name")
        if not tool.defer_loading or tool.name in loaded or path.startswith("messages"):
            seen[tool.name] = (path, tool)
    for path, tool in seen.values():
        if tool.name not in removed:
            function: dict[str, Any] = {"name": tool.name}
            if tool.description is not None:
                function["description"] = tool.description
            yield path, {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _changes(messages: Sequence[Any]) -> tuple[set[str], set[str], list[tuple[str, Tool]]]:
    """Names that messages load, names that they remove, and (path, tool) of those that they define."""
    loaded: set[str] = set()
    removed: set[str] = set()
    defined: list[tuple[str, Tool]] = []
    for path, block in _blocks(messages):
        match block:
            case ToolReferenceBlock():
                loaded.add(block.tool_name)
            case ToolAdditionBlock(tool=DefinedTool(definition=tool)):
                defined.append((f"{path}.tool.definition", tool))
                removed.discard(tool.name)
            case ToolAdditionBlock(tool=ChangedTool(name=name)):
                loaded.add(name)
                removed.discard(name)
            case ToolRemovalBlock(tool=change):
                removed.add(change.name)
            case _:
                pass
    return loaded, removed, defined


def _blocks(messages: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(path, block) of all blocks, those within results too."""
    for turn, message in enumerate(messages):
        blocks: list[Any] = message.content if isinstance(message.content, list) else []
        for number, block in enumerate(blocks):
            path = f"messages[{turn}].content[{number}]"
            yield path, block
            parts: Any = block.content if isinstance(block, ToolResultBlock) else None
            for place, part in enumerate(parts if isinstance(parts, list) else ()):
                yield f"{path}.content[{place}]", part


def _marks(request: CountRequest) -> Iterator[tuple[str, CacheControl | None]]:
    for number, tool in enumerate(request.tools or ()):
        yield f"tools[{number}].cache_control", tool.cache_control
    for number, block in enumerate(request.system if isinstance(request.system, list) else ()):
        yield f"system[{number}].cache_control", block.cache_control
    for path, block in _blocks(request.messages):
        yield f"{path}.cache_control", getattr(block, "cache_control", None)
    # On the whole body it stands for one on the last block.
    yield "cache_control", request.cache_control


def _choice(request: CountRequest, names: Sequence[str]) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, NoChoice):
        return {"tool_choice": "none"} if names else {}
    if isinstance(choice, NamedChoice) and choice.name not in names:
        text = f"tool_choice names the tool {choice.name!r}, which is not among tools."
        raise ClientError(text, param="tool_choice.name")
    if isinstance(choice, AnyChoice) and not names:
        raise ClientError("tool_choice 'any' needs at least one tool.", param="tool_choice")
    body: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False
    match choice:
        case NamedChoice():
            body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case AnyChoice():
            body["tool_choice"] = "required"
        case _:
            pass
    return body
