"""Anthropic's SDK against the real engine and the real model: a tool loop, its KV, and its explanation."""

import json
import urllib.request
from itertools import pairwise

import anthropic
import pytest

from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.server import running

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "smollm2"
MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEM = [
    {"type": "text", "text": "You are an airline agent. You look things up before you answer."},
    {
        "type": "text",
        "text": "Policy: flights are changed up to one hour before they leave, never after.",
        **MARK,
    },
]
TOOLS = [
    {
        "name": "get_weather",
        "description": "Weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        **MARK,
    }
]
QUESTION = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "I am Mia."}, {"type": "text", "text": "Rain in Paris?"}],
    }
]


@pytest.fixture(scope="module")
def base_url(smollm2, tmp_path_factory):
    config = EmbeddedConfig(served_name=NAME, vram_bytes="256MiB")
    engine = EmbeddedEngine.open(config, None, folder=smollm2, cache_dir=tmp_path_factory.mktemp("cache"))
    server = ServerConfig(port=0, shutdown_s=2)
    with running(build_app(engine, server), server) as url:
        yield url


@pytest.fixture(scope="module")
def claude(base_url):
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(claude, messages, **fields):
    ours = {"temperature": 0, **fields.pop("extra_body", {})}
    given = {"model": NAME, "max_tokens": 24, "system": SYSTEM, "tools": TOOLS} | fields
    return claude.messages.create(messages=messages, extra_body=ours, **given)


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens


def explanation(base_url, message):
    with urllib.request.urlopen(f"{base_url}/debug/requests/{message.id}") as answer:
        return json.loads(answer.read())


def test_a_tool_loop_computes_only_what_is_new(claude, base_url):
    history, cached = list(QUESTION), []
    for turn, result in enumerate(
        ["rain", [{"type": "text", "text": "rain,"}, {"type": "text", "text": "9 degrees"}]]
    ):
        answer = ask(claude, history, tool_choice={"type": "tool", "name": "get_weather"})
        assert (answer.stop_reason, answer.content[0].type) == ("tool_use", "tool_use")
        assert set(answer.content[0].input) == {"city"}
        cached.append((answer.usage.cache_read_input_tokens, prompt_tokens(answer.usage)))
        told = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": result}
        history += [
            answer.to_param(),
            {"role": "user", "content": [told, {"type": "text", "text": f"And {turn}?"}]},
        ]
    last = ask(claude, history)
    cached.append((last.usage.cache_read_input_tokens, prompt_tokens(last.usage)))
    for (_, before), (hit, total) in pairwise(cached):
        # All whole blocks of the prompt before, at least.
        assert before // 16 * 16 <= hit < total
    counted = claude.messages.count_tokens(model=NAME, messages=history, system=SYSTEM, tools=TOOLS)
    assert counted.input_tokens == prompt_tokens(last.usage)
    paths = {span["path"] for span in explanation(base_url, last)["spans"]}
    assert {
        "system[0].text",
        "system[1].text",
        "tools[0]",
        "messages[0].content[0].text",
        "messages[0].content[1].text",
        "messages[1].content[0].input",
        "messages[2].content[0].content",
        "messages[2].content[1].text",
        "messages[4].content[0].content[1].text",
    } <= paths


def test_a_moved_mark_costs_nothing(claude):
    history = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Sure?"}]
    first = ask(claude, history)
    marked = [*QUESTION, {"role": "assistant", "content": "No."}]
    marked.append({"role": "user", "content": [{"type": "text", "text": "Sure?", **MARK}]})
    again = ask(claude, marked)
    assert again.content == first.content
    assert again.usage.cache_read_input_tokens == (prompt_tokens(again.usage) - 1) // 16 * 16


def test_what_changed_is_named_by_the_clients_own_path(claude, base_url):
    def turn(word):
        blocks = [
            {"type": "text", "text": "Of the sea I know this."},
            {"type": "text", "text": f"It is {word} today."},
        ]
        return [{"role": "user", "content": blocks}]

    ask(claude, turn("calm"), max_tokens=1)
    changed = explanation(base_url, ask(claude, turn("wild"), max_tokens=1))
    assert changed["difference"]["path"] == "messages[0].content[1].text"


def test_a_stream_is_the_same_message(claude):
    whole = ask(claude, QUESTION)
    with claude.messages.stream(
        model=NAME,
        max_tokens=24,
        system=SYSTEM,
        tools=TOOLS,
        messages=QUESTION,
        extra_body={"temperature": 0},
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert message.content[0].text == whole.content[0].text
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(message.usage) == prompt_tokens(whole.usage)


def test_the_stop_sequence_is_named_and_not_shown(claude):
    whole = ask(claude, QUESTION)
    word = whole.content[0].text.split()[2]
    stopped = ask(claude, QUESTION, stop_sequences=["never said", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text


def test_an_answer_of_any_length_is_allowed(claude):
    short = ask(claude, QUESTION, max_tokens=128_000, stop_sequences=[" ", "\n"], stream=True)
    assert [event.type for event in short][-1] == "message_stop"
