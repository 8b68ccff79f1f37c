"""Anthropic's official SDK, unmodified, over loopback."""

import json
from pathlib import Path

import anthropic
import pytest

from workmem.core.errors import ClientError

MARK = {"cache_control": {"type": "ephemeral"}}
HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = 'Looking.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def claude(base_url):
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def create(claude, model):
    def call(messages=HELLO, **fields):
        return claude.messages.create(model=model, max_tokens=1000, messages=messages, **fields)

    return call


def test_a_message(create, engine, model):
    answer = create(system="Be kind.")
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", model)
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello there, friend.")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert engine.rendered == [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]]


def test_usage_splits_the_prompt_and_guesses_nothing(create, engine):
    long = [{"role": "user", "content": "Tell me of the sea, and of what lives in it."}]
    first, second = create(long), create(long)
    prompt = len(engine.requests[0].token_ids)
    cached = prompt // 16 * 16
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (prompt, 0)
    assert (second.usage.input_tokens, second.usage.cache_read_input_tokens) == (prompt - cached, cached)
    assert second.usage.output_tokens == 20
    assert second.usage.cache_creation_input_tokens is None
    assert second.usage.workmem["tokens_by_source"]["vram"] == cached


def test_a_stream_is_the_same_message(claude, create, model):
    with claude.messages.stream(model=model, max_tokens=100, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Hello there, friend."
    whole = create()
    assert message.to_dict()["content"] == whole.to_dict()["content"]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 20)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


def test_events_come_in_the_order_of_the_api(create):
    events = list(create(stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, end = events[0].message, events[-2]
    assert (start.content, start.stop_reason) == ([], None)
    assert start.usage.input_tokens > 0
    assert (end.delta.stop_reason, end.usage.input_tokens) == ("end_turn", start.usage.input_tokens)


def test_the_start_of_a_stream_already_says_what_was_cached(create, engine):
    long = [{"role": "user", "content": "Tell me of the sea, and of what lives in it."}]
    create(long)
    start = next(event for event in create(long, stream=True) if event.type == "message_start")
    cached = len(engine.requests[0].token_ids) // 16 * 16
    assert start.message.usage.cache_read_input_tokens == cached > 0


def test_a_call(create, engine):
    engine.answer = CALL
    answer = create(tools=[WEATHER])
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert text.text == "Looking."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert call.id.startswith("toolu_")
    assert "get_weather" in engine.rendered[0][0]["content"]


def test_calls_streamed(claude, engine, model):
    engine.answer = CALL + CALL.removeprefix("Looking.").replace("Paris", "Rome")
    with claude.messages.stream(model=model, max_tokens=900, messages=HELLO, tools=[WEATHER]) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [block.input["city"] for block in message.content[1:]] == ["Paris", "Rome"]
    assert message.stop_reason == "tool_use"


def test_a_turn_with_calls_goes_back_to_the_model(create, engine):
    engine.answer = CALL
    first = create(tools=[WEATHER])
    engine.answer = "It rains."
    results = [
        {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "rain"},
        {"type": "text", "text": "Well?"},
    ]
    history = [*HELLO, first.to_param(), {"role": "user", "content": results}]
    assert create(history, tools=[WEATHER]).content[0].text == "It rains."
    assert engine.rendered[1][2:] == [
        {"role": "assistant", "content": CALL},
        {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_is_constrained(create, engine, choice):
    engine.answer = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    answer = create(tools=[WEATHER], tool_choice=choice)
    schema = json.loads(engine.requests[0].sampling.json_schema)
    assert schema["properties"]["name"] == {"const": "get_weather"}
    assert [block.type for block in answer.content] == ["tool_use"]


def test_no_call_where_none_is_allowed(create, engine):
    engine.answer = CALL
    assert create(tools=[WEATHER], tool_choice={"type": "none"}).content[0].text == CALL


def test_one_call_where_parallel_ones_are_off(create, engine):
    engine.answer = CALL + CALL.removeprefix("Looking.")
    answer = create(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["text", "tool_use"]


def test_the_stop_sequence_that_ended_the_answer_is_named(create, engine):
    answer = create(stop_sequences=["!", " there"])
    assert answer.content[0].text == "Hello"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " there")
    end = next(e for e in create(stop_sequences=[" there"], stream=True) if e.type == "message_delta")
    assert (end.delta.stop_reason, end.delta.stop_sequence) == ("stop_sequence", " there")
    assert engine.requests[0].sampling.stop == ("!", " there")


def test_max_tokens_is_told_from_the_end_of_the_context(claude, model, engine):
    short = claude.messages.create(model=model, max_tokens=4, messages=HELLO)
    assert (short.content[0].text, short.stop_reason) == ("Hell", "max_tokens")
    engine.answer = "x" * 5000
    # Claude Code asks for more than most contexts have.
    long = claude.messages.create(model=model, max_tokens=64000, messages=HELLO, timeout=30)
    assert long.stop_reason == "model_context_window_exceeded"
    usage = long.usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert total == engine.info.max_context


def test_sampling_reaches_the_engine(create, engine):
    ours = {"seed": 7, "workmem": {"reuse": False}}
    create(extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, **ours})
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 7)
    assert (sampling.max_tokens, request.reuse) == (1000, False)


def test_an_answer_that_must_be_json(create, engine):
    engine.answer = '{"age": 3}'
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    answer = create(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert json.loads(engine.requests[0].sampling.json_schema) == schema
    assert json.loads(answer.content[0].text) == {"age": 3}


def test_tokens_are_counted_as_they_are_rendered(claude, create, engine, model):
    counted = claude.messages.count_tokens(model=model, messages=HELLO, system="Be kind.", tools=[WEATHER])
    create(system="Be kind.", tools=[WEATHER])
    assert counted.input_tokens == len(engine.requests[0].token_ids)


def test_errors_have_the_shape_of_the_api(claude, create, engine, model):
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as caught:
        claude.messages.create(model="other", max_tokens=9, messages=HELLO)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.request_id
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] is of type 'image'"):
        create([{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        create(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    engine.later_error = RuntimeError("secret")
    with pytest.raises(anthropic.APIStatusError) as broken:
        list(create(stream=True))
    assert broken.value.body["error"]["type"] == "api_error"
    assert "secret" not in str(broken.value)


def test_the_boundary_answers_in_the_shape_of_the_api(wire):
    for body, status, kind in [
        (b"{", 400, "invalid_request_error"),
        (b"x" * (70 * 1024), 413, "request_too_large"),
    ]:
        got, headers, answer = wire.post("/v1/messages", body)
        assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind)
        assert headers["request-id"] == headers["x-request-id"]
    assert wire.get("/v1/messages")[2]["type"] == "error"
    assert "error" in wire.post("/v1/chat/completions", b"{")[2]
    assert "type" not in wire.post("/v1/chat/completions", b"{")[2]


def test_a_quiet_stream_is_kept_alive_with_pings(base_url, engine, wire):
    engine.delay_s = 0.5
    engine.step = 10
    body = {"model": "fake-model", "max_tokens": 20, "messages": HELLO, "stream": True}
    _, headers, data = wire.post("/v1/messages", body)
    assert headers["content-type"].startswith("text/event-stream")
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in data
    assert data.index(b"event: message_start") == 0


THINKING = "<think>\nHe greets.\n</think>\n\nHello."


def test_thoughts_are_blocks_of_their_own(claude, create, engine, model):
    engine.thinking, engine.answer = "possible", THINKING
    whole = create()
    with claude.messages.stream(model=model, max_tokens=1000, messages=HELLO) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "He greets.", "Hello.")
        assert thought.signature == message.id
    create([*HELLO, whole.to_param(), {"role": "user", "content": "And?"}])
    assert engine.rendered[-1][1] == {
        "role": "assistant",
        "content": "Hello.",
        "reasoning_content": "He greets.",
    }


def test_a_prompt_may_have_begun_the_thoughts(create, engine):
    engine.thinking, engine.answer = "begun", THINKING.removeprefix("<think>")
    assert [block.type for block in create().content] == ["thinking", "text"]
    engine.thinking = "none"
    assert [block.type for block in create().content] == ["text"]


def test_what_must_be_json_has_no_thoughts(create, engine):
    engine.thinking, engine.answer = "begun", '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    answer = create(tools=[WEATHER], tool_choice={"type": "any"})
    assert [block.type for block in answer.content] == ["tool_use"]


def test_thoughts_of_a_chat(openai_client, engine, model):
    engine.thinking, engine.answer = "possible", THINKING
    asked = {"model": model, "messages": HELLO}
    message = openai_client.chat.completions.create(**asked).choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello.", "He greets.")
    told = {"content": "", "reasoning_content": ""}
    for chunk in openai_client.chat.completions.create(**asked, stream=True):
        for key in told:
            told[key] += getattr(chunk.choices[0].delta, key, None) or ""
    assert told == {"content": "Hello.", "reasoning_content": "He greets."}


def test_models_are_listed_for_both_sdks(claude, openai_client, model):
    assert [one.id for one in claude.models.list()] == [model]
    assert claude.models.retrieve(model).display_name == model
    assert [one.id for one in openai_client.models.list()] == [model]


def test_a_schema_that_is_none_is_told_by_the_clients_path(create, engine):
    engine.first_error = ClientError("no schema", param="response_format")
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.format: no schema"):
        create(output_config={"format": {"type": "json_schema", "schema": {"type": "what"}}})


def claude_code(*turns, mark=-1):
    """A request in the shape of Claude Code 2.1 (its texts are its own; these are made up)."""
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": f"<context>{part}</context>"} for part in "abc"],
        },
        {"role": "system", "content": "More instructions.", "output_config": {"effort": "medium"}},
        *turns,
    ]
    last = messages[mark]
    if isinstance(last["content"], str):
        messages[mark] = {**last, "content": [{"type": "text", "text": last["content"], **MARK}]}
    else:
        messages[mark] = {**last, "content": [*last["content"][:-1], {**last["content"][-1], **MARK}]}
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "5f0c"})
    return {
        "model": "fake-model",
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **MARK},
            {"type": "text", "text": "Rules.", **MARK},
        ],
        "tools": [
            {
                "name": "Glob",
                "description": "Finds files.",
                "input_schema": {"type": "object", "properties": {}},
            },
            {"name": "Later", "description": "", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
        "metadata": {"user_id": user},
        "max_tokens": 128000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def test_requests_of_claude_code_are_answered_and_append(wire, engine):
    use = {"type": "tool_use", "id": "toolu_1", "name": "Glob", "input": {"pattern": "*.py"}}
    result = {"tool_use_id": "toolu_1", "type": "tool_result", "content": "a.py"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    turns += [
        {"role": "assistant", "content": [{"type": "text", "text": "One."}]},
        {"role": "user", "content": "More."},
    ]
    engine.answer = "ok"
    prompts = []
    for count in (0, 2, 4):
        status, _, data = wire.post(
            "/v1/messages?beta=true", claude_code(*turns[:count]), {"anthropic-version": "2023-06-01"}
        )
        assert (status, data.count(b"event: message_stop")) == (200, 1)
        prompts.append(bytes(engine.requests[-1].token_ids).removesuffix(b"assistant: "))
    assert prompts[1].startswith(prompts[0])
    assert prompts[2].startswith(prompts[1])
    assert b"Later" not in prompts[0]
    assert {request.caller.session for request in engine.requests} == {"5f0c"}


def test_requests_of_the_sdk_are_answered_and_append(wire, engine):
    path = Path(__file__).parents[1] / "data" / "clients" / "anthropic_sdk_cache_control.jsonl"
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        body = json.loads(line)["body"] | {"model": "fake-model", "max_tokens": 100, "stream": False}
        assert wire.post("/v1/messages", body)[0] == 200
        prompts.append(bytes(engine.requests[-1].token_ids).removesuffix(b"assistant: "))
    assert len(prompts) == 3
    assert prompts[1].startswith(prompts[0])
    assert prompts[2].startswith(prompts[1])
