"""Why a request does not continue an earlier one: all causes, the one that broke the prefix first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from workmem.prompt.causes.answers import Made, answer_causes
from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.history import compare_histories
from workmem.prompt.causes.options import option_causes
from workmem.prompt.causes.texts import BILLING_HEADER, are_alike, billing_header, edits
from workmem.prompt.causes.tools import tool_causes
from workmem.prompt.causes.turns import text_causes
from workmem.prompt.causes.view import Atom, view_of
from workmem.prompt.dialects.places import Dialect

_SENTENCE = re.compile(r"[.!?\n]")
_ROLE = re.compile(r"\b(?:you are|your role|act as|you act|you play|agent)\b", re.IGNORECASE)


class Comparison(msgspec.Struct, frozen=True):
    """Two requests, compared."""

    causes: list[Cause]
    """In the order of the prompt; empty where the later request continues the earlier one."""
    shared_turns: int
    """Turns of the earlier history that the later one still has: how much the one is meant to be the other."""


def diagnose(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    dialect: Dialect,
    *,
    made: Made | None = None,
    tools_first: bool = True,
) -> list[Cause]:
    """Name each way in which `after` departs from being an append to `before`; both are bodies of `dialect`.

    `made`: what the model answered to `before`, where that is known; `after` should have it. `tools_first`: whether
    the model's template prints tools before the instructions, which decides what comes first.
    """
    return compare(before, after, dialect, made=made, tools_first=tools_first).causes


def compare(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    dialect: Dialect,
    *,
    made: Made | None = None,
    tools_first: bool = True,
) -> Comparison:
    """The same, and how much both have in common."""
    old, new = view_of(before, dialect), view_of(after, dialect)
    history = compare_histories(old.turns, new.turns)
    options = list(option_causes(before, after))
    said, said_before = ("\n".join(atom.text for atom in view.instructions) for view in (new, old))
    is_same_agent = are_alike(_bare(said_before), _bare(said)) or not (said or said_before)
    if history.is_new and not is_same_agent:
        path, path_before = _first(new.instructions, dialect), _first(old.instructions, dialect)
        text = "other instructions and another conversation: nothing to compare with"
        return Comparison([*options, cause("new_conversation", path, path_before, text)], 0)
    tools = tool_causes(before, after, dialect)
    if is_same_agent:
        instructions = list(
            _instruction_causes(old.instructions, new.instructions, dialect, is_shared=history.shared > 0)
        )
    else:
        path, path_before = _first(new.instructions, dialect), _first(old.instructions, dialect)
        what = "other instructions stand in front of a history that both share"
        instructions = [cause("role_swapped", path, path_before, what)]
    head = [*tools, *instructions] if tools_first else [*instructions, *tools]
    causes = [*options, *head, *history.causes]
    if made is not None and not history.causes:
        has_objects = dialect.name == "messages"
        causes += answer_causes(made, new.turns[len(old.turns) :], has_objects=has_objects)
    return Comparison(causes, history.shared)


def _instruction_causes(
    before: tuple[Atom, ...], after: tuple[Atom, ...], dialect: Dialect, *, is_shared: bool
) -> Iterator[Cause]:
    before, after, header = _without_billing(before, after, dialect)
    if header is not None:
        yield header
    end = after[-1].path if after else dialect.history_key
    found = list(text_causes(before, after, (end, ""), plain="system_changed"))
    if is_shared and _is_other_role(before, after):
        # What was found is what the other role says; only its place is of interest.
        first = next(one for one in found if one.name == "system_changed")
        what = f"another role in front of a history that both share: {first.what}"
        yield cause("role_swapped", first.path, first.path_before, what)
        found = [one for one in found if one.name != "system_changed"]
    yield from found


def _is_other_role(before: tuple[Atom, ...], after: tuple[Atom, ...]) -> bool:
    """Whether the first sentence says that the model is somebody else."""
    was, now = (_SENTENCE.split(atoms[0].text.lstrip(), 1)[0] if atoms else "" for atoms in (before, after))
    return was != now and _ROLE.search(now) is not None and any(not edit.name for edit in edits(was, now))


def _without_billing(
    before: tuple[Atom, ...], after: tuple[Atom, ...], dialect: Dialect
) -> tuple[tuple[Atom, ...], tuple[Atom, ...], Cause | None]:
    """Both without the line for billing in front, and the cause that it is where it differs."""
    (before, was, path_before), (after, now, path) = (_split_billing(atoms) for atoms in (before, after))
    if was == now:
        return before, after, None
    changes = "changed" if was and now else "is new" if now else "is gone"
    what = f"the line `{BILLING_HEADER}` in front of the instructions {changes}"
    fallback = _first(after or before, dialect)
    return before, after, cause("billing_header", path or fallback, path_before, what)


def _split_billing(atoms: tuple[Atom, ...]) -> tuple[tuple[Atom, ...], str, str]:
    header = billing_header(atoms[0].text) if atoms else ""
    if not header:
        return atoms, "", ""
    rest = atoms[0].text[len(header) :].lstrip("\n")
    first = (msgspec.structs.replace(atoms[0], text=rest),) if rest else ()
    return (*first, *atoms[1:]), header, atoms[0].path


def _bare(text: str) -> str:
    return text[len(billing_header(text)) :]


def _first(atoms: tuple[Atom, ...], dialect: Dialect) -> str:
    return atoms[0].path if atoms else dialect.history_key
