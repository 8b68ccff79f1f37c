"""How two lists of tools differ: by order, by what is in them, or only by how that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.texts import edits
from workmem.prompt.dialects.places import Dialect

_NAMES_SHOWN = 5
_VALUES = frozenset({"enum", "const", "default", "examples", "example"})
"""Keys of a schema below which there is no schema."""


class _Tool(NamedTuple):
    key: tuple[str, int]
    """Its name, and how many of that name stand before it."""
    path: str
    inner: str
    """Path of the object with the description."""
    whole: dict[str, Any]
    function: dict[str, Any]


def tool_causes(before: Mapping[str, Any], after: Mapping[str, Any], dialect: Dialect) -> list[Cause]:
    """Every difference between the tools of two bodies, in the order of the later one's list."""
    old, new = _tools(before, dialect), _tools(after, dialect)
    at_old, at_new = ({tool.key: index for index, tool in enumerate(tools)} for tools in (old, new))
    found: list[tuple[int, Cause]] = []
    added = [index for index, tool in enumerate(new) if tool.key not in at_old]
    removed = [index for index, tool in enumerate(old) if tool.key not in at_new]
    if added:
        first = added[0]
        what = f"{_names(new, added)} {'is' if len(added) == 1 else 'are'} new"
        if not old:
            what += ", where no tools were"
        elif first >= len(old) - len(removed):
            what += ", at the end"
        else:
            what += f", from place {first} of {len(new)} on"
        found.append((first, cause("tool_added", new[first].path, "", what)))
    if removed:
        first = removed[0]
        place = sum(tool.key in at_new for tool in old[:first])
        what = f"{_names(old, removed)} {'is' if len(removed) == 1 else 'are'} gone"
        path = new[place].path if place < len(new) else "tools"
        found.append((place, cause("tool_removed", path, old[first].path, what)))
    kept_old = [tool.key for tool in old if tool.key in at_new]
    kept_new = [tool.key for tool in new if tool.key in at_old]
    moved = next((pair for pair in zip(kept_old, kept_new, strict=True) if pair[0] != pair[1]), None)
    if moved is not None:
        was, now = (key[0] for key in moved)
        index = at_new[moved[1]]
        what = f"the same {len(kept_new)} tools in another order: {now!r} stands where {was!r} stood"
        found.append((index, cause("tool_order", new[index].path, old[at_old[moved[0]]].path, what)))
    for key in kept_new:
        index = at_new[key]
        found += [(index, one) for one in _changes(old[at_old[key]], new[index])]
    return [one for _, one in _merged(sorted(found, key=lambda item: item[0]))]


def _merged(found: list[tuple[int, Cause]]) -> Iterator[tuple[int, Cause]]:
    """One cause of each name that many tools tend to have at once: that all are written otherwise is one finding."""
    counts: dict[str, int] = {}
    for _, one in found:
        counts[one.name] = counts.get(one.name, 0) + 1
    seen: set[str] = set()
    for index, one in found:
        if one.name in seen:
            continue
        seen.add(one.name)
        if counts[one.name] > 1:
            more = f"{one.what}; and in {counts[one.name] - 1} more places"
            yield index, msgspec.structs.replace(one, what=more)
        else:
            yield index, one


def _tools(body: Mapping[str, Any], dialect: Dialect) -> list[_Tool]:
    places = {place.number: place for place in dialect.tools(body)}
    entries = body.get("tools")
    counts: dict[str, int] = {}
    tools: list[_Tool] = []
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        path = f"tools[{index}]"
        whole: dict[str, Any] = _plain(entry) if isinstance(entry, dict) else {"value": entry}
        place = places.get(index)
        name = place.name if place is not None else str(whole.get("name", whole.get("type", "")))
        number = counts[name] = counts.get(name, -1) + 1
        inner = path if place is None else place.function_path
        function = whole if inner == path else whole["function"]
        tools.append(_Tool((name, number), path, inner, whole, function))
    return tools


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """`entry` without marks for caches, which no template prints and which move."""
    marks = ("cache_control", "prompt_cache_breakpoint")
    return {key: value for key, value in entry.items() if key not in marks}


def _names(tools: list[_Tool], indexes: list[int]) -> str:
    names = [repr(tools[index].key[0]) for index in indexes]
    if len(names) > _NAMES_SHOWN:
        return f"{len(names)} tools ({', '.join(names[:_NAMES_SHOWN])}, ...)"
    return ", ".join(names)


def _changes(old: _Tool, new: _Tool) -> Iterator[Cause]:
    if _written(old.whole) == _written(new.whole):
        return
    yield from _description(old, new)
    here, there = _without_description(new), _without_description(old)
    if _written(here) == _written(there):
        return
    if _meaning(here) == _meaning(there):
        yield _key_order(there, here, old, new)
        return
    sets_here, sets_there = _with_sets(here), _with_sets(there)
    if _meaning(sets_here) == _meaning(sets_there):
        path = next(_leaves(there, here, ""))
        what = f"{new.key[0]!r}: the same names in `required`, in another order"
        yield cause("required_order", f"{new.path}{path}", f"{old.path}{path}", what)
        if _written(sets_here) != _written(sets_there):
            yield _key_order(sets_there, sets_here, old, new)
        return
    yield _other_schema(there, here, old, new)


def _description(old: _Tool, new: _Tool) -> Iterator[Cause]:
    was, now = old.function.get("description"), new.function.get("description")
    if was == now:
        return
    path, path_before = f"{new.inner}.description", f"{old.inner}.description"
    for edit in edits(was if isinstance(was, str) else "", now if isinstance(now, str) else ""):
        what = f"description of {new.key[0]!r}: {edit.what}"
        if edit.name == "unordered_context":
            yield cause("tool_description_order", path, path_before, what)
        else:
            yield cause(edit.name or "tool_changed", path, path_before, what)


def _without_description(tool: _Tool) -> dict[str, Any]:
    function = {key: value for key, value in tool.function.items() if key != "description"}
    return function if tool.function is tool.whole else {**tool.whole, "function": function}


def _key_order(before: Any, after: Any, old: _Tool, new: _Tool) -> Cause:
    path, was, now = next(_reordered(before, after, ""), ("", "", ""))
    what = f"{new.key[0]!r}: the same keys in another order: {now!r} stands where {was!r} stood"
    return cause("schema_key_order", f"{new.path}{path}", f"{old.path}{path}", what)


def _other_schema(before: Any, after: Any, old: _Tool, new: _Tool) -> Cause:
    path = next(_leaves(_with_sets(before), _with_sets(after), ""), "")
    what = f"{new.key[0]!r} has another schema, first at {path.lstrip('.') or 'its top'}"
    # That is all a newer generator of schemas tends to change, and it says nothing.
    same = _meaning(_without_dialect(before)) == _meaning(_without_dialect(after))
    rule = "schema_form" if same else None
    return cause("tool_changed", f"{new.path}{path}", f"{old.path}{path}", what, rule=rule)


def _written(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _meaning(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _with_sets(value: Any) -> Any:
    """`value` with each `required` sorted."""
    if isinstance(value, list):
        return [_with_sets(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, item in value.items():
        if key == "required" and isinstance(item, list):
            out[key] = sorted(item, key=_meaning)
        else:
            out[key] = item if key in _VALUES else _with_sets(item)
    return out


def _without_dialect(value: Any) -> Any:
    """`value` without `$schema`, at any depth."""
    if isinstance(value, list):
        return [_without_dialect(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_dialect(item) for key, item in value.items() if key != "$schema"}


def _reordered(before: Any, after: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Objects whose keys stand in another order: path, the first key that did, the first that does."""
    if isinstance(before, dict) and isinstance(after, dict):
        pair = next(((a, b) for a, b in zip(before, after, strict=False) if a != b), None)
        if pair is not None:
            yield path, *pair
        for key, item in after.items():
            yield from _reordered(before.get(key), item, f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        for index, (was, now) in enumerate(zip(before, after, strict=False)):
            yield from _reordered(was, now, f"{path}[{index}]")


def _leaves(before: Any, after: Any, path: str) -> Iterator[str]:
    """Paths at which two values differ, in the order of the later one."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, item in after.items():
            if key not in before:
                yield f"{path}.{key}"
            else:
                yield from _leaves(before[key], item, f"{path}.{key}")
        yield from (f"{path}.{key}" for key in before if key not in after)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        if _meaning(before) != _meaning(after) and all(isinstance(item, str) for item in (*before, *after)):
            yield path
            return
        for index, (was, now) in enumerate(zip(before, after, strict=True)):
            yield from _leaves(was, now, f"{path}[{index}]")
    elif _meaning(before) != _meaning(after):
        yield path
