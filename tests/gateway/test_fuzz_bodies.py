"""Bodies near valid ones, of every API: each is answered or refused, none trips the server up.

Everything runs in this process, as the server would run it, over the fake engine.
"""

import asyncio
import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.prompt.dialects.known import DIALECTS
from workmem.testing.fake_engine import FakeEngine

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["a", "b"]}, "deep": {"anyOf": [{"type": "null"}, {}]}},
    "required": ["path"],
}
CHAT = {
    "model": "fake-model",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Read a."}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "It is a file.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "text of a"},
        {"role": "user", "content": "And b?", "name": "mia"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "list"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "temperature": 0,
    "stop": ["\n\n"],
    "max_tokens": 8,
    "n": 1,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "metadata": {"user_id": "u"},
    "workmem": {"reuse": True},
}
RESPONSES = {
    "model": "fake-model",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Read a."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "It is a file."}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "text of a"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It says a.", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And b?"}]},
    ],
    "tools": [{"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}],
    "tool_choice": "auto",
    "max_output_tokens": 16,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "store": True,
    "truncation": "disabled",
    "metadata": {"k": "v"},
}
MESSAGES = {
    "model": "fake-model",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Read a."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "It is a file.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "text of a"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And b?"},
            ],
        },
    ],
    "tools": [{"name": "read", "description": "Reads.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["\n\n"],
    "temperature": 0.5,
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "u"},
}
COMPLETION = {
    "model": "fake-model",
    "prompt": ["Once", [1, 2]],
    "max_tokens": 4,
    "echo": False,
    "logprobs": 1,
}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/completions": COMPLETION,
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**63 - 2, max_value=2**64 + 2),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "\0",
            "\ud800",
            "💥",
            "system",
            "tool",
            "image",
            "image_url",
            "function",
            "none",
            "{",
            "[1]",
            "1" * 400,
        ]
    ),
    st.sampled_from([[], {}, [[]], [{}], [None], {"type": "text"}, {"type": "image"}, {"type": []}]),
)
VALUES = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
APP = build_app(FakeEngine(), ServerConfig(port=0, request_timeout_s=20))


def places(value, path=()):
    """Every place in a body."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in children:
        yield from places(inner, (*path, key))


def bent(body, data):
    """`body` with something changed, dropped, doubled, moved or new."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        path = data.draw(st.sampled_from(list(places(body))[1:]), label="place")
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        key = path[-1]
        what = data.draw(st.sampled_from(["set", "set", "drop", "double", "new", "swap"]), label="what")
        if what == "set":
            holder[key] = data.draw(VALUES, label="value")
        elif what == "drop":
            del holder[key]
        elif what == "double" and isinstance(holder, list):
            holder.insert(data.draw(st.integers(0, len(holder)), label="at"), copy.deepcopy(holder[key]))
        elif what == "swap":
            other = data.draw(st.sampled_from(list(places(body))[1:]), label="with")
            found = body
            for step in other:
                found = found[step]
            holder[key] = copy.deepcopy(found)
        elif isinstance(holder, dict):
            holder[data.draw(st.text(max_size=8), label="name")] = data.draw(VALUES, label="value")
        if not list(places(body))[1:]:
            break
    return body


def post(path, body):
    """(status, body) of the application's answer."""

    async def run():
        sent, messages = False, []

        async def receive():
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            messages.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await APP(scope, receive, send)
        return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])

    return asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_the_body_that_others_are_near_is_answered(path):
    status, answer = post(path, json.dumps(PATHS[path]).encode())
    assert status == 200, answer


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_near_a_valid_body_is_answered_or_refused_in_words(path, data):
    body = bent(PATHS[path], data) | {"stream": data.draw(st.booleans(), label="stream")}
    status, answer = post(path, json.dumps(body).encode())
    assert status == 200 or 400 <= status < 500, (status, answer)
    if status != 200:
        assert json.loads(answer)["error"]["message"]
    elif body["stream"] is True and not path.endswith("count_tokens"):
        assert b'"code":500' not in answer
        assert b"api_error" not in answer


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bytes_that_are_no_json_or_cut_short_are_refused_in_words(path, data):
    whole = json.dumps(PATHS[path]).encode()
    cut = data.draw(st.integers(0, len(whole) - 1), label="cut")
    junk = data.draw(st.binary(max_size=8), label="junk")
    status, answer = post(path, whole[:cut] + junk)
    # What is put behind the cut may happen to end it well.
    assert status == 400 or (junk and status in (200, 404))
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_places_of_any_body_are_where_their_paths_say(data):
    body = bent(data.draw(st.sampled_from(list(PATHS.values())), label="body"), data)
    for dialect in DIALECTS:
        for text in dialect.texts(body):
            assert isinstance(text.text, str)
        for place in (*dialect.tools(body), *dialect.calls(body), *dialect.results(body)):
            assert place.path
