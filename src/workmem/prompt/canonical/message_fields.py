"""Messages without what is for the client's own records."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect, objects_in

_NAME = "message_fields"
_RECORDS = (
    "id",
    "timestamp",
    "created",
    "created_at",
    "updated_at",
    "metadata",
    "response_metadata",
    "usage_metadata",
)


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    # Items of Responses have ids that a server looks up.
    if dialect.history_key != "messages":
        return None
    paths: list[str] = []
    for number, message in objects_in(body.get("messages")):
        for key in _RECORDS:
            if key in message:
                del message[key]
                paths.append(f"messages[{number}].{key}")
    return Applied(_NAME, tuple(paths)) if paths else None


MESSAGE_FIELDS = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=f"Drops {', '.join(f'`{key}`' for key in _RECORDS)} from messages; ids of calls stay. Not in Responses.",
    why=(
        "Frameworks send messages with ids and times of their own, new ones each time. No chat template prints them, "
        "but whoever knows a conversation by its messages does not know it again."
    ),
    fix="Send the fields of the API and no others.",
    apply=_apply,
)
