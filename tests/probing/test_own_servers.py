"""The checks against servers of our own: of a scripted engine, in front of another, and of the real model."""

import json

import pytest

from workmem.cli.main import main
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running


@pytest.fixture(scope="module")
def server():
    with running(build_app(FakeEngine(), ServerConfig())) as url:
        yield url


def said_of(url, capsys, *more):
    code = main(["doctor", url, "--yes", "--json", *more])
    out = capsys.readouterr().out
    return code, {finding["check"]: finding for finding in json.loads(out)["findings"]}


def test_a_workmem_is_known_and_tells_where_its_tools_are(server, capsys):
    code, said = said_of(server, capsys)
    assert code == 0
    assert said["server"]["seen"].startswith("workmem; model fake-model")
    assert "in blocks of 16 tokens" in said["block"]["seen"]
    assert said["explained"]["verdict"] == "ok"
    assert "by their keys" in said["salt"]["advice"]


def test_a_workmem_in_front_of_another_server_is_known_and_passes_its_counts(standing_in, capsys):
    with standing_in(block=32) as one:
        app = build_upstream_app(UpstreamConfig(urls=(one.url,)), ServerConfig())
        with running(app) as url:
            code, said = said_of(url, capsys)
    assert code == 0
    assert said["server"]["seen"].startswith("workmem, in front of others; model m")
    assert "in blocks of 32 tokens" in said["block"]["seen"]
    assert said["rounds"]["verdict"] == "ok"


def test_nothing_is_asked_without_consent(standing_in, capsys):
    with standing_in() as one:
        assert main(["doctor", one.url]) == 2
        assert one.requests == 0
    said = capsys.readouterr().err
    assert "takes at most 36 requests" in said
    assert "--yes" in said


def test_a_key_that_is_asked_for_is_named(standing_in, capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    with standing_in(key="secret") as one:
        code, said = said_of(one.url, capsys)
        assert (code, said["prefix cache"]["verdict"]) == (0, "unknown")
        assert "--key-file" in said["prefix cache"]["advice"]
        code, said = said_of(one.url, capsys, "--key-file", str(key))
        assert (code, said["prefix cache"]["verdict"]) == (0, "ok")


def test_the_table_says_what_to_do_and_the_exit_code_that_something_is_wrong(standing_in, capsys):
    with standing_in(caches=False, keeps_output=False) as one:
        assert main(["doctor", f"{one.url}/v1", "--yes"]) == 1
    out = capsys.readouterr().out
    assert "does not cache" in out
    assert "switch prefix caching on" in out
    assert "1 fail" in out


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_caches_says_so_and_finds_its_own_answers(smollm2, capsys, tmp_path):
    from workmem.testing.process import Place, serving

    more = {
        "engine.vram_bytes": "256MiB",
        "store.dram.bytes": "256MiB",
        "engine.deterministic": "false",
        "engine.threads": 2,
    }
    with serving(Place(smollm2, tmp_path / "store"), more=more) as served:
        code, said = said_of(served.url, capsys, "--tokens", "300")
    assert code == 0, said
    for check in ("cached tokens", "prefix cache", "block", "minimum", "rounds", "explained"):
        assert said[check]["verdict"] == "ok", said[check]
    assert "in blocks of 16 tokens" in said["block"]["seen"]
