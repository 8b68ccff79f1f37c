"""Requests of Anthropic's Messages API as they arrive: types, ranges, and nothing else.

As in `openai`: unknown fields are ignored, known ones are strict. A block that cannot be served is either no type
here, or decoded only to be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workmem.prompt.openai import MaxTokens, Name, Stops

TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """`cache_control`. It is counted, and changes nothing: whatever repeats is kept here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: CacheControl | None = None


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """Decoded only to be refused by name."""

    cache_control: CacheControl | None = None


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """Decoded only to be refused by name."""

    cache_control: CacheControl | None = None


class SearchResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="search_result"):
    """Decoded only to be refused by name."""

    cache_control: CacheControl | None = None


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """In a tool's result: a tool that was deferred is wanted from now on."""

    tool_name: Name
    cache_control: CacheControl | None = None


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What a call brought."""

    tool_use_id: CallId
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: CallId
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought before."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thinking that only Anthropic can read; passed over."""


class ChangedTool(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """A tool of a change, by its name."""

    name: Name


class DefinedTool(msgspec.Struct, frozen=True, tag_field="type", tag="tool_definition"):
    """A tool of a change, in full."""

    definition: Tool


class ToolAdditionBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_addition"):
    """From here on the model may call this tool."""

    tool: ChangedTool | DefinedTool
    cache_control: CacheControl | None = None


class ToolRemovalBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_removal"):
    """From here on the model may not call this tool."""

    tool: ChangedTool
    cache_control: CacheControl | None = None


Unread = ImageBlock | DocumentBlock | SearchResultBlock
ResultPart = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
UserBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock
SystemBlock = TextBlock | ToolAdditionBlock | ToolRemovalBlock


class UserMessage(msgspec.Struct, frozen=True, tag_field="role", tag="user"):
    """A message of the user: text, and what calls brought."""

    content: str | list[UserBlock]


class AssistantMessage(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    """A turn of the model."""

    content: str | list[AssistantBlock]


class SystemMessage(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    """Instructions in the middle of a history."""

    content: str | list[SystemBlock]
    clear_at: Literal["next_user_message", "never"] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`. One without a schema is Anthropic's own, and refused by name."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(msgspec.Struct, frozen=True, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, frozen=True, tag_field="type", tag="any"):
    """Some tool must be called."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="tool"):
    """One tool, named, must be called."""

    name: Name
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, frozen=True, tag_field="type", tag="none"):
    """No tool may be called."""


class SchemaFormat(
    msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", rename={"schema_": "schema"}
):
    """`output_config.format`: the answer is JSON that satisfies a schema."""

    schema_: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config`. Its effort is a wish that models here do not know."""

    format: SchemaFormat | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`. Budgets are Anthropic's models' own; thinking is always shown."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: everything that is rendered."""

    model: str
    messages: Annotated[list[UserMessage | AssistantMessage | SystemMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: TopK | None = None
