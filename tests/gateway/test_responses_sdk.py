"""The Responses API by the official SDK, unmodified, over loopback."""

import asyncio
import json
from pathlib import Path

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, TypeAdapter

from workmem.core.errors import EngineError
from workmem.gateway.app import build_app
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH = {"type": "custom", "name": "patch", "description": "Applies a patch."}
CALL = 'Looking.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = "Hello there, friend."
EVENTS_OF_TEXT = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
EVENTS_OF_CALL = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@pytest.fixture
def responses(openai_client):
    return openai_client.responses


def kinds(events):
    """Types of the events, runs of one type told once."""
    types = [event.type for event in events]
    return [kind for number, kind in enumerate(types) if number == 0 or types[number - 1] != kind]


def test_a_response(responses, engine, model):
    answer = responses.create(model=model, input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.output_text, answer.error, answer.incomplete_details) == (
        "completed",
        SAID,
        None,
        None,
    )
    assert [item.type for item in answer.output] == ["message"]
    assert (answer.output[0].role, answer.output[0].status) == ("assistant", "completed")
    assert (answer.model, answer.instructions, answer.metadata) == (model, "Be kind.", {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.tool_choice, answer.truncation) == (
        1.0,
        1.0,
        "auto",
        "disabled",
    )
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (20, 0)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert engine.rendered[-1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_the_same_conversation_is_the_same_prompt_as_in_a_chat(openai_client, model):
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi, and good day"}]
    openai_client.chat.completions.create(model=model, messages=chat)
    answer = openai_client.responses.create(model=model, instructions="Be kind.", input=chat[1:])
    cached = answer.usage.input_tokens_details.cached_tokens
    assert cached == answer.usage.input_tokens // 16 * 16 > 0
    assert answer.usage.workmem["tokens_by_source"]["vram"] == cached


def test_what_is_sent_has_every_field_of_the_sdk_s_types(wire, model):
    """The SDK itself forgives what is missing; its types, taken at their word, do not."""
    _, _, body = wire.post(
        "/v1/responses", {"model": model, "input": "Hi", "tools": [WEATHER], "store": True}
    )
    usage = body["usage"]["input_tokens_details"]
    # How many tokens were newly kept is not known when the answer is sent: not told, rather than guessed.
    usage["cache_write_tokens"] = 0
    strict = TypeAdapter(Response, config=None)
    assert strict.validate_python(body).output_text == SAID
    _, _, listed = wire.get(f"/v1/responses/{body['id']}/input_items")
    TypeAdapter(list[ResponseItem]).validate_python(listed["data"])


def test_a_stream_tells_its_events_in_order(responses, model):
    events = list(responses.create(model=model, input="Hi", stream=True))
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        *EVENTS_OF_TEXT,
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == SAID
    done = next(event for event in events if event.type == "response.output_text.done")
    assert done.text == SAID
    last = events[-1].response
    assert (last.status, last.output_text, last.usage.output_tokens) == ("completed", SAID, 20)
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}


def test_a_stream_on_the_wire(wire, model):
    _, headers, body = wire.post("/v1/responses", {"model": model, "input": "Hi", "stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    for told in body.decode().strip().split("\n\n"):
        name, data = told.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] in ("response.created", "response.in_progress", "response.completed"):
            usage = event["response"]["usage"]
            if usage:
                usage["input_tokens_details"]["cache_write_tokens"] = 0
        TypeAdapter(ResponseStreamEvent).validate_python(event)


def test_the_sdk_s_own_reading_of_a_stream_agrees(responses, engine, model):
    engine.answer = CALL
    with responses.stream(model=model, input="Weather in Paris?", tools=[WEATHER]) as stream:
        kinds_told = kinds(stream)
        final = stream.get_final_response()
    assert kinds_told == [
        "response.created",
        "response.in_progress",
        *EVENTS_OF_TEXT,
        *EVENTS_OF_CALL,
        "response.completed",
    ]
    assert final.output_text == "Looking."
    assert json.loads(final.output[1].arguments) == {"city": "Paris"}


def test_responses_async(base_url, model):
    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client:
            whole = await client.responses.create(model=model, input="Hi")
            stream = await client.responses.create(model=model, input="Hi", stream=True)
            return whole.output_text, [event async for event in stream][-1].response.output_text

    assert asyncio.run(talk()) == (SAID, SAID)


def test_a_tool_loop_with_state_on_the_server(responses, engine, model):
    engine.answer = CALL
    asked = responses.create(
        model=model, input="Weather in Paris?", tools=[WEATHER], instructions="Be brief."
    )
    message, call = asked.output
    assert (message.type, message.content[0].text) == ("message", "Looking.")
    assert (call.type, call.name, call.status, call.namespace) == (
        "function_call",
        "get_weather",
        "completed",
        None,
    )
    assert json.loads(call.arguments) == {"city": "Paris"}
    engine.answer = "Sunny."
    told = responses.create(
        model=model,
        tools=[WEATHER],
        previous_response_id=asked.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
    )
    assert (told.output_text, told.previous_response_id) == ("Sunny.", asked.id)
    system, user, assistant, result = engine.rendered[-1]
    assert "Be brief." not in system["content"]
    assert (user["content"], result["content"]) == (
        "Weather in Paris?",
        "<tool_response>\nsun\n</tool_response>",
    )
    assert assistant["content"] == CALL
    listed = list(responses.input_items.list(told.id, order="asc"))
    assert [item.type for item in listed] == ["message", "message", "function_call", "function_call_output"]


def test_the_same_loop_without_state_is_the_same_prompt(responses, engine, model):
    engine.answer = CALL
    first = [{"role": "user", "content": "Weather in Paris?"}]
    asked = responses.create(model=model, input=first, tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": asked.output[1].call_id, "output": "sun"}
    responses.create(model=model, tools=[WEATHER], previous_response_id=asked.id, input=[result])
    with_state = engine.rendered[-1]
    sent_back = [item.model_dump(exclude_none=True) for item in asked.output]
    responses.create(model=model, tools=[WEATHER], store=False, input=[*first, *sent_back, result])
    assert engine.rendered[-1] == with_state


def test_custom_tools_and_namespaces_go_back_as_they_came(responses, engine, model):
    tools = [{"type": "namespace", "name": "files", "description": "Files.", "tools": [WEATHER, PATCH]}]
    engine.answer = '<tool_call>\n{"name": "files__patch", "arguments": {"input": "+ a"}}\n</tool_call>'
    answer = responses.create(model=model, input="Patch it", tools=tools)
    call = answer.output[0]
    assert (call.type, call.name, call.namespace, call.input) == ("custom_tool_call", "patch", "files", "+ a")
    events = list(responses.create(model=model, input="Patch it", tools=tools, stream=True))
    assert kinds(events)[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    engine.answer = "Done."
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    responses.create(model=model, tools=tools, previous_response_id=answer.id, input=[result])
    written = engine.rendered[-1][-2]["content"]
    assert written == '<tool_call>\n{"name": "files__patch", "arguments": {"input": "+ a"}}\n</tool_call>'


def test_a_call_is_forced_and_calls_are_narrowed_without_changing_the_prompt(responses, engine, model):
    other = {**WEATHER, "name": "get_time"}
    fields = {"model": model, "input": "Weather?", "tools": [WEATHER, other]}
    responses.create(**fields)
    plain = engine.requests[-1].token_ids
    forced = {"type": "function", "name": "get_time"}
    responses.create(**fields, tool_choice=forced)
    assert json.loads(engine.requests[-1].sampling.json_schema)["properties"]["name"] == {"const": "get_time"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [forced]}
    responses.create(**fields, tool_choice=allowed)
    assert json.loads(engine.requests[-1].sampling.json_schema)["properties"]["name"] == {"const": "get_time"}
    engine.answer = CALL
    answer = responses.create(**fields, tool_choice={**allowed, "mode": "auto"})
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text.endswith('{"name": "get_weather", "arguments": {"city": "Paris"}}')
    assert engine.requests[-1].sampling.json_schema is None
    assert engine.requests[-1].token_ids == plain


THINKING = "<think>\nHm, Paris.\n</think>\n\nIt is sunny."
EVENTS_OF_THINKING = [
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def test_what_a_model_thinks_is_an_item_of_its_own(responses, engine, model):
    engine.thinking, engine.answer = "possible", THINKING
    answer = responses.create(model=model, input="Weather?")
    thought, said = answer.output
    assert (thought.type, thought.content[0].text, thought.encrypted_content) == (
        "reasoning",
        "Hm, Paris.",
        None,
    )
    assert (said.type, answer.output_text) == ("message", "It is sunny.")
    tokens = answer.usage.output_tokens_details.reasoning_tokens
    assert len("<think>Hm, Paris.") < tokens <= len(THINKING.partition("It")[0])
    events = list(responses.create(model=model, input="Weather?", stream=True))
    assert kinds(events)[2:-1] == EVENTS_OF_THINKING + EVENTS_OF_TEXT
    cut = responses.create(model=model, input="Weather?", max_output_tokens=14)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    assert cut.usage.output_tokens_details.reasoning_tokens == 14


def test_thoughts_come_back_from_a_client_that_keeps_them_encrypted(responses, engine, model):
    engine.thinking, engine.answer = "possible", THINKING
    include = ["reasoning.encrypted_content"]
    first = responses.create(model=model, input="Weather?", include=include, store=False)
    kept = [item.model_dump(exclude_none=True) for item in first.output]
    del kept[0]["content"]
    given = [{"role": "user", "content": "Weather?"}, *kept, {"role": "user", "content": "Thanks"}]
    responses.create(model=model, input=given, store=False)
    assert engine.rendered[-1][1]["reasoning_content"] == "Hm, Paris."


def test_tokens_of_a_request_are_counted(responses, engine, model):
    made = responses.create(model=model, instructions="Be kind.", input="Hi", tools=[WEATHER])
    counted = responses.input_tokens.count(model=model, instructions="Be kind.", input="Hi", tools=[WEATHER])
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    more = responses.input_tokens.count(input="And?", previous_response_id=made.id, instructions="Be kind.")
    going_on = responses.create(
        model=model, input="And?", previous_response_id=made.id, instructions="Be kind."
    )
    assert more.input_tokens == going_on.usage.input_tokens
    assert len(engine.requests) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        responses.input_tokens.count(input=[{"role": "user", "content": 3}])
    assert caught.value.param == "input[0].content"


def test_one_call_at_a_time(responses, engine, model):
    engine.answer = CALL + CALL
    answer = responses.create(model=model, input="Weather?", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["message", "function_call", "message"]
    assert answer.parallel_tool_calls is False


def test_an_answer_that_was_cut_is_incomplete(responses, model):
    answer = responses.create(model=model, input="Hi", max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("Hello", "incomplete")
    events = list(responses.create(model=model, input="Hi", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_an_empty_answer_is_a_message_that_says_nothing(responses, engine, model):
    engine.answer = ""
    assert responses.create(model=model, input="Hi").output_text == ""
    events = list(responses.create(model=model, input="Hi", stream=True))
    assert kinds(events)[2:-1] == [kind for kind in EVENTS_OF_TEXT if not kind.endswith("delta")]


def test_logprobs(responses, model):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = responses.create(model=model, input="Hi", **fields)
    told = answer.output[0].content[0].logprobs
    assert "".join(item.token for item in told) == SAID
    assert [top.token for top in told[0].top_logprobs] == ["a", "b"]
    streamed = [
        item.token
        for event in responses.create(model=model, input="Hi", stream=True, **fields)
        if event.type == "response.output_text.delta"
        for item in event.logprobs
    ]
    assert "".join(streamed) == SAID
    assert responses.create(model=model, input="Hi").output[0].content[0].logprobs == []


def test_structured_output(responses, engine, model):
    class City(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str

    engine.answer = '{"name": "Paris"}'
    answer = responses.parse(model=model, input="A city", text_format=City)
    assert answer.output_parsed == City(name="Paris")
    assert json.loads(engine.requests[-1].sampling.json_schema)["required"] == ["name"]
    assert answer.text.format.name == "City"


def test_what_the_server_does_not_run_is_left_out_and_told(responses, engine, model):
    answer = responses.create(model=model, input="Hi", tools=[{"type": "web_search"}, WEATHER])
    assert [tool.type for tool in answer.tools] == ["function"]
    assert answer.workmem == {"left_out": [{"path": "tools[0]", "type": "web_search"}]}
    assert not hasattr(responses.create(model=model, input="Hi"), "workmem")


def test_a_stored_response_is_found_deleted_and_gone(responses, model):
    made = responses.create(model=model, input="Hi")
    assert responses.retrieve(made.id).to_dict() == made.to_dict()
    streamed = list(responses.create(model=model, input="Hi", stream=True))[-1].response
    assert responses.retrieve(streamed.id).to_dict() == streamed.to_dict()
    responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        responses.delete(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(model=model, input="Hi", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_stored_is_not(responses, model):
    made = responses.create(model=model, input="Hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(made.id)


def test_a_conversation_goes_on_where_an_earlier_response_was_deleted(responses, engine, model):
    first = responses.create(model=model, input="One")
    second = responses.create(model=model, input="Two", previous_response_id=first.id)
    responses.delete(first.id)
    responses.create(model=model, input="Three", previous_response_id=second.id)
    assert [message["content"] for message in engine.rendered[-1]] == ["One", SAID, "Two", SAID, "Three"]


def test_items_are_referred_to(responses, engine, model):
    first = responses.create(model=model, input="One")
    reference = {"type": "item_reference", "id": first.output[0].id}
    responses.create(
        model=model, input=[{"role": "user", "content": "Say"}, reference, {"role": "user", "content": "?"}]
    )
    assert [message["content"] for message in engine.rendered[-1]] == ["Say", SAID, "?"]
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(model=model, input=[{"type": "item_reference", "id": "msg_none"}])
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[0].id")


def test_input_items_come_in_pages(responses, wire, model):
    first = responses.create(model=model, input=[{"role": "user", "content": str(n)} for n in range(5)])
    newest = responses.input_items.list(first.id, limit=2)
    assert [item.content[0].text for item in newest.data] == ["4", "3"]
    assert newest.has_more
    assert [item.content[0].text for item in newest] == list("43210")
    after = newest.data[0].id
    oldest = responses.input_items.list(first.id, order="asc", after=after)
    assert (oldest.data, oldest.has_more) == ([], False)
    for query, param in (
        ("order=up", "order"),
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("after=x", "after"),
    ):
        status, _, body = wire.get(f"/v1/responses/{first.id}/input_items?{query}")
        assert (status, body["error"]["param"]) == (400, param)


def test_tenants_do_not_see_each_other_s(engine, wire_to, tmp_path, config):
    keys = tmp_path / "keys"
    keys.write_text("ka:a\nkb:b\n")
    config = msgspec.structs.replace(config, api_key_file=str(keys))
    with running(build_app(engine, config), config) as url:
        wire = wire_to(url)
        a, b = {"authorization": "Bearer ka"}, {"authorization": "Bearer kb"}
        body = {"model": "fake-model", "input": "Secret"}
        _, _, made = wire.post("/v1/responses", body, a)
        path = f"/v1/responses/{made['id']}"
        assert wire.get(path, a)[0] == 200
        for method, of in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
            assert wire.request(method, of, None, b)[0] == 404
        status, _, told = wire.post("/v1/responses", {**body, "previous_response_id": made["id"]}, b)
        assert (status, told["error"]["code"]) == (400, "previous_response_not_found")
        reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
        assert (
            wire.post("/v1/responses", {**body, "input": reference}, b)[2]["error"]["code"]
            == "item_not_found"
        )
        assert wire.get(path, a)[0] == 200


def test_spans_are_told_in_the_client_s_words(responses, wire, model):
    first = responses.create(model=model, instructions="Be kind.", input=[{"role": "user", "content": "One"}])
    second = responses.create(
        model=model,
        previous_response_id=first.id,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Two"}]}],
    )
    _, _, told = wire.get(f"/debug/requests/{second.id}")
    assert [span["path"] for span in told["spans"]] == [
        f"{first.id}/input[0].content[0].text",
        f"{first.id}/output[0].content[0].text",
        "input[0].content[0].text",
        "template",
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": "Hi", "temperature": 3}, "temperature"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "Hi", "model": "other"}, "model"),
        ({"input": "Hi", "background": True}, "background"),
    ],
)
def test_refusals_name_the_field_of_this_api(responses, model, fields, param):
    with pytest.raises(openai.APIStatusError) as caught:
        responses.create(**{"model": model, **fields})
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == param


def test_a_failure_before_the_first_token_has_its_status(responses, engine, model):
    engine.first_error = EngineError("broken")
    with pytest.raises(openai.InternalServerError, match="broken"):
        responses.create(model=model, input="Hi", stream=True)


def test_a_failure_in_a_stream_is_its_last_event(responses, engine, model):
    engine.later_error = EngineError("broken")
    events = list(responses.create(model=model, input="Hi", stream=True))
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "broken")
    assert events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(events[-1].response.id)
    with pytest.raises(openai.InternalServerError):
        responses.create(model=model, input="Hi")


def test_silence_is_bridged(engine, wire, model):
    engine.delay_s = 0.5
    _, _, body = wire.post(
        "/v1/responses", {"model": model, "input": "Hi", "stream": True, "max_output_tokens": 6}
    )
    assert b": keepalive\n\n" in body


def test_a_client_that_leaves_stops_the_engine_and_nothing_is_stored(responses, engine, app, model, until):
    engine.delay_s = 0.05
    stream = responses.create(model=model, input="Hi", stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: engine.cancelled)
    assert app.state.responses.gauges()["responses_stored"] == 0


def test_what_codex_sends_is_answered():
    """Its captured shape: developer messages in the input, a namespace, a hosted tool, calls with their results."""
    body = json.loads((Path(__file__).parents[1] / "data" / "codex_request.json").read_text())
    engine = FakeEngine(name=body["model"])
    engine.answer = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
    with running(build_app(engine)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        of_codex = {"client_metadata": body.pop("client_metadata")}
        events = list(client.responses.create(**body, extra_body=of_codex))
    assert events[-1].type == "response.completed"
    call = events[-1].response.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "exec_command",
        {"cmd": "ls"},
    )
    assert [message["role"] for message in engine.rendered[-1]] == [
        "system",
        "developer",
        "developer",
        "user",
        "user",
        "assistant",
        "user",
    ]
