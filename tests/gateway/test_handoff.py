"""`kv_transfer_params.workmem.handoff` over HTTP: to the engine, into the answer, and into explanations."""

import json

import pytest

SAID = {"handoff": {"tokens": 64, "wait_s": 1.5}}
TOLD = {"workmem": {"handoff": {"waited_s": 0.125, "tokens": 32}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
def test_it_reaches_the_engine_and_the_answer_tells_of_it(wire, engine, path, body):
    # Unknown fields beside it are for whoever else moves KV.
    params = {"workmem": {**SAID, "session_id": "s", "actions": []}, "do_remote_prefill": True}
    status, _, answer = wire.post(path, {"model": "fake-model", "kv_transfer_params": params, **body})
    assert status == 200
    handoff = engine.requests[-1].handoff
    assert (handoff.tokens, handoff.wait_s) == (64, 1.5)
    assert answer["kv_transfer_params"] == TOLD
    for params in (None, {}, {"workmem": {}}, {"workmem": {"handoff": None}}, {"other": 1}):
        _, _, plain = wire.post(path, {"model": "fake-model", "kv_transfer_params": params, **body})
        assert engine.requests[-1].handoff is None
        assert "kv_transfer_params" not in plain


def test_choices_and_prompts_are_told_together(wire, engine):
    body = {"model": "fake-model", "prompt": ["Hi", "Ho"], "n": 2, "kv_transfer_params": {"workmem": SAID}}
    _, _, answer = wire.post("/v1/completions", body)
    assert len(answer["choices"]) == 4
    assert answer["kv_transfer_params"] == {"workmem": {"handoff": {"waited_s": 0.125, "tokens": 64}}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_tells_of_it_where_it_tells_its_usage(wire, path):
    body = {
        "model": "fake-model",
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt": "Hi",
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"workmem": SAID},
    }
    _, _, raw = wire.post(path, body)
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert events[-1]["kv_transfer_params"] == TOLD
    assert all("kv_transfer_params" not in event for event in events[:-1])


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ("soon", "kv_transfer_params"),
        ({"workmem": 7}, "kv_transfer_params.workmem"),
        ({"workmem": {"handoff": True}}, "kv_transfer_params.workmem.handoff"),
        ({"workmem": {"handoff": {"tokens": 5}}}, "kv_transfer_params.workmem.handoff.wait_s"),
        ({"workmem": {"handoff": {"tokens": 0, "wait_s": 1}}}, "kv_transfer_params.workmem.handoff.tokens"),
        ({"workmem": {"handoff": {"tokens": "5", "wait_s": 1}}}, "kv_transfer_params.workmem.handoff.tokens"),
        ({"workmem": {"handoff": {"tokens": 5, "wait_s": -1}}}, "kv_transfer_params.workmem.handoff.wait_s"),
    ],
)
def test_what_cannot_be_is_refused_by_name(refusing, idle_engine, said, param):
    status, _, answer = refusing.chat(kv_transfer_params=said)
    assert status == 400
    assert answer["error"]["param"] == param
    assert not idle_engine.requests


def test_explain_tells_how_long_it_waited(wire):
    _, _, answer = wire.chat(kv_transfer_params={"workmem": SAID})
    _, _, explained = wire.get(f"/debug/requests/{answer['id']}")
    assert explained["handoff"] == {"waited_s": 0.125, "tokens": 32}
    _, _, plain = wire.chat()
    _, _, explained = wire.get(f"/debug/requests/{plain['id']}")
    assert explained["handoff"] is None
