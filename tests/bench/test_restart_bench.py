"""What the restart benchmark counts, and the reach it compares with."""

from __future__ import annotations

import pytest
import restart
from restart import Sample

from workmem.core.layout import KVLayout

LAYOUT = KVLayout(dtype="bf16", layers=2, kv_heads=1, head_dim=32)


class Rates:
    copy_bytes_per_s = 1e6
    read_bytes_per_s: float | None = 1e5


def sample(source: str, ttft_s: float, **tokens: int) -> Sample:
    return Sample(source, 128, 0, ttft_s, tokens)


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
