"""From a recorded request to tokens: roughly where no model is named, by its own template where one is."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from workmem.core.generation import RenderedPrompt, Span
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.lint.segments import segments

_PIECE = re.compile(r" ?[^\W\d_]{1,6}|\d{1,3}| ?[^\w\s]|_|\s+")
TEMPLATE = "template"


class Renderer(Protocol):
    """Makes prompts."""

    name: str
    is_exact: bool
    """Whether its tokens are those of a model."""

    def render(self, body: dict[str, Any], dialect: Dialect) -> RenderedPrompt:
        """The prompt of `body`, with the client's own paths."""
        ...

    def notes(self) -> list[str]:
        """What has to be known of the prompts so far."""
        ...


class RoughRenderer:
    """Pieces of words stand for tokens, and a plain form for a template: counts are near those of a model, and no more."""

    name = "approximate tokens"
    is_exact = False

    def render(self, body: dict[str, Any], dialect: Dialect) -> RenderedPrompt:
        """See `Renderer`."""
        return render_plainly(body, dialect, rough_tokens)

    def notes(self) -> list[str]:
        """See `Renderer`."""
        return ["tokens and template are approximate; --model FOLDER takes a model's own"]


def rough_tokens(text: str) -> list[int]:
    """A number for each piece, the same everywhere."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in _PIECE.findall(text)]


def render_plainly(
    body: dict[str, Any], dialect: Dialect, encode: Callable[[str], list[int]]
) -> RenderedPrompt:
    """Piece behind piece, with the role in front of each."""
    token_ids: list[int] = []
    spans: list[Span] = []
    for path, text in _pieces(body, dialect):
        start = len(token_ids)
        token_ids += encode(text)
        if len(token_ids) > start:
            spans.append(Span(path, start, len(token_ids)))
    return RenderedPrompt(token_ids=token_ids, spans=tuple(spans))


def _pieces(body: dict[str, Any], dialect: Dialect) -> Iterator[tuple[str, str]]:
    role = ""
    for segment in segments(body, dialect):
        if segment.role != role:
            role = segment.role
            yield TEMPLATE, f"<|{role}|>\n"
        yield segment.path, f"{segment.text}\n"
    yield TEMPLATE, "<|assistant|>\n"
