"""What real clients do from one request to the next: those that append are quiet, the others are named."""

import json
from pathlib import Path

import pytest

from workmem.prompt.causes.answers import Made, MadeCall
from workmem.prompt.causes.diagnose import diagnose
from workmem.prompt.dialects.known import dialect_of_path

FOLDER = Path(__file__).parents[1] / "data" / "clients"
APPENDING = [
    "anthropic_sdk_cache_control",
    "codex",
    "langgraph_chatopenai",
    "openai_agents_chat",
    "openai_agents_responses",
    "openai_sdk_chat",
    "opencode",
    "pi",
]


def requests_of(client):
    lines = (FOLDER / f"{client}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def causes(client, number, made=None):
    before, after = requests_of(client)[number : number + 2]
    found = diagnose(before["body"], after["body"], dialect_of_path(after["path"]), made=made)
    return [(one.name, one.path) for one in found]


@pytest.mark.parametrize("client", APPENDING)
def test_a_client_that_appends_has_no_cause(client):
    pairs = range(len(requests_of(client)) - 1)
    start = 1 if client == "opencode" else 0  # Its first request asks for a title.
    assert [causes(client, number) for number in pairs if number >= start] == [[]] * (len(pairs) - start)


@pytest.mark.parametrize(
    ("client", "number", "found"),
    [
        ("openclaw", 0, [("floating_tail", "messages[2]")]),
        ("aider", 0, [("message_inserted", "messages[7]"), ("branched", "messages[15]")]),
        ("qwen_code", 1, [("history_rewritten", "messages[1].content[3].text")]),
        ("smolagents", 0, [("tool_removed", "tools"), ("role_swapped", "messages[0].content[0].text")]),
        (
            "oa_handoff",
            0,
            [
                ("tool_added", "tools[0]"),
                ("tool_removed", "tools[0]"),
                ("role_swapped", "messages[0].content"),
            ],
        ),
        (
            "opencode",
            0,
            [
                ("tool_added", "tools[0]"),
                ("role_swapped", "messages[0].content"),
                ("history_trimmed", "messages[1]"),
            ],
        ),
    ],
)
def test_what_a_client_does_to_its_prefix_is_named(client, number, found):
    assert causes(client, number) == found


@pytest.mark.parametrize(("client", "number"), [("pi", 0), ("opencode", 1)])
def test_arguments_that_a_client_wrote_anew_are_named(client, number):
    """The model had written spaces, as models do."""
    after = requests_of(client)[number + 1]["body"]["messages"]
    turn = [message for message in after if message["role"] == "assistant"][-1]
    calls = tuple(
        MadeCall(call["function"]["name"], json.dumps(json.loads(call["function"]["arguments"])), call["id"])
        for call in turn["tool_calls"]
    )
    made = Made(turn.get("content") or "", calls=calls)
    path = f"messages[{after.index(turn)}].tool_calls[0].function.arguments"
    assert causes(client, number, made) == [("arguments_reserialised", path)]
