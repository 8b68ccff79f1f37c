"""The cause of a miss over HTTP: from the embedded engine, in upstream mode, in a header, in metrics."""

import json
from contextlib import ExitStack

import msgspec
import pytest
from tests.prompt.talks import DIALECTS, Talk, Turn, function_path, schema_key, system_path, tool

from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.responses import RESPONSES
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

CONFIG = ServerConfig(port=0, shutdown_s=1, explain_header=True)
ASK = {"x-workmem-explain": "1"}
SYSTEM = "You are a careful travel assistant. Follow the policy to the letter, and never book without a payment method."
TOOLS = [
    tool("get_user", "Look up a user.", {"id": {"type": "string"}, "full": {"type": "boolean"}}),
    tool("book", "Book a flight.", {"flight": {"type": "string"}, "seat": {"type": "string"}}),
]


def talk(system=SYSTEM):
    return Talk(
        system, json.loads(json.dumps(TOOLS)), [Turn("user", "I want to fly from Berlin to Rome next week.")]
    )


def send(wire, body, headers=None, path="/v1/chat/completions"):
    status, sent, answer = wire.post(path, {**body, "model": "fake-model"}, headers)
    assert status == 200, answer
    return answer["id"], sent


def told(wire, request_id):
    status, _, found = wire.get(f"/debug/requests/{request_id}")
    assert status == 200, found
    return found


@pytest.fixture
def config():
    return CONFIG


def test_a_request_without_an_earlier_one_is_new_and_lost_nothing(wire):
    found = told(wire, send(wire, talk().body(CHAT))[0])
    assert [one["name"] for one in found["causes"]] == ["new_conversation"]
    assert found["cost"]["tokens"] == 0
    assert found["causes_against"] is None


def test_a_clock_in_the_instructions_is_named_with_its_place_and_cost(wire):
    first, _ = send(wire, talk(f"Now: 2026-11-29T10:15:03Z\n{SYSTEM}").body(CHAT))
    second, _ = send(wire, talk(f"Now: 2026-11-29T10:16:04Z\n{SYSTEM}").body(CHAT))
    found = told(wire, second)
    (one,) = found["causes"]
    assert (one["name"], one["path"], one["path_before"]) == ("volatile_time",) + 2 * ("messages[0].content",)
    assert found["fix"] == one["fix"] != ""
    assert found["causes_against"] == found["compared_with"] == first
    # Tokens are bytes: all behind the minute was there before.
    assert found["cost"]["tokens"] == found["prompt_tokens"] - found["difference"]["token"]
    assert found["cost"]["milliseconds"] > 0


@pytest.mark.parametrize("dialect", DIALECTS, ids=[dialect.name for dialect in DIALECTS])
def test_every_api_has_its_own_paths(wire, dialect):
    send(wire, talk().body(dialect), path=dialect.path)
    after = talk(f"{SYSTEM} Be brief.")
    request_id, sent = send(wire, after.body(dialect), ASK, dialect.path)
    assert json.loads(sent["x-workmem-explain"])["path"] == system_path(dialect)
    after.tools[1]["schema"]["properties"]["class"] = {"type": "string"}
    request_id, _ = send(wire, after.body(dialect), path=dialect.path)
    (one,) = told(wire, request_id)["causes"]
    path = f"{function_path(dialect, 1)}.{schema_key(dialect)}.properties.class"
    assert (one["name"], one["path"]) == ("tool_changed", path)


@pytest.mark.parametrize("dialect", DIALECTS, ids=[dialect.name for dialect in DIALECTS])
def test_an_answer_that_comes_back_as_it_was_has_no_cause_in_any_api(wire, engine, dialect):
    engine.answer = '<tool_call>\n{"name": "book", "arguments": {"flight": "LH 1840", "seat": "by the window"}}\n</tool_call>'
    body = {**talk().body(dialect), "model": "fake-model"}
    status, _, answer = wire.post(dialect.path, body)
    assert status == 200, answer
    if dialect.name == "chat":
        made = answer["choices"][0]["message"]
        new = [made, {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "Booked."}]
    elif dialect.name == "responses":
        made = answer["output"]
        new = [*made, {"type": "function_call_output", "call_id": made[-1]["call_id"], "output": "Booked."}]
    else:
        made = answer["content"]
        result = {"type": "tool_result", "tool_use_id": made[-1]["id"], "content": "Booked."}
        new = [{"role": "assistant", "content": made}, {"role": "user", "content": [result]}]
    body[dialect.history_key] += new
    request_id, _ = send(wire, body, path=dialect.path)
    assert [one for one in told(wire, request_id)["causes"] if one["name"] != "retokenised"] == []


def test_a_response_that_brings_only_what_is_new_is_compared_as_what_it_means(wire):
    first, _ = send(wire, talk().body(RESPONSES), path="/v1/responses")
    body = talk(f"{SYSTEM} Be brief.").body(RESPONSES)
    body["input"] = [{"type": "message", "role": "user", "content": "On Thursday."}]
    quiet, _ = send(
        wire, {**body, "instructions": SYSTEM, "previous_response_id": first}, path="/v1/responses"
    )
    assert [one for one in told(wire, quiet)["causes"] if one["name"] != "retokenised"] == []
    changed, _ = send(wire, {**body, "previous_response_id": first}, path="/v1/responses")
    assert told(wire, changed)["causes"][0]["name"] == "system_changed"


def test_a_request_that_continues_another_has_no_cause(wire):
    before = talk()
    _, _ = send(wire, before.body(CHAT))
    after = talk()
    after.turns += [Turn("assistant", "Hello there, friend."), Turn("user", "On Thursday.")]
    found = told(wire, send(wire, after.body(CHAT))[0])
    assert found["causes"] == []
    assert found["cost"] == {"tokens": 0} | {key: 0.0 for key in ("milliseconds",) if key in found["cost"]}
    assert found["fix"] == ""


def test_an_answer_that_came_back_otherwise_is_named(wire, engine):
    call = '<tool_call>\n{"name": "book", "arguments": {"flight": "LH 1840", "seat": "a window seat in the very first row"}}\n</tool_call>'
    engine.answer = call
    # Rules that came and went would be a cause of their own.
    off = {"workmem": {"canonical": "off"}}
    status, _, answer = wire.post("/v1/chat/completions", {**talk().body(CHAT), **off, "model": "fake-model"})
    assert status == 200
    made = answer["choices"][0]["message"]["tool_calls"][0]
    after = talk().body(CHAT)
    arguments = json.dumps(json.loads(made["function"]["arguments"]), separators=(",", ":"))
    made = {**made, "function": {"name": "book", "arguments": arguments}}
    after["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": "Booked."},
    ]
    (one,) = told(wire, send(wire, {**after, **off})[0])["causes"]
    assert one["name"] == "arguments_reserialised"
    assert one["path"] == "messages[2].tool_calls[0].function.arguments"


def test_the_request_before_of_the_session_is_what_one_is_compared_with(wire):
    """By tokens alone, another session's request with the same clock would be the nearest."""
    mine = {"x-workmem-session": "mine"}
    first, _ = send(wire, talk(f"Now: 2026-11-29T10:15:03Z\n{SYSTEM}").body(CHAT), mine)
    other = Talk(f"Now: 2026-11-29T10:16:04Z\n{SYSTEM}", [], [Turn("user", "Something else, please.")])
    send(wire, other.body(CHAT), {"x-workmem-session": "other"})
    second, _ = send(wire, talk(f"Now: 2026-11-29T10:16:04Z\n{SYSTEM}").body(CHAT), mine)
    found = told(wire, second)
    assert found["causes"][0]["name"] == "volatile_time"
    assert found["causes_against"] == first


def test_without_a_session_the_same_beginning_is_found_again(wire):
    first, _ = send(wire, talk(f"Now: 2026-11-29T10:15:03Z\n{SYSTEM}").body(CHAT))
    send(wire, Talk("Now: 2026-11-29T10:16:04Z", [], [Turn("user", "Something else.")]).body(CHAT))
    second, _ = send(wire, talk(f"Now: 2026-11-29T10:16:04Z\n{SYSTEM}").body(CHAT))
    assert told(wire, second)["causes_against"] == first


def test_what_is_shorter_than_a_block_is_said(wire):
    for _ in range(2):
        request_id, _ = send(wire, {"messages": [{"role": "user", "content": ""}]})
    assert [one["name"] for one in told(wire, request_id)["causes"]] == []
    for _ in range(2):
        _, _, answer = wire.post(
            "/v1/completions", {"model": "fake-model", "prompt": "Hello", "max_tokens": 1}
        )
    (one,) = told(wire, answer["id"])["causes"]
    assert one["name"] == "below_block_size"
    assert "5 tokens" in one["what"]


def test_raw_prompts_are_compared_as_texts(wire):
    tail = "Then tell the story of the fox and the goose that everybody knows by heart."
    ids = []
    for clock in ("10:15:03", "10:16:04"):
        body = {"model": "fake-model", "prompt": f"It is {clock}. {tail}", "max_tokens": 1}
        ids.append(wire.post("/v1/completions", body)[2]["id"])
    (one,) = told(wire, ids[1])["causes"]
    assert (one["name"], one["path"]) == ("volatile_time", "prompt")


def test_tenants_are_never_compared(tmp_path, wire_to):
    keys = tmp_path / "keys"
    keys.write_text("key-a:a\nkey-b:b\n")
    config = msgspec.structs.replace(CONFIG, api_key_file=str(keys))
    with running(build_app(FakeEngine(), config), config) as url:
        wire = wire_to(url)
        a, b = ({"authorization": f"Bearer key-{name}", "x-workmem-session": "s"} for name in "ab")
        send(wire, talk(f"Now: 2026-11-29T10:15:03Z\n{SYSTEM}").body(CHAT), a)
        request_id, sent = send(wire, talk(f"Now: 2026-11-29T10:16:04Z\n{SYSTEM}").body(CHAT), b | ASK)
        assert json.loads(sent["x-workmem-explain"])["cause"] == "new_conversation"
        found = wire.get(f"/debug/requests/{request_id}", b)[2]
        assert [one["name"] for one in found["causes"]] == ["new_conversation"]
        assert "2026" not in json.dumps(found["causes"])
        assert wire.get("/debug/requests?worst=5", a)[2]["data"] == []


def test_what_a_rule_repaired_is_said_and_is_no_cause(wire):
    send(wire, talk().body(CHAT))
    after = talk()
    after.tools.reverse()
    found = told(wire, send(wire, after.body(CHAT))[0])
    assert (found["causes"], found["cost"]["tokens"]) == ([], 0)
    assert found["canonical"]["repaired"] == ["tool_order"]
    assert (
        "tool_order"
        in found["canonical"]["applied"] | told(wire, found["compared_with"])["canonical"]["applied"]
    )
    after.tools[0]["schema"]["properties"]["class"] = {"type": "string"}
    (one,) = told(wire, send(wire, after.body(CHAT))[0])["causes"]
    # The path is where the client had it.
    assert (one["name"], one["path"]) == ("tool_changed", "tools[0].function.parameters.properties.class")


def test_the_header_says_it_where_it_was_asked_for(wire):
    send(wire, talk().body(CHAT))
    after = talk()
    after.tools.reverse()
    _, silent = send(wire, after.body(CHAT))
    assert "x-workmem-explain" not in silent
    after = talk(f"{SYSTEM} Be brief.")
    request_id, sent = send(wire, after.body(CHAT), ASK)
    said, found = json.loads(sent["x-workmem-explain"]), told(wire, request_id)
    assert said == {
        "cached": found["cached_tokens"],
        "computed": found["prompt_tokens"] - found["cached_tokens"],
        "cause": "system_changed",
        "path": "messages[0].content",
        "lost": found["cost"]["tokens"],
    }


def test_the_header_of_a_stream_says_what_is_known_when_it_begins(wire, engine):
    engine.delay_s = 0.05
    send(wire, talk().body(CHAT))
    body = {**talk(f"{SYSTEM} Be brief.").body(CHAT), "model": "fake-model", "stream": True}
    _, sent, _ = wire.post("/v1/chat/completions", body, ASK)
    assert json.loads(sent["x-workmem-explain"]) == {"cause": "system_changed", "path": "messages[0].content"}


def test_the_header_is_for_those_who_may_look(wire_to):
    for config in (ServerConfig(port=0, shutdown_s=1), CONFIG):
        with running(build_app(FakeEngine(), config), config) as url:
            _, sent = send(wire_to(url), talk().body(CHAT), ASK)
            assert ("x-workmem-explain" in sent) is config.explain_header


def test_a_name_with_odd_characters_cannot_split_the_header(wire):
    after = talk()
    after.tools[1]["schema"]["properties"]["x\r\nset-cookie: é"] = {"type": "string"}
    send(wire, talk().body(CHAT))
    _, sent = send(wire, after.body(CHAT), ASK)
    said = json.loads(sent["x-workmem-explain"])
    assert (said["cause"], "é" in said["path"]) == ("tool_changed", True)
    assert "set-cookie" not in sent


def test_the_worst_requests_are_summed_up_by_cause(wire, until):
    send(wire, talk().body(CHAT))
    for minute in range(3):
        send(wire, talk(f"Now: 2026-11-29T10:1{minute}:00Z\n{SYSTEM}").body(CHAT))
    tools = talk("Now: 2026-11-29T10:12:00Z\n" + SYSTEM)
    del tools.tools[0]
    send(wire, tools.body(CHAT))
    found = wire.get("/debug/requests?worst=10")[2]
    causes = {row["cause"]: row for row in found["by_cause"]}
    assert set(causes) == {"system_changed", "volatile_time", "tool_removed"}
    assert causes["volatile_time"]["requests"] == 2
    assert causes["volatile_time"]["path"] == "messages[0].content"
    lost = [row["cost"]["tokens"] for row in found["data"]]
    assert lost == sorted(lost, reverse=True)
    assert sum(lost) == sum(row["cost"]["tokens"] for row in found["by_cause"])
    assert len(wire.get("/debug/requests?worst=1")[2]["data"]) == 1
    assert wire.get("/debug/requests?worst=x")[0] == 400
    until(lambda: 'workmem_miss_tokens_total{cause="tool_removed"}' in wire.get("/metrics")[2].decode())
    page = wire.get("/metrics")[2].decode()
    for name, row in causes.items():
        assert f'workmem_miss_tokens_total{{cause="{name}"}} {float(row["cost"]["tokens"])}' in page


def test_a_server_that_keeps_no_bodies_tells_no_cause(wire_to):
    config = msgspec.structs.replace(CONFIG, explain_bytes_max=0)
    with running(build_app(FakeEngine(), config), config) as url:
        wire = wire_to(url)
        for _ in range(2):
            request_id, sent = send(wire, talk().body(CHAT), ASK)
        assert told(wire, request_id)["causes"] == []
        assert "x-workmem-explain" not in sent


@pytest.fixture
def upstream(wire_to):
    """A front before a real server of ours, and that server."""
    with ExitStack() as stack:
        back = stack.enter_context(running(build_app(FakeEngine(), CONFIG), CONFIG))
        app = build_upstream_app(UpstreamConfig(urls=(back,)), CONFIG)
        yield wire_to(stack.enter_context(running(app, CONFIG)))


def test_upstream_mode_tells_causes_from_bodies_and_counts(upstream, until):
    send(upstream, talk(f"Now: 2026-11-29T10:15:03Z\n{SYSTEM}").body(CHAT))
    request_id, sent = send(upstream, talk(f"Now: 2026-11-29T10:16:04Z\n{SYSTEM}").body(CHAT), ASK)
    # Answers pass as they come: nothing is known yet of what they cost.
    assert json.loads(sent["x-workmem-explain"]) == {"cause": "volatile_time", "path": "messages[0].content"}
    until(lambda: upstream.get(f"/debug/requests/{request_id}")[0] == 200)
    found = told(upstream, request_id)
    assert found["causes"][0]["name"] == "volatile_time"
    assert found["cost"]["tokens"] == found["prompt_tokens"] - found["cached_tokens"] > 0
    until(lambda: 'workmem_miss_tokens_total{cause="volatile_time"}' in upstream.get("/metrics")[2].decode())
    assert upstream.get("/debug/requests?worst=3")[2]["by_cause"][0]["cause"] == "volatile_time"


def test_upstream_mode_tells_a_request_that_continues_another(upstream, until):
    send(upstream, talk().body(CHAT))
    after = talk()
    after.turns += [Turn("assistant", "Hello there, friend."), Turn("user", "On Thursday.")]
    request_id, _ = send(upstream, after.body(CHAT))
    until(lambda: upstream.get(f"/debug/requests/{request_id}")[0] == 200)
    assert told(upstream, request_id)["causes"] == []
