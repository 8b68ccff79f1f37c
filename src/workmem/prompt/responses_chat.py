"""A request of the Responses API as a chat completion, and where each part of the chat came from.

The items of one turn of the model (what it thought, said and called) become one assistant message, as a chat has it:
the same conversation renders to the same tokens, whichever API it comes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from workmem.core.errors import ClientError
from workmem.prompt.decode import convert
from workmem.prompt.responses import (
    ANY_ITEM,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputAudio,
    InputFile,
    InputImage,
    Item,
    ItemReference,
    JsonObjectFormat,
    MessageItem,
    Part,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
    SchemaFormat,
    WebSearchItem,
)
from workmem.prompt.responses_tools import LeftOut, OfferedTools, custom_arguments, function_name
from workmem.prompt.thought_carrier import carried

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_THINKING = "reasoning.encrypted_content"
_AS_IN_A_CHAT = (
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "priority",
    "workmem",
    "kv_transfer_params",
)
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "web_search_call": "ws",
}
"""Of the ids that the API gives items."""


class PlacedItem(NamedTuple):
    """An item, and its path for explanations: `input[3]`, or where it stands in an earlier response."""

    path: str
    item: Any


class Translation(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a chat."""

    chat: dict[str, Any]
    """Body of a chat completion."""
    origins: dict[str, str]
    """As in `Prompt`."""
    passages: dict[str, list[str]]
    """As in `Prompt`."""
    tools: OfferedTools
    left_out: list[LeftOut]


def read_request(body: dict[str, Any]) -> ResponsesRequest:
    """The typed request. Raises ClientError where it is wrong, or asks for what is not served."""
    request = convert(body, ResponsesRequest)
    if request.background:
        raise ClientError("background is not supported: send it with stream instead.", param="background")
    if request.conversation is not None:
        raise ClientError(
            "conversation is not supported: continue with previous_response_id.", param="conversation"
        )
    if request.prompt is not None:
        raise ClientError(
            "prompt names a template that only its owner has: send instructions and input.", param="prompt"
        )
    return request


def placed_input(request: ResponsesRequest) -> list[PlacedItem]:
    """The items of `input`; a string is a message of the user."""
    if isinstance(request.input, str):
        return [PlacedItem("input", {"type": "message", "role": "user", "content": request.input})]
    return [PlacedItem(f"input[{index}]", item) for index, item in enumerate(request.input or ())]


def reference_id(item: Any) -> str | None:
    """The id of the item that `item` only refers to; None where it is an item itself."""
    if not isinstance(item, dict) or _type(item) != "item_reference":
        return None
    found = item.get("id")
    return found if isinstance(found, str) else None


def stored_item(item: Any, new_id: str) -> dict[str, Any]:
    """An item that was read, as the API shows it later: with a type, an id, and its text in parts."""
    kind = _type(item)
    stored: dict[str, Any] = {**item, "type": kind}
    if not isinstance(stored.get("id"), str):
        stored["id"] = f"{_PREFIXES.get(kind, 'item')}_{new_id}"
    if kind == "message":
        stored.setdefault("status", "completed")
        if isinstance(stored["content"], str):
            is_ours = stored["role"] == "assistant"
            part: dict[str, Any] = (
                {"type": "output_text", "annotations": []} if is_ours else {"type": "input_text"}
            )
            stored["content"] = [{**part, "text": stored["content"]}]
    return stored


def _type(item: dict[str, Any]) -> Any:
    """The type of an item. Some clients leave it out: a message has a role, a reference has but an id."""
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if "id" in item and "role" not in item else "message"
    return kind


def read_item(placed: PlacedItem) -> Item:
    """The typed item."""
    item = placed.item
    if isinstance(item, dict):
        item = {**item, "type": _type(item)}
    return convert(item, ANY_ITEM, at=placed.path)


def as_chat(body: Mapping[str, Any], request: ResponsesRequest, items: Sequence[PlacedItem]) -> Translation:
    """`request`, whose body is `body`, with the `items` of its whole context, as a chat.

    Raises ClientError where an item or a tool is wrong, naming its path.
    """
    tools = OfferedTools(request.tools or ())
    history = _History()
    if request.instructions is not None:
        history.add_text("system", request.instructions, "instructions")
    for placed in items:
        history.add(placed)
    history.close()
    if not history.messages:
        raise ClientError("There is nothing to answer: send input.", param="input")
    origins = history.origins
    origins |= {f"tools[{index}]": path for index, path in enumerate(tools.paths)}
    chat: dict[str, Any] = {"model": request.model, "messages": history.messages}
    if tools.functions:
        chat["tools"] = tools.functions
    choice = tools.choice(request.tool_choice)
    if choice is not None:
        chat["tool_choice"] = choice
    chat |= {name: body[name] for name in _AS_IN_A_CHAT if body.get(name) is not None}
    chat |= _options(body, request)
    # What is dropped from the front of a context would change all that follows: one that is too long is refused.
    asked = [LeftOut("truncation", "auto")] if request.truncation == "auto" else []
    left_out = [*tools.left_out, *history.left_out, *asked]
    return Translation(chat=chat, origins=origins, passages=history.passages, tools=tools, left_out=left_out)


def _options(body: Mapping[str, Any], request: ResponsesRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request.max_output_tokens is not None:
        options["max_completion_tokens"] = request.max_output_tokens
    if LOGPROBS in (request.include or ()):
        options |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    match None if request.text is None else request.text.format:
        case JsonObjectFormat():
            options["response_format"] = {"type": "json_object"}
        case SchemaFormat() as wanted:
            schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        case _:
            pass
    kwargs: Any = body.get("chat_template_kwargs")
    effort = None if request.reasoning is None else request.reasoning.effort
    if effort is not None and (kwargs is None or isinstance(kwargs, dict)):
        # Templates that know efforts take them by this name; the others take no notice.
        kwargs = {"reasoning_effort": effort, **(kwargs or {})}
    if kwargs is not None:
        options["chat_template_kwargs"] = kwargs
    return options


class _Turn:
    """What the model did between two messages of others."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.thoughts: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.calls: list[tuple[dict[str, Any], str]] = []
        self.thought_path = path


class _History:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self.passages: dict[str, list[str]] = {}
        self.left_out: list[LeftOut] = []
        self._turn: _Turn | None = None

    def add(self, placed: PlacedItem) -> None:
        """Take one item more."""
        path, item = placed.path, read_item(placed)
        # Where the input is a string, it is its own content.
        content = path if path == "input" else f"{path}.content"
        match item:
            case MessageItem(role="assistant"):
                texts = _texts(item.content, content)
                turn = self._turn_for(
                    path, is_new=bool(self._turn and self._turn.texts and not self._turn.calls)
                )
                turn.texts += texts
            case MessageItem():
                self._message({"role": item.role}, _texts(item.content, content), content)
            case FunctionOutputItem() | CustomOutputItem():
                told = {"role": "tool", "tool_call_id": item.call_id}
                self._message(told, _texts(item.output, f"{path}.output"), f"{path}.output")
            case FunctionCallItem():
                self._call(path, item, item.arguments, f"{path}.arguments")
            case CustomCallItem():
                self._call(path, item, custom_arguments(item.input), f"{path}.input")
            case ReasoningItem():
                self._think(path, item)
            case WebSearchItem():
                self.left_out.append(LeftOut(path, "web_search_call"))
            case ItemReference():
                raise ClientError(f"{path} refers to an item that is not held here.", param=f"{path}.id")

    def add_text(self, role: str, text: str, path: str) -> None:
        """Take a message of text."""
        self._message({"role": role}, [(text, path)], path)

    def close(self) -> None:
        """No more items of this turn."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        message: dict[str, Any] = {"role": "assistant"}
        place = f"messages[{len(self.messages)}]"
        if turn.thoughts:
            message["reasoning_content"] = "\n".join(turn.thoughts)
            self.origins[f"{place}.reasoning_content"] = turn.thought_path
        if turn.calls:
            message["tool_calls"] = [call for call, _ in turn.calls]
        for number, (_, path) in enumerate(turn.calls):
            self.origins[f"{place}.tool_calls[{number}].function.arguments"] = path
        self._append(message, turn.texts, turn.path)

    def _call(self, path: str, item: FunctionCallItem | CustomCallItem, arguments: str, at: str) -> None:
        function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._turn_for(path).calls.append((call, at))

    def _think(self, path: str, item: ReasoningItem) -> None:
        thoughts = [thought.text for thought in item.content or item.summary or ()]
        where = "content" if item.content else "summary"
        if not item.content and item.encrypted_content is not None:
            text = carried(item.encrypted_content)
            if text is not None:
                thoughts, where = [text], "encrypted_content"
        if not any(thoughts):
            self.left_out.append(LeftOut(path, "reasoning"))
            return
        turn = self._turn_for(path, is_new=bool(self._turn and (self._turn.texts or self._turn.calls)))
        turn.thoughts += thoughts
        turn.thought_path = f"{path}.{where}"

    def _turn_for(self, path: str, *, is_new: bool = False) -> _Turn:
        if is_new:
            self.close()
        if self._turn is None:
            self._turn = _Turn(path)
        return self._turn

    def _message(self, message: dict[str, Any], texts: list[tuple[str, str]], path: str) -> None:
        self.close()
        self._append(message, texts, path)

    def _append(self, message: dict[str, Any], texts: list[tuple[str, str]], path: str) -> None:
        place = f"messages[{len(self.messages)}].content"
        content: str | list[dict[str, Any]] = ""
        if len(texts) == 1:
            content, path = texts[0]
        elif texts:
            content = [{"type": "text", "text": text} for text, _ in texts]
            path = _shared([at for _, at in texts]) or path
            self.passages[place] = [text for text, _ in texts]
            self.origins |= {f"{place}[{number}]": at for number, (_, at) in enumerate(texts)}
        self.origins[place] = path
        role = message.pop("role")
        self.messages.append({"role": role, "content": content, **message})


def _texts(content: str | list[Part], path: str) -> list[tuple[str, str]]:
    """Text and path of each part. Raises ClientError on one that is no text."""
    if isinstance(content, str):
        return [(content, path)]
    texts: list[tuple[str, str]] = []
    for number, part in enumerate(content):
        here = f"{path}[{number}]"
        if isinstance(part, InputImage | InputFile | InputAudio):
            kind = str(type(part).__struct_config__.tag)
            raise ClientError(
                f"{here} is of type {kind!r}; the served model reads text only.", param=f"{here}.type"
            )
        if isinstance(part, Refusal):
            texts.append((part.refusal, f"{here}.refusal"))
        else:
            texts.append((part.text, f"{here}.text"))
    return texts


def _shared(paths: Iterable[str]) -> str:
    """The content that all of `paths` stand in; empty where they stand in several."""
    stems = {path.rpartition("[")[0] for path in paths}
    return stems.pop() if len(stems) == 1 else ""
