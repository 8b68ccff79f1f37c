"""What callers ask to be kept, brought back or let go, on the embedded engine over a real store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workmem.core.generation import Caller
from workmem.core.hints import Action, Kind, Payload

from .conftest import Answer, Bench

Make = Callable[..., Bench]
SMALL = "1MiB"


def prompt(seed: int, length: int = 160) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def hint(kind: Kind, **payload: Any) -> tuple[Action, ...]:
    return (Action("h", kind, Payload(**payload)),)


def told(answer: Answer) -> list[tuple[str, str]]:
    return [(outcome.id, outcome.outcome) for outcome in answer.usage.hints]


async def flood(world: Bench, start: int, count: int = 12) -> None:
    for seed in range(start, start + count):
        await world.ask(prompt(seed), 1)
    await world.idle()
    await world.engine.drop_vram()


def test_what_is_to_be_kept_outlasts_what_is_not(bench: Make) -> None:
    world = bench(dram=SMALL)

    async def run() -> None:
        kept = await world.ask(prompt(1), 1, hints=hint(Kind.RETAIN, ttl_s=60))
        await world.ask(prompt(2), 1)
        assert told(kept) == [("h", "accepted")]
        await flood(world, 100)
        again, other = await world.ask(prompt(1), 1), await world.ask(prompt(2), 1)
        assert again.sources()["dram"] == 144
        assert "dram" not in other.sources()

    asyncio.run(run())


def test_what_is_let_go_leaves_before_what_is_older(bench: Make) -> None:
    world = bench(dram=SMALL)

    async def run() -> None:
        capacity = 2 * (2**20 // world.engine._loaded.layout.page_bytes) // 3 // 10
        await world.ask(prompt(1), 1)
        gone = await world.ask(prompt(2), 1, caller=Caller(session="s"), hints=hint(Kind.DEMOTE))
        assert told(gone) == [("h", "accepted")]
        await flood(world, 100, max(1, capacity))
        answers = [await world.ask(prompt(1), 1), await world.ask(prompt(2), 1)]
        assert answers[0].cached >= answers[1].cached

    asyncio.run(run())


def test_a_pin_is_kept_by_the_store_and_says_so(bench: Make) -> None:
    world = bench()

    async def run() -> None:
        answer = await world.ask(prompt(1), 1, hints=hint(Kind.PIN))
        assert told(answer) == [("h", "clipped")]
        assert "in the store" in answer.usage.hints[0].why
        short = await world.ask(prompt(1, 8), 1, hints=hint(Kind.RETAIN))
        assert told(short) == [("h", "rejected")]
        long = await world.ask(prompt(1), 1, hints=hint(Kind.RETAIN, ttl_s=1e9))
        assert told(long) == [("h", "clipped")]
        assert "hint_ttl_max_s" in long.usage.hints[0].why

    asyncio.run(run())


def test_a_session_is_brought_back_before_its_turn(bench: Make, tmp_path: Path) -> None:
    world = bench(dram=SMALL, ssd=tmp_path)

    async def run() -> None:
        me = Caller(tenant="t", session="mine")
        await world.ask(prompt(1), 1, caller=me)
        await world.idle()
        for seed in range(100, 112):
            await world.ask(prompt(seed), 1, caller=Caller(tenant="t"))
        await world.idle()
        await world.engine.drop_vram()
        ahead = hint(Kind.PREFETCH, session="mine")
        stranger = await world.ask(prompt(5), 1, caller=Caller(tenant="other"), hints=ahead)
        assert told(stranger) == [("h", "missing")]
        asked = await world.ask(prompt(6), 1, caller=Caller(tenant="t", session="boss"), hints=ahead)
        assert told(asked) == [("h", "accepted")]
        assert world.store is not None
        for _ in range(400):
            if world.store.gauges()["store_promoted_total"] >= 9:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("nothing was brought")
        back = await world.ask(prompt(1), 1, caller=me)
        assert back.sources()["dram"] == 144

    asyncio.run(run())


def test_no_store_and_no_session_are_no_errors(bench: Make) -> None:
    world = bench(store=False)

    async def run() -> None:
        for kind in Kind:
            answer = await world.ask(prompt(1), 1, hints=hint(kind, session="x", group="g"))
            assert [outcome for _, outcome in told(answer)] in (["rejected"], ["missing"])
        assert told(await world.ask(prompt(1), 1, reuse=False, hints=hint(Kind.RETAIN))) == [
            ("h", "rejected")
        ]

    asyncio.run(run())
