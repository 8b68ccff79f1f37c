"""Requests of the OpenAI API as they arrive: types, ranges, and nothing else.

Unknown fields are ignored, because clients send many. Known fields are strict: a wrong type or a
value out of range is refused with its path, never coerced.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workmem.core.generation import Handoff

INT64_MAX = 2**63 - 1
CHOICES_MAX = 128
"""Completions that one HTTP request may ask for, prompts times `n`."""

Count = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Meta(max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both completion endpoints share; `top_k` and the rest below it are vLLM's."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Stop | Stops | None = None
    n: Count | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    workmem: Extension | None = None
    kv_transfer_params: TransferParams | None = None

    @property
    def allows_reuse(self) -> bool:
        """Whether the prompt may come from memory, and stay there."""
        return self.workmem is None or self.workmem.reuse is not False

    @property
    def handoff(self) -> Handoff | None:
        """What its sender knows of a prompt that was just computed elsewhere."""
        said = self.kv_transfer_params
        return None if said is None or said.workmem is None else said.workmem.handoff

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with `usage`."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """`workmem`: what only this server understands."""

    reuse: bool | None = None
    """False computes the whole prompt and leaves nothing behind, for a fair comparison."""
    canonical: Literal["lossless", "off"] | None = None
    """`off` leaves the prompt as it was written; read from the body before all else."""


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params`, as vLLM has it: what is said to whoever moves KV. All but ours is for others."""

    workmem: TransferExtension | None = None


class TransferExtension(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params.workmem`. Its hints are for vLLM's connector."""

    handoff: Handoff | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, rename={"schema_": "schema"}):
    """`response_format.json_schema`."""

    name: Name
    schema_: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that satisfies a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text content."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal an assistant gave earlier."""

    refusal: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """Decoded only to be refused by name."""


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """Decoded only to be refused by name."""


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """Decoded only to be refused by name."""


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Name and arguments (JSON text) of a call in the history."""

    name: Name
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an assistant message of the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function a model may call. `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a named `tool_choice`."""

    name: Name


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """`tool_choice` that forces one function."""

    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice.allowed_tools`: all tools stay in the prompt, and some may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice` that narrows what may be called without changing the prompt."""

    allowed_tools: AllowedTools


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`. `prompt` is text or token ids, one or several."""

    model: str
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Count | None = None
