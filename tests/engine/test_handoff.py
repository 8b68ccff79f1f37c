"""Prompts that were just computed elsewhere: the engine waits for their blocks, within bounds, and computes where they do not come."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workmem.core.generation import Handoff
from workmem.core.keys import BlockKey
from workmem.core.outcomes import Lookup, MissReason
from workmem.engines.embedded.handoffs import LOOKS_MAX, Handoffs
from workmem.policy.handoff import Ending
from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.host.client import HostStore
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store
from workmem.testing.mooncake import pool

from .conftest import Bench

Make = Callable[..., Bench]
LONG = Handoff(tokens=100, wait_s=30.0)


def prompt(length: int = 100, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture
def shared() -> Iterator[Store]:
    with Store(StoreConfig(dram=DramConfig(bytes="64MiB"), ssd=SsdConfig(enabled=False))) as opened:
        yield opened
        opened.audit()


async def until(fact: Callable[[], object]) -> None:
    for _ in range(2000):
        if fact():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never")


async def held_back(world: Bench) -> None:
    """Return once a request waits aside."""
    await until(lambda: world.engine.thread.scheduler.holds_back)


def ended(world: Bench) -> dict[str, float]:
    gauges = world.engine.gauges()
    counts = {ending.value: gauges[f"handoffs_{ending}_total"] for ending in Ending}
    return {name: count for name, count in counts.items() if count}


def test_it_waits_for_what_another_engine_computes(bench: Make, shared: Store) -> None:
    prefills, decodes = (
        bench(store=shared, dtype="fp32"),
        bench(store=shared, dtype="fp32", handoff_wait_max_s=30.0),
    )

    async def run() -> None:
        waiting = asyncio.create_task(decodes.ask(prompt(), handoff=LONG))
        await held_back(decodes)
        other = await decodes.ask(prompt(40, seed=1))
        assert other.usage.handoff is None
        assert not waiting.done(), "others run meanwhile"
        first = await prefills.ask(prompt(), 1)
        answer = await waiting
        assert answer.sources() == {"dram": 96, "computed": 4}
        assert answer.usage.handoff is not None
        assert answer.usage.handoff.tokens == 96
        assert answer.usage.handoff.waited_s > 0
        assert answer.tokens[:1] == first.tokens
        again = await decodes.ask(prompt(), handoff=LONG)
        assert again.sources() == {"vram": 96, "computed": 4}
        assert again.usage.handoff is not None
        assert (again.usage.handoff.waited_s, again.usage.handoff.tokens) == (0.0, 0)
        assert again.tokens == answer.tokens
        await decodes.idle()

    asyncio.run(run())
    assert ended(decodes) == {"whole": 1, "ready": 1}
    assert decodes.engine.gauges()["handoff_wait_seconds_total"] > 0


def test_where_nothing_comes_it_computes(bench: Make, shared: Store) -> None:
    decodes = bench(store=shared, handoff_wait_max_s=0.5)

    async def run() -> None:
        answer = await decodes.ask(prompt(), handoff=LONG)
        assert answer.sources() == {"computed": 100}
        assert answer.usage.handoff is not None
        assert 0.2 < answer.usage.handoff.waited_s < 5, (
            "a quarter of half a second, and what the machine takes"
        )
        await decodes.idle()

    asyncio.run(run())
    assert ended(decodes) == {"stalled": 1}


def test_nobody_waits_who_could_not_load(bench: Make, shared: Store) -> None:
    alone, refuses = bench(store=False), bench(store=shared)

    async def run() -> None:
        assert (await alone.ask(prompt(), handoff=LONG)).sources() == {"computed": 100}
        answer = await refuses.ask(prompt(), handoff=LONG, reuse=False)
        assert answer.usage.handoff is not None
        assert answer.usage.handoff.waited_s == 0.0

    asyncio.run(run())
    assert ended(alone) == ended(refuses) == {"unavailable": 1}


def test_one_that_leaves_while_it_waits_leaves_nothing_behind(bench: Make, shared: Store) -> None:
    decodes = bench(store=shared, handoff_wait_max_s=30.0)

    async def run() -> None:
        waiting = asyncio.create_task(decodes.ask(prompt(), handoff=LONG))
        await held_back(decodes)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not decodes.engine.thread.scheduler.waiting)
        assert not decodes.engine.thread.scheduler.holds_back
        await decodes.idle()

    asyncio.run(run())
    assert ended(decodes) == {"left": 1}


def test_one_that_waits_takes_nobodys_place(bench: Make, shared: Store) -> None:
    """It is more urgent than what runs, and there is one place."""
    decodes = bench(store=shared, handoff_wait_max_s=30.0, running_max=1)

    async def run() -> None:
        running = asyncio.create_task(decodes.ask(prompt(40, seed=1), 60))
        await until(lambda: decodes.engine.thread.scheduler.running)
        waiting = asyncio.create_task(decodes.ask(prompt(), handoff=LONG, priority=-5))
        await held_back(decodes)
        await running
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert decodes.engine.gauges()["num_preemptions_total"] == 0


def test_an_engine_that_only_waits_does_not_turn_in_place(bench: Make, shared: Store) -> None:
    decodes = bench(store=shared, handoff_wait_max_s=30.0)
    looks: list[int] = []
    inner = decodes.engine.thread.scheduler.plan

    def plan(now: float):
        looks.append(1)
        return inner(now)

    async def run() -> None:
        waiting = asyncio.create_task(decodes.ask(prompt(), handoff=LONG))
        await held_back(decodes)
        decodes.engine.thread.scheduler.plan = plan
        await asyncio.sleep(0.3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert 3 <= len(looks) <= 80


def test_many_whose_time_is_up_do_not_make_a_step_long() -> None:
    looked: list[bytes] = []

    def lookup(root: bytes, keys: object) -> Lookup:
        looked.append(root)
        return Lookup(reason=MissReason.COLD)

    store: Any = SimpleNamespace(lookup=lookup, announce=lambda *_: None)
    handoffs = Handoffs(store, 30.0)
    seqs: list[Any] = [waiting_seq(number) for number in range(40)]
    for seq in seqs:
        handoffs.arrives(seq)
    handoffs.step_begins(1.0)
    assert all(handoffs.waits(seq, lambda _: (), 1.0) for seq in seqs)
    assert len(looked) == LOOKS_MAX
    looked.clear()
    handoffs.step_begins(60.0)
    assert not any(handoffs.waits(seq, lambda _: (), 60.0) for seq in seqs)
    assert len(looked) == LOOKS_MAX
    assert handoffs.counts == {"late": 40}


def waiting_seq(number: int) -> object:
    """As much of one as its wait asks for."""
    return SimpleNamespace(
        id=str(number),
        root=b"%016d" % number,
        request=SimpleNamespace(handoff=LONG, reuse=True),
        block_tokens=16,
        reusable_prompt_blocks=6,
        arrived=0.0,
        keys=[BlockKey(b"%08d%08d" % (number, block)) for block in range(6)],
        wait=None,
        wait_leased=0,
    )


def test_over_the_hosts_store_it_ends_when_that_goes_away(bench: Make, shared: Store) -> None:
    with tempfile.TemporaryDirectory(prefix="wm-") as folder:
        path = Path(folder) / "s"
        server = HostServer(shared, path, HostLimits())
        try:
            with HostStore(path) as mine, HostStore(path) as theirs:
                prefills = bench(store=mine)
                decodes = bench(store=theirs, handoff_wait_max_s=30.0)

                async def run() -> None:
                    waiting = asyncio.create_task(decodes.ask(prompt(), handoff=LONG))
                    await held_back(decodes)
                    await prefills.ask(prompt(), 1)
                    assert (await waiting).sources() == {"dram": 96, "computed": 4}
                    gone = asyncio.create_task(decodes.ask(prompt(seed=2), handoff=LONG))
                    await held_back(decodes)
                    await asyncio.to_thread(server.close)
                    assert (await gone).sources() == {"computed": 100}

                asyncio.run(run())
                assert ended(decodes) == {"whole": 1, "unavailable": 1}
                prefills.engine.stop()
                decodes.engine.stop()
        finally:
            server.close()


@pytest.mark.timeout(120)
def test_over_a_pool_of_several_hosts(bench: Make) -> None:
    """Each engine with a store of its own, as on two hosts; a look at what the other one put once in a minute, but for the wait."""
    with pool(64 * 2**20) as master:
        options = {"master": master.address, "capacity": "64MiB", "poll_s": 60.0}
        config = StoreConfig(
            dram=DramConfig(bytes="16MiB"),
            below=BelowConfig(tier="mooncake", options=options),
            ssd=SsdConfig(enabled=False),
        )
        with Store(config) as one, Store(config) as other:
            prefills, decodes = bench(store=one), bench(store=other, handoff_wait_max_s=30.0)

            async def run() -> None:
                waiting = asyncio.create_task(decodes.ask(prompt(), handoff=LONG))
                await held_back(decodes)
                await prefills.ask(prompt(), 1)
                answer = await waiting
                assert answer.usage.handoff is not None
                assert answer.usage.handoff.tokens == 96
                assert answer.usage.handoff.waited_s < 7.5, (
                    "it is a quarter of the time that nothing may come"
                )
                assert sum(answer.sources().get(tier, 0) for tier in ("dram", "remote")) == 96
                await decodes.idle()

            asyncio.run(run())
            assert ended(decodes) == {"whole": 1}
            prefills.engine.stop()
            decodes.engine.stop()
