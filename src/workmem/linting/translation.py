"""A recorded body of any API as the one form that chat templates take."""

from __future__ import annotations

from typing import Any

from workmem.prompt.decode import convert
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.messages import plain_content
from workmem.prompt.messages_to_chat import chat_of_count
from workmem.prompt.openai import ChatRequest
from workmem.prompt.prompt import Prompt
from workmem.prompt.responses_chat import as_chat, placed_input, read_request


def as_prompt(body: dict[str, Any], dialect: Dialect) -> Prompt:
    """Raises ClientError where the body has what no chat template takes."""
    if dialect.name == "responses":
        # What an earlier response kept on its server is not in a recording.
        request = read_request({"model": ""} | body)
        translated = as_chat(body, request, placed_input(request))
        return _prompt(translated.chat, translated.origins, translated.passages)
    if dialect.name == "messages":
        chat = chat_of_count({"model": ""} | body)
        return _prompt(chat.body, chat.origins, chat.passages)
    return _prompt(body, {}, {})


def _prompt(chat: dict[str, Any], origins: dict[str, str], passages: dict[str, list[str]]) -> Prompt:
    request = convert({"model": ""} | chat, ChatRequest)
    return Prompt(
        messages=plain_content(chat["messages"], request.messages),
        tools=chat.get("tools") or [],
        origins=origins,
        passages=passages,
        template_kwargs=request.chat_template_kwargs,
    )
