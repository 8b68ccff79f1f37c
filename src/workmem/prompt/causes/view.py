"""A request body as the model's template sees it: instructions and turns, without what no template prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from workmem.prompt.dialects.places import Dialect

_OF_CACHES = frozenset({"cache_control", "prompt_cache_breakpoint"})
_OF_ITEMS = frozenset({"id", "status", *_OF_CACHES})
_BLOCK = re.compile(r"\]\.content\[(\d+)\]")
_LAST = 1 << 30
_ITEM_ROLES = {"function_call": "assistant", "reasoning": "assistant", "function_call_output": "tool"}


class Atom(msgspec.Struct, frozen=True):
    """A piece of a turn that is rendered as one."""

    kind: str
    """text, thinking, call, result, or other (an image, an item that is known to its server alone)."""
    path: str
    text: str
    """Text, or the arguments of a call as JSON."""
    name: str = ""
    """Function of a call."""
    id: str = ""
    """Of a call, or of the one that this is the result of."""
    id_path: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Equal where the piece is."""
        return (self.kind, self.text, self.name, self.id)


class TurnView(msgspec.Struct, frozen=True, dict=True):
    """A message, or an item, of the history."""

    path: str
    role: str
    atoms: tuple[Atom, ...]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal where the turn is."""
        return (self.role, *(atom.key for atom in self.atoms))

    @property
    def is_thinking(self) -> bool:
        """Whether it is thinking and nothing else."""
        return bool(self.atoms) and all(atom.kind == "thinking" for atom in self.atoms)

    @property
    def text(self) -> str:
        """All that it says."""
        return "\n".join(f"{atom.name} {atom.text}" if atom.name else atom.text for atom in self.atoms)


class BodyView(msgspec.Struct, frozen=True):
    """The instructions in front, and the history behind them."""

    instructions: tuple[Atom, ...]
    turns: tuple[TurnView, ...]


def view_of(body: Mapping[str, Any], dialect: Dialect) -> BodyView:
    """What `body` has the model read. Any shape is fine: what is not understood is an atom of kind other."""
    key = dialect.history_key
    history = body.get(key)
    entries: list[Any] = (
        [history] if isinstance(history, str) else history if isinstance(history, list) else []
    )
    atoms: list[list[Atom]] = [[] for _ in entries]
    before: list[Atom] = []
    roles = [_role(entry) for entry in entries]
    covered: set[int] = set()
    for place in dialect.texts(body):
        covered.add(id(place.holder))
        if place.text:  # An empty content is the same as none.
            (before if place.turn < 0 else atoms[place.turn]).append(Atom(place.kind, place.path, place.text))
    for call in dialect.calls(body):
        covered |= {id(call.holder), id(call.ids)}
        atoms[call.turn].append(
            Atom(
                "call",
                call.arguments_path,
                _as_text(call.holder.get(call.arguments_key)),
                _name(call.holder.get("name")),
                _name(call.ids.get(call.id_key)),
                f"{call.path if call.ids is call.holder else call.path.rpartition('.')[0]}.{call.id_key}",
            )
        )
    for result in dialect.results(body):
        covered.add(id(result.holder))
        result_id, id_path = _name(result.holder.get(result.id_key)), f"{result.path}.{result.id_key}"
        atoms[result.turn].append(Atom("result", result.path, "", "", result_id, id_path))
    for turn, entry in enumerate(entries):
        atoms[turn] += _others(entry, f"{key}[{turn}]", covered)
    turns = [
        TurnView(f"{key}[{turn}]", role, tuple(sorted(found, key=_block)))
        for turn, (role, found) in enumerate(zip(roles, atoms, strict=True))
    ]
    first = next((turn for turn, role in enumerate(roles) if role != "system"), len(roles))
    instructions = [*before, *(atom for turn in turns[:first] for atom in turn.atoms)]
    return BodyView(tuple(instructions), tuple(turns[first:]))


def _block(atom: Atom) -> int:
    """Where it stands in its turn: by its block of the content, calls that stand outside of that last."""
    found = _BLOCK.search(atom.path)
    if found:
        return int(found[1])
    return _LAST if atom.kind in ("call", "result") else -1


def _role(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "user"
    role = entry.get("role")
    if isinstance(role, str):
        return "system" if role == "developer" else role
    kind = entry.get("type")
    return _ITEM_ROLES.get(kind, kind) if isinstance(kind, str) else ""


def _others(entry: Any, path: str, covered: set[int]) -> list[Atom]:
    """Pieces of `entry` that no place names."""
    if not isinstance(entry, dict):
        return [] if isinstance(entry, str) else [Atom("other", path, _as_text(entry))]
    if "type" in entry and "role" not in entry:
        if id(entry) in covered:
            return []
        if entry["type"] == "reasoning":
            if any(id(part) in covered for key in ("summary", "content") for part in _parts(entry.get(key))):
                return []
            return [Atom("thinking", path, _as_text(entry.get("encrypted_content")))]
        return [Atom("other", path, _as_text(_without(entry, _OF_ITEMS)))]
    found: list[Atom] = []
    for number, part in enumerate(_parts(entry.get("content"))):
        here = f"{path}.content[{number}]"
        if part.get("type") == "redacted_thinking":
            found.append(Atom("thinking", here, _as_text(part.get("data"))))
        elif part.get("type") == "tool_result":
            inner = enumerate(_parts(part.get("content")))
            found += [
                Atom("other", f"{here}.content[{n}]", _as_text(_without(block, _OF_CACHES)))
                for n, block in inner
                if id(block) not in covered
            ]
        elif id(part) not in covered:
            found.append(Atom("other", here, _as_text(_without(part, _OF_CACHES))))
    return found


def _parts(value: Any) -> list[dict[str, Any]]:
    # Positions count, so that what is no object stays as an empty one.
    return [part if isinstance(part, dict) else {} for part in value] if isinstance(value, list) else []


def _without(value: dict[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""
