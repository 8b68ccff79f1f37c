"""The SDK, LangChain and curl against the real engine and the real model."""

import asyncio
import json
import subprocess

import openai
import pytest
from langchain_openai import ChatOpenAI

from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.server import running

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "smollm2"
MESSAGES = [
    {"role": "system", "content": "You are a terse assistant that answers in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def base_url(smollm2, tmp_path_factory):
    config = EmbeddedConfig(served_name=NAME, vram_bytes="256MiB")
    cache = tmp_path_factory.mktemp("cache")
    engine = EmbeddedEngine.open(config, None, folder=smollm2, cache_dir=cache)
    server = ServerConfig(port=0, shutdown_s=2)
    with running(build_app(engine, server), server) as url:
        yield url


@pytest.fixture(scope="module")
def client(base_url):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client, **fields):
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 24} | fields
    return client.chat.completions.create(**fields)


def test_the_second_time_its_prompt_is_a_hit_and_the_answer_the_same(client):
    first, second = chat(client), chat(client)
    assert "Paris" in first.choices[0].message.content
    assert second.choices[0].message.content == first.choices[0].message.content
    prompt = second.usage.prompt_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (prompt - 1) // 16 * 16
    assert second.usage.workmem["tokens_by_source"] == {
        "vram": cached,
        "dram": 0,
        "ssd": 0,
        "computed": prompt - cached,
    }


def test_a_stream_is_the_same_text_and_usage(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_async_requests_run_side_by_side(base_url):
    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="x", max_retries=0, timeout=120
        ) as client:
            calls = [chat(client, max_tokens=8, seed=n, temperature=1) for n in range(4)]
            return await asyncio.gather(*calls)

    assert all(answer.usage.completion_tokens <= 8 for answer in asyncio.run(ask()))


def test_n_seed_and_logprobs(client):
    # That a seed repeats an answer is a promise of the deterministic mode, and tested there.
    fields = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    answer = chat(client, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        assert "".join(item.token for item in choice.logprobs.content).startswith(choice.message.content)
        assert all(len(item.top_logprobs) == 3 and item.logprob <= 0 for item in choice.logprobs.content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call(client, stream):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = chat(
        client, messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=64, stream=stream
    )
    if stream:
        chunks = list(answer)
        function = next(
            c.choices[0].delta.tool_calls[0].function for c in chunks if c.choices[0].delta.tool_calls
        )
        reason = chunks[-1].choices[0].finish_reason
    else:
        function = answer.choices[0].message.tool_calls[0].function
        reason = answer.choices[0].finish_reason
    assert (function.name, reason) == ("get_weather", "tool_calls")
    assert isinstance(json.loads(function.arguments)["city"], str)


def test_tools_and_their_results_are_rendered(client):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    history = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Heavy rain, 12 degrees."},
    ]
    plain = chat(client, messages=history[:1], max_tokens=1)
    answer = chat(client, messages=history, tools=[WEATHER], max_tokens=24)
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 100
    assert answer.choices[0].message.content


def test_a_json_schema_is_kept(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = json.loads(chat(client, response_format=form, max_tokens=64).choices[0].message.content)
    assert set(answer) == {"city", "large"}


def test_stop_and_completions(client):
    answer = client.completions.create(
        model=NAME, prompt=["One, two, three,", "A, B, C,"], max_tokens=6, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "four" in answer.choices[0].text
    stopped = client.completions.create(
        model=NAME, prompt="One, two, three,", max_tokens=16, temperature=0, stop=["five"]
    )
    assert "four" in stopped.choices[0].text
    assert "five" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_errors_have_their_status(client):
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, messages=[{"role": "user", "content": "word " * 9000}], stream=True)
    assert too_long.value.code == "context_length_exceeded"
    assert "8192" in too_long.value.message
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model=NAME, prompt=[10**6])
    with pytest.raises(openai.NotFoundError, match=NAME):
        chat(client, model="other")


def test_a_client_that_leaves_frees_the_engine(client, base_url, wire_to, until):
    stream = chat(client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wire = wire_to(base_url)
    until(lambda: wire.get("/health")[2]["gauges"]["num_requests_running"] == 0, 20)


def test_explain_accounts_for_every_token(client, base_url, wire_to):
    answer = chat(client)
    found = wire_to(base_url).get(f"/debug/requests/{answer.id}")[2]
    spans = found["spans"]
    assert sum(part["tokens"] for span in spans for part in span["parts"]) == answer.usage.prompt_tokens
    assert {"messages[0].content", "messages[1].content"} <= {span["path"] for span in spans}


def test_langchain(base_url):
    model = ChatOpenAI(
        model=NAME, base_url=f"{base_url}/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0
    )
    assert "Paris" in model.invoke("What is the capital of France?").content
    assert "Paris" in "".join(chunk.content for chunk in model.stream("What is the capital of France?"))
    bound = model.bind_tools([WEATHER], tool_choice="get_weather").bind(max_tokens=64)
    assert bound.invoke("What is the weather in Paris?").tool_calls[0]["name"] == "get_weather"


def test_curl(base_url):
    body = json.dumps({"model": NAME, "messages": MESSAGES, "stream": True, "max_tokens": 8})
    command = ["curl", "-sS", "-N", "--max-time", "60", f"{base_url}/v1/chat/completions", "-d", body]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.startswith('data: {"id":"chatcmpl-')
    assert done.stdout.endswith("data: [DONE]\n\n")
