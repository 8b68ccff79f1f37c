"""How a history differs from the one that it is meant to continue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import msgspec

from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.turns import are_one_turn, turn_causes
from workmem.prompt.causes.view import TurnView

_TURNS_MAX = 400
"""Compared behind the place where two histories part; more would take long and say nothing new."""
_SUMMARY = re.compile(
    r"(?:continued from|summary of|summary:|<summary|compacted|condensed|previous conversation|earlier conversation"
    r"|conversation (?:so far|summary|history))",
    re.IGNORECASE,
)
Turns = Sequence[TurnView]


class HistoryDiff(msgspec.Struct, frozen=True):
    """What became of an earlier history."""

    causes: list[Cause]
    shared: int
    """Turns of the earlier one that are in the later one, changed or not."""
    is_new: bool
    """Nothing of the earlier one is there: another conversation."""


def compare_histories(before: Turns, after: Turns) -> HistoryDiff:
    """No causes where `after` continues `before`, or is the beginning of it."""
    start = _common(before, after)
    if start >= len(before) or start >= len(after) or _grows(before, after, start):
        return HistoryDiff([], start, is_new=False)
    old, new = before[start : start + _TURNS_MAX], after[start : start + _TURNS_MAX]
    matcher = SequenceMatcher(None, [turn.key for turn in old], [turn.key for turn in new], autojunk=False)
    walk = _Walk(old, new, is_start=start == 0)
    for op, i1, i2, j1, j2 in matcher.get_opcodes():
        walk.step(op, (i1, i2), (j1, j2))
    return HistoryDiff(_once(walk.causes), start + walk.shared, is_new=start + walk.shared == 0)


def _common(before: Turns, after: Turns) -> int:
    count = 0
    for was, now in zip(before, after, strict=False):
        if was.key != now.key:
            break
        count += 1
    return count


def _grows(before: Turns, after: Turns, at: int) -> bool:
    """Whether the last turn of `before` got more pieces, or its last text more characters: that is appending too."""
    if at != len(before) - 1 or before[at].role != after[at].role:
        return False
    old, new = before[at].atoms, after[at].atoms
    if not old or len(new) < len(old) or any(a.key != b.key for a, b in zip(old[:-1], new, strict=False)):
        return False
    was, now = old[-1], new[len(old) - 1]
    same = (was.kind, was.name, was.id) == (now.kind, now.name, now.id)
    return same and now.text.startswith(was.text) and (was.text == now.text or before[at].role == "assistant")


class _Walk:
    """Goes through what a diff of two histories found, and names it."""

    def __init__(self, old: Turns, new: Turns, *, is_start: bool) -> None:
        self._old, self._new, self._is_start = old, new, is_start
        self.causes: list[Cause] = []
        self.shared = 0

    def step(self, op: str, was: tuple[int, int], now: tuple[int, int]) -> None:
        """One finding: turns `was` of the earlier history became turns `now`."""
        old, new = list(self._old[slice(*was)]), list(self._new[slice(*now)])
        if op == "equal":
            self.shared += len(old)
        elif op == "insert":
            self._inserted(new, was[0])
        elif op == "delete":
            self._dropped(old, self._path(now[0]), is_last=was[1] == len(self._old), is_first=was[0] == 0)
        else:
            self._replaced(old, new, was, now)

    def _path(self, index: int) -> str:
        """Path of turn `index` of the later history, or of its last one where it has no such turn."""
        return self._new[min(index, len(self._new) - 1)].path

    def _inserted(self, new: list[TurnView], at: int) -> None:
        if at == len(self._old):
            return
        moved = self._old[at:]
        path, path_before = new[0].path, moved[0].path
        is_last = [turn.key for turn in moved] == [turn.key for turn in self._new[-len(moved) :]]
        if is_last and any(turn.role == "assistant" for turn in new):
            self._floats(path, path_before, len(moved), len(new))
            return
        what = f"{_count(new)} not there before, in front of what was {path_before}"
        self.causes.append(cause("message_inserted", path, path_before, what))

    def _floats(self, path: str, path_before: str, moved: int, new: int) -> None:
        what = f"the last {'message' if moved == 1 else f'{moved} messages'} moved behind {new} new ones, and stand at the end again"
        self.causes.append(cause("floating_tail", path, path_before, what))

    def _dropped(self, old: list[TurnView], path: str, *, is_last: bool, is_first: bool) -> None:
        if all(turn.is_thinking for turn in old):
            what = f"the thinking that stood at {old[0].path} was not sent back"
            self.causes.append(cause("reasoning_dropped", path, old[0].path, what))
            return
        place = "front" if is_first and self._is_start else "end" if is_last else "middle"
        what = f"{_count(old)} dropped from the {place} of the history, {old[0].path} first"
        self.causes.append(cause("history_trimmed", path, old[0].path, what))

    def _replaced(
        self, old: list[TurnView], new: list[TurnView], was: tuple[int, int], now: tuple[int, int]
    ) -> None:
        at, to = 0, 0
        while at < len(old) and to < len(new):
            if old[at].is_thinking and not new[to].is_thinking:
                self._dropped([old[at]], new[to].path, is_last=False, is_first=False)
                at += 1
            elif are_one_turn(old[at], new[to]):
                self.causes += turn_causes(old[at], new[to])
                self.shared += 1
                at, to = at + 1, to + 1
            else:
                break
        old, new = old[at:], new[to:]
        if not old:
            if new and was[1] < len(self._old):
                self._inserted(new, was[1])
            return
        is_last = was[1] == len(self._old)
        is_first = was[0] + at == 0
        if not new:
            self._dropped(old, self._path(now[1]), is_last=is_last, is_first=is_first)
            return
        self._exchanged(old, new, is_last=is_last and now[1] == len(self._new), is_first=is_first)

    def _exchanged(self, old: list[TurnView], new: list[TurnView], *, is_last: bool, is_first: bool) -> None:
        """Turns that are not each other's edits."""
        path, path_before = new[0].path, old[0].path
        if is_last and len(old) <= 2 and len(new) > len(old) and are_one_turn(old[-1], new[-1]):
            self._floats(path, path_before, len(old), len(new) - len(old))
            self.shared += len(old)
        elif len(old) > 2 and _size(new) < _size(old) and _SUMMARY.search(new[0].text[:2000]):
            what = f"{_count(old)} replaced by {len(new)}, {_size(new)} characters instead of {_size(old)}"
            self.causes.append(cause("compaction", path, path_before, what))
        elif is_last and is_first and self._is_start:
            self.causes.append(
                cause("new_conversation", path, path_before, "another conversation from its first message on")
            )
        elif is_last:
            what = f"another message than {path_before} of the earlier request, which shares all before it"
            self.causes.append(cause("branched", path, path_before, what))
        else:
            what = f"{_count(old)} replaced by {_count(new)}, {path_before} first"
            self.causes.append(cause("history_rewritten", path, path_before, what))


def _once(causes: list[Cause]) -> list[Cause]:
    """The first of each name and how many there are: one habit of a client shows in many messages."""
    counts: dict[str, int] = {}
    for one in causes:
        counts[one.name] = counts.get(one.name, 0) + 1
    return list(_first_of_each(causes, counts))


def _first_of_each(causes: list[Cause], counts: dict[str, int]) -> Iterator[Cause]:
    seen: set[str] = set()
    for one in causes:
        if one.name in seen:
            continue
        seen.add(one.name)
        more = counts[one.name] - 1
        yield one if not more else msgspec.structs.replace(one, what=f"{one.what}; and {more} times more")


def _count(turns: list[TurnView]) -> str:
    return "a message" if len(turns) == 1 else f"{len(turns)} messages"


def _size(turns: list[TurnView]) -> int:
    return sum(len(turn.text) for turn in turns)
