"""`workmem store stat` beside a store that is served."""

from __future__ import annotations

import json
import re

import pytest

from workmem.cli.main import main
from workmem.core.outcomes import TierName
from workmem.testing.pages import Chain, namespace

pytestmark = pytest.mark.timeout(60)


def stat(host, *words: str) -> None:
    sets = (f"store.ssd.path={host.folder / 'ssd'}", f"store.host.socket={host.socket}")
    assert main(["store", "stat", *words, *(part for each in sets for part in ("--set", each))]) == 0


def test_stat_asks_the_store_that_is_served(host, capsys):
    host.serve(dram="256KiB")
    client = host.client()
    chain = Chain(namespace(), 4)
    chain.save(client)
    client.pin(chain.root, chain.keys, owner="agent", name="p", ttl_s=600)
    client.set_quota("acme", TierName.DRAM, floor_bytes=4096)
    stat(host)
    told = capsys.readouterr().out
    assert re.search(r"^dram +ok +value ", told, re.MULTILINE)
    assert "hit at 200%" in told
    assert "pins: 1 of 1 owners" in told
    assert "acme" not in told
    stat(host, "--json")
    running = json.loads(capsys.readouterr().out)["running"]
    assert [tier["eviction"] for tier in running["tiers"]] == ["value", "value"]
    assert [tier["state"] for tier in running["tiers"]] == ["ok", "ok"]
    assert running["tiers"][0]["quotas"][0]["floor_bytes"] == 4096
    host.stop()
    stat(host, "--json")
    assert json.loads(capsys.readouterr().out)["running"] is None
