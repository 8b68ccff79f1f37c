"""What an engine is given: every message has text, whatever form the client sent it in."""

from typing import Any

import pytest

from workmem.core.errors import ClientError
from workmem.prompt.decode import convert
from workmem.prompt.messages import part_places, plain_content
from workmem.prompt.openai import ChatRequest

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def plain(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = convert({"model": "m", "messages": list(messages)}, ChatRequest)
    return plain_content(messages, request.messages)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": "x"}, "x"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "tool_calls": [CALL]}, ""),
    ],
)
def test_content_is_text(message, content):
    assert plain(message)[0] == {**message, "content": content}


def test_nulls_are_left_out_and_unknown_fields_kept():
    message = {"role": "user", "name": None, "content": "x", "mood": "calm"}
    assert plain(message) == [{"role": "user", "content": "x", "mood": "calm"}]


def test_what_is_no_text_is_refused_by_its_place():
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ClientError, match="reads text only") as caught:
        plain({"role": "user", "content": content})
    assert caught.value.param == "messages[0].content[1].type"


def test_parts_know_their_places():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "refusal", "refusal": "b"}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}]
    request = convert({"model": "m", "messages": messages}, ChatRequest)
    origins, passages = part_places(request.messages)
    assert origins == {
        "messages[1].content": "messages[1].content[0].text",
        "messages[1].content[0]": "messages[1].content[0].text",
        "messages[1].content[1]": "messages[1].content[2].refusal",
    }
    assert passages == {"messages[1].content": ["a", "b"]}
