"""Blocks that a request completed in its last step, or in one whose loads were not heard of when it was made up.

They are given to the workers with the next step, which comes at once: vLLM makes one to tell them that the request has ended.
Until then each has one reference more, so that nobody writes to it.
"""

from __future__ import annotations

from typing import Any

from workmem.engines.vllm.pins import BlockPool
from workmem.engines.vllm.steps import SaveOp


class LastSaves:
    """Of one engine. Called by its scheduler's thread alone. Keeps nothing until it has a pool."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._ops: list[SaveOp] = []
        self._held: list[Any] = []

    @property
    def is_bound(self) -> bool:
        """Whether blocks can be held."""
        return self._pool is not None

    @property
    def holds(self) -> bool:
        """Blocks are held that the next step gives back."""
        return bool(self._held)

    def bind(self, pool: BlockPool) -> None:
        """The engine's pool is there."""
        self._pool = pool

    def add(self, op: SaveOp) -> None:
        """Hold its blocks, which the engine is about to give up."""
        assert self._pool is not None
        blocks = [self._pool.blocks[number] for number in op.blocks]
        self._pool.touch(blocks)
        self._held += blocks
        self._ops.append(op)

    def take(self) -> list[SaveOp]:
        """For the step that is made up now. Who is given the blocks in a later one waits for their copies."""
        ops, self._ops = self._ops, []
        self._let_go()
        return ops

    def drop(self) -> None:
        """They are not to be kept, or nobody may hold a block."""
        self._ops = []
        self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        if held and self._pool is not None:
            # The end of a context is of no use without its beginning: it is evicted first.
            self._pool.free_blocks(reversed(held))
