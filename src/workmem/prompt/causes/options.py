"""What beside its texts decides how a prompt is rendered, and with whom it is shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from workmem.prompt.causes.cause import Cause, cause

# Read by chat templates, or by what chooses one.
_OPTIONS = (
    "model",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
# Fields that have nothing to do with what is rendered.
_QUIET = {"reasoning": ("summary", "generate_summary"), "thinking": ("budget_tokens", "display")}
_SALTS = ("cache_salt", "extra_key")


def option_causes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Cause]:
    """Options of two bodies that differ, salts first: with another one nothing is shared at all."""
    for name in _SALTS:
        was, now = before.get(name), after.get(name)
        if was != now:
            yield cause(
                "salt_or_tenant", name, name, f"`{name}` is another one: nothing is shared on purpose"
            )
    inner_was, inner_now = (_salt_of_hints(body) for body in (before, after))
    if inner_was != inner_now:
        path = "nvext.cache_salt"
        yield cause("salt_or_tenant", path, path, f"`{path}` is another one: nothing is shared on purpose")
    for name in _OPTIONS:
        was, now = (_plain(name, body.get(name)) for body in (before, after))
        if was != now:
            what = f"`{name}` changed from {_shown(was)} to {_shown(now)}"
            yield cause("model_or_template_options_changed", name, name, what)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in _QUIET.get(name, ())}
    return value or None


def _salt_of_hints(body: Mapping[str, Any]) -> Any:
    hints = body.get("nvext")
    return hints.get("cache_salt") if isinstance(hints, dict) else None


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode() if value is not None else "nothing"
    return text if len(text) <= 60 else f"{text[:59]}…"
