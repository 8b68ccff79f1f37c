"""Which losses are named, with which tokens, and what the rules repair."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.linting.files import Recorded
from workmem.linting.lint import Cache, Linter
from workmem.linting.rendering import RoughRenderer, rough_tokens
from workmem.prompt.canonical.rules import DEFAULT_RULES
from workmem.prompt.lint.entries import read_line

WORDS = [
    "river",
    "stone",
    "winter",
    "garden",
    "market",
    "letter",
    "window",
    "silver",
    "engine",
    "harbour",
    "teacher",
    "morning",
    "forest",
    "pencil",
]


def prose(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + number * number) % len(WORDS)] + str(number) for number in range(count))


def tool(name: str, seed: int) -> dict:
    properties = {
        key: {"type": "string", "description": prose(seed, 12)} for key in ("path", "limit", "mode")
    }
    parameters = {"type": "object", "properties": properties, "required": ["limit", "path"]}
    return {
        "type": "function",
        "function": {"name": name, "description": prose(seed, 30), "parameters": parameters},
    }


def turn(number: int) -> list[dict]:
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "alpha", "arguments": '{"path": "a"}'},
    }
    return [
        {"role": "assistant", "content": prose(number + 50, 20), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": prose(number + 80, 40)},
    ]


def chat(turns: int, **more) -> dict:
    messages = [{"role": "system", "content": prose(1, 200)}, {"role": "user", "content": prose(2, 60)}]
    for number in range(turns):
        messages += turn(number)
    tools = [tool("alpha", 3), tool("beta", 4), tool("gamma", 5)]
    return {"model": "m", "messages": messages, "tools": tools} | more


def as_anthropic(body: dict) -> dict:
    system, *rest = body["messages"]
    messages = []
    for one in rest:
        if one["role"] == "tool":
            content = [{"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}]
            messages.append({"role": "user", "content": content})
        else:
            blocks = [{"type": "text", "text": one["content"]}]
            for call in one.get("tool_calls", ()):
                given = json.loads(call["function"]["arguments"])
                blocks.append({"type": "tool_use", "id": call["id"], "name": "alpha", "input": given})
            messages.append({"role": one["role"], "content": blocks})
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in (tool["function"] for tool in body["tools"])
    ]
    return {"model": "m", "max_tokens": 9, "system": system["content"], "messages": messages, "tools": tools}


def as_responses(body: dict) -> dict:
    system, *rest = body["messages"]
    items = []
    for one in rest:
        if one["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]}
            )
            continue
        kind = "output_text" if one["role"] == "assistant" else "input_text"
        items.append(
            {"type": "message", "role": one["role"], "content": [{"type": kind, "text": one["content"]}]}
        )
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in one.get("tool_calls", ())
        ]
    tools = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    return {"model": "m", "instructions": system["content"], "input": items, "tools": tools}


DIALECTS = {"chat": lambda body: body, "messages": as_anthropic, "responses": as_responses}


def linted(bodies, *, block=16, tokens_max=None, rules=DEFAULT_RULES, engine="vllm"):
    linter = Linter(Cache(engine, block, tokens_max), RoughRenderer(), rules)
    for number, body in enumerate(bodies, 1):
        entry = read_line(json.dumps(body).encode())
        assert entry is not None
        linter.take(Recorded("requests.jsonl", number, entry))
    return linter.report()


@pytest.mark.parametrize("write", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("block", [1, 16, 128])
def test_a_conversation_that_only_grows_loses_nothing(write, block):
    report = linted([write(chat(turns)) for turns in range(6)], block=block)
    assert report.losses == []
    assert report.sessions == 1
    assert report.cached_tokens > 0.6 * report.prompt_tokens


def shuffled_tools(body):
    body["tools"] = body["tools"][::-1]


def shuffled_keys(body):
    for one in body["tools"]:
        function = one["function"]
        one["function"] = dict(reversed(function.items()))
        parameters = function["parameters"]
        one["function"]["parameters"] = dict(reversed(parameters.items())) | {
            "properties": dict(reversed(parameters["properties"].items()))
        }


def swapped_required(body):
    body["tools"][0]["function"]["parameters"]["required"] = ["path", "limit"]


@pytest.mark.parametrize("write", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    ("spoil", "cause", "rule", "path"),
    [
        (shuffled_tools, "tool_order", "tool_order", "tools"),
        (shuffled_keys, "schema_key_order", "schema_key_order", "tools"),
        (swapped_required, "required_order", "schema_key_order", "tools[0]"),
    ],
)
def test_what_a_lossless_rule_repairs_is_named_and_costs_nothing_after_it(write, spoil, cause, rule, path):
    spoilt = chat(3)
    spoil(spoilt)
    clean = linted([write(chat(2)), write(chat(3))])
    report = linted([write(chat(2)), write(spoilt)])
    (loss,) = report.losses
    assert (loss.cause, loss.rule) == (cause, rule)
    assert loss.path.startswith(path)
    assert (loss.line, loss.compared_with) == (2, "requests.jsonl:1")
    assert loss.tokens == clean.cached_tokens - report.cached_tokens > 0
    # With all rules it is as if the client had done nothing wrong, and alone its rule repairs it as well.
    assert report.canonical_cached_tokens == clean.canonical_cached_tokens
    alone = next(one for one in report.rules if one.rule == rule)
    assert alone.cached_tokens >= 0.95 * clean.cached_tokens
    assert report.causes[0].where.startswith("tools")


def with_system(text):
    def spoil(body):
        body["messages"][0]["content"] = text + body["messages"][0]["content"]

    return spoil


@pytest.mark.parametrize("write", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    ("early", "late", "cause"),
    [
        ("It is 2026-11-29T10:15:03Z. ", "It is 2026-11-29T10:16:04Z. ", "volatile_time"),
        ("Today is Sunday, 29 November 2026. ", "Today is Monday, 30 November 2026. ", "volatile_date"),
        (
            "Run 0b1f6f0e-30fb-4a53-9d2e-2f6a4b8a1c11. ",
            "Run 9c0e6a44-7a1b-4b0e-8a53-1d3b9f7e5a02. ",
            "volatile_id",
        ),
    ],
)
def test_what_changes_in_the_instructions_is_named_with_all_that_stands_behind_it(write, early, late, cause):
    before, after = chat(2), chat(3)
    with_system(early)(before)
    with_system(late)(after)
    report = linted([write(before), write(after)])
    (loss,) = report.losses
    assert loss.cause == cause
    assert loss.path in ("messages[0].content", "system", "instructions")
    clean = linted([write(chat(2)), write(chat(3))])
    assert abs(loss.tokens - (clean.cached_tokens - report.cached_tokens)) <= 32


def test_a_history_that_is_trimmed_is_named():
    before, after = chat(6), chat(7)
    del after["messages"][2:8]
    report = linted([before, after])
    (loss,) = report.losses
    assert loss.cause == "history_trimmed"
    assert loss.tokens > 0


def test_another_conversation_of_another_agent_is_no_loss():
    other = {
        "model": "m",
        "messages": [
            {"role": "system", "content": prose(30, 100)},
            {"role": "user", "content": prose(31, 40)},
        ],
    }
    assert linted([chat(3), other]).losses == []


def test_a_cache_that_is_too_small_is_named_as_the_cause():
    other = {"model": "m", "messages": [{"role": "user", "content": prose(40, 900)}]}
    report = linted([chat(3), other, chat(4)], tokens_max=2000)
    (loss,) = report.losses
    assert loss.cause == "evicted"
    assert loss.line == 3
    assert linted([chat(3), other, chat(4)]).losses == []


def test_a_salt_shares_nothing_and_is_named():
    report = linted([chat(3, cache_salt="a"), chat(4, cache_salt="b")])
    (loss,) = report.losses
    assert loss.cause == "salt_or_tenant"
    assert report.cached_tokens == 0


def test_without_rules_the_canonical_figures_are_those_as_recorded():
    spoilt = chat(3)
    shuffled_keys(spoilt)
    report = linted([chat(2), spoilt], rules=frozenset())
    assert report.canonical_cached_tokens == report.cached_tokens
    assert report.rules == []


def test_recorded_tokens_are_replayed_as_they_are():
    lines = [list(range(100)), list(range(120)), [*range(50), *range(200, 270)]]
    linter = Linter(Cache("vllm", 16), RoughRenderer(), DEFAULT_RULES)
    for number, ids in enumerate(lines, 1):
        entry = read_line(f"Request r details: prompt: None, prompt_token_ids: {ids}, x".encode())
        linter.take(Recorded("vllm.log", number, entry))
    report = linter.report()
    assert report.cached_tokens == 96 + 48
    assert [loss.line for loss in report.losses] == [3]


def test_requests_are_left_as_they_were():
    body = chat(3)
    shuffled_keys(body)
    entry = read_line(json.dumps(body).encode())
    kept = copy.deepcopy(entry.body)
    Linter(Cache("vllm", 16), RoughRenderer(), DEFAULT_RULES).take(Recorded("f", 1, entry))
    assert json.dumps(entry.body) == json.dumps(kept)


def test_rough_tokens_are_the_same_everywhere_and_lose_no_character():
    assert rough_tokens("Hello, wide world 2026!") == rough_tokens("Hello, wide world 2026!")
    assert rough_tokens("a b") != rough_tokens("a  b")
    assert len(rough_tokens(prose(1, 200))) < 800


PLACES = st.sampled_from(
    ["content", "text", "role", "tools", "function", "name", "arguments", "type", "tool_calls"]
)
ANY = st.recursive(
    st.none() | st.integers(-3, 3) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLACES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(ANY, max_size=4), ANY, ANY), min_size=2, max_size=3))
def test_nothing_that_clients_send_makes_it_fail(requests):
    bodies = [
        {"messages": messages, "tools": tools, "system": system} for messages, tools, system in requests
    ]
    bodies += [{"input": messages, "tools": tools} for messages, tools, _ in requests]
    report = linted(bodies)
    assert report.requests == len(bodies)
