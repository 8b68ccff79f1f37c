"""Requests of OpenAI's Responses API as they arrive: types, ranges, and nothing else.

As in `prompt.openai`, unknown fields are ignored and known ones are strict. Items are decoded one by one, so that an
error names its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workmem.prompt.openai import JsonObjectFormat, MaxTokens, Name, TextFormat

CallId = Annotated[str, Meta(min_length=1, max_length=512)]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text that a client wrote."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str


class PlainText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text as Chat Completions has it; some clients send it here."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal the model gave earlier."""

    refusal: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """Decoded only to be refused by name."""


class InputFile(msgspec.Struct, frozen=True, tag_field="type", tag="input_file"):
    """Decoded only to be refused by name."""


class InputAudio(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """Decoded only to be refused by name."""


Part = InputText | OutputText | PlainText | Refusal | InputImage | InputFile | InputAudio


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of either side."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of thinking, or of a summary of it."""

    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before what follows it."""

    summary: list[Thought] | None = None
    content: list[Thought] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call the model made. `arguments` is JSON text."""

    call_id: CallId
    name: Name
    arguments: str
    namespace: Name | None = None


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes text."""

    call_id: CallId
    name: Name
    input: str
    namespace: Name | None = None


class FunctionOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What came of a call."""

    call_id: CallId
    output: str | list[Part]


class CustomOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    """What came of a call of a tool that takes text."""

    call_id: CallId
    output: str | list[Part]


class ItemReference(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="item_reference"):
    """An item that the server has."""

    id: CallId


class WebSearchItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="web_search_call"):
    """A search that another server ran: it holds no result, so there is nothing to be read."""


Item = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | FunctionOutputItem
    | CustomOutputItem
    | ItemReference
    | WebSearchItem
)


ANY_ITEM: Any = Item
"""As a kind to decode to: for a type checker a union is none."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function a model may call. `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of a custom tool looks like."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool that takes text instead of JSON."""

    name: Name
    description: str | None = None
    format: CustomFormat | None = None


PlainTool = FunctionTool | CustomTool
PLAIN_TOOL: Any = PlainTool


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """Tools under one name, such as those of an MCP server. Each is decoded by itself."""

    name: Name
    tools: list[Any]
    description: str | None = None


ANY_TOOL: Any = FunctionTool | CustomTool | NamespaceTool


class ToolName(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as `tool_choice` names it."""

    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` that narrows what may be called. Each tool is decoded by itself."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Any], Meta(min_length=1)]


class SchemaFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag="json_schema",
    rename={"schema_": "schema"},
):
    """JSON that satisfies a schema."""

    name: Name
    schema_: dict[str, Any]
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`. What efforts there are is the template's matter."""

    effort: Name | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`. Fields of the sampling are those of a chat, and checked there."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: CallId | None = None
    max_output_tokens: MaxTokens | None = None
    include: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
