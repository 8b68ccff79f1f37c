"""The whole server over SmolLM2-135M-Instruct, driven by the clients people use, unmodified."""

import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from workmem.app import open_app
from workmem.config import cache_dir, load
from workmem.testing.server import running

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
POLICY = "You are an airline agent. " + " ".join(
    f"Rule {number}: a booking of class {number} may be changed {number} times." for number in range(40)
)
QUESTION = "What is the capital of France?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Quiet:
    def begin(self, step: str) -> None:
        """Nobody watches."""

    def end(self, result: str) -> None:
        """Nobody watches."""

    def note(self, text: str) -> None:
        """Nobody watches."""


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ssd = tmp_path_factory.mktemp("ssd")
    config = load(sets=(f"engine.model={smollm2}", f"store.ssd.path={ssd}", "store.dram.bytes=512MiB")).config
    with open_app(config, cache_dir=cache_dir(), progress=Quiet()) as app, running(app) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, question: str = QUESTION, **options):
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": question}],
        temperature=0,
        **{"max_tokens": 24, **options},
    )


def test_the_second_agent_reads_what_the_first_computed(client: openai.OpenAI) -> None:
    first = chat(client)
    second = chat(client)
    assert second.choices[0].message.content == first.choices[0].message.content
    usage = second.usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16
    assert usage.workmem["tokens_by_source"]["vram"] == usage.prompt_tokens_details.cached_tokens


def test_explain_names_the_message_that_changed(client: openai.OpenAI, url: str) -> None:
    chat(client)
    changed = chat(client, "Which city is the capital of Germany, please?")
    with urllib.request.urlopen(f"{url}/debug/requests/{changed.id}", timeout=10) as answer:
        found = json.load(answer)
    assert found["cached_tokens"] == changed.usage.prompt_tokens_details.cached_tokens > 700
    assert found["difference"]["path"] == "messages[1].content"
    assert sum(part["tokens"] for span in found["spans"] for part in span["parts"]) == found["prompt_tokens"]


def test_streaming_says_the_same_as_one_answer(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_forced_tool_call_is_parsed_and_its_result_understood(client: openai.OpenAI) -> None:
    """SmolLM2's template knows no tools: the documented default rendering and constrained decoding carry it."""
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=80
    )
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    messages += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"},
    ]
    final = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], temperature=0, max_tokens=30
    )
    assert final.choices[0].message.content
    assert final.usage.prompt_tokens_details.cached_tokens > 0


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "maximum": 99999999},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        "Name a city and its population as JSON.",
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "population"}


def test_seed_n_logprobs_and_stop(client: openai.OpenAI) -> None:
    options = {"n": 2, "seed": 11, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    messages = [{"role": "user", "content": "Tell me a story."}]
    client.chat.completions.create(model=MODEL, messages=messages, temperature=1.0, **options)
    # A seed promises the same draws; the same draws give the same tokens where the logits are the same, so
    # the two that are compared both start from the cached prompt.
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=1.0, **options)
    again = client.chat.completions.create(model=MODEL, messages=messages, temperature=1.0, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] != texts[1]
    assert all(len(entry.top_logprobs) == 3 for entry in first.choices[0].logprobs.content)
    stopped = chat(client, stop=["France"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "France" not in stopped.choices[0].message.content


def test_langchain(url: str) -> None:
    llm = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="unused", temperature=0, max_tokens=24)
    messages = [SystemMessage(POLICY), HumanMessage(QUESTION)]
    answer = llm.invoke(messages)
    assert answer.content
    assert "".join(chunk.content for chunk in llm.stream(messages)) == answer.content
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_curl(url: str) -> None:
    body = json.dumps(
        {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    )
    done = subprocess.run(
        ["curl", "-sS", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body],
        capture_output=True,
        check=True,
        text=True,
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["text"]


def test_a_client_that_disconnects_frees_the_engine(client: openai.OpenAI, url: str) -> None:
    stream = chat(
        client, "Count to one thousand.", stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    freed = threading.Event()
    for _ in range(100):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            readings = answer.read().decode()
        if "\nworkmem_num_requests_running 0.0" in readings:
            freed.set()
            break
        freed.wait(0.1)
    assert freed.is_set()


def test_too_long_and_unknown_and_malformed_are_told_clearly(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="the model's context is 8192"):
        chat(client, "word " * 9000)
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    broken = urllib.request.Request(
        f"{url}/v1/chat/completions", b'{"model": ', {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(broken, timeout=10)
    assert refusal.value.code == 400
    assert json.load(refusal.value)["error"]["type"] == "invalid_request_error"
