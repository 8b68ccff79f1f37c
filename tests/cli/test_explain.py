"""`workmem explain` against a real server of a scripted engine."""

import json
import urllib.request

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from workmem.cli.main import main
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running


@pytest.fixture(scope="module")
def server():
    with running(build_app(FakeEngine(), ServerConfig())) as url:
        yield url


def ask(url: str, text: str) -> str:
    body = {"model": "fake-model", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)["id"]


def test_each_span_is_accounted_for(server, capsys):
    shared = "A long story about a fox and a goose that everybody knows by heart. "
    ask(server, shared + "What did the fox say?")
    request_id = ask(server, shared + "What did the goose say?")
    assert main(["explain", request_id, "--url", server]) == 0
    out = capsys.readouterr().out
    assert out.startswith(request_id)
    assert "messages[0].content" in out
    assert "vram" in out
    assert "computed" in out
    assert "differs from its token" in out
    assert main(["explain", "--last", "--url", f"{server}/v1"]) == 0
    assert capsys.readouterr().out == out


def test_kv_that_was_kept_rounded_is_said(capsys):
    engine = FakeEngine()
    engine.approximate = True
    with running(build_app(engine, ServerConfig())) as url:
        for state in ("differs", "approximate"):
            request_id = ask(url, "A long story about a fox and a goose that everybody knows by heart. ")
            assert main(["explain", request_id, "--url", url]) == 0
            assert ("approximate" in capsys.readouterr().out) is (state == "approximate")


def test_an_id_nobody_knows_is_said(server, capsys):
    assert main(["explain", "nosuch", "--url", server]) == 1
    assert "No request 'nosuch' is remembered" in capsys.readouterr().err


def test_a_server_without_requests_has_no_last_one(capsys):
    with running(build_app(FakeEngine(), ServerConfig())) as url:
        assert main(["explain", "--last", "--url", url]) == 1
    assert "has served no request yet" in capsys.readouterr().err


def test_a_key_is_sent_where_one_is_asked_for(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("secret-of-acme:acme\n")
    with running(build_app(FakeEngine(), ServerConfig(api_key_file=str(keys)))) as url:
        assert main(["explain", "--last", "--url", url]) == 1
        assert "401" in capsys.readouterr().err
        mine = tmp_path / "key"
        mine.write_text("secret-of-acme\n")
        assert main(["explain", "--last", "--url", url, "--key-file", str(mine)]) == 1
        assert "has served no request yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "cannot read"), ("\n", "is empty"), ("k\u00e9y", "a header")]
)
def test_a_key_file_that_gives_no_key_is_a_wrong_command_line(tmp_path, capsys, content, problem):
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    assert main(["explain", "--last", "--key-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("workmem: --key-file: ")
    assert problem in err


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "127.0.0.1:8000", "http://", "http://a:b", "http://a b", "http://[a"]
)
def test_what_is_no_url_is_a_wrong_command_line(capsys, url):
    assert main(["explain", "--last", "--url", url]) == 2
    assert "workmem: --url: must be like http://" in capsys.readouterr().err


def test_nobody_there_is_one_line(capsys):
    assert main(["explain", "--last", "--url", "http://127.0.0.1:9"]) == 1
    assert "is `workmem serve` running there?" in capsys.readouterr().err


def test_another_kind_of_server_is_told_apart(capsys):
    with running(Starlette(routes=[Route("/debug/requests", lambda _: PlainTextResponse("hello"))])) as url:
        assert main(["explain", "--last", "--url", url]) == 1
    assert "not as workmem does" in capsys.readouterr().err


def test_the_cause_stands_before_the_spans(server, capsys):
    clock = "It is {}. A long story about a fox and a goose that everybody knows by heart."
    for time in ("10:15:03", "10:16:04"):
        request_id = ask(server, clock.format(time))
    assert main(["explain", request_id, "--url", server]) == 0
    out = capsys.readouterr().out
    assert 'volatile_time at messages[0].content: a time changed from "10:15:03" to "10:16:04"' in out
    assert out.index("fix: Put it behind everything") < out.index("computed  ")
    assert main(["explain", request_id, "--json", "--url", server]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["name"] == "volatile_time"
    assert main(["explain", "--worst", "3", "--url", server]) == 0
    assert "volatile_time" in capsys.readouterr().out


def test_nothing_lost_is_said(capsys):
    with running(build_app(FakeEngine(), ServerConfig())) as url:
        ask(url, "Hello.")
        assert main(["explain", "--worst", "3", "--url", url]) == 0
    assert "no recent request lost tokens" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["x", "--last"], ["--last", "--worst", "3"], ["--worst", "0"]])
def test_one_thing_is_asked_for(capsys, words):
    assert main(["explain", *words]) == 2
    assert "workmem: " in capsys.readouterr().err
