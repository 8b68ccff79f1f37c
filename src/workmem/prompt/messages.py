"""Message content as text: parts joined, everything that is no text refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workmem.core.errors import ClientError
from workmem.prompt.openai import Message, RefusalPart, TextPart


def plain_content(raw: Sequence[dict[str, Any]], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of `raw` with text content, in the client's own order of keys, nulls left out.

    `messages` are the same, decoded. Fields we do not know stay: a chat template may use them.
    Raises ClientError on a part that is no text.
    """
    plain: list[dict[str, Any]] = []
    for index, (fields, message) in enumerate(zip(raw, messages, strict=True)):
        kept = {key: value for key, value in fields.items() if value is not None}
        if isinstance(message.content, list):
            kept["content"] = "\n".join(_texts(index, message))
        elif message.content is None:
            kept["content"] = ""
        plain.append(kept)
    return plain


def part_places(messages: Sequence[Message]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """`origins` and `passages` of contents that are lists of parts, as `Prompt` has them."""
    origins: dict[str, str] = {}
    passages: dict[str, list[str]] = {}
    for index, message in enumerate(messages):
        field, parts = f"messages[{index}].content", message.content
        if not isinstance(parts, list):
            continue
        places = [
            (f"{field}[{number}].{'text' if isinstance(part, TextPart) else 'refusal'}", text)
            for number, (part, text) in enumerate(zip(parts, _texts(index, message), strict=True))
            if text
        ]
        if places:
            origins[field] = places[0][0]
        for number, (path, _) in enumerate(places):
            origins[f"{field}[{number}]"] = path
        passages[field] = [text for _, text in places]
    return origins, passages


def _texts(index: int, message: Message) -> list[str]:
    texts: list[str] = []
    for number, part in enumerate(message.content or ()):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            kind = "text" if isinstance(part, str) else str(type(part).__struct_config__.tag)
            raise ClientError(
                f"messages[{index}].content[{number}] is of type {kind!r}; the served model reads text only.",
                param=f"messages[{index}].content[{number}].type",
            )
    return texts
