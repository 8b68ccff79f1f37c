"""An assistant's turn as it grows: what of the generated text is content, what is a thought, and what is a call."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence

import msgspec

from workmem.core.generation import ThinkingState, TokenLogprob
from workmem.prompt.thinking import ThinkingParser, Thought
from workmem.prompt.tool_calls import ParsedCall, Piece, ToolCallParser


class MadeCall(msgspec.Struct, frozen=True):
    """A call of the model, with the id by which its result will come back."""

    index: int
    """Among the calls of its turn."""
    id: str
    name: str
    arguments: str
    """JSON text of an object."""


class Turn:
    """One answer. `take` what the engine yields; the turn keeps all of it, in every API's terms and in none's shape."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        calls_max: int | None = None,
        allowed: Collection[str] | None = None,
        thinking: ThinkingState = "none",
    ) -> None:
        self._thinking = None if thinking == "none" else ThinkingParser(has_begun=thinking == "begun")
        self._parser = ToolCallParser(names) if names else None
        self._calls_max = calls_max
        self._allowed = allowed
        """The only tools that may be called; a call of another one stays text, so that it is seen and not made."""
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[MadeCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""
        """"stop", "length", or "tool_calls"; empty while it runs."""
        self.has_started = False

    @property
    def text(self) -> str:
        """The content so far."""
        return "".join(self.texts)

    @property
    def thinking(self) -> str:
        """The thoughts so far."""
        return "".join(self.thoughts)

    def take(self, text: str, finish_reason: str | None) -> list[str | Thought | MadeCall]:
        """What came of `text`: new thoughts, content and calls, in their order."""
        out: list[str | Thought | MadeCall] = []
        for piece in self._pieces(text, is_last=finish_reason is not None):
            if isinstance(piece, Thought):
                self.thoughts.append(piece.text)
                out.append(piece)
            elif isinstance(piece, ParsedCall) and (self._allowed is None or piece.name in self._allowed):
                if self._calls_max is not None and len(self.calls) >= self._calls_max:
                    continue
                call = MadeCall(len(self.calls), f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments)
                self.calls.append(call)
                out.append(call)
            else:
                content = piece if isinstance(piece, str) else _shown(piece)
                self.texts.append(content)
                out.append(content)
        if finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls and finish_reason == "stop" else finish_reason
        return out

    def _pieces(self, text: str, *, is_last: bool) -> list[Thought | Piece]:
        out: list[Thought | Piece] = [text] if text else []
        if self._thinking is not None:
            out = [*self._thinking.feed(text), *(self._thinking.finish() if is_last else ())]
        if self._parser is None:
            return out
        pieces: list[Thought | Piece] = []
        for piece in out:
            pieces += self._parser.feed(piece) if isinstance(piece, str) else [piece]
        return [*pieces, *self._parser.finish()] if is_last else pieces


def _shown(call: ParsedCall) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'
