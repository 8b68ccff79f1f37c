"""The side of the connector that runs beside the model: pages into blocks, and blocks into pages.

Saving is behind the engine: the store's thread copies from the engine's blocks, and a step that is about to write
to one of them waits for its copy first (`before_step`): by itself where the blocks are on a device, else with the
engine's thread. Pages from below dram are loaded behind it as well.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.engines.vllm.loading import Loading
from workmem.engines.vllm.moving import EngineBlocks, Fence, Mark, Reading
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.pending import PendingSaves
from workmem.engines.vllm.steps import LoadOp, SaveOp, StepPlan
from workmem.store.contract import BlockId, KVStore, PageWrite, SaveState

log = logging.getLogger("vllm.workmem")

SYNC_LOAD_S = 1.0
"""Longest that a step waits for pages that were in dram when they were promised."""
SAVE_WAIT_S = 10.0
"""Longest that a step waits for a copy of a block that it is about to write to; past it saving is over."""
ROOTS_MAX = 1024
"""Remembered; then from the beginning."""


class WorkerSide:
    """Of one worker of rank `rank`. Called by the engine's thread; two threads of its own and the store's do the rest."""

    def __init__(
        self, store: KVStore, blocks: EngineBlocks, outcomes: LoadOutcomes, *, rank: int, load_s: float
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._blocks = blocks
        self._outcomes = outcomes
        self._rank = rank
        self._load_s = load_s
        self._loading = Loading(store, blocks, self.counts)
        self._pending = PendingSaves()
        self._roots: dict[Namespace, bytes] = {}
        self._jobs: queue.SimpleQueue[tuple[LoadOp, Mark, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._load_behind, name="workmem-vllm-load", daemon=True)
        self._thread.start()

    @property
    def page_bytes(self) -> int:
        """Of this worker's part of a block."""
        return self._blocks.layout.page_bytes

    @property
    def save_waits(self) -> int:
        """Times that the engine had to wait for a copy."""
        return self._pending.waits

    # -- the steps of the engine

    def before_step(self, plan: StepPlan) -> None:
        """Nothing is read any more from blocks that this step writes to. Raises RuntimeError where a copy never ends."""
        if plan.is_off:
            # Which blocks it writes to nobody says.
            self.give_up()
            return
        self._blocks.hold(self._free(plan.written))

    def load(self, plan: StepPlan) -> None:
        """Load what the step computes with; begin to load what it does not."""
        if not plan.loads:
            return
        # Whoever had the blocks before may still be at them, and so may vLLM's own zeroing of new ones.
        mark = self._blocks.mark()
        for op in plan.loads:
            if op.is_async:
                self._outcomes.goes_aside(op)
                # From now on, and not from its turn: many may stand before it that wait for the same disk.
                self._jobs.put((op, mark, time.monotonic() + self._load_s))
            elif not op.blocks:
                self._outcomes.end(op, 0, "")
            else:
                self._end(op, *self._loaded(op, mark, SYNC_LOAD_S))

    def save(self, plan: StepPlan) -> None:
        """The step is over: save the blocks that it completed, behind the engine."""
        if not plan.saves:
            return
        mark = self._blocks.mark()
        for op in plan.saves:
            root = self._root(op.namespace)
            self._store.save(root, self._writes(op, root, mark))

    def give_up(self) -> None:
        """`before_step` is not called any more: what is being saved may be overwritten, and is dropped."""
        self._pending.is_over = True

    def before_sleep(self) -> None:
        """The blocks' memory is about to go. Raises RuntimeError where a copy from it never ends."""
        if not self._pending.drain(SAVE_WAIT_S):
            raise RuntimeError(f"blocks were still being copied after {SAVE_WAIT_S:g} s")

    def end_loads(self) -> bool:
        """Finish what is queued and begin nothing more. False where something may still write to the engine's blocks."""
        self._jobs.put(None)
        self._thread.join(self._load_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Finish what is queued and stop."""
        self.end_loads()

    # -- loading

    def _load_behind(self) -> None:
        while (job := self._jobs.get()) is not None:
            op, mark, until = job
            try:
                pages, why = self._loaded(op, mark, max(0.0, until - time.monotonic()))
            except Exception as error:  # thread main: whoever waits for the load must hear of its end
                log.exception("loading pages met a bug of ours; their tokens are computed")
                pages, why = 0, str(error)
            self._end(op, pages, why)

    def _loaded(self, op: LoadOp, mark: Mark, wait_s: float) -> tuple[int, str]:
        """Bring pages into blocks. How many are in place, from the first on, and why the next one is not."""
        return self._loading.load(op, self._root(op.namespace), mark, self._free(op.blocks), wait_s)

    def _end(self, op: LoadOp, pages: int, why: str) -> None:
        self.counts["pages_loaded"] += pages
        self._outcomes.end(op, pages, why)

    # -- saving

    def _writes(self, op: SaveOp, root: bytes, mark: Mark) -> list[PageWrite]:
        size = self._blocks.layout.block_tokens
        writes: list[PageWrite] = []
        parent = op.parent or root
        for index, (key, block) in enumerate(zip(op.keys, op.blocks, strict=True)):
            tokens = op.tokens[index * size : (index + 1) * size]
            block_id = BlockId(key=key, parent=parent, tokens=tokens, depth=op.depth + index)
            reading = self._blocks.begin_out(block, mark)
            self._pending.begin(block, reading)
            writes.append(
                PageWrite(block=block_id, copy_into=self._copier(reading), done=self._done(block, reading))
            )
            parent = BlockKey(key)
        return writes

    def _copier(self, reading: Reading) -> Callable[[memoryview], tuple[int, ...]]:
        def copy(into: memoryview) -> tuple[int, ...]:
            reading.issue()
            self._pending.issued()
            sums = reading.copy_into(into)
            if self._pending.is_over:
                # Half of it may be of another context: such a page must not become visible (R2).
                raise RuntimeError("the engine had the block back before it was copied")
            return sums

        return copy

    def _done(self, block: int, reading: Reading) -> Callable[[SaveState], None]:
        def done(state: SaveState) -> None:
            reading.end()
            self._pending.end(block, reading)
            self.counts[f"pages_{state.value}"] += 1

        return done

    def _free(self, blocks: tuple[int, ...] | list[int]) -> list[Fence]:
        fences = self._pending.wait_for(blocks, SAVE_WAIT_S)
        if fences is None:
            raise RuntimeError(f"a block was still being copied after {SAVE_WAIT_S:g} s")
        return fences

    def _root(self, first: Namespace) -> bytes:
        root = self._roots.get(first)
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[first] = self._store.register(first.of_rank(self._rank))
        return root
