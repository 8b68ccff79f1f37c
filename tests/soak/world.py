"""What the soak's processes agree on: layouts, chains, and how a store of theirs is set up."""

from __future__ import annotations

from pathlib import Path

from workmem.core.layout import KVLayout
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.testing.pages import SLICED, SMALL, Chain, namespace

DRAM_BYTES = 128 * 2**20
SSD_BYTES = 320 * 2**20
LENGTH = 8
LAYOUTS: dict[str, tuple[KVLayout, int]] = {
    "4 KiB": (SMALL, 300),
    "16 KiB": (KVLayout(dtype="fp32", layers=4, kv_heads=4, head_dim=32, block_tokens=4), 200),
    "60 KiB": (KVLayout(dtype="bf16", layers=3, kv_heads=5, head_dim=128, block_tokens=8), 60),
    "192 KiB": (SLICED, 40),
    "360 KiB": (KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16), 40),
    "1 MiB": (KVLayout(dtype="bf16", layers=16, kv_heads=8, head_dim=128, block_tokens=16), 20),
}
"""Layouts of several page sizes, and how many chains of each there are: twice what the disk may hold."""
CHAINS = [
    Chain(namespace(name, layout), LENGTH, seed=seed)
    for name, (layout, count) in LAYOUTS.items()
    for seed in range(count)
]


def config(folder: Path) -> StoreConfig:
    """A store far smaller than what goes through it."""
    return StoreConfig(
        dram=DramConfig(bytes=DRAM_BYTES), ssd=SsdConfig(path=str(folder), bytes=SSD_BYTES, readers=2)
    )
