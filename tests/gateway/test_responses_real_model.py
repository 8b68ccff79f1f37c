"""The Responses API by the SDK against the real engine and the real model."""

import json

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.server import running

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "smollm2"
TERSE = "You are a terse assistant that answers in one short sentence."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def base_url(smollm2, tmp_path_factory):
    config = EmbeddedConfig(served_name=NAME, vram_bytes="256MiB")
    engine = EmbeddedEngine.open(config, None, folder=smollm2, cache_dir=tmp_path_factory.mktemp("cache"))
    server = ServerConfig(port=0, shutdown_s=2)
    with running(build_app(engine, server), server) as url:
        yield url


@pytest.fixture(scope="module")
def client(base_url):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client, **fields):
    return client.responses.create(**{"model": NAME, "temperature": 0, "max_output_tokens": 24} | fields)


def cached(answer):
    return answer.usage.input_tokens_details.cached_tokens


def explained(wire_to, base_url, answer):
    status, _, told = wire_to(base_url).get(f"/debug/requests/{answer.id}")
    assert status == 200
    return told


def test_the_second_turn_of_a_stored_conversation_finds_the_first_one_s_kv(client, base_url, wire_to):
    first = ask(
        client,
        input=[
            {"role": "system", "content": TERSE},
            {"role": "user", "content": "What is the capital of France?"},
        ],
    )
    assert "Paris" in first.output_text
    second = ask(client, previous_response_id=first.id, input="And of Italy?")
    # All of the first turn, prompt and answer, but for its last block that is not full.
    known = first.usage.input_tokens + first.usage.output_tokens
    assert known // 16 * 16 - 16 <= cached(second) <= known
    assert second.usage.workmem["tokens_by_source"]["vram"] == cached(second)
    paths = [
        span["path"] for span in explained(wire_to, base_url, second)["spans"] if span["path"] != "template"
    ]
    assert paths == [
        f"{first.id}/input[0].content[0].text",
        f"{first.id}/input[1].content[0].text",
        f"{first.id}/output[0].content[0].text",
        "input",
    ]


def test_each_part_of_a_content_is_told_apart(client, base_url, wire_to):
    parts = [
        {"type": "input_text", "text": text} for text in ("The sky is blue today.", "What colour is it?")
    ]
    answer = ask(client, instructions=TERSE, input=[{"role": "user", "content": parts}])
    paths = [span["path"] for span in explained(wire_to, base_url, answer)["spans"]]
    assert [path for path in paths if path != "template"] == [
        "instructions",
        "input[0].content[0].text",
        "input[0].content[1].text",
    ]
    counted = client.responses.input_tokens.count(
        model=NAME, instructions=TERSE, input=[{"role": "user", "content": parts}]
    )
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_conversation_is_the_same_tokens_as_in_a_chat(client):
    messages = [
        {"role": "system", "content": TERSE},
        {"role": "user", "content": "Name the largest planet, please."},
    ]
    chat = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=24)
    answer = ask(client, instructions=TERSE, input=messages[1:])
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert cached(answer) == (chat.usage.prompt_tokens - 1) // 16 * 16


def test_a_stream_is_the_same_text_and_usage(client):
    fields = {"instructions": TERSE, "input": "What is the capital of Spain?"}
    whole = ask(client, **fields)
    events = list(ask(client, **fields, stream=True))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[-1].response.status == whole.status


def test_a_tool_loop(client, base_url, wire_to):
    fields = {"tools": [WEATHER], "instructions": "Use the tools."}
    asked = ask(client, **fields, input="Weather in Paris?", tool_choice="required", max_output_tokens=60)
    call = asked.output[0]
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert list(json.loads(call.arguments)) == ["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    told = ask(client, **fields, previous_response_id=asked.id, input=[result])
    assert told.output_text
    assert cached(told) >= asked.usage.input_tokens // 16 * 16 - 16
    paths = {span["path"] for span in explained(wire_to, base_url, told)["spans"]}
    assert paths == {
        "instructions",
        "tools",
        "tools[0]",
        f"{asked.id}/input[0].content[0].text",
        f"{asked.id}/output[0].arguments",
        "input[0].output",
        "template",
    }


def test_a_tool_that_is_allowed_is_called_with_the_prompt_of_all(client):
    tools = [WEATHER, {**WEATHER, "name": "get_time", "description": "Time in a city."}]
    fields = {"tools": tools, "input": "What time is it in Rome?", "max_output_tokens": 60}
    free = ask(client, **fields)
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    narrowed = ask(client, **fields, tool_choice=choice)
    assert narrowed.output[0].name == "get_time"
    assert narrowed.usage.input_tokens == free.usage.input_tokens
    assert cached(narrowed) == (free.usage.input_tokens - 1) // 16 * 16


def test_an_answer_keeps_to_a_schema(client):
    class City(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=20)
        is_capital: bool

    answer = client.responses.parse(
        model=NAME, input="Tell me of Paris.", text_format=City, temperature=0, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, City)
