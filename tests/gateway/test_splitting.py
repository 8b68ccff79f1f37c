"""Requests whose prompt one server computes and another one answers."""

import json
import time
import uuid
from threading import Thread

import pytest
from tests.gateway.faulty_servers import DIE_FIRST, DIE_HALF, DIE_HEADERS, HANG, Standin
from tests.gateway.fleets import fleet_of, text_of

from workmem.cli.explain import explain

WHOLE = "Hello there, friend."


@pytest.fixture
def pair():
    """A prefill and a decode server."""
    return Standin(prompt_tokens=1234), Standin(prompt_tokens=1234, cached_tokens=1200)


@pytest.fixture
def fleet(pair, seats, wire_to):
    with fleet_of(
        seats,
        wire_to,
        *pair,
        roles=("prefill", "decode"),
        split="always",
        retry_after_s=1.0,
        prefill_timeout_s=10,
    ) as fleet:
        yield fleet


def test_the_prompt_goes_to_one_and_the_request_with_word_of_it_to_the_other(fleet, pair):
    prefill, decode = pair
    given = str(uuid.uuid4())
    body = (
        b'{"model": "m" ,"messages":[{"role":"user","content":"%s"}], "stream": true, "max_tokens": 50}'
        % (b"x" * 4000)
    )
    status, _, answer = fleet.front.post(
        "/v1/chat/completions", body, {"x-request-id": given, "x-session-id": "s1"}
    )
    assert (status, text_of(answer)[0]) == (200, WHOLE)
    assert prefill.bodies == [
        {"model": "m", "messages": json.loads(body)["messages"], "stream": False, "max_tokens": 1}
    ]
    (path, headers, sent), (_, prefill_headers, _) = decode.asked[0], prefill.asked[0]
    assert path == "/v1/chat/completions"
    assert sent.startswith(body[:-1])
    handoff = {"tokens": 1234, "wait_s": 2.0}
    assert json.loads(sent) == json.loads(body) | {"kv_transfer_params": {"workmem": {"handoff": handoff}}}
    assert headers["x-request-id"] == given
    assert str(uuid.UUID(prefill_headers["x-request-id"])) != given
    assert headers["x-workmem-session"] == prefill_headers["x-workmem-session"] == "s1"
    readings = fleet.readings()
    assert readings['generations_total{reason="always",way="split"}'] == 1
    assert readings["handed_tokens_total"] == 1234
    assert readings['events_total{type="requestsplit"}'] == 1
    assert readings['hop_seconds_count{hop="prefill"}'] == readings['hop_seconds_count{hop="answer"}'] == 1


def test_completions_are_split_too_and_what_the_client_says_to_the_engine_is_kept(fleet, pair):
    own = {"workmem": {"session": "a"}, "more": [1]}
    body = {"model": "m", "prompt": "x" * 4000, "max_tokens": 9, "kv_transfer_params": own}
    status, _, answer = fleet.front.post("/v1/completions", body)
    assert (status, answer["choices"][0]["text"]) == (200, WHOLE)
    (sent,) = pair[1].bodies
    handoff = {"tokens": 1234, "wait_s": 2.0}
    assert sent["kv_transfer_params"] == own | {"workmem": {"session": "a", "handoff": handoff}}
    assert pair[0].bodies[0]["kv_transfer_params"] == {"more": [1]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_transfer_params": "mine"}, "client_params"),
        ({"content": "short"}, "short_prompt"),
        ({"max_tokens": 1}, "one_token"),
        ({"workmem": {"reuse": False}}, "reuse_off"),
    ],
)
def test_what_is_not_split_reaches_one_server_as_it_came(fleet, pair, fields, reason):
    assert fleet.chat(**fields)[0] == 200
    assert pair[0].asked == []
    assert "handoff" not in json.dumps(pair[1].bodies)
    assert (fleet.last()["split"]["is_split"], fleet.last()["split"]["reason"]) == (False, reason)


@pytest.mark.parametrize(
    ("spoil", "fallback"),
    [
        ({"fault": DIE_FIRST}, "prefill_broke_off"),
        ({"fault": DIE_HEADERS}, "prefill_broke_off"),
        ({"fault": DIE_HALF}, "prefill_broke_off"),
        ({"status": 500}, "prefill_5xx"),
        ({"status": 503}, "prefill_5xx"),
        ({"status": 400}, "prefill_4xx"),
        ({"status": 429}, "prefill_4xx"),
        ({"has_usage": False}, "prefill_without_usage"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_whatever_fails_at_the_prefill_server_costs_nobody_an_answer(
    fleet, pair, until, spoil, fallback, is_stream
):
    prefill, decode = pair
    for name, value in spoil.items():
        setattr(prefill, name, value)
    status, answer = fleet.chat(stream=is_stream)
    assert status == 200
    assert (text_of(answer)[0] if is_stream else answer["choices"][0]["message"]["content"]) == WHOLE
    assert "kv_transfer_params" not in decode.bodies[0]
    assert fleet.readings()[f'one_sided_total{{reason="{fallback}"}}'] == 1
    split = fleet.last()["split"]
    assert (split["is_split"], split["fallback"]) == (False, fallback)
    until(lambda: prefill.running == 0)


def test_a_prefill_server_that_is_slow_is_given_up_and_spared(pair, seats, wire_to, until):
    pair[0].fault = HANG
    with fleet_of(
        seats, wire_to, *pair, roles=("prefill", "decode"), split="always", prefill_timeout_s=0.3
    ) as fleet:
        assert fleet.chat()[1]["choices"][0]["message"]["content"] == WHOLE
        assert fleet.last()["split"]["fallback"] == "prefill_slow"
        until(lambda: pair[0].dropped == 1)
        fleet.chat()
        assert fleet.last()["split"]["reason"] == "no_prefill_server"
        # One that stays frozen costs a timeout less and less often.
        server, pauses = fleet.app.state.servers[0], []
        for _ in range(2):
            server.no_prefill_until = 0.0
            begun = time.monotonic()
            fleet.chat()
            pauses.append(server.no_prefill_until - begun)
        assert pauses[0] > 1.9 * 5.0
        assert pauses[1] > 1.5 * pauses[0]


def test_hops_that_fail_at_once_are_one_failure(pair, seats, wire_to, until):
    pair[0].status, pair[0].delay_s = 500, 0.5
    with fleet_of(seats, wire_to, *pair, roles=("prefill", "decode"), split="always") as fleet:
        server = fleet.app.state.servers[0]
        threads = [Thread(target=fleet.chat) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(10)
        assert len(pair[0].asked) == 4
        assert server.prefill_failures == 1
        assert server.no_prefill_until - time.monotonic() <= 5.0
        server.no_prefill_until = 0.0
        fleet.chat()
        assert server.prefill_failures == 2
        assert server.no_prefill_until - time.monotonic() > 5.0


@pytest.mark.parametrize("spoil", [{"status": 400}, {"has_usage": False}])
def test_a_prefill_server_that_is_of_no_use_is_spared_after_three_times(pair, seats, wire_to, spoil):
    prefill = pair[0]
    with fleet_of(seats, wire_to, *pair, roles=("prefill", "decode"), split="always") as fleet:
        server = fleet.app.state.servers[0]

        def asked(times):
            before = len(prefill.asked)
            for _ in range(times):
                assert fleet.chat()[0] == 200
            return len(prefill.asked) - before

        for name, value in spoil.items():
            setattr(prefill, name, value)
        assert asked(2) == 2
        prefill.status, prefill.has_usage = 200, True
        assert asked(1) == 1
        for name, value in spoil.items():
            setattr(prefill, name, value)
        assert asked(4) == 3
        assert fleet.last()["split"]["reason"] == "no_prefill_server"
        assert 0 < server.no_prefill_until - time.monotonic() <= 5.0
        # It is tried once more, and not three times.
        server.no_prefill_until = 0.0
        assert asked(2) == 1


def test_an_error_of_the_request_is_told_by_the_decode_server(fleet, pair):
    for one in pair:
        one.status = 400
        one.model = "prefill" if one is pair[0] else "decode"
    status, body = fleet.chat()
    assert (status, body["error"]["message"]) == (400, "by decode")


def test_a_prefill_server_that_failed_is_spared_for_a_while(fleet, pair, until):
    pair[0].fault = DIE_FIRST
    fleet.chat()
    fleet.chat()
    assert len(pair[0].asked) == 1
    assert fleet.last()["split"]["reason"] == "no_prefill_server"
    pair[0].fault = None

    def is_split_again():
        fleet.chat()
        return fleet.last()["split"]["is_split"]

    until(is_split_again)


def test_a_dead_prefill_server_is_passed_over(pair, seats, wire_to):
    gone = Standin()
    with fleet_of(
        seats, wire_to, gone, *pair, roles=("prefill", "prefill", "decode"), split="always"
    ) as fleet:
        server = fleet.app.state.servers[0]
        server.url = "http://127.0.0.1:9"
        assert fleet.chat()[0] == 200
        assert fleet.last()["split"]["fallback"] == "prefill_unreachable"
        assert fleet.chat()[0] == 200
        assert fleet.last()["split"]["is_split"]
        assert len(pair[0].asked) == 1


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_client_that_leaves_ends_the_hop_that_runs(fleet, pair, until, is_prefill):
    server = pair[0] if is_prefill else pair[1]
    server.delay_s = 5.0
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}], "stream": True}
    ).encode()
    with fleet.front.open() as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: server.running == 1)
    until(lambda: server.dropped == 1)
    until(lambda: not any(one["running"] for one in fleet.servers()))
    assert len(pair[1].asked) == (not is_prefill)
    assert all(one["backlog_s"] == 0 for one in fleet.servers())


def test_a_decode_server_that_dies_leaves_the_answer_to_those_beside_it(seats, wire_to):
    prefill, decode, spare = Standin(), Standin(), Standin()
    with fleet_of(
        seats, wire_to, prefill, decode, spare, roles=("prefill", "decode", "both"), split="always"
    ) as fleet:
        fleet.chat(headers={"x-session-id": "s"})
        first, second = (decode, spare) if decode.asked else (spare, decode)
        for one in (prefill, decode, spare):
            one.asked.clear()
        first.fault, first.die_after = DIE_HALF, 3
        assert text_of(fleet.chat(headers={"x-session-id": "s"}, stream=True)[1])[::2] == (WHOLE, True)
        # With word of what was computed: it is in the store that all share.
        assert second.bodies == first.bodies
        assert len(prefill.asked) == 1
        second.fault = first.fault = DIE_FIRST
        assert fleet.chat(headers={"x-session-id": "s"})[1]["choices"][0]["message"]["content"] == WHOLE
        assert [body.get("stream") for body in prefill.bodies] == [False, False, None]


def test_prefill_servers_answer_where_nobody_else_is_up(pair, seats, wire_to):
    with fleet_of(seats, wire_to, *pair, roles=("prefill", "decode"), split="always") as fleet:
        fleet.app.state.servers[1].url = "http://127.0.0.1:9"
        for _ in range(2):
            assert fleet.chat()[0] == 200
        assert pair[0].bodies[-1].get("stream") is None
        assert fleet.last()["split"]["reason"] == "no_decode_server"


def test_without_a_prefill_server_nothing_is_split(seats, wire_to):
    pair = Standin(), Standin()
    with fleet_of(seats, wire_to, *pair, split="always") as fleet:
        assert fleet.chat()[0] == 200
        assert fleet.last()["split"]["reason"] == "no_prefill_server"
        assert "handoff" not in json.dumps([one.bodies for one in pair])


def test_auto_measures_first_and_then_splits_where_streams_would_wait(pair, seats, wire_to, until):
    decode = pair[1]
    with fleet_of(seats, wire_to, *pair, roles=("prefill", "decode")) as fleet:
        # Each a session of its own, of which no server has anything.
        for number in range(3):
            fleet.chat(f"{number}" + 4000 * "x")
            assert fleet.last()["split"]["reason"] in ("measuring", "faster")
        server = fleet.app.state.servers
        for _ in range(12):
            server[0].costs.learn_computing(1000, 1.1)
            server[0].costs.learn_computing(1, 0.1)
            server[1].costs.learn_computing(1000, 1.0)
            server[1].costs.learn_handover(1000, 0.02)
        fleet.chat("a" + 4000 * "x")
        assert fleet.last()["split"]["reason"] == "slower"
        decode.fault = HANG
        held = Thread(target=fleet.chat, kwargs={"content": "short"})
        held.start()
        until(lambda: decode.running == 1)
        decode.fault = None
        fleet.chat("b" + 4000 * "x")
        split = fleet.last()["split"]
        assert (split["is_split"], split["reason"]) == (True, "faster")
        assert split["split_s"] < split["whole_s"]
    held.join(5)


def test_a_session_whose_context_is_there_is_not_split(pair, seats, wire_to):
    with fleet_of(seats, wire_to, *pair, roles=("prefill", "decode")) as fleet:
        for turn in range(2):
            fleet.chat(headers={"x-session-id": "s"})
            assert fleet.last()["split"]["reason"] == ("measuring", "cached")[turn]


def test_costs_are_learned_from_what_answers_say(pair, seats, wire_to):
    prefill, decode = pair
    prefill.delay_s, decode.delay_s, decode.prompt_tokens = 0.3, 0.0, 1000
    with fleet_of(seats, wire_to, *pair, roles=("prefill", "decode"), split="always") as fleet:
        for _ in range(3):
            fleet.chat(stream=True, stream_options={"include_usage": True})
        costs = [one["costs"] for one in fleet.servers()]
        assert costs[0]["computed_token_s"] * 1234 == pytest.approx(0.3, rel=0.6)
        assert costs[0]["samples"] == 3
        assert costs[1]["handed_token_s"] < 1e-3
        assert fleet.last()["split"]["prompt_tokens"] == 1234
        # An answer in one piece says how long it waited.
        decode.params = {"workmem": {"handoff": {"waited_s": 1.0, "tokens": 1200}}}
        for _ in range(3):
            fleet.chat()
        assert fleet.servers()[1]["costs"]["handed_token_s"] > 1e-3


def test_explain_tells_who_did_what_and_why(fleet, pair, capsys):
    fleet.chat()
    found = fleet.front.get(f"/debug/requests/{fleet.last()['id']}")[2]
    assert found["split"]["prefill_server"] == fleet.urls[0]
    assert "Split: 1234 tokens computed by" in found["served"]
    explain(last=True, url=fleet.front.base_url)
    page = " ".join(capsys.readouterr().out.split())
    assert f"Split: 1234 tokens computed by {fleet.urls[0]} in" in page
    assert f"answered by {fleet.urls[1]}; upstream.split is always." in page
    fleet.chat(content="Hi")
    explain(last=True, url=fleet.front.base_url)
    assert "Not split: the prompt was expected to be shorter" in " ".join(capsys.readouterr().out.split())
    pair[0].status = 500
    fleet.chat()
    explain(last=True, url=fleet.front.base_url)
    assert "failed (prefill_5xx)" in " ".join(capsys.readouterr().out.split())
