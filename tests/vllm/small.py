"""A small model and a small store, for all tests here."""

from __future__ import annotations

from pathlib import Path

from workmem.engines.vllm.facts import EngineFacts
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store

SIZE = 4
"""Tokens per block."""
LAYERS, HEADS, DIM = 3, 1, 16
FACTS = EngineFacts(
    version="0.32",
    model="m",
    dtype="torch.float32",
    cache_dtype="torch.float32",
    order="fake",
    quantization="",
    rope="{}",
    block_tokens=SIZE,
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=DIM,
    layer_bytes=2 * SIZE * HEADS * DIM * 4,
    workers=1,
    hashing="sha256_cbor:00",
    hash_bytes=32,
)


def open_store(folder: Path, dram: str = "1MiB") -> Store:
    """Over a folder that may hold what another one left."""
    tier = SsdConfig(path=str(folder), bytes="16MiB", scrub_bytes_per_s=0, io="buffered")
    return Store(StoreConfig(dram=DramConfig(bytes=dram), ssd=tier))
