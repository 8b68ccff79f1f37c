"""Anthropic's SDK through the gateway, before servers that know its API and before those that know chats alone."""

import json
from contextlib import ExitStack

import anthropic
import pytest

from workmem.gateway.app import build_app
from workmem.gateway.chat_as_message import MessageStream, whole_message
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

FRONT = ServerConfig(port=0, shutdown_s=1, read_timeout_s=2)
HELLO = [{"role": "user", "content": "Tell me of the sea, and of what lives in it."}]
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = 'Looking.\n<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'


class ChatsAlone:
    """A server that knows no messages, and remembers what it was asked."""

    def __init__(self, app):
        self.app = app
        self.asked = []

    async def __call__(self, scope, receive, send):
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith("/v1/") and path != "/v1/models":
            self.asked.append((path, {k.decode(): v.decode() for k, v in scope["headers"]}))
        if path.startswith("/v1/messages"):
            scope = {**scope, "path": "/v1/nothing", "raw_path": b"/v1/nothing"}
        await self.app(scope, receive, send)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def back(engine):
    return ChatsAlone(build_app(engine, FRONT))


@pytest.fixture
def front(back, stack):
    url = stack.enter_context(running(back, FRONT))
    app = build_upstream_app(UpstreamConfig(urls=(url,), read_timeout_s=5), FRONT)
    return stack.enter_context(running(app, FRONT))


@pytest.fixture
def claude(front):
    with anthropic.Anthropic(base_url=front, api_key="secret", max_retries=0, timeout=30) as client:
        yield client


def create(claude, **fields):
    return claude.messages.create(**({"model": "fake-model", "max_tokens": 900, "messages": HELLO} | fields))


def test_a_server_that_knows_chats_alone_answers_messages(claude, engine, back):
    first, second = create(claude, system="Be kind."), create(claude, system="Be kind.")
    assert first.content[0].text == "Hello there, friend."
    assert (first.stop_reason, first.usage.output_tokens) == ("end_turn", 20)
    cached = second.usage.cache_read_input_tokens
    assert cached == len(engine.requests[0].token_ids) // 16 * 16
    assert second.usage.input_tokens + cached == len(engine.requests[0].token_ids)
    # It is asked in vain once, and then known.
    assert [path for path, _ in back.asked] == ["/v1/messages", *["/v1/chat/completions"] * 2]
    assert back.asked[1][1]["authorization"] == "Bearer secret"


def test_streams_too(claude, engine):
    engine.answer = CALL
    with claude.messages.stream(model="fake-model", max_tokens=900, messages=HELLO, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "input_json")]
        message = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == {"at": "sea"}
    assert message.stop_reason == "tool_use"
    whole = create(claude, tools=[TOOL])
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(engine.requests[0].token_ids)


def test_thoughts_pass(claude, engine):
    engine.thinking, engine.answer = "possible", "<think>\nhm\n</think>\n\nSo."
    whole = create(claude)
    with claude.messages.stream(model="fake-model", max_tokens=900, messages=HELLO) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("hm", "So.")


def test_errors_keep_the_shape_of_the_api(claude, engine):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(claude, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(claude, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    engine.later_error = RuntimeError("secret")
    with pytest.raises(anthropic.APIStatusError) as broken:
        list(create(claude, stream=True))
    assert broken.value.body["type"] == "error"
    engine.later_error = None
    assert create(claude).content[0].text == "Hello there, friend."


def test_a_server_that_knows_messages_gets_the_bytes(engine, stack, wire_to):
    url = stack.enter_context(running(build_app(engine, FRONT), FRONT))
    app = build_upstream_app(UpstreamConfig(urls=(url,), read_timeout_s=5), FRONT)
    wire = wire_to(stack.enter_context(running(app, FRONT)))
    body = {"model": "fake-model", "max_tokens": 9, "messages": HELLO, "unknown": [1]}
    status, headers, answer = wire.post("/v1/messages?beta=true", body)
    assert (status, answer["type"], answer["content"][0]["text"]) == (200, "message", "Hello the")
    assert headers["request-id"]
    assert wire.post("/v1/messages/count_tokens", body)[2] == {
        "input_tokens": len(engine.requests[0].token_ids)
    }


CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning": "hm"}}]},
    {"choices": [{"delta": {"content": "a"}}]},
    {
        "choices": [
            {"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}}
        ]
    },
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}}]},
    {
        "choices": [
            {"delta": {"tool_calls": [{"index": 1, "id": "d", "function": {"name": "g", "arguments": "{}"}}]}}
        ]
    },
    {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": 2}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_of_another_server_in_any_pieces(size):
    data = b": hello\n\n" + b"".join(
        b"data: " + json.dumps({"id": "i", "model": "m", **c}).encode() + b"\n\n" for c in CHUNKS
    )
    data += b"data: [DONE]\n\n"
    stream = MessageStream()
    out = b"".join(stream.feed(data[at : at + size]) for at in range(0, len(data), size)) + stream.finish()
    events = [json.loads(line[5:]) for line in out.split(b"\n") if line.startswith(b"data:")]
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "ping",
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    fragments = [
        event["delta"].get("partial_json", "")
        for event in events
        if event.get("index") == 2 and "delta" in event
    ]
    assert json.loads("".join(fragments)) == {"x": 1}
    # Where it is not said what was cached, that is not said here.
    assert events[-2]["usage"] == {"input_tokens": 9, "output_tokens": 4}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_an_answer_of_another_server():
    call = {"id": "c", "function": {"name": "f", "arguments": "{broken"}}
    choice = {
        "message": {"content": "a", "tool_calls": [call]},
        "finish_reason": "stop",
        "stop_reason": "END",
    }
    body = json.loads(whole_message(json.dumps({"id": "i", "model": "m", "choices": [choice]}).encode(), 200))
    # A call that cannot be read is shown and not made.
    assert body["content"] == [{"type": "text", "text": "af({broken)"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    "data", [b"<html>", b'{"error": "no"}', b'{"error": {"message": "no"}}', b'{"detail": "no"}', b"[]"]
)
def test_an_error_of_any_shape(data):
    body = json.loads(whole_message(data, 500))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert isinstance(body["error"]["message"], str)
