"""The lever that empties vram: for local callers, and only where an engine has one."""

from workmem.gateway.app import build_app
from workmem.testing.fake_engine import FakeEngine
from workmem.testing.server import running


class EngineWithVram(FakeEngine):
    async def drop_vram(self):
        return 7


def test_local_callers_may_drop_vram(config, wire_to):
    with running(build_app(EngineWithVram(), config), config) as url:
        status, _, body = wire_to(url).post("/debug/drop_vram", b"")
    assert (status, body) == (200, {"dropped_blocks": 7})


def test_an_engine_without_vram_says_so(wire):
    status, _, body = wire.post("/debug/drop_vram", b"")
    assert status == 404
    assert "no vram" in body["error"]["message"]
