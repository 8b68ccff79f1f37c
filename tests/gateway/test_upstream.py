"""Upstream mode before real instances of our own server."""

import asyncio
import json
import time
from contextlib import ExitStack

import openai
import pytest

from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.servers import UpstreamServer, rank
from workmem.gateway.upstream import build_upstream_app
from workmem.gateway.usage_peek import UsagePeek
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

FRONT = ServerConfig(port=0, shutdown_s=1, read_timeout_s=2)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engines():
    return [FakeEngine(), FakeEngine()]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def backs(engines, stack):
    config = ServerConfig(port=0, shutdown_s=1)
    return [stack.enter_context(running(build_app(engine, config), config)) for engine in engines]


@pytest.fixture
def front(backs, stack, wire_to):
    app = build_upstream_app(UpstreamConfig(urls=tuple(backs), read_timeout_s=2), FRONT)
    return wire_to(stack.enter_context(running(app, FRONT)))


def test_the_sdk_works_through_it(front, engines):
    with openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake-model", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello there, friend."
        chunks = list(client.chat.completions.create(model="fake-model", messages=MESSAGES, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there, friend."
        assert [model.id for model in client.models.list()] == ["fake-model"]
        assert client.models.retrieve("fake-model").id == "fake-model"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_a_session_stays_with_one_server_and_sessions_spread(front, engines):
    for turn in range(3):
        for session in range(12):
            front.chat(f"turn {turn}", {"x-session-id": f"s{session}"})
    by_engine = [{request.caller.session for request in engine.requests} for engine in engines]
    assert all(by_engine)
    assert not by_engine[0] & by_engine[1]


def test_one_session_name_of_many_tenants_is_many_sessions(front, engines):
    for turn in range(2):
        for tenant in range(12):
            front.chat(f"turn {turn}", {"x-session-id": "main", "x-workmem-tenant": f"t{tenant}"})
    # By its name alone all of it would lie on one server, and whoever picks a name would pick the server for others.
    by_engine = [[request.caller.tenant for request in engine.requests] for engine in engines]
    assert all(by_engine)
    assert not set(by_engine[0]) & set(by_engine[1])
    assert sorted(by_engine[0] + by_engine[1]) == sorted(2 * [f"t{tenant}" for tenant in range(12)])


def test_a_session_stays_with_one_server_that_is_slow_to_say_what_it_serves(engines, stack, wire_to, until):
    def slow_to_list(app):
        async def serve(scope, receive, send):
            if scope.get("path") == "/v1/models":
                await asyncio.sleep(0.5)
            await app(scope, receive, send)

        return serve

    config = ServerConfig(port=0, shutdown_s=1)
    apps = [build_app(engines[0], config), slow_to_list(build_app(engines[1], config))]
    backs = tuple(stack.enter_context(running(app, config)) for app in apps)
    app = build_upstream_app(UpstreamConfig(urls=backs, read_timeout_s=2), FRONT)
    front = wire_to(stack.enter_context(running(app, FRONT)))
    until(lambda: front.get("/health")[2]["servers"][0]["models"])
    assert not front.get("/health")[2]["servers"][1]["models"]
    test_a_session_stays_with_one_server_and_sessions_spread(front, engines)


def test_an_unnamed_session_stays_with_one_server_by_its_history(front, engines):
    for number in range(6):
        history = []
        for turn in range(3):
            history += [{"role": "user", "content": f"agent {number}, turn {turn}"}]
            body = {"model": "fake-model", "messages": history}
            answer = front.post("/v1/chat/completions", body)[2]["choices"][0]["message"]
            history += [{"role": "assistant", "content": answer["content"]}]
    counts = sorted(len(engine.requests) for engine in engines)
    assert sum(counts) == 18
    assert all(count % 3 == 0 for count in counts)


def test_unknown_fields_and_errors_pass_through(front):
    status, _, body = front.chat(temperature=9)
    assert (status, body["error"]["param"]) == (400, "temperature")
    status, _, body = front.post("/v1/embeddings", {"model": "fake-model", "input": "x"})
    assert (status, body["error"]["code"]) == (404, "unknown_url")
    assert front.post("/v1/chat/completions", b"{")[0] == 400


def test_a_dead_server_is_passed_over(engines, stack, wire_to):
    config = ServerConfig(port=0, shutdown_s=1)
    alive = stack.enter_context(running(build_app(engines[0], config), config))
    app = build_upstream_app(UpstreamConfig(urls=("http://127.0.0.1:9", alive)), FRONT)
    front = wire_to(stack.enter_context(running(app, FRONT)))
    for number in range(8):
        assert front.chat(headers={"x-session-id": f"s{number}"})[0] == 200
    servers = front.get("/health")[2]["servers"]
    assert [server["is_up"] for server in servers] == [False, True]


def test_no_server_at_all_is_502_in_shape_and_one_line_in_the_log(stack, wire_to, caplog):
    app = build_upstream_app(UpstreamConfig(urls=("http://127.0.0.1:9",)), FRONT)
    front = wire_to(stack.enter_context(running(app, FRONT)))
    status, _, body = front.chat()
    assert (status, body["error"]["code"]) == (502, "upstream_unreachable")
    (line,) = [one for one in caplog.records if one.message.startswith("request ")]
    assert body["error"]["message"] in line.message
    assert not line.exc_info


def test_a_silent_server_is_504(front, engines):
    for engine in engines:
        engine.delay_s = 5.0
    status, _, body = front.chat(stream=True)
    assert (status, body["error"]["code"]) == (504, "upstream_timeout")


def test_a_stream_that_breaks_off_says_so(front, engines):
    def slow_end(request):
        return "abcdef"

    for engine in engines:
        engine.answer = slow_end
        engine.delay_s = 0.0
    front_body = front.chat(stream=True)[2]
    assert front_body.endswith(b"data: [DONE]\n\n")
    for engine in engines:
        engine.step, engine.answer = 1, _Sleepy(engine)
    body = front.chat(stream=True)[2]
    assert b"[DONE]" not in body
    last = body.decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_error"


class _Sleepy:
    """An answer after whose start the engine falls silent for longer than the front waits."""

    def __init__(self, engine):
        self.engine = engine

    def __call__(self, request):
        engine = self.engine

        class Text(str):
            __slots__ = ()

            def __getitem__(self, key):
                engine.delay_s = 6.0
                return str.__getitem__(self, key)

        return Text("abcdef")


def test_a_client_that_leaves_frees_the_server(front, engines, until):
    for engine in engines:
        engine.answer, engine.delay_s = "x" * 3000, 0.02
    body = json.dumps({"model": "fake-model", "messages": MESSAGES, "stream": True}).encode()
    with front.open() as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert b"200 OK" in client.recv(1000)
    until(lambda: any(engine.cancelled for engine in engines))
    until(lambda: not any(engine.running for engine in engines))
    until(lambda: not any(server["running"] for server in front.get("/health")[2]["servers"]))


def test_keys_tenants_and_request_ids_travel_as_they_should(engines, stack, wire_to, tmp_path):
    (tmp_path / "back").write_text("back-key\n")
    (tmp_path / "front").write_text("front-key:acme\n")
    config = ServerConfig(port=0, shutdown_s=1, api_key_file=str(tmp_path / "back"))
    back = stack.enter_context(running(build_app(engines[0], config), config))
    upstream = UpstreamConfig(urls=(back,), api_key_file=str(tmp_path / "back"))
    server = ServerConfig(port=0, shutdown_s=1, api_key_file=str(tmp_path / "front"))
    front = wire_to(stack.enter_context(running(build_upstream_app(upstream, server), server)))
    assert front.chat()[0] == 401
    status, headers, _ = front.chat(headers={"authorization": "Bearer front-key", "x-request-id": "r1"})
    assert (status, headers["x-request-id"]) == (200, "r1")


def test_usage_is_counted_as_it_passes(front):
    front.chat("a" * 64)
    front.chat("a" * 64, stream=True, stream_options={"include_usage": True})
    time.sleep(0.05)
    page = front.get("/metrics")[2].decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(lines["workmem_generation_tokens_total"]) == 40
    by_source = [
        float(value)
        for name, value in lines.items()
        if name.startswith("workmem_prompt_tokens_by_source_total")
    ]
    assert sum(by_source) == float(lines["workmem_prompt_tokens_total"]) > 128
    assert float(lines['workmem_prompt_tokens_by_source_total{source="vram"}']) >= 64


def test_rank_keeps_order_when_a_server_leaves():
    servers = [UpstreamServer(f"http://h{i}") for i in range(5)]
    for key in map(str, range(50)):
        order = rank(servers, model="m", affinity=key, now=0)
        order[0].down_until = 10.0
        assert rank(servers, model="m", affinity=key, now=0) == [*order[1:], order[0]]
        order[0].down_until = 0.0


def test_rank_without_a_session_takes_the_least_busy_of_the_model():
    servers = [UpstreamServer(f"http://h{i}") for i in range(3)]
    servers[0].in_flight, servers[1].in_flight = 2, 1
    servers[2].models = {"other": {}}
    servers[0].models = servers[1].models = {"m": {}}
    for server in servers:
        server.has_listed = True
    assert rank(servers, model="m", affinity="", now=0) == [servers[1], servers[0]]


def test_rank_keeps_the_place_of_a_server_whose_list_is_on_its_way():
    servers = [UpstreamServer(f"http://h{i}") for i in range(5)]
    for server in servers[1:]:
        server.models, server.has_listed = {"m": {}}, True
    before = [rank(servers, model="m", affinity=str(key), now=0) for key in range(50)]
    assert {order[0] for order in before} == set(servers)
    assert rank(servers, model="m", affinity="", now=0)[-1] is servers[0]
    servers[0].models, servers[0].has_listed = {"m": {}}, True
    assert before == [rank(servers, model="m", affinity=str(key), now=0) for key in range(50)]


def test_a_model_that_nobody_lists_is_asked_of_those_without_a_list_or_of_a_lone_server():
    servers = [UpstreamServer(f"http://h{i}") for i in range(2)]
    assert rank(servers, model="m", affinity="", now=0) == servers
    servers[0].has_listed = True
    assert rank(servers, model="m", affinity="", now=0) == [servers[1]]
    servers[1].has_listed = True
    assert rank(servers, model="m", affinity="", now=0) == []
    assert rank(servers, model="", affinity="", now=0) == servers
    assert rank(servers[:1], model="m", affinity="", now=0) == servers[:1]


@pytest.mark.parametrize(
    "usage",
    [None, 3, {"prompt_tokens": "x"}, {"prompt_tokens": 5, "prompt_tokens_details": None}],
    ids=["null", "number", "text", "bare"],
)
def test_odd_usage_is_harmless(usage):
    peek = UsagePeek("application/json")
    for byte in json.dumps({"usage": usage}).encode():
        peek.feed(bytes([byte]))
    peek.close()
    assert peek.usage is None or peek.usage.by_source in ({}, {"unreported": 5})
