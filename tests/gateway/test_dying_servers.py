"""Servers that die with a generation: before the client has heard anything, and in the middle of a stream."""

import json

import pytest
from tests.gateway.faulty_servers import (
    DIE_FIRST,
    DIE_HALF,
    DIE_HEADERS,
    END_EARLY,
    END_HALF,
    HANG,
    SAY_FAILED,
    Standin,
)
from tests.gateway.fleets import fleet_of, text_of

WHOLE = "Hello there, friend."


def order_of(fleet, standins):
    """The stand-ins as a session of its own finds them: who is asked first, and so on."""
    fleet.chat(headers={"x-session-id": "s"}, max_tokens=1)
    first = next(one for one in standins if one.asked)
    for one in standins:
        one.asked.clear()
    return [first, *(one for one in standins if one is not first)]


SESSION = {"x-session-id": "s"}


@pytest.mark.parametrize("fault", [DIE_FIRST, DIE_HEADERS, DIE_HALF])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_generation_whose_server_dies_is_answered_by_another(seats, wire_to, fault, is_stream):
    standins = [Standin(), Standin("Hel", "lo there", ", frie", "nd.")]
    with fleet_of(seats, wire_to, *standins) as fleet:
        first, second = order_of(fleet, standins)
        first.fault = fault
        status, answer = fleet.chat(headers=SESSION, stream=is_stream)
        assert status == 200
        if is_stream:
            text, ids, end = text_of(answer)
            assert (text, len(ids), end) == (WHOLE, 1, True)
        else:
            assert answer["choices"][0]["message"]["content"] == WHOLE
        assert (len(first.asked), len(second.asked)) == (1, 1)
        assert first.asked[0][2] == second.asked[0][2]
        if is_stream and fault == DIE_HALF:
            assert fleet.readings()['resumed_streams_total{outcome="resumed"}'] == 1
            assert fleet.last()["resumed_on"] == [fleet.last()["server"]]
        else:
            assert fleet.readings()["repeated_total"] == 1
        assert fleet.readings()['events_total{type="requestmoved"}'] == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_server_whose_engine_died_is_answered_for_by_another(seats, wire_to, is_stream):
    standins = [Standin(), Standin(), Standin()]
    with fleet_of(seats, wire_to, *standins, tries_max=2) as fleet:
        first, *others = order_of(fleet, standins)
        first.status = 500
        status, answer = fleet.chat(headers=SESSION, stream=is_stream)
        assert status == 200
        assert (text_of(answer)[0] if is_stream else answer["choices"][0]["message"]["content"]) == WHOLE
        assert fleet.readings()["repeated_total"] == 1
        assert (fleet.last()["status"], len(first.asked)) == (200, 1)
        # The last one's own words are the answer, of as many servers as may be asked.
        for number, one in enumerate(others):
            one.status = 503 + number
            one.asked.clear()
        asked = sum(len(one.asked) for one in standins)
        status, answer = fleet.chat(headers=SESSION, stream=is_stream)
        # Which of them comes second depends on their ports.
        (last,) = [one for one in others if one.asked]
        assert (status, answer["error"]["code"]) == (last.status, "made_up")
        assert sum(len(one.asked) for one in standins) == asked + 2
        assert fleet.readings()["repeated_total"] == 2
        assert fleet.readings()['bound_reached_total{name="upstream.tries"}'] == 1
        # What is no generation may have begun.
        status, _, answer = fleet.front.post("/v1/files", {"model": "m"}, SESSION)
        assert (status, sum(len(one.asked) for one in standins)) == (500, asked + 3)
        assert not any(one["running"] for one in fleet.servers())


def test_a_5xx_is_the_answer_where_the_others_do_not_answer_at_all(seats, wire_to):
    standins = [Standin(), Standin()]
    with fleet_of(seats, wire_to, *standins) as fleet:
        first, second = order_of(fleet, standins)
        first.status, second.fault = 500, DIE_FIRST
        status, body = fleet.chat(headers=SESSION)
        assert (status, body["error"]["code"]) == (500, "made_up")


@pytest.mark.parametrize(
    ("fault", "die_after"),
    [(END_HALF, 0), (SAY_FAILED, 0), *((fault, 3) for fault in (END_EARLY, END_HALF, SAY_FAILED))],
)
def test_a_stream_whose_server_fails_in_good_order_goes_on(seats, wire_to, fault, die_after):
    standins = [Standin(), Standin("Hello th", "ere", ", friend."), Standin()]
    with fleet_of(seats, wire_to, *standins, tries_max=3) as fleet:
        first, *others = order_of(fleet, standins)
        first.fault, first.die_after = fault, die_after
        text, ids, end = text_of(fleet.chat(headers=SESSION, stream=True)[1])
        assert (text, len(ids), end) == (WHOLE, 1, True)
        # Nor does it end with the second one that fails so, but with the last.
        for one in others:
            one.fault, one.die_after = fault, 2
        others[0].pieces = others[1].pieces = list(first.pieces)
        text, ids, end = text_of(fleet.chat(headers=SESSION, stream=True)[1])
        assert (bool(text) and WHOLE.startswith(text), end) == (True, "upstream_error")
        assert sum(len(one.asked) for one in standins) == 2 + 3


@pytest.mark.parametrize("fault", [END_EARLY, END_HALF])
def test_a_lone_stream_that_ends_too_early_ends_with_an_error(seats, wire_to, fault):
    lone = Standin()
    with fleet_of(seats, wire_to, lone) as fleet:
        lone.fault, lone.die_after = fault, 3
        for fields in ({}, {"n": 2}, {"temperature": 1}):
            answer = fleet.chat(stream=True, **fields)[1]
            assert text_of(answer)[::2] == ("Hello there", "upstream_error")
            assert all(json.loads(one[6:]) for one in answer.decode().split("\n\n") if one.strip())


def test_a_server_that_says_it_failed_is_quoted_where_nobody_goes_on(seats, wire_to):
    lone = Standin()
    with fleet_of(seats, wire_to, lone) as fleet:
        lone.fault, lone.die_after = SAY_FAILED, 3
        for fields in ({}, {"temperature": 1}):
            answer = fleet.chat(stream=True, **fields)[1]
            assert answer == b"".join(lone._events({"messages": []})[:3]) + lone.failed_events
        lone.die_after = 99
        assert text_of(fleet.chat(stream=True)[1])[::2] == (WHOLE, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("die_after", [0, 1, 2, 3, 4, 5, 6])
def test_a_stream_goes_on_wherever_it_broke_off(seats, wire_to, path, die_after):
    standins = [Standin(), Standin("Hello th", "ere", ", friend.")]
    with fleet_of(seats, wire_to, *standins) as fleet:
        first, _ = order_of(fleet, standins)
        first.fault, first.die_after = DIE_HALF, die_after
        prompt = (
            {"prompt": "Hi"}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "Hi"}]}
        )
        body = {
            "model": "m",
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **prompt,
        }
        answer = fleet.front.post(path, body, SESSION)[2]
        text, ids, end = text_of(answer)
        assert (text, end) == (WHOLE, True)
        assert len(ids) == 1
        assert answer.count(b'"usage": {') + answer.count(b'"usage":{') == 1


def test_a_stream_survives_two_deaths_and_a_third_is_its_end(seats, wire_to):
    standins = [Standin() for _ in range(4)]
    with fleet_of(seats, wire_to, *standins, tries_max=3) as fleet:
        for number, one in enumerate(standins):
            one.fault, one.die_after = DIE_HALF, 1 + number
        text, ids, end = text_of(fleet.chat(stream=True)[1])
        assert (len(ids), end) == (1, "upstream_error")
        assert WHOLE.startswith(text)
        assert sum(len(one.asked) for one in standins) == 3
        standins[0].fault = standins[1].fault = None
        for one in standins:
            one.die_after = 2
        assert text_of(fleet.chat(stream=True)[1])[::2] == (WHOLE, True)


def test_another_text_ends_the_stream_with_an_error(seats, wire_to):
    standins = [Standin(), Standin()]
    with fleet_of(seats, wire_to, *standins) as fleet:
        first, second = order_of(fleet, standins)
        first.fault, first.die_after = DIE_HALF, 3
        second.pieces = ["Help"]
        text, _, end = text_of(fleet.chat(headers=SESSION, stream=True)[1])
        assert (text, end) == ("Hello there", "upstream_error")
        assert fleet.readings()['resumed_streams_total{outcome="other_text"}'] == 1


@pytest.mark.parametrize(
    ("fields", "is_resumed"),
    [
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": 3}, True),
        ({"temperature": None}, False),
        ({"n": 2}, False),
    ],
)
def test_only_what_gives_the_same_again_is_gone_on_with(seats, wire_to, fields, is_resumed):
    standins = [Standin(), Standin()]
    with fleet_of(seats, wire_to, *standins) as fleet:
        first, second = order_of(fleet, standins)
        first.fault, first.die_after = DIE_HALF, 3
        text, _, end = text_of(fleet.chat(headers=SESSION, stream=True, **fields)[1])
        assert (text, end) == ((WHOLE, True) if is_resumed else ("Hello there", "upstream_error"))
        assert len(second.asked) == is_resumed


def test_a_drawn_answer_of_which_nothing_is_out_is_drawn_by_another(seats, wire_to):
    standins = [Standin(), Standin("Something", " else")]
    with fleet_of(seats, wire_to, *standins) as fleet:
        first, _ = order_of(fleet, standins)
        first.fault, first.die_after, first.pieces = DIE_HALF, 1, ["Other", " words"]
        text, ids, end = text_of(fleet.chat(headers=SESSION, stream=True, temperature=1)[1])
        assert (text in (WHOLE, "Something else"), len(ids), end) == (True, 1, True)


def test_a_lone_server_that_dies_is_an_error_as_before(seats, wire_to):
    lone = Standin()
    with fleet_of(seats, wire_to, lone) as fleet:
        lone.fault = DIE_FIRST
        status, body = fleet.chat()
        assert (status, body["error"]["code"]) == (502, "upstream_error")
        lone.fault = DIE_HALF
        answer = fleet.chat(stream=True)[1]
        assert text_of(answer)[2] == "upstream_error"
        # No half of an event goes out, or the error behind it could not be read.
        assert all(json.loads(one[6:]) for one in answer.decode().split("\n\n") if one)


def test_a_request_that_kills_everybody_does_not_reach_everybody(seats, wire_to):
    standins = [Standin() for _ in range(4)]
    with fleet_of(seats, wire_to, *standins, tries_max=2) as fleet:
        for one in standins:
            one.fault = DIE_FIRST
        status, body = fleet.chat()
        assert (status, body["error"]["code"]) == (502, "upstream_error")
        assert sum(len(one.asked) for one in standins) == 2
        assert fleet.readings()['bound_reached_total{name="upstream.tries"}'] == 1


def test_a_silent_server_is_504_and_nobody_else_is_asked(seats, wire_to):
    standins = [Standin(), Standin()]
    with fleet_of(seats, wire_to, *standins, read_timeout_s=1) as fleet:
        first, second = order_of(fleet, standins)
        first.fault = HANG
        status, body = fleet.chat(headers=SESSION)
        assert (status, body["error"]["code"]) == (504, "upstream_timeout")
        assert second.asked == []


def test_what_is_no_generation_is_asked_once(seats, wire_to):
    standins = [Standin(), Standin()]
    with fleet_of(seats, wire_to, *standins) as fleet:
        for one in standins:
            one.fault = DIE_FIRST
        status, _, body = fleet.front.post("/v1/files", {"model": "m"})
        assert (status, body["error"]["code"]) == (502, "upstream_error")
        assert sum(len(one.asked) for one in standins) == 1


def test_streams_without_a_death_pass_byte_for_byte(seats, wire_to):
    lone = Standin("caf\u00e9", "\u2615")
    with fleet_of(seats, wire_to, lone) as fleet:
        answer = fleet.chat(stream=True)[1]
        assert answer == b"".join(lone._events({"messages": []}))
