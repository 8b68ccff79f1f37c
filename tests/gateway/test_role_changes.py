"""Roles at run time: by operators, and by the controller."""

from threading import Thread

import msgspec
import pytest
from tests.gateway.faulty_servers import HANG, Standin
from tests.gateway.fleets import FRONT, fleet_of

from workmem.core.errors import ConfigError
from workmem.gateway.config import UpstreamConfig
from workmem.gateway.role_keeping import Recent, _seen
from workmem.gateway.servers import UpstreamServer


@pytest.fixture
def trio():
    return Standin(), Standin(), Standin()


@pytest.fixture
def fleet(trio, seats, wire_to):
    with fleet_of(seats, wire_to, *trio, roles=("prefill", "decode", "both"), split="always") as fleet:
        yield fleet


def change(fleet, number, role, headers=None, **fields):
    body = {"url": fleet.urls[number], "role": role, **fields}
    status, _, answer = fleet.front.post("/debug/servers", body, headers)
    return status, answer


def roles(fleet):
    return [(one["role"], one["next_role"]) for one in fleet.front.get("/health")[2]["servers"]]


def test_roles_are_seen_and_changed(fleet, trio, until):
    assert roles(fleet) == [("prefill", None), ("decode", None), ("both", None)]
    status, server = change(fleet, 1, "both")
    assert (status, server["role"], server["next_role"]) == (200, "both", None)
    assert change(fleet, 2, "prefill")[0] == 200
    until(lambda: roles(fleet)[2] == ("prefill", None))
    readings = fleet.readings()
    assert (readings["servers_prefill"], readings["servers_both"], readings["servers_draining"]) == (2, 1, 0)
    assert readings['role_changes_total{by="operator",role="prefill"}'] == 1
    fleet.chat()
    assert trio[1].bodies[-1]["kv_transfer_params"]


def test_what_runs_ends_before_the_role_changes_and_nothing_new_comes(fleet, trio, until):
    decode = trio[1]
    decode.fault = trio[2].fault = HANG
    threads = []
    for number in range(8):
        threads.append(
            Thread(target=fleet.chat, kwargs={"content": "Hi", "headers": {"x-session-id": f"s{number}"}})
        )
        threads[-1].start()
    until(lambda: decode.running + trio[2].running == 8)
    assert decode.running > 0
    trio[2].fault = None
    running = decode.running
    _, server = change(fleet, 1, "prefill", drain_s=30)
    assert (server["role"], server["next_role"], server["running"]) == ("decode", "prefill", running)
    for number in range(8):
        fleet.chat(content="Hi", headers={"x-session-id": f"new-{number}"})
    assert decode.running == running
    assert roles(fleet)[1] == ("decode", "prefill")
    assert fleet.readings()["servers_draining"] == 1
    # A change back is no change, and takes effect at once.
    change(fleet, 1, "decode")
    assert roles(fleet)[1] == ("decode", None)
    change(fleet, 1, "prefill", drain_s=0.2)
    until(lambda: roles(fleet)[1] == ("prefill", None))
    assert fleet.readings()['bound_reached_total{name="upstream.drain"}'] == 1
    # The drain is over; what still runs was not cut off.
    assert decode.running == running
    assert decode.dropped == 0


def test_a_server_that_drains_takes_its_new_role_when_it_is_idle(fleet, trio, until):
    trio[0].delay_s = 1.0
    thread = Thread(target=fleet.chat)
    thread.start()
    until(lambda: trio[0].running == 1)
    change(fleet, 0, "decode", drain_s=30)
    assert roles(fleet)[0] == ("prefill", "decode")
    until(lambda: roles(fleet)[0] == ("decode", None))
    thread.join(5)
    assert trio[1].asked or trio[2].asked


def test_somebody_must_be_left_to_answer(fleet):
    assert change(fleet, 1, "prefill")[0] == 200
    status, answer = change(fleet, 2, "prefill")
    assert (status, answer["error"]["code"]) == (409, "no_decode_server")
    assert roles(fleet)[2] == ("both", None)


def test_somebody_means_somebody_who_is_up_and_has_the_model(seats, wire_to):
    pair = Standin(model="m"), Standin(model="other")
    with fleet_of(seats, wire_to, *pair) as fleet:
        status, answer = change(fleet, 0, "prefill")
        assert status == 409
        assert "with m " in answer["error"]["message"]
    alike = Standin(), Standin()
    with fleet_of(seats, wire_to, *alike) as fleet:
        fleet.app.state.servers[1].down_until = float("inf")
        assert change(fleet, 0, "prefill")[0] == 409
        # It is asked again, and nobody knows yet whether it answers.
        fleet.app.state.servers[1].down_until, fleet.app.state.servers[1].last_error = 0.0, "refused"
        assert change(fleet, 0, "prefill")[0] == 409
        fleet.app.state.servers[1].last_error = ""
        assert change(fleet, 0, "prefill")[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "http://elsewhere", "role": "decode"}, "url"),
        ({"role": "decode"}, "url"),
        ({"url": 3, "role": "decode"}, "url"),
        ({"url": "U", "role": "elastic"}, "role"),
        ({"url": "U"}, "role"),
        ({"url": "U", "role": "decode", "drain_s": -1}, "drain_s"),
        ({"url": "U", "role": "decode", "drain_s": "soon"}, "drain_s"),
        ({"url": "U", "role": "decode", "drain_s": True}, "drain_s"),
        ({"url": "U", "role": "decode", "drain_s": 10**400}, "drain_s"),
        ({"url": "U", "role": "decode", "drain_s": 86401}, "drain_s"),
        ({"url": "U", "role": "decode", "wait": 1}, "wait"),
    ],
)
def test_a_wrong_field_is_named(fleet, body, param):
    body = {name: fleet.urls[0] if value == "U" else value for name, value in body.items()}
    status, _, answer = fleet.front.post("/debug/servers", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert fleet.front.post("/debug/servers", b"{")[0] == 400


def test_roles_are_the_operators_own(trio, seats, wire_to, tmp_path):
    (tmp_path / "keys").write_text("root\nhers:acme\n")
    server = msgspec.structs.replace(FRONT, api_key_file=str(tmp_path / "keys"))
    with fleet_of(seats, wire_to, *trio, server=server) as fleet:
        assert change(fleet, 0, "prefill")[0] == 401
        assert fleet.front.get("/debug/servers")[0] == 401
        assert fleet.front.get("/debug/servers", {"authorization": "Bearer hers"})[0] == 403
        assert fleet.front.get("/debug/servers", {"authorization": "Bearer root"})[0] == 200
        status, answer = change(fleet, 0, "prefill", {"authorization": "Bearer hers"})
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        assert change(fleet, 0, "prefill", {"authorization": "Bearer root"})[0] == 200


def test_the_controller_changes_what_is_elastic_and_nothing_else(seats, wire_to, until):
    servers = [Standin() for _ in range(3)]
    with fleet_of(
        seats,
        wire_to,
        *servers,
        roles=("prefill", "elastic", "both"),
        elastic=True,
        elastic_every_s=0.3,
        elastic_patience=2,
        elastic_dwell_s=0.2,
        slo_ttft_s=0.01,
        slo_itl_s=5.0,
        slo_streams=1000,
    ) as fleet:
        assert roles(fleet)[1] == ("both", None)
        for one in servers:
            one.delay_s = 0.05
        until(
            lambda: (
                fleet.chat(content="Hi", stream=True, stream_options={"include_usage": True})
                and roles(fleet)[1][0] == "prefill"
            )
        )
        assert roles(fleet)[2] == ("both", None)
        assert fleet.readings()['role_changes_total{by="controller",role="prefill"}'] == 1


def test_without_elastic_nothing_changes_by_itself():
    with pytest.raises(ConfigError, match="elastic"):
        UpstreamConfig(urls=("http://a",), roles=("both",), elastic=True)
    with pytest.raises(ConfigError, match=r"upstream\.elastic.*never"):
        UpstreamConfig(urls=("http://a", "http://b"), roles=("both", "elastic"), elastic=True, split="never")
    assert not UpstreamConfig().elastic


@pytest.mark.parametrize("given", [("prefill",), ("prefill", "prefill"), ("both", "both", "both")])
def test_roles_that_do_not_fit_stop_the_start(given):
    with pytest.raises(ConfigError, match=r"upstream\.roles"):
        UpstreamConfig(urls=("http://a", "http://b"), roles=given)


def test_a_server_that_did_not_answer_is_not_up_for_the_controller():
    server = UpstreamServer("http://a")
    assert _seen(server, 1.0).is_up
    server.last_error = "refused"
    assert not _seen(server, 1.0).is_up


@pytest.mark.parametrize("host", ["me:secret@a", "me@a:80", ":secret@a"])
def test_a_url_with_a_password_stops_the_start_and_is_not_shown(host):
    with pytest.raises(ConfigError, match=r"upstream\.urls\[1\]") as caught:
        UpstreamConfig(urls=("http://a", f"http://{host}/x"))
    assert "secret" not in str(caught.value)
    assert UpstreamConfig(urls=("http://a/x@y",))


def test_recent_times_forget_and_are_high_ones():
    recent = Recent(10.0)
    assert recent.high(0.0) == 0.0
    for value in range(10):
        recent.add(float(value), 0.0)
    assert recent.high(5.0) == 8.0
    recent.add(1.0, 9.0)
    assert recent.high(15.0) == 1.0
