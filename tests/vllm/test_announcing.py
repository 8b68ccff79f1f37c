"""What is published of the store's blocks is what the store has, as far as looking at it now and then can tell."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from fake_engine import FakeVllm, Request
from small import FACTS, SIZE

from workmem.core.keys import BlockKey
from workmem.core.outcomes import TierName
from workmem.engines.vllm import announcing
from workmem.engines.vllm.announcing import LOOK_S, YOUNG_S, Announcer, RemovedRun, RunOrigin, StoredRun
from workmem.engines.vllm.facts import Scope
from workmem.engines.vllm.scheduler import SchedulerSide
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store

DRAM, SSD = TierName.DRAM, TierName.SSD
MINE = RunOrigin(Scope(), "s")


def key(name: str) -> BlockKey:
    return BlockKey(hashlib.sha256(name.encode()).digest())


K = [key(str(n)) for n in range(8)]


class Case:
    """An announcer before a store that is a dictionary."""

    def __init__(self) -> None:
        self.tiers: dict[BlockKey, TierName] = {}
        self.now = 0.0
        self.looks: list[int] = []
        self.announcer = Announcer(self.resident, 2, lambda: self.now)

    def resident(self, scope, keys) -> list[TierName]:
        del scope
        self.looks.append(len(keys))
        found = []
        for one in keys:
            if one not in self.tiers:
                break
            found.append(self.tiers[one])
        return found

    def seen(self, start: int, end: int, origin: RunOrigin = MINE) -> None:
        parent = K[start - 1] if start else b""
        self.announcer.seen(K[start:end], parent, range(2 * start, 2 * end), origin)

    def take(self, seconds: float = LOOK_S) -> list:
        self.now += seconds
        return self.announcer.take()


def stored(start: int, end: int, tier: TierName = DRAM, origin: RunOrigin = MINE) -> StoredRun:
    parent = K[start - 1] if start else b""
    return StoredRun(tuple(K[start:end]), parent, tuple(range(2 * start, 2 * end)), tier, origin)


def removed(start: int, end: int, tier: TierName = DRAM) -> RemovedRun:
    return RemovedRun(tuple(K[start:end]), tier)


def test_a_block_is_announced_when_it_is_there_and_not_before():
    case = Case()
    case.seen(0, 3)
    assert case.take() == []
    case.tiers = dict.fromkeys(K[:2], DRAM)
    assert case.take() == [stored(0, 2)]
    case.tiers[K[2]] = DRAM
    assert case.take() == [stored(2, 3)]
    assert case.take() == []


def test_a_block_that_moves_down_is_announced_where_it_is():
    case = Case()
    case.seen(0, 3)
    case.tiers = dict.fromkeys(K[:3], DRAM)
    case.take()
    case.tiers[K[1]] = case.tiers[K[2]] = SSD
    assert case.take() == [removed(1, 3), stored(1, 3, SSD)]


def test_what_lies_behind_an_evicted_block_is_gone_too():
    case = Case()
    case.seen(0, 4)
    case.tiers = dict.fromkeys(K[:4], DRAM)
    case.take()
    del case.tiers[K[1]]
    assert case.take(YOUNG_S) == [removed(1, 4)]
    assert len(case.announcer) == 1
    # Saved again, it is announced again.
    case.tiers[K[1]] = DRAM
    case.seen(1, 4)
    assert case.take() == [stored(1, 4)]


def test_a_block_that_was_dropped_is_not_waited_for_for_ever():
    case = Case()
    case.seen(0, 2)
    case.take()
    case.take(YOUNG_S)
    assert len(case.announcer) == 0
    before = len(case.looks)
    case.take()
    assert len(case.looks) == before
    assert case.announcer.counts["blocks_not_found"] == 2


def test_neighbours_that_come_one_by_one_are_looked_at_together():
    case = Case()
    for at in range(8):
        case.seen(at, at + 1)
    case.tiers = dict.fromkeys(K, DRAM)
    assert case.take() == [stored(0, 8)]
    assert case.looks == [8]
    other = RunOrigin(Scope(), "another")
    case.announcer.seen([key("x")], K[7], [1, 2], other)
    case.tiers[key("x")] = DRAM
    assert case.take() == [StoredRun((key("x"),), K[7], (1, 2), DRAM, other)]


def test_the_store_is_asked_seldom_and_for_little(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announcing, "RUN_KEYS_MAX", 2)
    case = Case()
    case.seen(0, 8)
    case.tiers = dict.fromkeys(K, DRAM)
    said = [one for _ in range(10) for one in case.take(0.0)]
    assert len(case.looks) == announcing.LOOKS - 1
    assert set(case.looks) == {2}
    said += case.take(LOOK_S / 2)
    assert len(case.looks) == announcing.LOOKS - 1
    said += case.take(LOOK_S / 2)
    assert said == [stored(at, at + 2) for at in range(0, 8, 2)]


def test_every_run_has_its_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announcing, "RUN_KEYS_MAX", 1)
    case = Case()
    case.seen(0, 8)
    case.tiers = dict.fromkeys(K, DRAM)
    while case.announcer._young:
        case.take()
    for one in K:
        case.tiers[one] = SSD
    said = [one for _ in range(8) for one in case.take()]
    assert sorted(one.keys[0] for one in said if isinstance(one, StoredRun)) == sorted(K)


def test_at_the_bound_the_oldest_run_is_taken_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announcing, "KEYS_MAX", 4)
    monkeypatch.setattr(announcing, "RUN_KEYS_MAX", 2)
    case = Case()
    case.seen(0, 4)
    case.tiers = dict.fromkeys(K, DRAM)
    case.take()
    case.seen(0, 2)
    case.seen(4, 6)
    assert case.take(0.0) == [removed(2, 4)]
    assert len(case.announcer) == 4
    assert case.announcer.counts["announcer_full"] == 1


def test_a_new_epoch_takes_all_back():
    case = Case()
    case.seen(0, 2)
    case.tiers = dict.fromkeys(K[:2], DRAM)
    case.take()
    case.announcer.forget_all()
    assert case.take() == [removed(0, 2)]
    assert len(case.announcer) == 0


def announcing_engine(store: Store) -> FakeVllm:
    made = FakeVllm(store, 32)
    made.side = SchedulerSide(
        FACTS, "weights", store, made.settings, clock=lambda: float(next(TICKS)), announces=True
    )
    return made


TICKS = iter(range(10**9))


def test_an_engine_announces_what_it_saves_what_it_finds_and_a_new_epoch(tmp_path: Path):
    store = Store(
        StoreConfig(
            dram=DramConfig(bytes="1MiB"),
            ssd=SsdConfig(path=str(tmp_path / "ssd"), bytes="16MiB", scrub_bytes_per_s=0, io="buffered"),
        )
    )
    first, second = announcing_engine(store), announcing_engine(store)
    request = Request("a", list(range(100, 100 + 6 * SIZE + 1)), to_generate=SIZE, cache_salt="t")
    first.add(request)
    first.run()
    assert store.flush(5)
    said = first.side.take_announcements()
    keys = [one for run in said for one in run.keys]
    assert keys == list(request.block_hashes)
    assert said[0].parent == b""
    assert said[0].origin.scope == Scope("", "t")
    assert [t for run in said for t in run.tokens] == request.all_token_ids[: 7 * SIZE]
    again = Request("b", request.prompt, cache_salt="t")
    second.add(again)
    found = second.side.take_announcements()
    assert [one for run in found for one in run.keys] == keys[:6]
    second.run()
    first.side.start_epoch(1, is_empty=True)
    assert {type(one) for one in first.side.take_announcements()} == {RemovedRun}
    first.close()
    second.close()
    store.close()
