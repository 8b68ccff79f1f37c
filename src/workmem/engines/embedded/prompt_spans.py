"""Which characters of a rendered prompt come from which field of the request.

The template is rendered a second time with a mark in place of each field. Where its fixed text is the
same in both, as it is for most templates, the fields' places follow exactly. Where a template looks into
the fields, they are searched in order instead; what is not found counts as template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workmem.core.generation import Span

TEMPLATE = "template"
# Private-use characters: no template trims, splits or escapes them.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(rf'\{{"{_OPEN}(\d+){_CLOSE}": 0\}}|{_OPEN}(\d+){_CLOSE}')

Region = tuple[int, int, str]
"""Characters [start, end) and their path."""
Passages = Mapping[str, Sequence[tuple[str, str]]]
"""By path of a field: (path, text) of each text that it was joined from, in their order."""


@dataclass(frozen=True)
class Needle:
    """A field of the request and what it holds: text, or call arguments as an object."""

    number: int
    path: str
    message: int
    call: int | None
    field: str
    value: Any

    @property
    def mark(self) -> Any:
        """What stands in for the value; an object for an object, so that templates treat it alike."""
        mark = f"{_OPEN}{self.number}{_CLOSE}"
        return mark if isinstance(self.value, str) else {mark: 0}

    def forms(self) -> tuple[str, ...]:
        """How templates may write the value."""
        if isinstance(self.value, str):
            return _unique(self.value, self.value.strip(), self.value.rstrip(), self.value.lstrip())
        return _json_forms(self.value)


def locate(
    text: str,
    marked: str | None,
    needles: Sequence[Needle],
    tools: Sequence[dict[str, Any]],
    passages: Sequence[Passages] = (),
) -> list[Region]:
    """Regions of `text`, ascending and disjoint; what lies between them is template.

    `passages`: one after the other, the later ones of what the earlier ones found.
    """
    regions = _aligned(text, marked, needles) if marked is not None else None
    if regions is None:
        regions = _searched(text, needles)
    for known in passages:
        regions = [part for region in regions for part in _divided(text, region, known.get(region[2], ()))]
    cursor = 0
    for index, tool in enumerate(tools):
        forms = _json_forms(tool) + _json_forms(tool.get("function", tool))
        place = _first(text, forms, cursor)
        if place is not None:
            regions = _carve(regions, (*place, f"tools[{index}]"))
            cursor = place[1]
    return sorted(regions)


def spans_of_tokens(regions: Sequence[Region], offsets: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    """Spans that cover all tokens: a token belongs to the region that holds its first character."""
    spans: list[Span] = []
    position = 0
    for token, (start, _) in enumerate(offsets):
        while position < len(regions) and regions[position][1] <= start:
            position += 1
        inside = position < len(regions) and regions[position][0] <= start
        path = regions[position][2] if inside else TEMPLATE
        if spans and spans[-1].path == path:
            spans[-1] = Span(path, spans[-1].start, token + 1)
        else:
            spans.append(Span(path, token, token + 1))
    return tuple(spans)


def _aligned(text: str, marked: str, needles: Sequence[Needle]) -> list[Region] | None:
    """Walk both renderings side by side; None where their fixed text differs."""
    regions: list[Region] = []
    at = marked_at = 0
    marks = list(_MARK.finditer(marked))
    ends = [match.start() for match in marks[1:]] + [len(marked)]
    if not marks:
        return [] if marked == text else None
    for match, following in zip(marks, ends, strict=True):
        fixed = marked[marked_at : match.start()]
        number = int(match[1] or match[2])
        if number >= len(needles) or not text.startswith(fixed, at):
            return None
        at += len(fixed)
        after = marked[match.end() : following]
        is_last = following == len(marked)
        for form in needles[number].forms():
            end = at + len(form)
            fits = text[end:] == after if is_last else text.startswith(after, end)
            if text.startswith(form, at) and fits:
                regions.append((at, end, needles[number].path))
                at, marked_at = end, match.end()
                break
        else:
            return None
    return [region for region in regions if region[0] < region[1]]


def _searched(text: str, needles: Sequence[Needle]) -> list[Region]:
    regions: list[Region] = []
    cursor = 0
    for needle in needles:
        place = _first(text, needle.forms(), cursor)
        if place is not None:
            regions.append((*place, needle.path))
            cursor = place[1]
    return regions


def _divided(text: str, region: Region, passages: Sequence[tuple[str, str]]) -> list[Region]:
    """`region` by the passages in it. What joins two of them counts to the first."""
    start, end = region[:2]
    starts: list[tuple[int, str]] = []
    cursor = start
    for name, passage in passages:
        # Templates trim what is at the ends of a content.
        for form in _unique(passage, passage.strip()):
            at = text.find(form, cursor, end) if form else -1
            if at >= 0:
                starts.append((at if starts else start, name))
                cursor = at + len(form)
                break
    if not starts:
        return [region]
    ends = [at for at, _ in starts[1:]] + [end]
    return [(at, until, name) for (at, name), until in zip(starts, ends, strict=True)]


def _carve(regions: Sequence[Region], hole: Region) -> list[Region]:
    """`regions` with `hole` cut out of the one around it, and added."""
    carved = [hole]
    for start, end, path in regions:
        carved += [(a, b, path) for a, b in ((start, min(end, hole[0])), (max(start, hole[1]), end)) if a < b]
    return carved


def _first(text: str, forms: Sequence[str], cursor: int) -> tuple[int, int] | None:
    for form in forms:
        at = text.find(form, cursor) if form else -1
        if at >= 0:
            return at, at + len(form)
    return None


def _json_forms(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (dict, list)):
        return (str(value),)
    return _unique(
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, indent=4),
        json.dumps(value, ensure_ascii=False, sort_keys=True),
        json.dumps(value, ensure_ascii=False, indent=2),
        json.dumps(value),
    )


def _unique(*forms: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(forms))
