"""The engine end to end on a tiny model: exact reuse on every tier, and every way a request can end."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from workmem.core.errors import (
    ClientError,
    ConfigError,
    ContextTooLong,
    EngineError,
    InvariantError,
    QueueFull,
)
from workmem.core.events import RequestFinished, RequestPreempted
from workmem.core.generation import Caller
from workmem.core.keys import block_keys
from workmem.core.outcomes import MissReason
from workmem.engines.embedded.scheduler import Work
from workmem.gateway.replies import usage_body
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import PageWrite
from workmem.store.store import Store
from workmem.testing.tiny_models import KINDS, build_model

from .conftest import Bench

EPSILON = {"fp32": 1e-3, "bf16": 0.25}
Make = Callable[..., Bench]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def agrees(reference: torch.Tensor, token: int, epsilon: float) -> bool:
    """The token is the reference's choice, or so close to it that rounding decides."""
    return bool(reference.max() - reference[token] <= epsilon)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_greedy_tokens_are_those_of_the_plain_model(
    kind: str, dtype: str, bench: Make, tmp_path: Path
) -> None:
    folder = build_model(tmp_path / kind, kind)
    world = bench(folder=folder, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = prompt(75, seed=3)

    async def run() -> None:
        for wanted_cached in (0, 64):
            answer = await world.ask(tokens, 12)
            assert answer.cached == wanted_cached
            with torch.inference_mode():
                logits = model(torch.tensor([tokens + answer.tokens])).logits[0]
            for index, token in enumerate(answer.tokens):
                assert agrees(logits[len(tokens) + index - 1], token, EPSILON[dtype])

    asyncio.run(run())


def test_each_tier_gives_the_same_answer_and_says_where_it_came_from(bench: Make, tmp_path: Path) -> None:
    tokens = prompt(100)

    async def first() -> list[int]:
        world = bench(ssd=tmp_path / "ssd", dtype="fp32")
        cold = await world.ask(tokens)
        assert cold.sources() == {"computed": 100}
        assert cold.usage.sources[0].reason is MissReason.COLD
        vram = await world.ask(tokens)
        assert vram.sources() == {"vram": 96, "computed": 4}
        assert vram.usage.sources[-1].reason is MissReason.TAIL
        await world.idle()
        assert await world.engine.drop_vram() > 0
        dram = await world.ask(tokens)
        assert dram.sources() == {"dram": 96, "computed": 4}
        assert cold.tokens == vram.tokens == dram.tokens
        await world.engine.close()
        assert world.store is not None
        world.store.close()
        return cold.tokens

    async def second(expected: list[int]) -> None:
        world = bench(ssd=tmp_path / "ssd", dtype="fp32")
        ssd = await world.ask(tokens)
        assert ssd.sources() == {"ssd": 96, "computed": 4}
        assert ssd.tokens == expected
        gauges = world.engine.gauges()
        assert gauges["load_slices_total"] > 0

    asyncio.run(second(asyncio.run(first())))


def test_generated_tokens_are_reused_by_the_next_turn(bench: Make) -> None:
    world = bench()

    async def run() -> None:
        first = await world.ask(prompt(40), 30)
        follow_up = [*prompt(40), *first.tokens, 7, 8, 9]
        second = await world.ask(follow_up)
        assert second.cached == (40 + 30 - 1) // 16 * 16

    asyncio.run(run())


def test_agents_that_start_together_compute_their_head_once(bench: Make) -> None:
    world = bench(batch_tokens=32)

    async def run() -> None:
        head = prompt(96)
        answers = await asyncio.gather(*(world.ask([*head, agent]) for agent in range(6)))
        assert sum(answer.sources().get("computed", 0) for answer in answers) == 96 + 6
        await world.idle()

    asyncio.run(run())


def test_tenants_never_share(bench: Make) -> None:
    world = bench()

    async def run() -> None:
        await world.ask(prompt(64), caller=Caller(tenant="a"))
        other = await world.ask(prompt(64), caller=Caller(tenant="b"))
        assert other.cached == 0
        assert (await world.ask(prompt(64), caller=Caller(tenant="a"))).cached == 48

    asyncio.run(run())


def test_pages_are_saved_in_the_name_of_the_workflow_that_had_them_computed(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = bench()
    assert world.store is not None
    save, workflows = world.store.save, []

    def noted(root: bytes, pages: Sequence[PageWrite]) -> None:
        workflows.extend(page.workflow for page in pages)
        save(root, pages)

    monkeypatch.setattr(world.store, "save", noted)

    async def run() -> None:
        await world.ask(prompt(64), caller=Caller(tenant="a", workflow="nightly"))
        await world.ask(prompt(64, seed=2), caller=Caller(tenant="a"))

    asyncio.run(run())
    assert set(workflows) == {"nightly", ""}
    assert workflows == sorted(workflows, reverse=True)


def test_reuse_off_computes_all_and_leaves_nothing(bench: Make) -> None:
    world = bench()

    async def run() -> None:
        off = await world.ask(prompt(64), reuse=False)
        assert off.usage.sources[0].reason is MissReason.DISABLED
        assert (await world.ask(prompt(64))).cached == 0
        assert (await world.ask(prompt(64), reuse=False)).cached == 0

    asyncio.run(run())


def test_a_context_larger_than_the_pool_is_served_from_dram(bench: Make) -> None:
    small = bench(vram_bytes="200KiB", batch_tokens=32, dtype="fp32")
    large = bench(dtype="fp32")
    pool_tokens = small.engine.thread.pool.block_count * 16
    tokens = prompt(350)
    assert pool_tokens < len(tokens)

    async def run() -> None:
        expected = await large.ask(tokens, 40)
        got = await small.ask(tokens, 40)
        assert got.tokens == expected.tokens
        again = await small.ask(tokens, 40)
        assert again.tokens == expected.tokens
        assert again.sources() == {"dram": 336, "computed": 14}
        await small.idle()

    asyncio.run(run())


def test_a_context_whose_pages_in_dram_are_taken_back_ends_with_an_error_not_with_their_successors(
    bench: Make,
) -> None:
    """The store of a host takes back what a process held that stood still for too long (rule R3)."""
    small = bench(vram_bytes="200KiB", batch_tokens=32, dtype="fp32")
    tokens = prompt(350)

    async def run() -> None:
        expected = await small.ask(tokens, 40)
        await small.idle()
        asked = asyncio.create_task(small.ask(tokens, 40))
        while not any(seq.spilled for seq in list(small.engine.thread.scheduler.running)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert small.store is not None
        small.store.pool.leases.end_leases()
        with pytest.raises(EngineError, match="left dram while they were in use"):
            await asked
        again = await small.ask(tokens, 40)
        assert again.tokens == expected.tokens
        await small.idle()

    asyncio.run(run())


def test_pages_taken_back_amid_a_step_end_who_read_them_and_nobody_else(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = bench(vram_bytes="200KiB", batch_tokens=32, dtype="fp32")
    long, short = prompt(350), prompt(20, seed=2)

    async def run() -> None:
        expected = await small.ask(short, 40)
        await small.ask(long, 40)
        await small.idle()
        inner = small.engine.thread.runner.run

        def run_and_lose(work: list[Work]) -> torch.Tensor:
            if len(work) > 1 and any(item.seq.spilled for item in work):
                assert small.store is not None
                small.store.pool.leases.end_leases()
            return inner(work)

        monkeypatch.setattr(small.engine.thread.runner, "run", run_and_lose)
        reader = asyncio.create_task(small.ask(long, 40))
        other = await small.ask(short, 40)
        with pytest.raises(EngineError, match="left dram while they were in use"):
            await reader
        assert other.tokens == expected.tokens
        await small.idle()

    asyncio.run(run())


def test_a_context_that_no_tier_can_hold_is_refused_with_both_sizes(bench: Make) -> None:
    world = bench(vram_bytes="200KiB", batch_tokens=32, dtype="fp32", store=False)

    async def run() -> None:
        with pytest.raises(
            ContextTooLong, match=r"needs 4\d\d tokens of KV; vram holds \d+ and dram holds 0 tokens"
        ):
            await world.ask(prompt(400), 40)

    asyncio.run(run())


def test_a_corrupt_page_is_recomputed_not_served(bench: Make) -> None:
    world = bench(dtype="fp32")
    tokens = prompt(100)

    async def run() -> None:
        expected = await world.ask(tokens)
        await world.idle()
        await world.engine.drop_vram()
        assert world.store is not None
        root = world.engine._root("")
        keys = block_keys(root, tokens, 16)
        lease = world.store.lease(root, keys, owner="saboteur", ttl_s=60)
        address = lease.page_address(3)
        lease.release()
        ctypes.memset(address + 5, 0x41, 3)
        got = await world.ask(tokens)
        assert got.tokens == expected.tokens
        assert got.sources() == {"dram": 48, "computed": 52}
        assert got.usage.sources[1].reason is MissReason.CORRUPT
        assert world.engine.gauges()["load_pages_corrupt_total"] == 1
        await world.idle()

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_blocks_at_once(bench: Make) -> None:
    world = bench()

    async def run() -> None:
        stream = world.stream(prompt(30), 400)
        async for _ in stream:
            break
        await stream.aclose()
        await world.idle()
        assert any(
            isinstance(event, RequestFinished) and event.finish_reason == "cancelled"
            for event in world.events
        )
        waiting = asyncio.create_task(world.ask(prompt(30, 1), 400))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await world.idle()

    asyncio.run(run())


def test_a_full_queue_refuses_with_a_time_to_retry(bench: Make) -> None:
    world = bench(queue_max=2, running_max=1)

    async def run() -> None:
        tasks = [asyncio.create_task(world.ask(prompt(20, seed), 200)) for seed in range(3)]
        for _ in range(100):
            await asyncio.sleep(0.01)
            if len(world.engine.thread.scheduler.waiting) == 2:
                break
        with pytest.raises(QueueFull) as refusal:
            await world.ask(prompt(20, 9), 4)
        assert 1.0 <= refusal.value.retry_after_s <= 60.0
        assert all(answer.reason == "length" for answer in await asyncio.gather(*tasks))

    asyncio.run(run())


def test_priority_overtakes_and_the_victim_answers_the_same(bench: Make) -> None:
    world = bench(vram_bytes="160KiB", batch_tokens=32, dtype="fp32")
    alone = bench(dtype="fp32")

    async def run() -> None:
        expected = await alone.ask(prompt(60), 100)
        low = asyncio.create_task(world.ask(prompt(60), 100, priority=5))
        while not world.engine.thread.scheduler.running:  # noqa: ASYNC110 - the engine runs on its own thread
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        high = await world.ask(prompt(60, 1), 60, priority=0)
        assert high.reason == "length"
        assert (await low).tokens == expected.tokens
        assert any(isinstance(event, RequestPreempted) for event in world.events)
        await world.idle()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "error", "message"),
    [
        ([], 4, ClientError, "empty"),
        ([99999], 4, ClientError, "token id 99999 is outside the vocabulary"),
        ([1] * 600, 4, ContextTooLong, "the prompt has 600 tokens and the model's context is 512"),
        ([1] * 500, 100, ContextTooLong, "lower max_tokens to 12"),
        ([1], 0, ClientError, "max_tokens is 0"),
    ],
)
def test_bad_requests_are_refused_with_what_to_do(
    tokens: list[int], max_tokens: int, error: type[Exception], message: str, bench: Make
) -> None:
    world = bench()
    with pytest.raises(error, match=message):
        asyncio.run(world.ask(tokens, max_tokens))


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(bench: Make) -> None:
    world = bench()
    inner, calls = world.engine.thread.runner.run, [0]

    def run_once_broken(work: list[object]) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("device fell off")
        return inner(work)

    world.engine.thread.runner.run = run_once_broken

    async def run() -> None:
        with pytest.raises(EngineError, match="device fell off"):
            await world.ask(prompt(20))
        assert (await world.ask(prompt(20))).reason == "length"
        await world.idle()

    asyncio.run(run())


def test_our_own_bug_switches_the_cache_off_and_serving_goes_on(bench: Make) -> None:
    world = bench()

    async def run() -> None:
        await world.ask(prompt(40))

        def broken(*_: object) -> bool:
            raise InvariantError("ledger is off by one")

        world.engine.thread.pool.name = broken
        with pytest.raises(EngineError, match="switched off"):
            await world.ask(prompt(60, 1))
        assert world.engine.gauges()["reuse_disabled"] == 1
        assert (await world.ask(prompt(40))).reason == "length"

    asyncio.run(run())


def test_a_model_changed_between_two_starts_never_hits(bench: Make, tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model", seed=1)
    tokens = prompt(64)

    async def run(expect_cached: int) -> list[int]:
        world = bench(folder=folder, ssd=tmp_path / "ssd")
        answer = await world.ask(tokens)
        assert answer.cached == expect_cached
        await world.engine.close()
        assert world.store is not None
        world.store.close()
        return answer.tokens

    before = asyncio.run(run(0))
    assert asyncio.run(run(48)) == before
    build_model(folder, seed=2)
    assert asyncio.run(run(0)) != before


def test_two_models_share_one_store_and_never_each_others_blocks(
    bench: Make, tiny: Path, tmp_path: Path
) -> None:
    other = build_model(tmp_path / "other", "qwen3", seed=5)
    a = bench()
    b = bench(folder=other, store=a.store)
    tokens = prompt(64)

    async def run() -> None:
        await a.ask(tokens)
        assert (await b.ask(tokens)).cached == 0
        await a.idle()
        await b.idle()
        await a.engine.drop_vram()
        await b.engine.drop_vram()
        assert (await a.ask(tokens)).sources()["dram"] == 48
        assert (await b.ask(tokens)).sources()["dram"] == 48

    asyncio.run(run())


def test_fast_kv_is_never_a_hit_in_deterministic_mode(bench: Make, tmp_path: Path) -> None:
    """Its sums were taken in another order: reused, it would break the promise of equal bits."""
    tokens = prompt(64)

    async def run(*, deterministic: bool, expect_cached: int) -> None:
        world = bench(ssd=tmp_path / "ssd", dtype="fp32", deterministic=deterministic)
        assert (await world.ask(tokens)).cached == expect_cached
        await world.engine.close()
        assert world.store is not None
        world.store.close()

    asyncio.run(run(deterministic=False, expect_cached=0))
    asyncio.run(run(deterministic=True, expect_cached=0))
    asyncio.run(run(deterministic=True, expect_cached=48))
    asyncio.run(run(deterministic=False, expect_cached=48))


def test_answers_from_a_store_that_rounds_say_so_and_deterministic_mode_refuses_it(
    bench: Make, tmp_path: Path
) -> None:
    ssd = SsdConfig(path=str(tmp_path / "ssd"), bytes="64MiB", compression="int8", approximate=True)
    tokens = prompt(64)

    async def run(store: Store) -> None:
        world = bench(store=store, dtype="fp32")
        first = await world.ask(tokens)
        assert not first.usage.approximate
        again = await world.ask(tokens)
        assert again.cached > 0
        assert again.usage.approximate
        assert usage_body({0: again.usage}, 1)["workmem"]["approximate"] is True
        assert "approximate" not in usage_body({0: first.usage}, 1)["workmem"]
        await world.engine.close()

    with Store(StoreConfig(dram=DramConfig(bytes="64MiB"), ssd=ssd)) as store:
        asyncio.run(run(store))
        with pytest.raises(ConfigError, match="promises results to the bit"):
            bench(store=store, dtype="fp32", deterministic=True)


def test_a_loader_that_fails_costs_time_and_nothing_else(bench: Make) -> None:
    world = bench(dtype="fp32")

    async def run() -> None:
        expected = await world.ask(prompt(100))
        await world.idle()
        await world.engine.drop_vram()
        inner = world.engine.thread.pages.copier_in

        def broken(*_: object) -> object:
            world.engine.thread.pages.copier_in = inner
            raise RuntimeError("copy engine fell off")

        world.engine.thread.pages.copier_in = broken
        got = await world.ask(prompt(100))
        assert got.tokens == expected.tokens
        assert got.sources() == {"computed": 100}
        assert (await world.ask(prompt(100))).tokens == expected.tokens
        await world.idle()

    asyncio.run(run())


def test_a_corrupt_page_is_not_read_in_place_either(bench: Make) -> None:
    small = bench(vram_bytes="200KiB", batch_tokens=32, dtype="fp32")
    tokens = prompt(350)

    async def run() -> None:
        expected = await small.ask(tokens, 10)
        await small.idle()
        assert small.store is not None
        keys = block_keys(small.engine._root(""), tokens, 16)
        lease = small.store.lease(small.engine._root(""), keys, owner="saboteur", ttl_s=60)
        address = lease.page_address(7)
        lease.release()
        ctypes.memset(address + 5, 0x41, 3)
        got = await small.ask(tokens, 10)
        assert got.tokens == expected.tokens
        assert got.sources() == {"dram": 112, "computed": 238}
        assert got.usage.sources[1].reason is MissReason.CORRUPT
        await small.idle()

    asyncio.run(run())


def test_after_the_end_a_request_is_told_so(bench: Make) -> None:
    world = bench()
    world.engine.stop()
    with pytest.raises(EngineError, match="shutting down"):
        asyncio.run(world.ask(prompt(20)))


def test_requests_whose_schema_is_being_compiled_count_as_waiting(bench: Make) -> None:
    world = bench(queue_max=2, running_max=1)

    async def run() -> None:
        asks = [world.ask(prompt(20, seed), 30, json_schema="{}", ignore_eos=False) for seed in range(12)]
        peak = 0

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, len(world.engine.thread.scheduler.waiting))
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        ended = await asyncio.gather(*asks, return_exceptions=True)
        watcher.cancel()
        refused = [end for end in ended if isinstance(end, QueueFull)]
        assert len(refused) >= 12 - 2 - 1 - 1
        assert peak <= 3

    asyncio.run(run())
