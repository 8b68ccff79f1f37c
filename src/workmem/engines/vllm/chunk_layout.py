"""The layout of a chunk: what lies in a row of the memory that vLLM's tiered offload keeps chunks in."""

from __future__ import annotations

import msgspec
import numpy as np

from workmem.core.layout import KVLayout
from workmem.engines.vllm.facts import EngineFacts
from workmem.engines.vllm.kv_blocks import KVBlocks


def chunk_layout(facts: EngineFacts, *, blocks: int, copies: int, order: str) -> KVLayout:
    """Of `blocks` neighbours: worker after worker (`copies` of them), layer after layer, block after block.

    Never that of a page which the connector keeps, not even of a chunk of one block. `order`: what else decides where
    bytes lie.
    """
    block = facts.layout(0)
    return msgspec.structs.replace(
        block,
        layers=block.layers * copies,
        block_tokens=block.block_tokens * blocks,
        page_order=f"{block.page_order}/chunk:{blocks}x{copies}/{order}",
    )


def chunk_rows(memory: memoryview, layout: KVLayout) -> KVBlocks:
    """Rows of `memory`, [chunks, bytes], as pages are copied to and from them. What is behind a page is padding."""
    rows = np.asarray(memory).view(np.uint8)
    step = layout.layer_bytes
    return KVBlocks(layout, [[rows[:, at : at + step]] for at in range(0, layout.page_bytes, step)])
