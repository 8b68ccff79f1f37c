"""The scrubber: everything is read in time, at a bounded rate, and only what is damaged leaves service."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

import pytest

from workmem.core.errors import IntegrityError
from workmem.core.outcomes import MissReason
from workmem.store.scrubber import PASS_EVERY_S, Scrubber, ScrubThread
from workmem.store.tools.folder_view import read_folder
from workmem.store.tools.pages import PageReader
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import Chain, namespace

pytestmark = pytest.mark.timeout(60)

PAGE = 1000


class Shelf:
    """Segments of page names; names in `rotten` and `dead` fail as they say."""

    def __init__(self, segments: dict[int, list[str]]) -> None:
        self.held = segments
        self.rotten: set[str] = set()
        self.dead: set[str] = set()
        self.gone: set[str] = set()
        self.read_order: list[str] = []
        self.struck: list[tuple[str, MissReason]] = []
        self.busy = False

    def segments(self) -> Sequence[int]:
        return list(self.held)

    def pages(self, segment: int) -> Sequence[str]:
        return list(self.held.get(segment, ()))

    def read(self, page: str) -> int | None:
        if page in self.gone:
            return None
        self.read_order.append(page)
        if page in self.rotten:
            raise IntegrityError(f"{page} is rotten")
        if page in self.dead:
            raise OSError(errno.EIO, "no such luck")
        return PAGE

    def quarantine(self, page: str, reason: MissReason) -> None:
        self.struck.append((page, reason))

    def is_busy(self) -> bool:
        return self.busy


def scrubber(shelf: Shelf, clock, rate: int = PAGE, sink=lambda event: None) -> Scrubber[str]:
    return Scrubber(shelf, clock, sink, rate)


def drive(made: Scrubber[str], clock, steps: int) -> float:
    """Take steps, waiting as told; returns how long that took."""
    began = clock.now
    for _ in range(steps):
        clock.now += made.step()
    return clock.now - began


def test_every_page_is_read_once_a_pass_in_the_order_it_lies(hand_clock):
    shelf = Shelf({7: ["c", "d"], 2: ["a", "b"], 9: []})
    made = scrubber(shelf, hand_clock)
    while not made.counts.passes:
        hand_clock.now += made.step()
    assert shelf.read_order == ["a", "b", "c", "d"]
    assert (made.counts.pages, made.counts.bytes, made.counts.damaged) == (4, 4 * PAGE, 0)
    while made.counts.passes < 2:
        hand_clock.now += made.step()
    assert shelf.read_order == ["a", "b", "c", "d"] * 2


def test_the_rate_is_kept(hand_clock):
    shelf = Shelf({1: [str(number) for number in range(50)]})
    made = scrubber(shelf, hand_clock, rate=100)
    took = drive(made, hand_clock, 50)
    assert took == pytest.approx(50 * PAGE / 100)


def test_a_pass_begins_a_day_after_the_one_before_began(hand_clock):
    shelf = Shelf({1: ["a", "b"]})
    made = scrubber(shelf, hand_clock)
    began = hand_clock.now
    while len(shelf.read_order) < 3:
        hand_clock.now += made.step()
    assert hand_clock.now - began >= PASS_EVERY_S


def test_it_goes_on_where_it_was_when_segments_come_and_go(hand_clock):
    shelf = Shelf({1: ["a"], 2: ["b"], 3: ["c"]})
    made = scrubber(shelf, hand_clock)
    drive(made, hand_clock, 2)
    assert shelf.read_order == ["a", "b"]
    del shelf.held[1], shelf.held[2]
    shelf.held[4] = ["d"]
    drive(made, hand_clock, 2)
    assert shelf.read_order == ["a", "b", "c", "d"]


def test_damage_is_struck_out_and_counted_and_the_walk_goes_on(hand_clock):
    shelf = Shelf({1: ["a", "b", "c", "d"]})
    shelf.rotten, shelf.dead, shelf.gone = {"b"}, {"c"}, {"a"}
    made = scrubber(shelf, hand_clock)
    drive(made, hand_clock, 4)
    assert shelf.struck == [("b", MissReason.CORRUPT), ("c", MissReason.UNAVAILABLE)]
    assert (made.counts.pages, made.counts.damaged, made.counts.unreadable) == (1, 1, 1)


def test_a_disk_that_reads_nothing_does_not_cost_every_page(hand_clock):
    shelf = Shelf({1: [str(number) for number in range(100)]})
    shelf.dead = set(shelf.held[1])
    events = []
    made = scrubber(shelf, hand_clock, sink=events.append)
    while not events:
        hand_clock.now += made.step()
    assert len(shelf.struck) == 7
    assert events[0].name == "store.ssd.scrub"
    assert made.counts.passes == 0
    before = hand_clock.now
    hand_clock.now += made.step()
    assert shelf.read_order[-1] == "0"
    assert hand_clock.now >= before


def test_others_go_first(hand_clock):
    shelf = Shelf({1: ["a"]})
    shelf.busy = True
    made = scrubber(shelf, hand_clock)
    assert drive(made, hand_clock, 20) > 0
    assert shelf.read_order == []
    shelf.busy = False
    drive(made, hand_clock, 1)
    assert shelf.read_order == ["a"]


def test_an_empty_store_is_looked_at_now_and_then(hand_clock):
    shelf = Shelf({})
    made = scrubber(shelf, hand_clock)
    assert drive(made, hand_clock, 3) > 3
    shelf.held[1] = ["a"]
    drive(made, hand_clock, 1)
    assert shelf.read_order == ["a"]
    assert made.counts.passes == 0


def test_the_thread_ends_when_told_and_survives_no_bug_of_ours(monkeypatch, caplog):
    monkeypatch.setattr("workmem.store.scrubber._IDLE_TICK_S", 0.01)
    steps = threading.Semaphore(0)

    def step() -> float:
        steps.release()
        return 0.0

    thread = ScrubThread(step)
    for _ in range(3):
        assert steps.acquire(timeout=10)
    assert thread.close(10)

    def bug() -> float:
        raise KeyError("ours")

    thread = ScrubThread(bug)
    thread._thread.join(10)
    assert thread.close(10)
    assert "the scrubber met a bug of ours" in caplog.text


class FolderSource:
    """The pages of a closed store's folder, over a disk that may misbehave."""

    def __init__(self, folder, device: FaultyDevice) -> None:
        self.view = read_folder(folder)
        (self.space,) = self.view.spaces
        self.reader = PageReader(self.view, device)
        self.struck: list[tuple[int, MissReason]] = []

    def segments(self) -> Sequence[int]:
        return list(self.view.segments)

    def pages(self, segment: int):
        found = [page for page in self.space.pages.values() if page.segment == segment]
        return sorted(found, key=lambda page: page.offset)

    def read(self, page) -> int | None:
        self.reader.check(self.space, page)
        return page.length

    def quarantine(self, page, reason: MissReason) -> None:
        self.struck.append((page.depth, reason))

    def is_busy(self) -> bool:
        return False


def test_over_a_faulty_disk_rot_and_bad_sectors_are_told_apart(kit, hand_clock):
    chain = Chain(namespace(), 8)
    store = kit.open()
    chain.save(store)
    store.close()
    plan = FaultPlan()
    source = FolderSource(kit.folder, FaultyDevice(plan))
    by_depth = {page.depth: page for page in source.space.pages.values()}
    file = kit.folder / "segments" / f"{by_depth[3].segment:010d}.seg"
    raw = bytearray(file.read_bytes())
    raw[by_depth[3].offset + 5000] ^= 1
    file.write_bytes(raw)

    def bad_sector(path, offset: int) -> None:
        if offset == by_depth[5].offset:
            raise OSError(errno.EIO, "bad sector")

    plan.before_read = bad_sector
    made = Scrubber(source, hand_clock, lambda event: None, 10**6)
    while not made.counts.passes:
        hand_clock.now += made.step()
    source.reader.close()
    assert source.struck == [(3, MissReason.CORRUPT), (5, MissReason.UNAVAILABLE)]
    assert (made.counts.pages, made.counts.damaged, made.counts.unreadable) == (6, 1, 1)
