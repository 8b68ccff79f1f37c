"""The pieces of a prompt in the order in which most templates write them, whatever the API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from workmem.prompt.dialects.places import CallPlace, Dialect, TextPlace


class Segment(NamedTuple):
    """A piece and where it stands in the client's body."""

    path: str
    text: str
    role: str


def segments(body: Mapping[str, Any], dialect: Dialect) -> Iterator[Segment]:
    """Instructions in front of the history, tools, then the history, each turn's texts before its calls."""
    texts = list(dialect.texts(body))
    head = _head(texts)
    for place in texts[:head]:
        yield Segment(place.path, place.text, place.role)
    for tool in dialect.tools(body):
        yield Segment(tool.path, json.dumps(tool.tool, ensure_ascii=False), "tools")
    calls = list(dialect.calls(body))
    turns = sorted({place.turn for place in (*texts[head:], *calls)})
    texts_of: dict[int, list[TextPlace]] = {}
    calls_of: dict[int, list[CallPlace]] = {}
    for place in texts[head:]:
        texts_of.setdefault(place.turn, []).append(place)
    for call in calls:
        calls_of.setdefault(call.turn, []).append(call)
    for turn in turns:
        for place in texts_of.get(turn, ()):
            yield Segment(place.path, place.text, place.role)
        for call in calls_of.get(turn, ()):
            yield Segment(call.arguments_path, _call_text(call), "assistant")


def _head(texts: list[TextPlace]) -> int:
    """How many of them are instructions that stand before everything else."""
    return next((i for i, place in enumerate(texts) if place.role != "system"), len(texts))


def _call_text(call: CallPlace) -> str:
    arguments = call.holder.get(call.arguments_key)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call.holder.get('name') or ''} {text}"
