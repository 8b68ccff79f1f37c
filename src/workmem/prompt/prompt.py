"""A prompt in the one form that is rendered, whichever API it came by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from workmem.core.generation import Span


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is to read: OpenAI chat messages, whose content is text, and tools as OpenAI chat has them.

    Thinking in an assistant's message stands under `reasoning_content`, which chat templates know.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    origins: dict[str, str] = {}
    """From a path here (`messages[1].content`, `tools[0]`) to that of the client's own body, where they differ."""
    passages: dict[str, list[str]] = {}
    """The texts that a field (`messages[1].content`) was joined from, where they were several. Each is told apart: the
    path of the second one here is `messages[1].content[1]`."""
    template_kwargs: dict[str, Any] | None = None

    def in_client_words(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """`spans` of this prompt with the paths that the client knows."""
        if not self.origins:
            return tuple(spans)
        return tuple(Span(self.origins.get(span.path, span.path), span.start, span.end) for span in spans)
