"""An engine without a model, for what a real one cannot be made to do on demand: faults and timing.

Tokens are bytes. It answers what `answer` says, in pieces of `step` bytes, remembers prompts in full
blocks like a cache would, and counts what runs and what was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from workmem.core.errors import ContextTooLong
from workmem.core.generation import (
    Delta,
    GenerateRequest,
    HandoffReport,
    KnownTurn,
    ModelInfo,
    RenderedPrompt,
    Span,
    ThinkingState,
    TokenLogprob,
    Usage,
)
from workmem.core.layout import BLOCK_TOKENS
from workmem.core.outcomes import COMPUTED, MissReason, SourceRun
from workmem.prompt.default_tools import as_plain_chat

Answer = Callable[[GenerateRequest], str]


class FakeEngine:
    """See the module. Set the attributes between requests to change what happens next."""

    def __init__(self, answer: str | Answer = "Hello there, friend.", *, name: str = "fake-model") -> None:
        self.info = ModelInfo(
            name=name, fingerprint="f" * 16, max_context=4096, dtype="fp32", created=1_700_000_000
        )
        self.answer = answer
        self.step = 3
        self.delay_s = 0.0
        """Before each piece."""
        self.approximate = False
        """What usage says of reused KV."""
        self.thinking: ThinkingState = "none"
        """What a rendered prompt says of its answer."""
        self.waited_s = 0.125
        """What usage says of a handoff."""
        self.first_error: Exception | None = None
        """Raised instead of the first delta."""
        self.later_error: Exception | None = None
        """Raised instead of the second delta."""
        self.requests: list[GenerateRequest] = []
        self.rendered: list[list[dict[str, Any]]] = []
        self.known: list[tuple[KnownTurn, ...]] = []
        """Turns that came with each chat."""
        self.running = 0
        self.cancelled: list[str] = []
        self.is_closed = False
        self._seen: set[bytes] = set()

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: dict[str, Any] | None = None,
        passages: Mapping[str, Sequence[str]] | None = None,
        known: Sequence[KnownTurn] = (),
    ) -> RenderedPrompt:
        """`role: content` lines; the template knows no tools and no passages, and bytes need no memory of turns."""
        del template_kwargs, passages
        self.known.append(tuple(known))
        chat = as_plain_chat(messages, tools)
        self.rendered.append(chat.messages)
        token_ids: list[int] = []
        spans: list[Span] = []
        lines = [
            (path, f"{item['role']}: {item['content']}\n")
            for path, item in zip(chat.paths, chat.messages, strict=True)
        ]
        for path, text in [*lines, ("template", "assistant: ")]:
            start = len(token_ids)
            token_ids += text.encode("utf-8", "replace")
            spans.append(Span(path, start, len(token_ids)))
        text = "".join(text for _, text in lines) + "assistant: "
        return RenderedPrompt(token_ids=token_ids, spans=tuple(spans), thinking=self.thinking, text=text)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream the answer; see `Engine.generate`."""
        self.requests.append(request)
        prompt_tokens = len(request.token_ids)
        if prompt_tokens >= self.info.max_context:
            raise ContextTooLong(
                f"The prompt has {prompt_tokens} tokens; the limit is {self.info.max_context}."
            )
        if self.first_error is not None:
            raise self.first_error
        self.running += 1
        is_finished = False
        try:
            async for delta in self._deltas(request):
                is_finished = delta.finish_reason is not None
                yield delta
        finally:
            self.running -= 1
            if not is_finished:
                self.cancelled.append(request.id)

    async def _deltas(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        sources = self._lookup(request.token_ids)
        answer = self.answer if isinstance(self.answer, str) else self.answer(request)
        reason, stopped_by = "stop", None
        for stop in request.sampling.stop:
            if stop in answer:
                answer, stopped_by = answer.split(stop)[0], stop
        limit = request.sampling.max_tokens
        if limit is not None and len(answer) > limit:
            answer, reason, stopped_by = answer[:limit], "length", None
        for count, start in enumerate(range(0, len(answer), self.step)):
            await asyncio.sleep(self.delay_s)
            if count == 1 and self.later_error is not None:
                raise self.later_error
            first = self._usage(request, sources, self.step) if count == 0 else None
            yield self._delta(answer[start : start + self.step], request.sampling.logprobs, first)
        usage = self._usage(request, sources, len(answer))
        yield Delta(finish_reason=reason, stopped_by=stopped_by, usage=usage)

    def _usage(self, request: GenerateRequest, sources: tuple[SourceRun, ...], generated: int) -> Usage:
        return Usage(
            prompt_tokens=len(request.token_ids),
            completion_tokens=generated,
            sources=sources,
            approximate=self.approximate and any(run.source != COMPUTED for run in sources),
            handoff=None if request.handoff is None else HandoffReport(waited_s=self.waited_s, tokens=32),
        )

    def _delta(self, text: str, top: int | None, usage: Usage | None) -> Delta:
        logprobs: tuple[TokenLogprob, ...] = ()
        if top is not None:
            logprobs = tuple(
                TokenLogprob(
                    ord(char), char, -0.5, tuple((ord("a") + i, chr(97 + i), -0.5 - i) for i in range(top))
                )
                for char in text
            )
        token_ids = tuple(text.encode("utf-8", "replace"))
        return Delta(text=text, token_ids=token_ids, logprobs=logprobs, usage=usage)

    def _lookup(self, token_ids: Sequence[int]) -> tuple[SourceRun, ...]:
        blocks = [
            bytes(token % 256 for token in token_ids[:end])
            for end in range(BLOCK_TOKENS, len(token_ids), BLOCK_TOKENS)
        ]
        hits = next((i for i, block in enumerate(blocks) if block not in self._seen), len(blocks))
        self._seen.update(blocks)
        cached = hits * BLOCK_TOKENS
        runs = [SourceRun("vram", cached)] if cached else []
        return (*runs, SourceRun(COMPUTED, len(token_ids) - cached, MissReason.COLD))

    def gauges(self) -> dict[str, float]:
        """What runs."""
        return {"num_requests_running": float(self.running), "num_requests_waiting": 0.0}

    async def close(self) -> None:
        """Remember that it was asked for."""
        self.is_closed = True
