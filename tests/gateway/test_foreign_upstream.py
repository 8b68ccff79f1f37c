"""Upstream mode before servers that are not ours: stand-ins that behave as the real ones were seen to."""

import asyncio
import json
import socket
import threading
import uuid
from contextlib import ExitStack

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from workmem.cli.explain import explain
from workmem.core.errors import ClientError
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.gateway.usage_peek import UsagePeek
from workmem.testing.server import running

FRONT = ServerConfig(port=0, shutdown_s=1, read_timeout_s=2)


class Foreign:
    """Serves `answer` under whatever model name is asked for, and refuses request ids that are no UUID."""

    def __init__(self, model):
        self.model = model
        self.asked = []
        self.list_delay_s = 0.0
        self.answer = chat(usage={"prompt_tokens": 40, "completion_tokens": 4})
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, request):
        await asyncio.sleep(self.list_delay_s)
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _chat(self, request):
        try:
            uuid.UUID(request.headers["x-request-id"])
        except ValueError:
            return Response(status_code=400)
        self.asked.append(await request.json())
        return self.answer


def chat(finish="length", **fields):
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": finish}
    return JSONResponse({"id": "chatcmpl-7", "object": "chat.completion", "choices": [choice], **fields})


def stream(*events):
    return StreamingResponse(iter(events), media_type="text/event-stream")


def chunk(delta, finish=None, **fields):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    # With spaces, as servers in Python write it.
    return f"data: {json.dumps({'id': 'chatcmpl-8', 'choices': [choice], **fields})}\n\n"


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def foreigners():
    return [Foreign("left"), Foreign("right")]


@pytest.fixture
def front(foreigners, stack, wire_to):
    urls = [stack.enter_context(running(server.app, ServerConfig(port=0))) for server in foreigners]
    app = build_upstream_app(UpstreamConfig(urls=tuple(urls)), FRONT)
    return wire_to(stack.enter_context(running(app, FRONT)))


def readings(front):
    page = front.get("/metrics")[2].decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name.removeprefix("workmem_"): float(value) for name, value in lines.items()}


def test_our_own_request_id_is_one_that_strict_servers_take(front):
    assert front.chat(model="left")[0] == 200
    assert front.chat(model="left", headers={"x-request-id": "not usable: \t"})[0] == 200


def test_a_model_reaches_its_server_and_an_unknown_one_reaches_none(front, foreigners):
    for model in ("left", "right", "right"):
        assert front.chat(model=model)[0] == 200
    status, _, body = front.chat(model="rihgt")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "left" in body["error"]["message"]
    assert [len(server.asked) for server in foreigners] == [1, 2]


def test_the_first_request_waits_for_the_first_list(foreigners, stack, wire_to):
    foreigners[1].list_delay_s = 0.5
    urls = [stack.enter_context(running(server.app, ServerConfig(port=0))) for server in foreigners]
    app = build_upstream_app(UpstreamConfig(urls=tuple(urls)), FRONT)
    front = wire_to(stack.enter_context(running(app, FRONT)))
    for session in "abc":
        assert front.chat(model="right", headers={"x-session-id": session})[0] == 200
    assert [len(server.asked) for server in foreigners] == [0, 3]


def test_whole_answers_count_their_reason_and_no_time_to_first_token(front):
    front.chat(model="left")
    seen = readings(front)
    assert seen['request_success_total{finished_reason="length"}'] == 1
    assert 'request_success_total{finished_reason="stop"}' not in seen
    assert seen["time_to_first_token_seconds_count"] == seen["time_per_output_token_seconds_count"] == 0
    assert seen["e2e_request_latency_seconds_count"] == 1
    assert seen['prompt_tokens_by_source_total{source="unreported"}'] == 40


def test_streams_are_timed_from_their_first_token(front, foreigners):
    usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
    foreigners[0].answer = stream(
        ": waiting\n\n",
        chunk({"role": "assistant"}),
        chunk({"content": "Hi"}),
        chunk({}, "tool_calls"),
        f"data: {json.dumps({'id': 'chatcmpl-8', 'choices': [], 'usage': usage})}\n\n",
        "data: [DONE]\n\n",
    )
    front.chat(model="left", stream=True)
    seen = readings(front)
    assert seen['request_success_total{finished_reason="tool_calls"}'] == 1
    assert seen["time_to_first_token_seconds_count"] == seen["time_per_output_token_seconds_count"] == 1
    assert seen['prompt_tokens_by_source_total{source="cached"}'] == 32
    assert seen['prompt_tokens_by_source_total{source="computed"}'] == 8


def test_a_stream_that_ends_in_an_error_is_no_success(front, foreigners):
    foreigners[0].answer = stream(
        chunk({"content": "Hi"}), 'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    )
    assert front.chat(model="left", stream=True)[2].endswith(b'"code": 500}}\n\n')
    seen = readings(front)
    assert seen['request_success_total{finished_reason="error"}'] == 1
    assert 'request_success_total{finished_reason="stop"}' not in seen


def test_a_server_that_dies_in_the_middle_is_an_error_and_not_whole(front, foreigners):
    def dying():
        yield chunk({"content": "Hi"})
        raise ConnectionError("as if killed")

    foreigners[0].answer = StreamingResponse(dying(), media_type="text/event-stream")
    last = front.chat(model="left", stream=True)[2].decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_error"
    assert readings(front)['request_success_total{finished_reason="error"}'] == 1
    (record,) = front.get("/debug/requests")[2]["data"]
    assert (record["id"], record["is_whole"], record["usage"]) == ("chatcmpl-8", False, None)


def test_a_server_that_dies_before_it_answers_is_502_and_nobody_else_is_asked(foreigners, stack, wire_to):
    alive = stack.enter_context(running(foreigners[0].app, ServerConfig(port=0)))
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def hang_up():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)

    threading.Thread(target=hang_up, daemon=True).start()
    dying = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = build_upstream_app(UpstreamConfig(urls=(dying, alive)), FRONT)
    front = wire_to(stack.enter_context(running(app, FRONT)))
    # The one without a list is asked for what the other does not list.
    status, _, body = front.chat(model="elsewhere")
    assert (status, body["error"]["code"]) == (502, "upstream_error")
    assert foreigners[0].asked == []
    assert front.chat(model="left")[0] == 200


def test_explain_tells_what_the_server_said(front, foreigners, capsys):
    usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 30}}
    foreigners[1].answer = chat(usage=usage)
    given = str(uuid.uuid4())
    front.chat(model="right", headers={"x-request-id": given, "x-session-id": "s1"})
    (record,) = front.get("/debug/requests")[2]["data"]
    assert (record["request_id"], record["caller"]["session"], record["status"]) == (given, "s1", 200)
    for name in (given, "chatcmpl-7"):
        found = front.get(f"/debug/requests/{name}")[2]
        assert (found["prompt_tokens"], found["cached_tokens"], found["finished"]) == (40, 30, True)
    explain(last=True, url=front.base_url)
    page = capsys.readouterr().out
    assert "chatcmpl-7: 40 prompt tokens, 30 reused (75%)" in page
    assert f"as {record['server']} says" in page


def test_explain_says_why_it_knows_nothing(front, foreigners):
    foreigners[0].answer = stream(chunk({"content": "Hi"}, "stop"), "data: [DONE]\n\n")
    front.chat(model="left", stream=True)
    with pytest.raises(ClientError, match="include_usage"):
        explain(last=True, url=front.base_url)
    with pytest.raises(ClientError, match="is remembered"):
        explain("chatcmpl-9", url=front.base_url)


def peeked(content_type, data):
    peek = UsagePeek(content_type)
    for byte in data.encode():
        peek.feed(bytes([byte]))
    peek.close()
    return peek


def test_the_responses_dialect_is_understood():
    done = {
        "id": "resp_1",
        "object": "response",
        "status": "incomplete",
        "usage": {
            "input_tokens": 34,
            "output_tokens": 3,
            "input_tokens_details": {"cached_tokens": 16},
        },
    }
    begun = {**done, "status": "in_progress", "usage": None}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_text.delta", "delta": "Hi", "item_id": "msg_1"},
        {"type": "response.completed", "response": done},
    ]
    text = "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)
    for peek in (peeked("text/event-stream", text), peeked("application/json", json.dumps(done))):
        assert (peek.id, peek.reasons, peek.has_failed) == ("resp_1", ["length"], False)
        assert peek.usage.by_source == {"cached": 16, "computed": 18}
        assert peek.usage.completion_tokens == 3


def test_the_messages_dialect_is_understood():
    usage = {"input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 32}
    done = {"id": "msg_1", "type": "message", "stop_reason": "max_tokens", "usage": usage}
    begun = {"id": "msg_1", "stop_reason": None, "usage": {"input_tokens": 2, "output_tokens": 0}}
    events = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage},
    ]
    text = "".join(f"event: {one['type']}\r\ndata: {json.dumps(one)}\r\n\r\n" for one in events)
    for peek in (peeked("text/event-stream", text), peeked("application/json", json.dumps(done))):
        assert (peek.id, peek.reasons, peek.has_failed) == ("msg_1", ["length"], False)
        assert peek.usage.by_source == {"cached": 32, "computed": 2}
        assert (peek.usage.prompt_tokens, peek.usage.completion_tokens) == (34, 3)


def test_each_choice_counts_its_own_reason_and_odd_ones_stay_few():
    text = "".join(
        f"data: {json.dumps({'id': 'c', 'choices': [{'index': i, 'finish_reason': reason}]})}\n\n"
        for i, reason in enumerate(["stop", "length", "\u0007odd", None])
    )
    assert peeked("text/event-stream", text).reasons == ["stop", "length", "other"]
