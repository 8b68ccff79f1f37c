"""What the restart benchmark counts, and the reach it compares with."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partialmethod

import pytest
import restart
from harness import Journal
from restart import Sample

from workmem.core.layout import KVLayout

LAYOUT = KVLayout(dtype="bf16", layers=2, kv_heads=1, head_dim=32)


class Rates:
    copy_bytes_per_s = 1e6
    read_bytes_per_s: float | None = 1e5


def sample(source: str, ttft_s: float, **tokens: int) -> Sample:
    return Sample(source, 128, 0, 0, ttft_s, tokens)


@pytest.mark.parametrize(
    ("measured", "is_pure"),
    [
        (sample("cold", 1.0, vram=0, computed=128), True),
        (sample("cold", 1.0, ssd=16, computed=112), False),
        (sample("dram", 1.0, dram=112, computed=16), True),
        (sample("dram", 1.0, dram=96, computed=32), False),
        (sample("dram", 1.0, vram=16, dram=96, computed=16), False),
        (sample("ssd", 1.0, vram=112, computed=16), False),
    ],
)
def test_only_hits_wholly_from_their_tier_count(measured: Sample, is_pure: bool):  # noqa: FBT001
    assert measured.is_pure is is_pure


def test_the_reach_adds_moving_the_bytes_to_a_vram_hit():
    samples = [
        sample("cold", 10.0, computed=128),
        sample("vram", 0.1, vram=112, computed=16),
        sample("dram", 0.15, dram=112, computed=16),
        sample("ssd", 1.0, ssd=112, computed=16),
        sample("ssd", 0.01, ssd=96, computed=32),
    ]
    (row,) = restart.summarise(samples, Rates(), LAYOUT)
    assert row["bytes"] == 112 * LAYOUT.token_bytes == 28672
    assert row["reach"]["dram"]["bound_s"] == pytest.approx(0.1 + 1.5 * 28672 / 1e6)
    assert not row["reach"]["dram"]["is_met"]
    assert row["reach"]["ssd"]["bound_s"] == pytest.approx(0.1 + 1.3 * 28672 / 1e5)
    assert not row["reach"]["ssd"]["is_met"]
    assert row["cold_over"]["ssd"] == 10.0
    assert len(row["impure"]) == 1


def test_without_direct_reads_no_reach_is_claimed():
    class NoDirect(Rates):
        read_bytes_per_s = None

    samples = [sample("vram", 0.1, vram=112), sample("ssd", 0.2, ssd=112)]
    (row,) = restart.summarise(samples, NoDirect(), LAYOUT)
    assert "ssd" not in row["reach"]


class Texts:
    """Prompts that tell themselves apart."""

    def __init__(self):
        self._made = 0

    def prompt(self, tokens: int) -> list[int]:
        self._made += 1
        return [self._made] * tokens


class Machine:
    """What outlives a scripted server: its ssd, and the number of the request at which it dies."""

    def __init__(self):
        self.ssd: set[int] = set()
        self.asked = 0
        self.dies_at = 0


class Server:
    """Knows where a prompt would come from."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._tiers = {"ssd": machine.ssd.copy(), "dram": set(), "vram": set()}

    async def drop_vram(self):
        self._tiers["vram"].clear()

    async def ask(self, token_ids: list[int]) -> tuple[float, dict[str, int]]:
        self._machine.asked += 1
        if self._machine.asked == self._machine.dies_at:
            raise ConnectionError("killed")
        prompt = token_ids[0]
        source = next((name for name in ("vram", "dram", "ssd") if prompt in self._tiers[name]), "computed")
        cached = 0 if source == "computed" else restart.reusable(len(token_ids))
        for tier in self._tiers.values():
            tier.add(prompt)
        self._machine.ssd.add(prompt)
        return 1.0, {source: cached, "computed": len(token_ids) - cached} if cached else {
            "computed": len(token_ids)
        }


@contextlib.asynccontextmanager
async def serving(bench: restart.Bench, machine: Machine):
    yield Server(machine)


class NoRates(Rates):
    def measure(self):
        pass


@pytest.mark.parametrize("dies_at", range(1, 33, 3))
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch, dies_at):
    machine = Machine()
    machine.dies_at = dies_at
    monkeypatch.setattr(restart.Bench, "_serving", partialmethod(serving, machine))
    died = 0
    while True:
        journal = Journal(tmp_path / "run.partial.jsonl", {})
        bench = restart.Bench(restart.SMOKE, Texts(), [], NoRates(), tmp_path, journal)
        try:
            asyncio.run(bench.run(lambda _: None))
        except ConnectionError:
            died += 1
        else:
            break
    assert died == 1
    mode = restart.SMOKE
    each = 1 + 2 * mode.repeats + 2 * mode.restarts
    assert len(bench.samples) == len(mode.prompt_tokens) * mode.prompts * each
    assert all(sample.is_pure for sample in bench.samples)
    assert bench.skipped == []
    asked = machine.asked
    asyncio.run(bench.run(lambda _: None))
    assert machine.asked == asked, "nothing is measured twice"
