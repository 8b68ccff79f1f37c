"""The bodies of a split request, and which requests have none."""

import json

import pytest

from workmem.gateway.split_bodies import (
    exact_tokens,
    is_repeatable,
    prefill_body,
    why_whole,
    with_handoff,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
# Odd on purpose: spaces, escapes, an order of its own.
BODY = (
    b'{ "messages" : [{"role":"user","content":"caf\\u00e9 \xe2\x98\x95"}] ,"stream": true,\n'
    b'"tools": [ {"type":"function","function":{"name":"f"}} ], "max_completion_tokens": 64, "model":"m", "x": 1.50 }\n'
)
HANDOFF = {"tokens": 900, "wait_s": 2.0}


def test_the_addition_is_all_that_changes():
    out = with_handoff(BODY, 900, 2.0)
    stem = BODY[: BODY.rindex(b"}")].rstrip()
    assert out.startswith(stem)
    assert json.loads(out) == json.loads(BODY) | {"kv_transfer_params": {"workmem": {"handoff": HANDOFF}}}


def test_what_the_client_says_there_is_kept():
    own = {"other": [1], "workmem": {"pin": {"ttl_s": 3}}}
    body = json.dumps({"model": "m", "kv_transfer_params": own, "messages": [{"content": "a  b"}]}).encode()
    out = json.loads(with_handoff(body, 900, 2.0))
    assert out["kv_transfer_params"] == own | {"workmem": {"pin": {"ttl_s": 3}, "handoff": HANDOFF}}
    assert b'[{"content": "a  b"}]' in with_handoff(body, 900, 2.0)
    empty = json.dumps({"kv_transfer_params": {"workmem": None}}).encode()
    assert json.loads(with_handoff(empty, 900, 2.0))["kv_transfer_params"]["workmem"] == {"handoff": HANDOFF}


def test_the_prefill_body_makes_the_same_prompt_and_one_token():
    extra = {
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_object"},
        "tool_choice": "required",
        "min_tokens": 9,
        "best_of": 4,
    }
    body = json.dumps(json.loads(BODY) | extra).encode()
    out = json.loads(prefill_body(body))
    kept = {name: json.loads(BODY)[name] for name in ("messages", "tools", "model", "x")}
    assert out == kept | {"stream": False, "max_completion_tokens": 1, "tool_choice": "none"}
    for name in (b"messages", b"tools"):
        value = BODY[BODY.index(b'"' + name) :].partition(b"[")[2].partition(b"]")[0]
        assert value in prefill_body(BODY)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (
            {"workmem": {"actions": [{"action_type": "Pin"}]}, "kv_hints": {}, "more": [1, 2.50]},
            {"more": [1, 2.5]},
        ),
        ({"workmem": {"session_id": "s"}}, None),
        ({"more": {"workmem": 1}}, {"more": {"workmem": 1}}),
        ({}, {}),
    ],
)
def test_what_is_to_be_kept_is_not_said_to_the_prefill_server(params, kept):
    body = {"prompt": "x", "max_tokens": 9, "kv_hints": {"actions": []}, "kv_transfer_params": params}
    out = json.loads(prefill_body(json.dumps(body).encode()))
    wanted = {} if kept is None else {"kv_transfer_params": kept}
    assert out == {"prompt": "x", "max_tokens": 1, "stream": False} | wanted


@pytest.mark.parametrize(
    ("given", "sent"),
    [("auto", "auto"), ("none", "none"), (None, None), ("required", "none"), ({"type": "function"}, "none")],
)
def test_a_tool_choice_that_forces_nothing_stays(given, sent):
    body = json.dumps({"messages": [], "tools": [{}], "tool_choice": given}).encode()
    assert json.loads(prefill_body(body))["tool_choice"] == sent
    assert "tool_choice" not in json.loads(prefill_body(BODY))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 9}, {"max_tokens": 1}),
        ({"max_tokens": 9, "max_completion_tokens": None}, {"max_tokens": 1, "max_completion_tokens": 1}),
    ],
)
def test_the_limit_has_the_name_that_the_client_uses(limits, expected):
    out = json.loads(prefill_body(json.dumps({"prompt": "x"} | limits).encode()))
    assert out == {"prompt": "x", "stream": False} | expected


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {}, ""),
        (CHAT, {"kv_transfer_params": {"workmem": {"pin": 1}}}, ""),
        (TEXT, {"prompt": "x"}, ""),
        (TEXT, {"prompt": ["x"]}, ""),
        (TEXT, {"prompt": [1, 2]}, ""),
        (TEXT, {"prompt": [[1, 2]]}, ""),
        (TEXT, {"prompt": ["x", "y"]}, "no_single_prompt"),
        (TEXT, {"prompt": [[1], [2]]}, "no_single_prompt"),
        (TEXT, {"prompt": ""}, "no_single_prompt"),
        (TEXT, {"prompt": {}}, "no_single_prompt"),
        (CHAT, {"messages": "x"}, "no_single_prompt"),
        ("/v1/embeddings", {}, "other_endpoint"),
        (CHAT, {"max_tokens": 1}, "one_token"),
        (CHAT, {"max_completion_tokens": 1}, "one_token"),
        (TEXT, {"prompt": "x", "echo": True}, "prompt_is_answered"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_is_answered"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_is_answered"),
        (CHAT, {"prompt_logprobs": None}, ""),
        (CHAT, {"prompt_logprob_token_ids": [7]}, "prompt_is_answered"),
        (CHAT, {"workmem": {"reuse": False}}, "reuse_off"),
        (CHAT, {"workmem": {"reuse": True}}, ""),
        (CHAT, {"kv_transfer_params": "x"}, "client_params"),
        (CHAT, {"kv_transfer_params": None}, "client_params"),
        (CHAT, {"kv_transfer_params": {"workmem": []}}, "client_params"),
        (CHAT, {"kv_transfer_params": {"workmem": {"handoff": {}}}}, "client_params"),
    ],
)
def test_which_requests_are_served_whole(path, fields, why):
    assert why_whole(path, {"messages": [], "model": "m"} | fields) == why


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "n": 1}, True),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": False}, False),
        ({"temperature": 0.1}, False),
        ({"seed": 0}, True),
        ({"seed": True}, False),
        ({"seed": 3, "best_of": 2}, False),
    ],
)
def test_what_gives_the_same_when_asked_again(fields, expected):
    assert is_repeatable(fields) is expected


def test_token_ids_need_no_estimate():
    assert exact_tokens({"prompt": [1, 2, 3]}) == 3
    assert exact_tokens({"prompt": [[1, 2]]}) == 2
    assert exact_tokens({"prompt": ["a"]}) is exact_tokens({"prompt": "abc"}) is exact_tokens({}) is None
