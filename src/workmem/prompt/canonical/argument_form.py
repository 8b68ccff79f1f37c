"""Arguments of earlier calls, JSON as text, with the same spaces and escapes."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect

_NAME = "argument_form"
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)
_SPACED = {":": ": ", ",": ", "}
_SURROGATE = re.compile("[\ud800-\udfff]")


def respaced(text: str) -> str:
    """JSON text as Python and most models write it: `{"a": [1, 2]}`. Key order and numbers stay; no JSON, no change."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    return "".join(_SPACED.get(token) or _unescaped(token) for token in _TOKEN.findall(text))


def _unescaped(token: str) -> str:
    if "\\" not in token:
        return token
    plain = json.dumps(json.loads(token, strict=False), ensure_ascii=False)
    return token if _SURROGATE.search(plain) else plain


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    paths: list[str] = []
    for place in dialect.calls(body):
        text = place.holder.get(place.arguments_key)
        if isinstance(text, str) and (now := respaced(text)) != text:
            place.holder[place.arguments_key] = now
            paths.append(place.arguments_path)
    return Applied(_NAME, tuple(paths)) if paths else None


ARGUMENT_FORM = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=(
        "Writes the arguments of calls in the history, JSON as text, with one space behind `:` and `,`, and with "
        "characters rather than escapes of them. The order of keys and the form of numbers are the model's, and stay. "
        "Arguments that are no JSON stay as they are."
    ),
    why=(
        'Clients read a call and write it anew, `{"path":"."}` for the `{"path": "."}` that the model wrote; a '
        "template that prints the text prints other tokens than those whose KV is there."
    ),
    fix="Send the `arguments` of a call back as the text that came.",
    apply=_apply,
)
