"""Who a request belongs to, and what can be learnt about it afterwards."""

import pytest

from workmem.core.errors import ConfigError
from workmem.core.events import BlockEvicted, BoundReached, RequestPreempted
from workmem.core.outcomes import TierName
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.gateway.keys import ApiKeys
from workmem.gateway.metrics import Metrics
from workmem.testing.server import running


@pytest.fixture
def guarded(engine, tmp_path, wire_to):
    keys = tmp_path / "keys"
    keys.write_text("# who may come in\nsk-one:acme\n\nsk-two: beta\nsk-three\n")
    config = ServerConfig(port=0, shutdown_s=1, api_key_file=str(keys))
    with running(build_app(engine, config), config) as url:
        yield wire_to(url)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-wrong"),
        bearer("sk-on"),
        bearer("sk-one:acme"),
        {"authorization": "sk-one"},
        bearer("ü"),
    ],
    ids=str,
)
def test_without_a_right_key_nothing_is_served(guarded, engine, headers):
    headers = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    status, answer, body = guarded.chat(headers=headers)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert answer["www-authenticate"] == "Bearer"
    assert guarded.get("/v1/models", headers)[0] == 401
    assert guarded.get("/debug/requests", headers)[0] == 401
    assert not engine.requests


def test_the_key_names_the_tenant_and_nothing_else_does(guarded, engine):
    evil = {"x-workmem-tenant": "beta"}
    assert guarded.chat(headers=bearer("sk-one") | evil, metadata={"tenant": "beta"})[0] == 200
    assert guarded.chat(headers={"x-api-key": "sk-two"})[0] == 200
    assert guarded.chat(headers=bearer("sk-three"))[0] == 200
    assert [request.caller.tenant for request in engine.requests] == ["acme", "beta", ""]


def test_a_tenant_cannot_look_at_anothers_requests(guarded):
    answer = guarded.chat(headers=bearer("sk-one"))[2]
    assert guarded.get(f"/debug/requests/{answer['id']}", bearer("sk-one"))[0] == 200
    assert guarded.get(f"/debug/requests/{answer['id']}", bearer("sk-two"))[0] == 404
    assert guarded.get("/debug/requests", bearer("sk-two"))[2]["data"] == []


def test_health_and_metrics_need_no_key(guarded):
    assert guarded.get("/health")[2]["status"] == "ok"
    assert guarded.get("/metrics")[0] == 200


@pytest.mark.parametrize("text", ["", "\n# nothing\n", ":tenant\n"])
def test_a_key_file_without_keys_stops_the_start(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"\$\.server\.api_key_file"):
        ApiKeys.load(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.load(str(tmp_path / "absent"))


def test_identity_reaches_the_engine(wire, engine):
    headers = {
        "x-workmem-tenant": "t",
        "x-workmem-agent": "planner",
        "x-session-id": "s",
        "x-workmem-workflow": "w",
    }
    wire.chat(headers=headers)
    caller = engine.requests[0].caller
    assert (caller.tenant, caller.workflow, caller.agent, caller.session) == ("t", "w", "planner", "s")


def test_a_session_is_inferred_from_its_history(wire, engine):
    wire.chat("first")
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "Hello there, friend."},
        {"role": "user", "content": "second"},
    ]
    wire.post("/v1/chat/completions", {"model": "fake-model", "messages": turns})
    wire.chat("other")
    sessions = [request.caller.session for request in engine.requests]
    assert sessions[0] == sessions[1] != sessions[2]


def test_explain_finds_a_request_by_each_of_its_ids(wire):
    answer = wire.chat("x" * 64, headers={"x-request-id": "mine"})[2]
    by_answer = wire.get(f"/debug/requests/{answer['id']}")
    by_header = wire.get("/debug/requests/mine")
    assert by_answer[0] == by_header[0] == 200
    assert by_answer[2] == by_header[2]
    assert by_answer[2]["request_id"] == answer["id"]
    listed = wire.get("/debug/requests?n=5")[2]["data"]
    assert [(item["id"], item["request_id"]) for item in listed] == [(answer["id"], "mine")]


def test_explain_of_choices_and_of_several_prompts(wire):
    choices = wire.chat("x", n=2)[2]
    assert wire.get(f"/debug/requests/{choices['id']}")[2]["request_id"] == f"{choices['id']}-0"
    assert wire.get(f"/debug/requests/{choices['id']}-1")[0] == 200
    prompts = wire.post("/v1/completions", {"model": "fake-model", "prompt": ["ab", "cd"]})[2]
    found = wire.get(f"/debug/requests/{prompts['id']}")[2]["data"]
    assert [item["request_id"] for item in found] == [f"{prompts['id']}-0", f"{prompts['id']}-1"]
    assert wire.get(f"/debug/requests/{prompts['id']}-1")[2]["request_id"] == f"{prompts['id']}-1"


def test_explain_of_an_unknown_request_says_where_to_look(wire):
    status, _, body = wire.get("/debug/requests/none")
    assert (status, body["error"]["code"]) == (404, "request_not_found")
    assert "/debug/requests" in body["error"]["message"]
    assert wire.get("/debug/requests?n=many")[0] == 400


def test_metrics_account_for_every_token(wire):
    for _ in range(2):
        wire.chat("x" * 64)
    wire.chat(temperature=9)
    page = wire.get("/metrics")[2].decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    prompt = float(lines["workmem_prompt_tokens_total"])
    by_source = [
        float(lines[f'workmem_prompt_tokens_by_source_total{{source="{s}"}}']) for s in ("vram", "computed")
    ]
    assert prompt == sum(by_source)
    assert by_source[0] >= 64
    assert float(lines["workmem_generation_tokens_total"]) == 40
    assert float(lines['workmem_request_success_total{finished_reason="stop"}']) == 2
    assert float(lines["workmem_time_to_first_token_seconds_count"]) == 2
    assert float(lines["workmem_time_per_output_token_seconds_count"]) == 2
    assert float(lines["workmem_e2e_request_latency_seconds_count"]) == 2
    assert float(lines["workmem_num_requests_running"]) == 0
    assert float(lines['workmem_http_requests_total{path="/v1/chat/completions",status="400"}']) == 1


def test_readings_are_typed_by_their_name():
    page = Metrics(lambda: {"odd-name": 1.5, "steps_total": 3.0}).page().decode()
    assert "# TYPE workmem_odd_name gauge\nworkmem_odd_name 1.5" in page
    assert "# TYPE workmem_steps_total counter\nworkmem_steps_total 3.0" in page


def test_events_are_counted_by_what_they_say():
    metrics = Metrics()
    for _ in range(2):
        metrics.events(BlockEvicted(tier=TierName.DRAM, key="00", reason="capacity"))
    metrics.events(BoundReached(name="store.save_queue", limit=8))
    metrics.events(RequestPreempted(request_id="r", by="q", reason="priority"))
    page = metrics.page().decode()
    assert 'workmem_blocks_evicted_total{reason="capacity",tier="dram"} 2.0' in page
    assert 'workmem_bound_reached_total{name="store.save_queue"} 1.0' in page
    assert 'workmem_requests_preempted_total{reason="priority"} 1.0' in page
    assert 'workmem_events_total{type="blockevicted"} 2.0' in page
