"""Canonical prompts over HTTP: one form for the engine and for other servers, told, counted, and put off."""

import json
import random

import pytest
from tests.gateway.faulty_servers import Seat, Standin

from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.prompt.config import PromptConfig, TenantPromptConfig
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

SERVER = ServerConfig(port=0, shutdown_s=1)
USER = {"role": "user", "content": "Hi"}
NAMES = ("read", "write", "list_files", "grep", "run")


def tool(name):
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Where."}, "mode": {"enum": ["r", "w"]}},
        "required": ["path", "mode"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": schema},
    }


def mixed(seed):
    """The same tools in another order."""
    tools = [tool(name) for name in NAMES]
    random.Random(seed).shuffle(tools)
    return tools


def ask(wire, tools, model="fake-model", **fields):
    body = {"model": model, "messages": [USER], "tools": tools, "max_tokens": 4, **fields}
    status, _, answer = wire.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_what_was_done_is_told_and_counted(wire):
    answer = ask(wire, [tool("b"), tool("a")])
    assert answer["usage"]["workmem"]["canonical"]["tool_order"] == 2
    page = wire.get("/metrics")[2].decode()
    assert 'workmem_canonical_applied_total{rule="tool_order"} 1.0' in page
    again = ask(wire, [tool("a")], messages=[{"role": "user", "content": "Hi"}])
    assert "tool_order" not in again["usage"]["workmem"].get("canonical", {})


def test_off_leaves_every_token_as_it_was_written(wire, engine):
    for seed in range(3):
        ask(wire, mixed(seed), workmem={"canonical": "off"})
    plain = FakeEngine()
    wanted = [list(plain.render_chat([USER], tools=mixed(seed)).token_ids) for seed in range(3)]
    assert [list(request.token_ids) for request in engine.requests] == wanted
    assert len({tuple(ids) for ids in wanted}) > 1


def test_a_wrong_word_is_refused_by_its_field(wire):
    body = {"model": "fake-model", "messages": [USER], "workmem": {"canonical": "maybe"}}
    status, _, answer = wire.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "workmem.canonical")
    assert "'lossless' or 'off', got 'maybe'" in answer["error"]["message"]


def test_a_tenant_has_its_own_switch_and_its_own_rules(wire_to):
    engine = FakeEngine()
    tenants = {
        "quiet": TenantPromptConfig(canonical="off"),
        "picky": TenantPromptConfig(rules={"tool_order": False}),
    }
    app = build_app(engine, SERVER, prompt=PromptConfig(tenants=tenants))
    told = {}
    with running(app, SERVER) as url:
        for tenant in ("", "quiet", "picky"):
            body = {"model": "fake-model", "messages": [USER], "tools": [tool("b"), tool("a")]}
            headers = {"x-workmem-tenant": tenant} if tenant else {}
            answer = wire_to(url).post("/v1/chat/completions", body, headers)[2]
            told[tenant] = set(answer["usage"]["workmem"].get("canonical", {}))
    assert "tool_order" in told[""]
    assert told["quiet"] == set()
    assert told["picky"] == told[""] - {"tool_order"}


@pytest.fixture
def standin():
    return Standin()


@pytest.fixture
def front(standin, wire_to):
    seat = Seat()
    seat.taken_by = standin
    with running(seat, SERVER) as back:
        app = build_upstream_app(UpstreamConfig(urls=(back,)), SERVER)
        with running(app, SERVER) as url:
            yield wire_to(url)


def test_a_server_behind_us_gets_one_form_and_all_unknown_fields(front, standin):
    for seed in range(20):
        ask(front, mixed(seed), model="m", x_unknown={"b": [1.5, {"z": 1, "a": 2}], "a": 0})
    bodies = {body for _, _, body in standin.asked}
    assert len(bodies) == 1
    assert standin.bodies[0]["x_unknown"] == {"b": [1.5, {"z": 1, "a": 2}], "a": 0}


@pytest.mark.parametrize("off", [False, True])
def test_a_body_that_no_rule_changes_goes_on_byte_for_byte(front, standin, off):
    body = {"x_number": 1.50, "model": "m", "messages": [USER], "max_tokens": 4}
    if off:
        body |= {"tools": [tool("b"), tool("a")], "workmem": {"canonical": "off"}}
    data = json.dumps(body, indent=3).encode().replace(b"1.5", b"1.50e0")
    assert front.post("/v1/chat/completions", data)[0] == 200
    assert standin.asked[0][2] == data


@pytest.mark.model
@pytest.mark.slow
def test_tools_in_twenty_orders_are_one_prompt_to_the_real_model(smollm2, tmp_path, wire_to):
    config = EmbeddedConfig(served_name="smollm2", vram_bytes="128MiB")
    engine = EmbeddedEngine.open(config, None, folder=smollm2, cache_dir=tmp_path)
    with running(build_app(engine, SERVER), SERVER) as url:
        usages = [
            ask(wire_to(url), mixed(seed), model="smollm2", max_tokens=1)["usage"] for seed in range(20)
        ]
        off = [
            ask(wire_to(url), mixed(seed), model="smollm2", max_tokens=1, workmem={"canonical": "off"})[
                "usage"
            ]
            for seed in range(20, 24)
        ]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    whole = (usages[0]["prompt_tokens"] - 1) // 16 * 16
    # As good as the same request sent twice.
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[1:]] == [whole] * 19
    assert min(usage["prompt_tokens_details"]["cached_tokens"] for usage in off) < whole
