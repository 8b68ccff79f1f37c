"""Complete blocks become findable in vram and go to the store, behind the engine.

The saver only queues: a store thread copies the page, and until it has, the block stays held.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from workmem.core.errors import InvariantError
from workmem.engines.embedded.block_pool import BlockPool
from workmem.engines.embedded.kv_pages import KVPages
from workmem.engines.embedded.sequence import Sequence
from workmem.store.contract import BlockId, KVStore, PageWrite, SaveState


class PageSaver:
    """Owned by the engine thread; `post` brings a store thread's answer back to it."""

    def __init__(
        self,
        store: KVStore | None,
        pool: BlockPool,
        pages: KVPages,
        *,
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        self._store = store
        self._pool = pool
        self._pages = pages
        self._post = post
        self._lock = threading.Lock()
        self._closed = False

    def offer(self, seq: Sequence) -> None:
        """Name the blocks of `seq` that have become complete, and queue those the store does not hold."""
        if not seq.request.reuse:
            return
        complete = seq.computed // seq.block_tokens
        writes: list[PageWrite] = []
        for index in range(max(seq.named, len(seq.spilled)), complete):
            block = seq.table[index - len(seq.spilled)]
            if not seq.window:
                # A block that is spilled next must be nobody else's: those who share it find it in dram.
                self._pool.name(block, seq.keys[index])
            if self._store is None or index < seq.restored:
                continue
            self._pool.hold(block)
            seq.saving += 1
            writes.append(
                PageWrite(
                    block=BlockId(
                        key=seq.keys[index],
                        parent=seq.parent_of(index),
                        tokens=seq.block_of_tokens(index),
                        depth=index,
                    ),
                    copy_into=functools.partial(self._copy, block),
                    done=functools.partial(self._saved, seq, block),
                    workflow=seq.request.caller.workflow,
                )
            )
        seq.named = max(seq.named, complete)
        if writes:
            assert self._store is not None
            self._store.save(seq.root, writes)

    def close(self) -> None:
        """Nothing still queued may be stored any more: the blocks are about to hold other bytes."""
        with self._lock:
            self._closed = True

    def _copy(self, block: int, target: memoryview) -> tuple[int, ...]:
        with self._lock:
            if self._closed:
                raise InvariantError("the vram ledger was rebuilt while a page waited to be saved")
            return self._pages.copy_out(block, target)

    def _saved(self, seq: Sequence, block: int, state: SaveState) -> None:
        del state  # counted by the store; for the block it makes no difference

        def book() -> None:
            seq.saving -= 1
            self._pool.let_go([block])

        self._post(book)
