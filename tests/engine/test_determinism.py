"""In deterministic mode logits are bit-identical however they came about; by default they agree within rounding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workmem.core.errors import ConfigError
from workmem.testing.tiny_models import build_model

from .conftest import Bench

Make = Callable[..., Bench]
OUTPUT = 6


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    head = [rng.randrange(256) for _ in range(70)]
    return [
        [*head[:cut], *(rng.randrange(256) for _ in range(tail))]
        for cut, tail in ((70, 5), (70, 33), (32, 20), (0, 290))
    ]


def rows(world: Bench, name: str, length: int) -> list[torch.Tensor]:
    return [world.logits[(name, length + step)] for step in range(OUTPUT)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("det") / request.param, request.param)


async def interleave(
    world: Bench, expected: list[list[torch.Tensor]], rng: random.Random, rounds: int
) -> set[str]:
    """Rounds of five prompts at random moments, the pool emptied at random; returns the tiers that served."""
    sources: set[str] = set()

    async def one(name: str, which: int) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        tokens = prompts()[which]
        answer = await world.ask(tokens, OUTPUT, id=name)
        sources.update(answer.sources())
        for got, want in zip(rows(world, name, len(tokens)), expected[which], strict=True):
            assert torch.equal(got, want)

    for round_number in range(rounds):
        await asyncio.gather(*(one(f"{round_number}.{place}", rng.randrange(4)) for place in range(5)))
        await world.idle()
        if rng.random() < 0.7:
            await world.engine.drop_vram()
    return sources


@pytest.mark.parametrize("seed", range(3))
def test_any_batch_split_and_tier_gives_the_same_bits(
    seed: int, model: Path, bench: Make, tmp_path: Path
) -> None:
    """Reference: each prompt alone, whole, cold. Then random interleavings, chunk sizes, evictions, a restart."""
    fixed = {"folder": model, "deterministic": True, "dtype": "fp32"}
    alone = bench(store=False, batch_tokens=512, vram_bytes="8MiB", **fixed)
    rng = random.Random(seed)

    async def run() -> None:
        expected = []
        for index, tokens in enumerate(prompts()):
            await alone.ask(tokens, OUTPUT, id=f"p{index}", reuse=False)
            expected.append(rows(alone, f"p{index}", len(tokens)))
        small = {"batch_tokens": rng.choice([16, 23, 64]), "vram_bytes": "1MiB"}
        world = bench(ssd=tmp_path / "ssd", **small, **fixed)
        seen = await interleave(world, expected, rng, 3)
        await world.engine.close()
        assert world.store is not None
        world.store.close()
        large = {"batch_tokens": rng.choice([16, 40]), "vram_bytes": "8MiB"}
        again = bench(ssd=tmp_path / "ssd", **large, **fixed)
        seen |= await interleave(again, expected, rng, 2)
        assert {"vram", "dram", "ssd", "computed"} <= seen

    asyncio.run(run())


def test_a_seed_gives_the_same_answer_in_any_company(model: Path, bench: Make) -> None:
    world = bench(batch_tokens=64, folder=model, deterministic=True, dtype="fp32")
    drawn = {"temperature": 1.0, "seed": 5}

    async def run() -> None:
        alone = await world.ask(prompts()[0], OUTPUT, **drawn)
        others = [world.ask(tokens, OUTPUT) for tokens in prompts()[1:]]
        again, *_ = await asyncio.gather(world.ask(prompts()[0], OUTPUT, **drawn), *others)
        assert again.tokens == alone.tokens

    asyncio.run(run())


def test_a_context_larger_than_the_pool_has_the_same_bits(model: Path, bench: Make) -> None:
    fixed = {"folder": model, "deterministic": True, "dtype": "fp32"}
    large = bench(batch_tokens=512, vram_bytes="8MiB", **fixed)
    small = bench(batch_tokens=32, vram_bytes="200KiB", **fixed)
    tokens = prompts()[3]

    async def run() -> None:
        await large.ask(tokens, OUTPUT, id="x")
        await small.ask(tokens, OUTPUT, id="x")
        assert small.engine.thread.pool.block_count * 16 < len(tokens) + OUTPUT
        for got, want in zip(rows(small, "x", len(tokens)), rows(large, "x", len(tokens)), strict=True):
            assert torch.equal(got, want)

    asyncio.run(run())


def test_deterministic_mode_refuses_what_it_cannot_promise(bench: Make) -> None:
    with pytest.raises(ConfigError, match=r"\$\.engine\.deterministic: needs \$\.engine\.dtype = 'fp32'"):
        bench(deterministic=True, dtype="bf16")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_the_default_mode_agrees_within_epsilon_for_any_split(bench: Make, cuts: list[int]) -> None:
    """Fp32 logits of a prompt, cut anywhere by earlier requests, differ by rounding only."""
    tokens = prompts()[1]
    world = bench(dtype="fp32", store=False)

    async def run() -> None:
        await world.ask(tokens, 2, id="whole", reuse=False)
        for index, cut in enumerate(cuts):
            await world.ask(tokens[:cut], 2, id=f"part{index}")
        await world.ask(tokens, 2, id="pieced")
        want, got = world.logits[("whole", len(tokens))], world.logits[("pieced", len(tokens))]
        assert torch.allclose(want, got, atol=1e-3, rtol=0)

    asyncio.run(run())
    world.engine.stop()
