"""Values in a text that are other ones in each request: which of them changed, and the text without them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher

import msgspec

from workmem.prompt.volatile import Volatile, find_volatile

_MASK = "\0"


class ChangedValue(msgspec.Struct, frozen=True):
    """A value that is another one now. `offset` is its place in the later text."""

    kind: str
    """time, date, id, path or version."""
    before: str
    after: str
    offset: int


class Masked:
    """A text with one character in place of each value."""

    def __init__(self, text: str) -> None:
        self.values = find_volatile(text)
        self.said = [value.of(text) for value in self.values]
        pieces: list[str] = []
        self._starts: list[tuple[int, int]] = [(0, 0)]
        end = length = 0
        for value in self.values:
            pieces += [text[end : value.start], _MASK]
            length += value.start - end + 1
            end = value.end
            self._starts.append((length, end))
        self.text = "".join([*pieces, text[end:]])

    def raw(self, offset: int) -> int:
        """Place in the whole text of what is at `offset` of the masked one."""
        masked, raw = self._starts[bisect_right(self._starts, offset, key=lambda pair: pair[0]) - 1]
        return raw + offset - masked


def changed_values(before: Masked, after: Masked) -> list[ChangedValue]:
    """The first value of each kind that is another one now. Those that only moved are none."""
    if Counter(before.said) == Counter(after.said):
        return []
    found: dict[str, ChangedValue] = {}
    for was, now in _pairs(before, after):
        kind = after.values[now].kind
        if kind not in found:
            found[kind] = ChangedValue(kind, before.said[was], after.said[now], after.values[now].start)
    return list(found.values())


def _pairs(before: Masked, after: Masked) -> Iterator[tuple[int, int]]:
    """Values that stand in each other's place and differ."""
    if before.text == after.text:
        places = ((index, index) for index in range(len(after.said)))
    else:
        matcher = SequenceMatcher(None, before.said, after.said, autojunk=False)
        places = (
            pair
            for op, i1, i2, j1, j2 in matcher.get_opcodes()
            if op == "replace"
            for pair in zip(range(i1, i2), range(j1, j2), strict=False)
        )
    for was, now in places:
        same_form = _form(before.values[was]) == _form(after.values[now])
        if same_form and before.said[was] != after.said[now]:
            yield was, now


def _form(value: Volatile) -> tuple[str, str]:
    return (value.kind, value.form)
