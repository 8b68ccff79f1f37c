"""How one turn differs from the earlier one that it is meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest

from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.texts import are_alike, edits, same_json
from workmem.prompt.causes.view import Atom, TurnView

_OF_TEXT = ("text", "other")


def are_one_turn(before: TurnView, after: TurnView) -> bool:
    """Whether `after` may be `before`, edited."""
    if before.role != after.role:
        return False
    if before.key == after.key:
        return True
    causes = list(turn_causes(before, after))
    return all(one.name != "history_rewritten" for one in causes) or are_alike(before.text, after.text)


def turn_causes(before: TurnView, after: TurnView) -> Iterator[Cause]:
    """All differences between two turns of one role."""
    yield from _thinking(before, after)
    yield from _texts(before, after)
    calls_before, calls = _of(before, "call"), _of(after, "call")
    if [call.name for call in calls_before] != [call.name for call in calls]:
        path = calls[0].path if calls else after.path
        path_before = calls_before[0].path if calls_before else before.path
        yield cause("history_rewritten", path, path_before, "other calls stand in this turn than before")
        return
    for was, now in zip(calls_before, calls, strict=True):
        yield from _arguments(was, now)
        if was.id != now.id:
            yield _other_id(was, now)
    for was, now in zip(_of(before, "result"), _of(after, "result"), strict=False):
        if was.id != now.id:
            yield _other_id(was, now)
    if len(_of(before, "result")) != len(_of(after, "result")):
        yield cause(
            "history_rewritten", after.path, before.path, "other results stand in this turn than before"
        )


def text_causes(
    before: tuple[Atom, ...], after: tuple[Atom, ...], at: tuple[str, str], *, plain: str
) -> Iterator[Cause]:
    """Differences between two runs of texts; `at`: paths to name where one has a text more than the other."""
    if "".join(atom.text for atom in before) == "".join(atom.text for atom in after):
        # Cut into parts in another way. Templates that print a mark between parts are not known.
        return
    matcher = SequenceMatcher(
        None, [atom.text for atom in before], [atom.text for atom in after], autojunk=False
    )
    for op, i1, i2, j1, j2 in matcher.get_opcodes():
        if op != "equal":
            path = after[j1].path if j1 < len(after) else at[0]
            for was, now in zip_longest(before[i1:i2], after[j1:j2]):
                yield from _part_causes(was, now, (path, at[1]), plain)


def _part_causes(was: Atom | None, now: Atom | None, at: tuple[str, str], plain: str) -> Iterator[Cause]:
    if was is None:
        assert now is not None
        yield cause(plain, now.path, at[1], f"a part that was not there before: {_short(now.text)}")
    elif now is None:
        yield cause(plain, at[0], was.path, f"a part that stood here is gone: {_short(was.text)}")
    else:
        for edit in edits(was.text, now.text):
            yield edit.at(now.path, was.path, plain=plain)


def _thinking(before: TurnView, after: TurnView) -> Iterator[Cause]:
    was, now = _of(before, "thinking"), _of(after, "thinking")
    if was and not now:
        yield cause(
            "reasoning_dropped", after.path, was[0].path, "the thinking of this turn was not sent back"
        )
    else:
        yield from text_causes(was, now, (after.path, before.path), plain="history_rewritten")


def _texts(before: TurnView, after: TurnView) -> Iterator[Cause]:
    was, now = (tuple(atom for atom in turn.atoms if atom.kind in _OF_TEXT) for turn in (before, after))
    yield from text_causes(was, now, (after.path, before.path), plain="history_rewritten")


def _arguments(was: Atom, now: Atom) -> Iterator[Cause]:
    if was.text == now.text:
        return
    if same_json(was.text, now.text):
        what = f"the same arguments of {now.name!r}, written another way: {_short(was.text)} became {_short(now.text)}"
        yield cause("arguments_reserialised", now.path, was.path, what)
        return
    for edit in edits(was.text, now.text):
        yield edit.at(now.path, was.path, plain="history_rewritten")


def _other_id(was: Atom, now: Atom) -> Cause:
    what = f"the id of the call was {_short(was.id)} and is {_short(now.id)}"
    return cause("call_id_changed", now.id_path, was.id_path, what)


def _of(turn: TurnView, kind: str) -> tuple[Atom, ...]:
    return tuple(atom for atom in turn.atoms if atom.kind == kind)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
