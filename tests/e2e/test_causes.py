"""Two requests to the real model: the cause of the second one's miss, its place and its cost, over HTTP and on a terminal."""

import json
import urllib.request

import pytest

from workmem.cli.main import main
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.server import running

pytestmark = [pytest.mark.model, pytest.mark.slow]

POLICY = " ".join(f"Rule {number}: never change booking {number} without asking." for number in range(40))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name} a booking.",
            "parameters": {
                "type": "object",
                "properties": {"id": {"type": "string"}, "day": {"type": "string"}},
            },
        },
    }
    for name in ("find", "change", "cancel")
]


@pytest.fixture(scope="module")
def url(smollm2, tmp_path_factory):
    config = EmbeddedConfig(served_name="smollm2", vram_bytes="256MiB")
    engine = EmbeddedEngine.open(config, None, folder=smollm2, cache_dir=tmp_path_factory.mktemp("cache"))
    server = ServerConfig(port=0, shutdown_s=2, explain_header=True)
    with running(build_app(engine, server), server) as url:
        yield url


def ask(url, system, tools=(), said=()):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello."}, *said]
    body = {"model": "smollm2", "messages": messages, "tools": list(tools), "max_tokens": 8, "temperature": 0}
    headers = {"content-type": "application/json", "x-workmem-explain": "1"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response), json.loads(response.headers["x-workmem-explain"])


def explanation(url, request_id):
    with urllib.request.urlopen(f"{url}/debug/requests/{request_id}", timeout=20) as response:
        return json.load(response)


def test_a_clock_before_a_policy_is_named_with_what_it_cost(url, capsys):
    ask(url, f"Now: 2026-11-29T10:15:03Z\n{POLICY}")
    answer, said = ask(url, f"Now: 2026-11-29T10:16:04Z\n{POLICY}")
    prompt, cached = (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )
    found = explanation(url, answer["id"])
    assert [(one["name"], one["path"]) for one in found["causes"]] == [
        ("volatile_time", "messages[0].content")
    ]
    # All behind the clock but the block that it stands in.
    assert prompt - 64 < found["cost"]["tokens"] <= prompt - cached
    assert found["cost"]["milliseconds"] > 0
    assert said == {
        "cause": "volatile_time",
        "path": "messages[0].content",
        "lost": found["cost"]["tokens"],
        "cached": cached,
        "computed": prompt - cached,
    }
    assert main(["explain", answer["id"], "--url", url]) == 0
    out = capsys.readouterr().out
    assert "volatile_time at messages[0].content" in out
    assert f"cost: {found['cost']['tokens']} tokens computed again" in out
    assert found["fix"] in out


def test_a_tool_in_the_middle_is_named_and_a_next_turn_is_not(url, capsys):
    policy = f"You book flights. {POLICY}"
    first, _ = ask(url, policy, TOOLS[::2])
    turns = [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    second, said = ask(url, policy, TOOLS[::2], turns)
    assert said["cached"] >= first["usage"]["prompt_tokens"] - 16
    assert explanation(url, second["id"])["causes"] == []
    third, said = ask(url, policy, TOOLS, turns)
    assert (said["cause"], said["path"]) == ("tool_added", "tools[1]")
    assert main(["explain", "--worst", "5", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "tool_added" in out
    assert third["id"] in out
    assert main(["explain", "--worst", "5", "--json", "--url", url]) == 0
    assert "tool_added" in {row["cause"] for row in json.loads(capsys.readouterr().out)["by_cause"]}
