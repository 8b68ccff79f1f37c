"""What goes wrong between a client and us: each gets its own answer, and nothing is left running."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from workmem.core.errors import ConfigError, EngineError, QueueFull
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.gateway.serve import Server, listen
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

PATIENT = ServerConfig(port=0, shutdown_s=1)


def error_of(answer):
    status, _, body = answer
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"model": "m",\n "messages" [', "line 2, column 13"),
        (b'{"model": "m"', "13 bytes read"),
        (b"", "0 bytes read"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 30000, "nested too deeply"),
    ],
    ids=["colon", "cut", "empty", "utf8", "list", "deep"],
)
def test_malformed_json_is_placed(refusing, body, place):
    status, error = error_of(refusing.post("/v1/chat/completions", body))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert place in error["message"]


CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 1}, "model"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 1}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "gadget", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": ""}}},
            "response_format.json_schema.name",
        ),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"priority": "high"}, "priority"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"workmem": {"reuse": "no"}}, "workmem.reuse"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_chat_fields_are_named(refusing, idle_engine, fields, param):
    status, error = error_of(refusing.post("/v1/chat/completions", CHAT | fields))
    assert (status, error["param"]) == (400, param)
    assert not idle_engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
    ],
)
def test_wrong_completion_fields_are_named(refusing, idle_engine, fields, param):
    status, error = error_of(
        refusing.post("/v1/completions", {"model": "fake-model", "prompt": "x"} | fields)
    )
    assert (status, error["param"]) == (400, param)
    assert not idle_engine.requests


def test_unknown_fields_and_nulls_are_fine(wire):
    nulls = dict.fromkeys(["temperature", "stop", "tools", "tool_choice", "n", "seed", "logprobs", "stream"])
    assert wire.post("/v1/chat/completions", CHAT | nulls | {"store": True, "what": {"ever": []}})[0] == 200


def test_unknown_model_lists_the_served(wire):
    status, error = error_of(wire.post("/v1/chat/completions", CHAT | {"model": "gpt-9"}))
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "fake-model" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status(wire, engine, stream):
    status, error = error_of(wire.chat("x" * 5000, stream=stream))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    engine.first_error = QueueFull("The queue is full.", retry_after_s=2.5)
    answer = wire.chat(stream=stream, n=2)
    assert error_of(answer)[0] == 429
    assert answer[1]["retry-after"] == "3"
    engine.first_error = EngineError("The device is gone.")
    assert error_of(wire.chat(stream=stream))[0] == 500
    engine.first_error = ZeroDivisionError("secret path /x/y")
    status, error = error_of(wire.chat(stream=stream))
    assert status == 500
    assert "secret" not in error["message"]


def test_an_error_after_the_first_token_is_an_event(wire, engine):
    engine.later_error = EngineError("The device is gone.")
    status, _, body = wire.chat(stream=True)
    assert status == 200
    last = body.decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "The device is gone."
    assert b"[DONE]" not in body


def test_one_failed_choice_fails_the_request_and_stops_the_others(wire, engine, until):
    engine.delay_s = 0.05

    def answer(request):
        if request.id.endswith("-1"):
            raise EngineError("No luck.")
        return "x" * 1000

    engine.answer = answer
    assert wire.chat(n=2)[0] == 500
    until(lambda: engine.running == 0)


@pytest.mark.parametrize("size", [70_000, 300_000])
def test_large_bodies_are_refused(wire, engine, size):
    status, error = error_of(wire.post("/v1/chat/completions", b" " * size))
    assert (status, error["code"]) == (413, "request_too_large")
    assert not engine.requests


def test_large_chunked_bodies_are_refused_while_they_arrive(wire, engine):
    with wire.open() as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(30):
            client.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert not engine.requests


def test_an_endless_body_is_cut_off(wire):
    def send_for_ever(client):
        while True:
            client.sendall(b" " * 0x10000)

    with wire.open() as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999\r\n\r\n")
        with pytest.raises(OSError):
            send_for_ever(client)


def test_slow_headers_are_cut_off(hasty):
    with hasty.open() as client:
        client.settimeout(5)
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        answer = b""
        while more := client.recv(1000):
            answer += more
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"server.read_timeout_s" in answer


def test_a_silent_connection_is_cut_off(hasty):
    with hasty.open() as client:
        client.settimeout(5)
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_a_slow_body_is_cut_off(hasty):
    with hasty.open() as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = b""
        while data := client.recv(1000):
            answer += data
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer


def send_chat(client, **fields):
    body = json.dumps(CHAT | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)


def test_disconnect_mid_stream_cancels(wire, engine, until):
    engine.answer, engine.delay_s = "x" * 3000, 0.01
    with wire.open() as client:
        send_chat(client, stream=True)
        assert b"200 OK" in client.recv(1000)
    until(lambda: engine.cancelled)
    assert engine.running == 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}], ids=str)
def test_disconnect_while_waiting_cancels(wire, engine, until, fields):
    engine.delay_s = 30.0
    with wire.open() as client:
        send_chat(client, **fields)
        until(lambda: engine.running == fields.get("n", 1))
    until(lambda: engine.running == 0)
    assert len(engine.cancelled) == fields.get("n", 1)


def test_a_half_closed_connection_counts_as_closed(wire, engine, until):
    engine.delay_s = 30.0
    with wire.open() as client:
        send_chat(client, stream=True)
        until(lambda: engine.running == 1)
        client.shutdown(socket.SHUT_WR)
        until(lambda: engine.running == 0)


def test_a_client_that_reads_nothing_is_dropped(hasty, engine, until):
    engine.answer, engine.step = "x" * 4_000_000, 4000
    engine.info = type(engine.info)(**{**_fields(engine.info), "max_context": 10**9})
    with hasty.open() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send_chat(client, stream=True)
        until(lambda: engine.cancelled, 10)
    assert engine.running == 0


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_a_quiet_stream_is_kept_alive(wire, engine):
    engine.answer, engine.delay_s = "abcdef", 0.5
    body = wire.chat(stream=True)[2]
    assert body.count(b": keepalive\n\n") >= 1


def test_requests_that_take_too_long_end(wire_to, until):
    engine = FakeEngine("x" * 300)
    engine.delay_s = 0.1
    config = ServerConfig(port=0, request_timeout_s=0.4, shutdown_s=1)
    with running(build_app(engine, config), config) as url:
        wire = wire_to(url)
        status, error = error_of(wire.chat())
        assert (status, error["code"]) == (504, "timeout")
        assert engine.running == 0
        body = wire.chat(stream=True)[2]
        assert b'"timeout"' in body
        until(lambda: engine.running == 0)


def test_unknown_paths_and_methods_answer_in_shape(wire):
    assert error_of(wire.get("/v2/nothing"))[0] == 404
    answer = wire.get("/v1/chat/completions")
    assert error_of(answer)[0] == 405
    assert answer[1]["allow"] == "POST"


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/models", "/v1"])
def test_a_wrong_base_url_is_told_the_right_one(refusing, path):
    status, error = error_of(refusing.get(path))
    assert (status, error["code"]) == (404, "unknown_url")
    assert f"base_url is {refusing.base_url}/v1." in error["message"]


def raw_error(wire, data):
    """Status and error of what is sent as it is."""
    with wire.open() as client:
        client.sendall(data)
        answer = b""
        while more := client.recv(65536):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    return error_of((int(head.split()[1]), None, json.loads(body)))


def test_not_http_at_all(wire):
    status, error = raw_error(wire, b"\x16\x03\x01 hello\r\n\r\n")
    assert (status, error["code"]) == (400, "not_http")
    assert "https://" in error["message"], "the likeliest reason is TLS"
    assert wire.get("/health")[0] == 200


def test_large_headers_are_refused_by_name(refusing):
    status, error = error_of(refusing.get("/v1/models", {"x-big": "a" * 70_000}))
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "x-big alone 70000" in error["message"]
    assert refusing.get("/v1/models", {"x-big": "a" * 60_000})[0] == 200


def test_endless_headers_are_cut_off(wire):
    with wire.open() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: ")
        # Whoever goes on sending may find the connection reset before the answer is read.
        with suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(b"a" * 200_000)
            assert client.recv(100).startswith(b"HTTP/1.1 431")
    assert wire.get("/health")[0] == 200


def test_refused_values_are_told_with_what_would_do(refusing):
    assert "got -1." in error_of(refusing.chat(temperature=-1))[1]["message"]
    assert (
        "choose one of 'auto', 'none', 'required'."
        in error_of(refusing.chat(tool_choice="maybe"))[1]["message"]
    )
    robot = {"model": "fake-model", "messages": [{"role": "robot", "content": "x"}]}
    assert "'system', 'tool', 'user'." in error_of(refusing.post("/v1/chat/completions", robot))[1]["message"]
    # What is long would hide the reason.
    assert len(error_of(refusing.chat(stop="x" * 2000))[1]["message"]) < 200


def test_shutdown_closes_the_engine(engine, config):
    with running(build_app(engine, config), config):
        pass
    assert engine.is_closed


def test_more_connections_than_allowed_are_turned_away(engine, wire_to, until):
    config = ServerConfig(port=0, shutdown_s=1, connections_max=3)
    with running(build_app(engine, config), config) as url:
        wire = wire_to(url)
        with wire.open(), wire.open():
            until(lambda: wire.get("/health")[0] == 503)
            assert wire.chat()[0] == 503
        until(lambda: wire.chat()[0] == 200)


SERVE = """
import sys
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.gateway.serve import listen
from workmem.gateway.serve import serve
from workmem.testing.fake_engine import FakeEngine

engine = FakeEngine("x" * 30)
engine.delay_s = 0.05
serve(build_app(engine), ServerConfig(port=0, shutdown_s=int(sys.argv[1])), lambda url: print(url, flush=True))
print("closed", engine.is_closed, "running", engine.running, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("shutdown_s", "is_whole"), [(5, True), (1, False)])
def test_a_signal_stops_the_server_within_its_bound(wire_to, number, shutdown_s, is_whole):
    command = [sys.executable, "-c", SERVE, str(shutdown_s)]
    if not is_whole:
        command[2] = SERVE.replace("0.05", "3.0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        wire = wire_to(process.stdout.readline().strip())
        with wire.open() as client:
            send_chat(client, stream=True)
            if is_whole:
                assert b"200 OK" in client.recv(1000)
            else:
                time.sleep(0.3)
            began = time.monotonic()
            process.send_signal(number)
            answer = b""
            while data := client.recv(65536):
                answer += data
        assert process.stdout.readline() == "closed True running 0\n"
        assert process.wait(10) == 0
        assert time.monotonic() - began < shutdown_s + 3
        assert (b"[DONE]" in answer) == is_whole


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)],
    ids=["once", "term", "twice"],
)
def test_a_stream_that_a_stop_cuts_off_is_told_so(wire_to, number, times):
    # Twice: nobody has to wait for what the first Ctrl-C lets finish.
    command = [sys.executable, "-c", SERVE.replace('"x" * 30', '"x" * 3000'), "30" if times == 2 else "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wire = wire_to(process.stdout.readline().strip())
        with wire.open() as client:
            send_chat(client, stream=True)
            assert b"200 OK" in client.recv(1000)
            began = time.monotonic()
            for _ in range(times):
                process.send_signal(number)
                time.sleep(0.3)
            answer = b""
            while data := client.recv(65536):
                answer += data
        assert process.stdout.readline() == "closed True running 0\n"
        assert (process.wait(10), process.stderr.read()) == (0, ""), (
            "a stop is no error and leaves no traceback"
        )
        assert time.monotonic() - began < 8
    assert b'"code":"stopping"' in answer
    assert b"[DONE]" not in answer


def test_a_stop_says_what_it_waits_for(engine, wire_to, until):
    engine.delay_s = 0.02
    waited = []
    app, config = build_app(engine, PATIENT), PATIENT
    listener = listen(config)
    urls = []
    server = Server(app, config, urls.append, waited.append)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: urls)
    with wire_to(urls[0]).open() as client:
        send_chat(client, stream=True)
        assert client.recv(1000)
        server.should_exit = True
        thread.join(10)
    assert waited == [1]


def test_a_taken_port_is_a_clear_error(wire):
    with pytest.raises(ConfigError, match=r"\$\.server\.port: cannot listen on .* or stop what uses it\."):
        listen(ServerConfig(port=wire.address[1]))


def test_a_strange_address_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"\$\.server\.host: cannot listen on .* 127\.0\.0\.1"):
        listen(ServerConfig(host="192.0.2.1", port=0))
