"""LangChain and curl, unmodified; and anything at all that fits into JSON."""

import json
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def chat_model(base_url, model):
    return ChatOpenAI(
        model=model, base_url=f"{base_url}/v1", api_key="none", max_retries=0, stream_usage=True
    )


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"rain in {city}"


def test_langchain_invoke_and_stream(chat_model):
    answer = chat_model.invoke("Hi")
    assert answer.content == "Hello there, friend."
    assert answer.usage_metadata["output_tokens"] == 20
    chunks = list(chat_model.stream("Hi"))
    assert "".join(chunk.content for chunk in chunks) == "Hello there, friend."
    assert sum(chunk.usage_metadata["input_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def test_langchain_tools(chat_model, engine):
    engine.answer = CALL
    bound = chat_model.bind_tools([get_weather])
    answer = bound.invoke("Weather in Paris?")
    assert answer.tool_calls[0]["name"] == "get_weather"
    assert answer.tool_calls[0]["args"] == {"city": "Paris"}
    streamed = None
    for chunk in bound.stream("Weather in Paris?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == {"city": "Paris"}
    engine.answer = "It rains."
    result = ToolMessage(get_weather("Paris"), tool_call_id=answer.tool_calls[0]["id"])
    final = bound.invoke([HumanMessage("Weather in Paris?"), answer, result])
    assert final.content == "It rains."
    assert "rain in Paris" in engine.rendered[-1][-1]["content"]


def test_langchain_structured_output(chat_model, engine):
    class Pet(BaseModel):
        name: str
        age: int

    engine.answer = '{"name": "Rex", "age": 3}'
    pet = chat_model.with_structured_output(Pet, method="json_schema").invoke("A pet?")
    assert pet == Pet(name="Rex", age=3)
    assert set(json.loads(engine.requests[0].sampling.json_schema)["properties"]) == {"name", "age"}


@pytest.fixture
def curl(base_url):
    program = shutil.which("curl")
    assert program, "curl is needed"

    def run(path, *arguments):
        done = subprocess.run(
            [program, "-sS", "--max-time", "20", f"{base_url}{path}", *arguments],
            capture_output=True,
            check=True,
        )
        return done.stdout.decode()

    return run


def test_curl(curl, model):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}]})
    answer = curl("/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    assert json.loads(answer)["choices"][0]["message"]["content"] == "Hello there, friend."
    # curl's own content type, a form, is no reason to refuse valid JSON.
    assert json.loads(curl("/v1/chat/completions", "-d", body))["object"] == "chat.completion"
    assert json.loads(curl("/v1/models"))["data"][0]["id"] == model


def test_curl_stream_and_headers(curl, model):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True})
    answer = curl("/v1/chat/completions", "-N", "-i", "-d", body)
    head, _, events = answer.partition("\r\n\r\n")
    assert "text/event-stream" in head
    assert "x-request-id: " in head
    assert events.startswith("data: {")
    assert events.endswith("data: [DONE]\n\n")


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6) | st.sampled_from(["user", "assistant", "tool", "text", "function", "fake-model"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text", "name"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
    optional={"content": st.text(max_size=9) | VALUE, "tool_calls": VALUE, "name": VALUE, "odd": VALUE},
)
FIELDS = [
    "temperature",
    "stop",
    "n",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "top_logprobs",
    "seed",
]
FIELDS += [
    "max_tokens",
    "metadata",
    "user",
    "stream_options",
    "logit_bias",
    "chat_template_kwargs",
    "priority",
    "x",
]
BODY = st.fixed_dictionaries(
    {"model": st.just("fake-model"), "messages": st.lists(MESSAGE, max_size=3) | VALUE},
    optional=dict.fromkeys(FIELDS, VALUE),
)
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(body=BODY | VALUE, path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_no_json_is_an_internal_error(wire, body, path):
    status, _, answer = wire.post(path, json.dumps(body).encode())
    assert status in (200, 400), answer


@QUICK
@given(body=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_no_bytes_are_an_internal_error(wire, body):
    assert wire.post("/v1/chat/completions", body)[0] == 400


@QUICK
@given(prompt=VALUE, logprobs=VALUE, n=st.integers(0, 3))
def test_no_prompt_is_an_internal_error(wire, prompt, logprobs, n):
    body = {"model": "fake-model", "prompt": prompt, "logprobs": logprobs, "n": n, "max_tokens": 3}
    assert wire.post("/v1/completions", body)[0] in (200, 400)
