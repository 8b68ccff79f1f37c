"""In which way two texts differ that stand at the same place."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.values import ChangedValue, Masked, changed_values

BILLING_HEADER = "x-anthropic-billing-header:"
_QUOTED_CHARS = 40
_VALUE_NAMES = {
    "time": "time",
    "date": "date",
    "id": "random id",
    "path": "path, or the state of a checkout,",
    "version": "version",
}
_BULLET = re.compile(r"^\s*(?:\d+[.):]|[-*•])\s*")
_ALIKE = 0.6


class Edit(msgspec.Struct, frozen=True):
    """One way in which a text differs from an earlier one. `name` is a cause, or empty for a plain edit."""

    name: str
    offset: int
    what: str

    def at(self, path: str, path_before: str, *, plain: str) -> Cause:
        """The cause that it is at `path`; a plain edit is called `plain`."""
        return cause(self.name or plain, path, path_before, self.what)


def edits(before: str, after: str, *, may_grow: bool = False) -> list[Edit]:
    """All ways in which `after` differs from `before`, the first one first. Empty where they are equal.

    `may_grow`: that more text follows is no difference.
    """
    if before == after:
        return []
    start = first_difference(before, after)
    for name, is_so, what in _FORMS:
        if is_so(before, after):
            return [Edit(name, start, f"{what}, from character {start} on")]
    old, new = Masked(before), Masked(after)
    found = [_of_value(value) for value in changed_values(old, new)]
    if old.text != new.text and not (may_grow and new.text.startswith(old.text)):
        found.append(_of_rest(old, new))
    return sorted(found, key=lambda edit: edit.offset)


def _of_value(value: ChangedValue) -> Edit:
    # Long ones (the state of a checkout) are shown where they begin to differ.
    cut = max(0, first_difference(value.before, value.after) - 12) if len(value.after) > _QUOTED_CHARS else 0
    was, now = _quote(value.before[cut:]), _quote(value.after[cut:])
    what = f"a {_VALUE_NAMES[value.kind]} changed from {was} to {now}, at character {value.offset}"
    return Edit(f"volatile_{value.kind}", value.offset, what)


def _of_rest(old: Masked, new: Masked) -> Edit:
    """The edit beside values that changed."""
    before, after = old.text, new.text
    start = first_difference(before, after)
    offset = new.raw(start)
    for name, is_so, what in _FORMS:
        if is_so(before, after):
            return Edit(name, offset, f"{what}, from character {offset} on")
    end = first_difference(before[start:][::-1], after[start:][::-1])
    was, now = (_quote(text[start : len(text) - end].replace("\0", "…")) for text in (before, after))
    what = f"{was} became {now}, at character {offset}; the {end} characters behind it are the same"
    return Edit("", offset, what)


def first_difference(before: str, after: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(before), len(after))
    if before[:high] == after[:high]:
        return high
    # Whole slices are compared, which runs in C.
    while high - low > 1:
        middle = (low + high) // 2
        if before[low:middle] == after[low:middle]:
            low = middle
        else:
            high = middle
    return low


def are_alike(before: str, after: str) -> bool:
    """Whether one may be an edit of the other: most words are the same."""
    if before == after:
        return True
    here, there = Counter(before.split()), Counter(after.split())
    most = max(here.total(), there.total())
    return bool(most) and (here & there).total() >= _ALIKE * most


def is_respaced(before: str, after: str) -> bool:
    """Whether only spaces and line ends differ."""
    return "".join(before.split()) == "".join(after.split())


def is_reordered(before: str, after: str) -> bool:
    """Whether both say the same pieces in another order: lines, whatever their numbers, or words."""
    lines, lines_before = (
        [_BULLET.sub("", line).strip() for line in text.split("\n")] for text in (after, before)
    )
    if len(lines) > 1 and Counter(filter(None, lines)) == Counter(filter(None, lines_before)):
        return True
    words, words_before = (re.findall(r"[^\s,;|]+", text) for text in (after, before))
    return len(words) > 2 and Counter(words) == Counter(words_before)


_FORMS = (
    ("whitespace", is_respaced, "only spaces or line ends differ"),
    ("unordered_context", is_reordered, "the same lines or words, in another order"),
)


def billing_header(text: str) -> str:
    """The line for billing that `text` begins with; empty where it does not."""
    return text.split("\n", 1)[0] if text.startswith(BILLING_HEADER) else ""


def _as_json(text: str) -> bytes | None:
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def same_json(before: str, after: str) -> bool:
    """Whether both are JSON of one value."""
    value = _as_json(before)
    return value is not None and value == _as_json(after)


def _quote(text: str) -> str:
    text = text if len(text) <= _QUOTED_CHARS else f"{text[: _QUOTED_CHARS - 1]}…"
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()
