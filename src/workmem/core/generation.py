"""What the gateway asks of an engine, and what it gets back: shared, so it lives in `core`.

The embedded engine implements `Engine`; tests implement it with a fake only for faults and clocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from workmem.core.hints import Action, Outcome
from workmem.core.outcomes import COMPUTED, SourceRun

ThinkingState = Literal["none", "possible", "begun"]
"""Whether an answer may begin with thoughts between `<think>` and `</think>`, or is in the middle of them."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Ranges are those of the OpenAI API; the gateway validates."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    """None takes the engine's `default_max_tokens`, cut to the context that is left."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives reported per token; 0 reports the chosen token only; None nothing."""
    json_schema: str | None = None
    """A JSON schema (as text) the answer must satisfy; "{}" means any JSON value."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who is calling, as far as the wire tells. Empty strings where it does not."""

    tenant: str = ""
    workflow: str = ""
    agent: str = ""
    session: str = ""
    parent: str = ""
    """Session or agent that started this one."""
    trace: str = ""
    """Of `traceparent`: one may span several agents."""


class Span(msgspec.Struct, frozen=True):
    """Prompt tokens [start, end) and the request field they render, such as `messages[2].content`."""

    path: str
    start: int
    end: int


class KnownTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the history that this server generated, and of which it still has the tokens.

    `messages[message]` means what was generated, so that a prompt with these tokens in place of its rendering says
    the same, and its KV is the one that generating them left behind.
    """

    message: int
    prompt_chars: int
    """Length of the text that it was the answer to, as the template wrote it."""
    prompt_digest: bytes
    """`text_digest` of that text."""
    token_ids: tuple[int, ...]
    """As generated, without an end mark."""


class KnownOutcome(msgspec.Struct, frozen=True):
    """What a rendering made of a known turn."""

    message: int
    outcome: str
    """`USED`, `SAME` where encoding the turn's text gives the same tokens anyway, or the reason against it."""
    tokens: int = 0
    """That were put in place."""


USED, SAME = "used", "same"


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the model sees it. Spans are ascending, disjoint and cover all tokens."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    thinking: ThinkingState = "none"
    """Of the answer to it."""
    text: str = ""
    """What the template wrote. The tokens of known turns may spell arguments of calls in another way."""
    known: tuple[KnownOutcome, ...] = ()
    """Of each known turn that was given, in the order of messages."""


def text_digest(text: str) -> bytes:
    """Stands for a text where it must be the same to the character."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever sends a request knows: its prompt was just computed elsewhere, and comes to the store. Advice."""

    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Of the prompt, from its beginning."""
    wait_s: Annotated[float, Meta(ge=0)]
    """It is worth to wait so many seconds for their blocks rather than to compute them; engines clip it."""


class HandoffReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a handoff."""

    waited_s: float
    """How long the request was held back for it."""
    tokens: int
    """Of the prompt, that came from below vram."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of one prompt. `priority`: lower runs earlier, as in vLLM."""

    id: str
    token_ids: list[int]
    sampling: SamplingParams
    caller: Caller = Caller()
    priority: int = 0
    reuse: bool = True
    """False computes everything and leaves nothing behind."""
    handoff: Handoff | None = None
    hints: tuple[Action, ...] = ()
    """What is to be done with its context, or with that of another of the caller's sessions. Advice."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability (natural log) of a token and of its `top` alternatives, best first."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished request cost. `sources` sum to `prompt_tokens`, true to the token."""

    prompt_tokens: int
    completion_tokens: int
    sources: tuple[SourceRun, ...]
    approximate: bool = False
    """Some of the tokens that were not computed may have come back rounded from a tier that was told to."""
    handoff: HandoffReport | None = None
    """Where the request had one."""
    hints: tuple[Outcome, ...] = ()
    """What became of each of the request's."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(run.tokens for run in self.sources if run.source != COMPUTED)


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A step of output. The last one carries `finish_reason` ("stop", "length", "cancelled") and `usage`.

    The first one may carry `usage` too: where the prompt came from is known by then.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stopped_by: str | None = None
    """The stop string that ended the text, where one did."""
    usage: Usage | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. `max_context` is in tokens, prompt and output together."""

    name: str
    fingerprint: str
    max_context: int
    dtype: str
    created: int
    """Unix seconds."""


class Engine(Protocol):
    """Generates.

    `encode` and `render_chat` compute, and may be called from any thread; the others are called on the
    event loop and do not block it.
    """

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, as `/v1/completions` takes it."""
        ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: dict[str, Any] | None = None,
        passages: Mapping[str, Sequence[str]] | None = None,
        known: Sequence[KnownTurn] = (),
    ) -> RenderedPrompt:
        """Apply the model's chat template, ready for the assistant's turn.

        `messages` and `tools` are OpenAI Chat Completions objects; the content of each message is text. `passages`
        has, by path, the texts that a content was joined from: each gets a span of its own, `messages[2].content[1]`.
        `known`, by ascending message, is put in place where the rendering says the same; an engine may leave that.
        Raises ClientError where the template refuses them.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream a completion. Closing the iterator cancels the request.

        The first `__anext__` raises ContextTooLong, ClientError or QueueFull; later ones EngineError.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Current readings, by metric name without prefix (`num_requests_running`, ...)."""
        ...

    async def close(self) -> None:
        """Finish or cancel what runs, save what is computed, and stop."""
        ...
