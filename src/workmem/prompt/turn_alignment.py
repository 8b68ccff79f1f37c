"""Does a rendered turn say what was generated? Where each part of the one stands in the other.

Text must be the same to the character. Where a turn has calls, their arguments may be spelled in another way (order
of keys, spaces, escapes, `1.0` for `1`), and white space around calls may differ: whoever reads calls drops it, so no
client can send it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from workmem.prompt.dialects.chat import REASONING_KEYS

_EXACT_INTEGERS = 2**53
"""Up to here every reader of JSON has the same numbers."""
_DECODER = json.JSONDecoder()


class Part(NamedTuple):
    """Characters [start, end) of the generated text, and where they stand in the rendered one."""

    start: int
    end: int
    rendered_start: int
    rendered_end: int


def canonical_json(value: Any) -> str:
    """One spelling of a decoded JSON value: equal texts mean the same JSON, in every language's numbers."""
    return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def call_arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, decoded; the text itself where it is no JSON."""
    arguments: Any = (call.get("function") or {}).get("arguments")
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def align(generated: str, rendered: str, message: Mapping[str, Any]) -> list[Part] | None:
    """Parts that cover all of `rendered`, in order; None where it does not say what `generated` says.

    `rendered` is how a template writes the assistant's `message`. Parts end before the end of `generated` where the
    rendering does: a stop string, or white space that the template trims.
    """
    calls: Any = message.get("tool_calls")
    if not calls:
        return [Part(0, len(rendered), 0, len(rendered))] if generated.startswith(rendered) else None
    try:
        return _with_calls(generated, rendered, message, calls)
    except RecursionError:
        return None


def _with_calls(
    generated: str, rendered: str, message: Mapping[str, Any], calls: list[dict[str, Any]]
) -> list[Part] | None:
    parts: list[Part] = []
    here = there = 0
    for field in (*REASONING_KEYS, "content"):
        text = message.get(field)
        text = text.strip() if isinstance(text, str) else ""
        if not text:
            continue
        at, rendered_at = generated.find(text, here), rendered.find(text, there)
        if at < 0 or rendered_at < 0:
            return None
        parts.append(Part(here, at, there, rendered_at))
        here, there = at + len(text), rendered_at + len(text)
        parts.append(Part(at, here, rendered_at, there))
    for call in calls:
        wanted = canonical_json(call_arguments(call))
        place, rendered_place = _object(generated, here, wanted), _object(rendered, there, wanted)
        if place is None or rendered_place is None:
            return None
        parts.append(Part(here, place[0], there, rendered_place[0]))
        parts.append(Part(*place, *rendered_place))
        here, there = place[1], rendered_place[1]
    parts.append(Part(here, len(generated), there, len(rendered)))
    # Every second part is what stands between fields: marks, names and brackets.
    if all(_bare(generated[a:b]) == _bare(rendered[c:d]) for a, b, c, d in parts[::2]):
        return parts
    return None


def _object(text: str, start: int, wanted: str) -> tuple[int, int] | None:
    """The first JSON object of `text` from `start` on that means `wanted`."""
    at = text.find("{", start)
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            value, end = None, at
        if value is not None and canonical_json(value) == wanted:
            return at, end
        at = text.find("{", at + 1)
    return None


def _bare(text: str) -> str:
    return "".join(text.split())


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGERS:
        return int(value)
    return value
