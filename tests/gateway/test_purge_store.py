"""The lever that has a store forget: who may pull it, and for whom."""

import json

import pytest

from workmem.gateway import debug
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.store.selector import Purged, PurgeSelector
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running

GONE = Purged(namespaces=1, blocks=12, bytes=49152)


class EngineWithVram(FakeEngine):
    async def drop_vram(self):
        return 7


class Store:
    def __init__(self):
        self.asked = []

    def purge(self, chosen):
        self.asked.append(chosen)
        return GONE


@pytest.fixture
def store():
    return Store()


def test_local_callers_purge_what_they_name(config, wire_to, store):
    with running(build_app(EngineWithVram(), config, purge=store.purge), config) as url:
        wire = wire_to(url)
        status, _, body = wire.post("/debug/store/purge", {"tenant": "acme", "epoch": 3})
        assert (status, body) == (
            200,
            {"namespaces": 1, "blocks": 12, "bytes": 49152, "dropped_vram_blocks": 7},
        )
        for wrong in ({}, {"tenat": "acme"}, {"root": "3fa9"}, b"nonsense", {"everything": True, "epoch": 1}):
            status, _, body = wire.post("/debug/store/purge", wrong)
            assert status == 400, json.dumps(body)
    assert store.asked == [PurgeSelector(tenant="acme", epoch=3)]


def test_others_are_refused_without_keys(config, wire_to, store, monkeypatch):
    monkeypatch.setattr(debug, "is_local", lambda _: False)
    with running(build_app(FakeEngine(), config, purge=store.purge), config) as url:
        status, _, _ = wire_to(url).post("/debug/store/purge", {"everything": True})
    assert (status, store.asked) == (403, [])


def test_a_key_with_a_tenant_purges_that_tenant_only(tmp_path, wire_to, store, monkeypatch):
    monkeypatch.setattr(debug, "is_local", lambda _: False)
    keys = tmp_path / "keys"
    keys.write_text("operator-key\nacme-key:acme\n", encoding="utf-8")
    config = ServerConfig(port=0, shutdown_s=1, api_key_file=str(keys))
    with running(build_app(FakeEngine(), config, purge=store.purge), config) as url:

        def ask(key, **fields):
            return wire_to(url).post("/debug/store/purge", fields, {"authorization": f"Bearer {key}"})[0]

        assert ask("wrong", everything=True) == 401
        assert ask("acme-key", everything=True) == ask("acme-key", tenant="other") == 403
        assert store.asked == []
        assert ask("acme-key", tenant="acme", epoch=2) == 200
        assert ask("operator-key", everything=True) == 200
    assert [chosen.everything for chosen in store.asked] == [False, True]


def test_a_server_without_a_store_says_so(wire):
    status, _, body = wire.post("/debug/store/purge", {"everything": True})
    assert status == 404
    assert "no store" in body["error"]["message"]
