"""Upstream mode before SGLang's answers, as the models of its own protocol (0.5.23) wrote them down.

The server itself needs a GPU; how it answers is in its wheel. Its errors are flat, every chunk carries
`matched_stop` and a `usage` of null, and cached tokens are told with `--enable-cache-report` alone.
"""

import json

import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.testing.server import running

FRONT = ServerConfig(port=0, shutdown_s=1, read_timeout_s=2)
MESSAGES = [{"role": "user", "content": "Hi"}]
MODELS = (
    '{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"sglang","root":"m",'
    '"parent":null,"max_model_len":8192}]}'
)
WHOLE = (
    '{"id":"a1b2","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"Hi","reasoning_content":null},"logprobs":null,"finish_reason":"stop",'
    '"matched_stop":2}],"usage":USAGE,"metadata":{"weight_version":"default"}}'
)
CHUNK = (
    '{"id":"a1b2","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    '{"role":ROLE,"content":TEXT,"reasoning_content":null},"logprobs":null,"finish_reason":REASON,'
    '"matched_stop":STOP}],"usage":null}'
)
LAST = '{"id":"a1b2","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":USAGE}'
USAGE = (
    '{"prompt_tokens":40,"total_tokens":44,"completion_tokens":4,"prompt_tokens_details":DETAILS,'
    '"reasoning_tokens":0,"completion_tokens_details":null}'
)
REFUSED = (
    '{"object":"error","message":"The input is too long.","type":"BadRequestError","param":null,"code":400}'
)
REPORTED, UNREPORTED = USAGE.replace("DETAILS", '{"cached_tokens":32}'), USAGE.replace("DETAILS", "null")


def chunk(role="null", text="null", reason="null", stop="null"):
    filled = CHUNK.replace("ROLE", role).replace("TEXT", text).replace("REASON", reason)
    return filled.replace("STOP", stop)


def events(*bodies):
    return "".join(f"data: {body}\n\n" for body in (*bodies, "[DONE]"))


class Answers:
    """Answers the next chat with `body`."""

    def __init__(self):
        self.status, self.body, self.is_stream = 200, "", False
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, request):
        return Response(MODELS, media_type="application/json")

    async def _chat(self, request):
        if self.is_stream:
            return StreamingResponse(iter([self.body]), media_type="text/event-stream")
        return Response(self.body, self.status, media_type="application/json")


@pytest.fixture
def server():
    return Answers()


@pytest.fixture
def front(server, wire_to):
    with running(server.app, ServerConfig(port=0)) as url:
        app = build_upstream_app(UpstreamConfig(urls=(url,)), FRONT)
        with running(app, FRONT) as front_url:
            yield wire_to(front_url)


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="x", max_retries=0) as client:
        yield client


def counted(front, name):
    page = front.get("/metrics")[2].decode()
    found = [line for line in page.splitlines() if line.startswith(f"workmem_{name} ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def test_its_models_are_ours(client):
    (model,) = client.models.list()
    assert (model.id, model.owned_by, model.max_model_len) == ("m", "sglang", 8192)


@pytest.mark.parametrize(
    ("usage", "sources"),
    [(REPORTED, {"cached": 32, "computed": 8}), (UNREPORTED, {"unreported": 40})],
    ids=["reported", "unreported"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_pass_and_are_counted(front, server, stream, usage, sources):
    server.is_stream = stream
    server.body = WHOLE.replace("USAGE", usage)
    if stream:
        server.body = events(
            chunk('"assistant"', '""'),
            chunk(text='"Hi"'),
            chunk(reason='"stop"', stop="2"),
            LAST.replace("USAGE", usage),
        )
    answer = front.chat(model="m", stream=stream)[2]
    assert (answer.decode() if stream else answer) == (server.body if stream else json.loads(server.body))
    for source in ("cached", "computed", "unreported"):
        name = f'prompt_tokens_by_source_total{{source="{source}"}}'
        assert counted(front, name) == sources.get(source, 0)
    assert counted(front, "generation_tokens_total") == 4
    assert counted(front, 'request_success_total{finished_reason="stop"}') == 1
    assert counted(front, "time_to_first_token_seconds_count") == stream
    (record,) = front.get("/debug/requests")[2]["data"]
    assert (record["id"], record["is_whole"]) == ("a1b2", True)


def test_the_sdk_reads_its_streams(client, server):
    server.is_stream = True
    server.body = events(
        chunk('"assistant"', '""'),
        chunk(text='"Hi"'),
        chunk(reason='"stop"', stop="2"),
        LAST.replace("USAGE", UNREPORTED),
    )
    *parts, last = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hi"
    assert parts[-1].choices[0].matched_stop == 2
    assert (last.usage.prompt_tokens, last.usage.prompt_tokens_details) == (40, None)


def test_its_flat_errors_reach_the_client_and_count(front, client, server):
    server.status, server.body = 400, REFUSED
    with pytest.raises(openai.BadRequestError, match=r"The input is too long\."):
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert front.chat(model="m")[2] == json.loads(REFUSED)
    assert counted(front, 'request_success_total{finished_reason="error"}') == 2
    assert counted(front, "prompt_tokens_total") == 0


def test_an_error_in_its_stream_is_no_success_though_done_follows(front, server):
    server.is_stream = True
    server.body = events(chunk('"assistant"', '""'), f'{{"error":{REFUSED}}}')
    assert front.chat(model="m", stream=True)[2].decode() == server.body
    assert counted(front, 'request_success_total{finished_reason="error"}') == 1
    assert counted(front, 'request_success_total{finished_reason="stop"}') == 0
