"""What every tier below dram has to pass. Subclass the suite, say how to make the tier, and let pytest collect it.

    class TestMyTier(TierSuite):
        def make(self) -> Tier:
            return MyTier()

`below_suite.BelowSuite` drives a whole store over the tier.
"""

# ruff: noqa: D102 - the names of tests say what they are about

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager

from workmem.store.arena import align
from workmem.store.tiers.contract import ArenaMemory, Outcome, PageIn, Tier
from workmem.store.tiers.page_header import header_bytes
from workmem.testing.pages import SLICED, SMALL, Chain, namespace
from workmem.testing.tier_bench import WAIT_S, Bench, outcomes_of, page_of, require


class TierSuite(ABC):
    """The contract of `workmem.store.tiers.contract.Tier`. Blocks are 4 KiB and 192 KiB."""

    @abstractmethod
    def make(self) -> Tier:
        """A tier without pages, not open, with room for twelve of 192 KiB at the least."""

    def again(self, tier: Tier) -> Tier | None:
        """The closed `tier` as the next process would have it; None where pages do not outlive it."""
        del tier
        return None

    @contextmanager
    def bench(self, tier: Tier | None = None, *, places: int = 12, sliced: bool = False) -> Generator[Bench]:
        """A tier, open, closed at the end."""
        layout = SLICED if sliced else SMALL
        size = header_bytes(layout) + align(layout.page_bytes)
        memory = memoryview(mmap.mmap(-1, places * size))
        tier = self.make() if tier is None else tier
        held = list(tier.open(ArenaMemory(_address(memory), len(memory))))
        try:
            yield Bench(tier, places, held, memory)
        finally:
            require(tier.close(WAIT_S), "the tier does not close")

    def chain(self, *, seed: int = 0, sliced: bool = False, length: int = 12) -> Chain:
        """Blocks to work with."""
        return Chain(namespace(layout=SLICED if sliced else SMALL), length, seed=seed)

    def test_what_is_put_is_what_comes_back(self) -> None:
        for sliced in (False, True):
            chain = self.chain(sliced=sliced)
            with self.bench(sliced=sliced) as bench:
                require(not bench.held, "a new tier holds pages")
                require(bench.put(chain, range(12)) == [Outcome.DONE] * 12, "pages were not kept")
                require(bench.get(chain, range(11, -1, -1)) == [Outcome.DONE] * 12, "pages did not come")

    def test_what_was_never_put_is_absent_and_says_so_page_by_page(self) -> None:
        chain, other = self.chain(), self.chain(seed=1)
        with self.bench() as bench:
            bench.put(chain, range(0, 12, 2))
            wanted = [Outcome.DONE if index % 2 == 0 else Outcome.ABSENT for index in range(12)]
            require(bench.get(chain, range(12)) == wanted, "absent pages are not told from others")
            require(bench.get(other, range(3)) == [Outcome.ABSENT] * 3, "a page under another name came")

    def test_one_key_under_two_roots_is_two_pages(self) -> None:
        mine, other = self.chain(), Chain(namespace("other"), 12)
        other.keys = mine.keys
        with self.bench() as bench:
            bench.put(mine, [0])
            require(bench.get(other, [0]) == [Outcome.ABSENT], "the root is no part of the name")

    def test_putting_again_is_done_and_changes_nothing(self) -> None:
        chain = self.chain()
        with self.bench() as bench:
            bench.put(chain, range(4))
            require(bench.put(chain, range(4)) == [Outcome.DONE] * 4, "a page that is there is not DONE")
            require(bench.get(chain, range(4)) == [Outcome.DONE] * 4, "pages were lost")

    def test_the_memory_that_was_put_from_may_change_afterwards(self) -> None:
        chain = self.chain()
        with self.bench() as bench:
            bench.put(chain, range(4))
            for place in range(12):
                bench.room(place)[:] = b"\xff" * len(bench.room(place))
            require(bench.get(chain, range(4)) == [Outcome.DONE] * 4, "pages were lost")

    def test_what_is_dropped_is_gone(self) -> None:
        chain = self.chain()
        with self.bench() as bench:
            bench.put(chain, range(6))
            names = [(chain.root, key) for key in chain.keys]
            require(bench.drop(names[:3]) == [Outcome.DONE] * 3, "pages could not be dropped")
            require(bench.drop(names[:1]) == [Outcome.DONE], "dropping what is not there is not DONE")
            wanted = [Outcome.ABSENT] * 3 + [Outcome.DONE] * 3
            require(bench.get(chain, range(6)) == wanted, "what came is not what was kept")
            require(bench.put(chain, [0]) == [Outcome.DONE], "a dropped page cannot be put again")
            require(bench.get(chain, [0]) == [Outcome.DONE], "a page put again does not come")

    def test_usage_follows(self) -> None:
        chain = self.chain()
        with self.bench() as bench:
            before = bench.tier.usage()
            bench.put(chain, range(8))
            after = bench.tier.usage()
            require(after.pages == before.pages + 8, f"{after.pages} pages are counted")
            require(after.used_bytes > before.used_bytes, "pages take no bytes")
            require(not after.capacity_bytes or after.used_bytes <= after.capacity_bytes, "over capacity")

    def test_more_than_fits_is_refused_or_forgotten_and_never_a_failure(self) -> None:
        with self.bench(sliced=True) as bench:
            kept: list[tuple[Chain, int, Outcome]] = []
            for seed in range(4):
                chain = self.chain(seed=seed, sliced=True)
                for index, outcome in enumerate(bench.put(chain, range(12))):
                    kept.append((chain, index, outcome))
            require(Outcome.FAILED not in {outcome for _, _, outcome in kept}, "a full tier fails")
            for chain, index, outcome in kept:
                (found,) = bench.get(chain, [index])
                require(found in {Outcome.DONE, Outcome.ABSENT}, f"a page is {found}")
                require(found is Outcome.ABSENT or outcome is Outcome.DONE, "a refused page is there")

    def test_many_threads_at_a_time(self) -> None:
        problems: list[str] = []

        def work(bench: Bench, seed: int) -> None:
            chain = self.chain(seed=seed)
            room, into = bench.room(seed), bench.room(6 + seed)
            page = page_of(chain, 0, room)
            for _ in range(20):
                put = outcomes_of(1, lambda done: bench.tier.put([page], done))
                into[:] = bytes(len(into))
                get = outcomes_of(1, lambda done: bench.tier.get([PageIn(page.about.name, into)], done))
                if put + get != [Outcome.DONE] * 2 or into != room:
                    problems.append(f"thread {seed}: {put} {get}")
                outcomes_of(1, lambda done: bench.tier.drop([page.about.name], done))

        with self.bench() as bench:
            threads = [threading.Thread(target=work, args=(bench, seed)) for seed in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        require(not problems, "; ".join(problems[:3]))

    def test_an_empty_batch_is_no_matter(self) -> None:
        with self.bench() as bench:
            require(outcomes_of(0, lambda done: bench.tier.put([], done)) == [], "it was answered for")
            require(outcomes_of(0, lambda done: bench.tier.get([], done)) == [], "it was answered for")

    def test_closing_twice_is_closing_once(self) -> None:
        with self.bench() as bench:
            require(bench.tier.close(WAIT_S), "the tier does not close")

    def test_what_outlives_is_told_at_the_next_start(self) -> None:
        chain = self.chain()
        tier = self.make()
        with self.bench(tier) as bench:
            bench.put(chain, range(5))
            bench.drop([(chain.root, chain.keys[4])])
        next_one = self.again(tier)
        if next_one is None:
            return
        with self.bench(next_one) as bench:
            found = {about.name.key: about for about in bench.held}
            require(
                set(found) == {bytes(key) for key in chain.keys[:4]}, "other pages are told than are there"
            )
            require([found[bytes(key)].depth for key in chain.keys[:4]] == [0, 1, 2, 3], "depths differ")
            require(bench.get(chain, range(4)) == [Outcome.DONE] * 4, "pages that were told do not come")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
