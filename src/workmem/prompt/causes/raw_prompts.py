"""The same for `/v1/completions`, whose prompt is one text without parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.diagnose import Comparison
from workmem.prompt.causes.options import option_causes
from workmem.prompt.causes.texts import edits, first_difference

_SHARED_CHARS_MIN = 64


def compare_raw(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """How the later prompt departs from the earlier one. Of token ids nothing is said: tokens are compared anyway."""
    causes = list(option_causes(before, after))
    was, now = before.get("prompt"), after.get("prompt")
    if not isinstance(was, str) or not isinstance(now, str) or now.startswith(was) or was.startswith(now):
        return Comparison(causes, 0)
    return Comparison([*causes, *_text_causes(was, now)], first_difference(was, now))


def _text_causes(was: str, now: str) -> list[Cause]:
    shared = first_difference(was, now)
    named = [edit.at("prompt", "prompt", plain="branched") for edit in edits(was, now, may_grow=True)]
    if shared < _SHARED_CHARS_MIN and all(one.name == "branched" for one in named):
        what = f"another prompt; its first {shared} characters are those of the earlier one"
        return [cause("new_conversation", "prompt", "prompt", what)]
    return named
