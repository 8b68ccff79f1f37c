"""Blocks as pages, by compiled code and without: the same bytes, the same checksums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from workmem.core.layout import KVLayout
from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.store import copying
from workmem.store.copying import use_native_copy

LAYERS, COUNT = 3, 5
LAYOUT = KVLayout(dtype="fp32", layers=LAYERS, kv_heads=1, head_dim=64, block_tokens=128)
BYTES = LAYOUT.layer_bytes


@pytest.fixture(params=["compiled", "plain"])
def blocks(request, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> KVBlocks:
    monkeypatch.setattr(copying._Process, "copy", None)
    if request.param == "compiled":
        folder: Path = tmp_path_factory.getbasetemp()
        assert use_native_copy(folder), "this test needs the C compiler that CI has"
    random = np.random.default_rng(3)
    # Rows with something else between them, as where other tensors share the memory.
    wide = [random.integers(0, 256, (COUNT, BYTES + 64 * layer), dtype=np.uint8) for layer in range(LAYERS)]
    made = KVBlocks(LAYOUT, [[rows[:, :BYTES]] for rows in wide])
    assert (made._native is not None) == (request.param == "compiled")
    return made


def test_a_block_becomes_a_page_and_a_page_a_block(blocks: KVBlocks):
    layers = [rows for (rows,) in blocks._slices]
    before = [rows.copy() for rows in layers]
    page = bytearray(LAYOUT.page_bytes)
    sums = blocks.copy_out(3, memoryview(page))
    parts = [page[at : at + LAYOUT.layer_bytes] for at in range(0, LAYOUT.page_bytes, LAYOUT.layer_bytes)]
    assert parts == [rows[3].tobytes() for rows in layers]
    assert sums == tuple(xxhash.xxh3_64_intdigest(bytes(part)) for part in parts)
    assert blocks.copy_in(1, memoryview(bytes(page))) == sums
    for rows, old in zip(layers, before, strict=True):
        assert np.array_equal(rows[1], old[3])
        for other in (0, 2, 3, 4):
            assert np.array_equal(rows[other], old[other]), "only one block is written to"


def test_the_checksum_is_of_what_is_in_the_block_and_not_of_what_was_to_be(monkeypatch: pytest.MonkeyPatch):
    """The page may become another one while it is copied."""
    layers = [np.zeros((COUNT, BYTES), dtype=np.uint8) for _ in range(LAYERS)]
    monkeypatch.setattr(copying._Process, "copy", None)
    blocks = KVBlocks(LAYOUT, [[rows] for rows in layers])
    page = bytearray(LAYOUT.page_bytes)
    sums = blocks.copy_out(1, memoryview(page))
    copy = np.copyto

    def torn(into: np.ndarray, source: np.ndarray) -> None:
        copy(into, source)
        into[7] ^= 1

    monkeypatch.setattr(np, "copyto", torn)
    found = blocks.copy_in(2, memoryview(bytes(page)))
    assert found != sums
    assert found == tuple(xxhash.xxh3_64_intdigest(rows[2].data) for rows in layers)
