"""The official SDK, unmodified, over loopback."""

import asyncio
import json
import uuid

import openai
import pytest

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'Looking.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_models(openai_client, model):
    assert [item.id for item in openai_client.models.list()] == [model]
    assert openai_client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.models.retrieve("other")


def test_chat(openai_client, model):
    answer = openai_client.chat.completions.create(model=model, messages=MESSAGES)
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "Hello there, friend."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = openai_client.chat.completions.create(model=model, messages=MESSAGES)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached == again.usage.prompt_tokens // 16 * 16 > 0
    assert again.usage.workmem["tokens_by_source"] == {
        "vram": cached,
        "dram": 0,
        "ssd": 0,
        "computed": again.usage.prompt_tokens - cached,
    }


def test_chat_stream(openai_client, model):
    chunks = list(
        openai_client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello there, friend."
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_async(base_url, model):
    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(model=model, messages=MESSAGES)
            stream = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True)
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return (await whole).choices[0].message.content, "".join(text)

    assert asyncio.run(talk()) == ("Hello there, friend.", "Hello there, friend.")


def test_sampling_reaches_the_engine(openai_client, engine, model):
    openai_client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        stop=["there"],
        max_completion_tokens=50,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "priority": 3},
    )
    request = engine.requests[0]
    assert request.priority == 3
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.9, 7, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (1, -1, 0.1)
    assert (sampling.repetition_penalty, sampling.ignore_eos, sampling.max_tokens) == (1.2, True, 50)
    assert sampling.stop == ("there",)


def test_n_choices_have_their_own_ids_and_seeds(openai_client, engine, model):
    engine.answer = lambda request: f"answer {request.id[-1]}"
    answer = openai_client.chat.completions.create(model=model, messages=MESSAGES, n=3, seed=40)
    assert [choice.message.content for choice in answer.choices] == ["answer 0", "answer 1", "answer 2"]
    assert [request.sampling.seed for request in engine.requests] == [40, 41, 42]
    assert [request.id for request in engine.requests] == [f"{answer.id}-{i}" for i in range(3)]
    assert answer.usage.prompt_tokens == len(engine.requests[0].token_ids)
    assert answer.usage.completion_tokens == 24


def test_n_choices_streamed(openai_client, engine, model):
    engine.answer = lambda request: f"answer {request.id[-1]}"
    texts = ["", ""]
    for chunk in openai_client.chat.completions.create(model=model, messages=MESSAGES, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["answer 0", "answer 1"]


def test_chat_logprobs(openai_client, model):
    fields = {"model": model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = openai_client.chat.completions.create(**fields).choices[0].logprobs.content
    assert "".join(item.token for item in whole) == "Hello there, friend."
    assert whole[0].bytes == [72]
    assert [top.token for top in whole[0].top_logprobs] == ["a", "b"]
    streamed = []
    for chunk in openai_client.chat.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole


def test_stop_and_max_tokens(openai_client, model):
    stopped = openai_client.chat.completions.create(model=model, messages=MESSAGES, stop=" there")
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("Hello", "stop")
    cut = openai_client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Hell", "length")


def test_tool_call(openai_client, engine, model):
    engine.answer = CALL
    answer = openai_client.chat.completions.create(model=model, messages=MESSAGES, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    call = choice.message.tool_calls[0]
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert "get_weather" in engine.rendered[0][0]["content"]


def test_tool_call_streamed(openai_client, engine, model):
    engine.answer = CALL + CALL.removeprefix("Looking.").replace("Paris", "Rome")
    text, calls, reasons = "", {}, []
    for chunk in openai_client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[WEATHER], stream=True
    ):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or []:
            calls[call.index] = (call.id, call.function.name, call.function.arguments)
    assert text == "Looking."
    assert reasons[-1] == "tool_calls"
    assert [json.loads(calls[i][2])["city"] for i in (0, 1)] == ["Paris", "Rome"]
    assert calls[0][0] != calls[1][0]


def test_tool_turn_goes_back_to_the_model(openai_client, engine, model):
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    openai_client.chat.completions.create(model=model, messages=history, tools=[WEATHER])
    assistant, result = engine.rendered[0][2:]
    assert assistant["content"] == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    )
    assert result == {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"}


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_forced_tool_call_is_constrained(openai_client, engine, model, choice):
    engine.answer = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    answer = openai_client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[WEATHER], tool_choice=choice
    )
    schema = json.loads(engine.requests[0].sampling.json_schema)
    assert schema["properties"]["name"] == {"const": "get_weather"}
    parameters = WEATHER["function"]["parameters"]
    assert schema["properties"]["arguments"] == parameters | {"additionalProperties": False}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_tool_choice_none_leaves_text_alone(openai_client, engine, model):
    engine.answer = CALL
    answer = openai_client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None


def test_parallel_tool_calls_off_gives_one(openai_client, engine, model):
    engine.answer = CALL + CALL
    answer = openai_client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def test_json_schema(openai_client, engine, model):
    engine.answer = '{"age": 3}'
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    answer = openai_client.chat.completions.create(model=model, messages=MESSAGES, response_format=form)
    assert json.loads(engine.requests[0].sampling.json_schema) == schema
    assert json.loads(answer.choices[0].message.content) == {"age": 3}
    openai_client.chat.completions.create(
        model=model, messages=MESSAGES, response_format={"type": "json_object"}
    )
    assert json.loads(engine.requests[1].sampling.json_schema) == {"type": "object"}


def test_content_parts_are_joined(openai_client, engine, model):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    openai_client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}])
    assert engine.rendered[0][0]["content"] == "one\ntwo"


def test_whether_the_developer_role_is_known_is_left_to_the_engine(openai_client, engine, model):
    openai_client.chat.completions.create(model=model, messages=[{"role": "developer", "content": "x"}])
    assert engine.rendered[0][0]["role"] == "developer"


def test_completions(openai_client, engine, model):
    answer = openai_client.completions.create(model=model, prompt="Once", max_tokens=5)
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")
    assert engine.requests[0].token_ids == list(b"Once")


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_completions_prompt_kinds(openai_client, engine, model, prompt, token_ids):
    answer = openai_client.completions.create(model=model, prompt=prompt, max_tokens=5, n=2)
    assert [request.token_ids for request in engine.requests[::2]] == token_ids
    assert [choice.index for choice in answer.choices] == list(range(2 * len(token_ids)))
    assert answer.usage.prompt_tokens == sum(map(len, token_ids))


def test_completions_stream_and_logprobs(openai_client, model):
    fields = {"model": model, "prompt": "Once", "max_tokens": 5, "logprobs": 1}
    whole = openai_client.completions.create(**fields).choices[0].logprobs
    assert (whole.tokens, whole.text_offset) == (list("Hello"), [0, 1, 2, 3, 4])
    assert whole.top_logprobs[0] == {"a": -0.5, "H": -0.5}
    chunks = list(
        openai_client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello"
    offsets = [
        o for chunk in chunks[:-1] if chunk.choices[0].logprobs for o in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == whole.text_offset
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5


def test_request_id_is_the_clients_or_ours(openai_client, model):
    mine = openai_client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, extra_headers={"X-Request-Id": "run-1.turn-2"}
    )
    assert mine.headers["x-request-id"] == "run-1.turn-2"
    odd = openai_client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, extra_headers={"X-Request-Id": "a b<script>"}
    )
    assert uuid.UUID(odd.headers["x-request-id"]).version == 4


def test_reuse_can_be_switched_off(openai_client, engine, model):
    openai_client.chat.completions.create(
        model=model, messages=MESSAGES, extra_body={"workmem": {"reuse": False}}
    )
    assert engine.requests[0].reuse is False
