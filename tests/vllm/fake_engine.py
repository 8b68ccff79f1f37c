"""A vLLM of a few hundred lines: a block pool with a prefix cache, chunked prefill, preemption, both kinds of load.

What a block must hold follows from the tokens up to its end, so that each step can check every block it reads.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from small import FACTS, LAYERS, SIZE

from workmem.core.keys import block_keys
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.scheduler import SchedulerSide
from workmem.engines.vllm.steps import OTHER_WEIGHTS, StepReport
from workmem.engines.vllm.weights import WeightsWatch
from workmem.engines.vllm.worker import WorkerSide
from workmem.store.contract import KVStore

CHUNK = 3 * SIZE
"""Most tokens that a request computes in a step."""


@dataclass
class Request:
    request_id: str
    prompt: list[int]
    to_generate: int = 0
    is_prefill: bool = False
    """Its answer is one token, which is not computed any more."""
    cache_salt: str | None = None
    kv_transfer_params: dict[str, object] | None = None
    kv_hints: object = None
    session_id: str | None = None
    all_token_ids: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"
    answer: dict[str, object] | None = None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        seed = hashlib.sha256((self.cache_salt or "").encode(errors="surrogatepass")).digest()
        return block_keys(seed, self.all_token_ids, SIZE)


def content(key: bytes, layer: int, weights: int = 0) -> np.ndarray:
    """What a layer of the block that `key` names must hold, where it was computed with these weights."""
    decides = key + bytes([layer, *([weights] if weights else [])])
    return np.frombuffer(hashlib.shake_128(decides).digest(FACTS.layer_bytes), dtype=np.uint8)


class Block:
    """One of a `FakeVllm`'s, as its pool shows it."""

    is_null = False

    def __init__(self, engine: FakeVllm, block_id: int) -> None:
        self._engine = engine
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        return self._engine.refs[self.block_id]

    @property
    def block_hash(self) -> bytes | None:
        return self._engine.key_of.get(self.block_id)


class Pool:
    """The blocks of a `FakeVllm`, as `pins.BlockPool` has them."""

    def __init__(self, engine: FakeVllm, blocks: int) -> None:
        self._engine = engine
        self.num_gpu_blocks = blocks
        self.blocks = [Block(engine, number) for number in range(blocks)]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._engine._take(block.block_id)

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            self._engine._drop(block.block_id)

    def get_num_free_blocks(self) -> int:
        return len(self._engine.free)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Block] | None:
        found = self._engine.cached.get(block_hash)
        return None if found is None else [self.blocks[found]]


class FakeVllm:
    def __init__(
        self,
        store: KVStore,
        blocks: int,
        settings: VllmConfig | None = None,
        fingerprint: str = "weights",
        **role: bool,
    ) -> None:
        self.settings = settings or VllmConfig(load_s=5.0)
        self.side = SchedulerSide(FACTS, fingerprint, store, self.settings, **role)
        self.tensors = [np.full((blocks, FACTS.layer_bytes), 255, dtype=np.uint8) for _ in range(LAYERS)]
        self.kv = self.blocks_of_tensors()
        self.outcomes = LoadOutcomes()
        self.worker = WorkerSide(store, self.kv, self.outcomes, rank=0, load_s=self.settings.load_s)
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(blocks))
        self.refs = [0] * blocks
        self.cached: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.invalid: list[int] = []
        self.asked = 0
        """Times that a request was looked up for."""
        self.side.bind(Pool(self, blocks), longest_tokens=blocks * SIZE // 2, step_tokens=CHUNK)
        self.weights = 0
        """Which ones it computes with. Whoever changes them says nothing."""
        self.watch = WeightsWatch(lambda: self.weights)

    def blocks_of_tensors(self) -> Any:
        return KVBlocks(FACTS.layout(0), [[tensor] for tensor in self.tensors])

    # -- what a client and the engine do

    def add(self, request: Request) -> None:
        self.side.arrives(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """As vLLM does: in whatever state; a load under way keeps its blocks until the worker says so."""
        if request.state == "done":
            return
        request.answer = self.side.finished(request)
        if request.state == "parked":
            request.state = "aborted"
            return
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._give_back(request)
        request.state = "done"

    def preempt(self) -> None:
        if self.running:
            request = self.running.pop()
            self._give_back(request)
            request.computed, request.state = 0, "waiting"
            self.waiting.insert(0, request)

    def reset(self) -> None:
        """Forget the local prefix cache."""
        self.cached.clear()
        self.key_of.clear()

    def step(self) -> None:
        scheduled: dict[str, tuple[int, int]] = {}
        by_name: dict[str, Request] = {}
        self._continue(scheduled, by_name)
        self._admit(scheduled, by_name)
        scheduled = {name: span for name, span in scheduled.items() if by_name[name].state == "running"}
        plan = self.side.plan(scheduled, lambda name: by_name[name].blocks if name in by_name else None)
        self.watch.begins(plan)
        stale = self.watch.stale
        if stale is not None:
            self.outcomes.spoil(OTHER_WEIGHTS)
            self.outcomes.fail(plan, OTHER_WEIGHTS)
        self.worker.before_step(plan)
        if stale is None:
            self.worker.load(plan)
        bad = self.outcomes.failed_blocks()
        for name, (has, adds) in scheduled.items():
            self._compute(by_name[name], has, adds, bad)
        if stale is None:
            self.worker.save(plan)
        arrived = self.outcomes.arrived()
        bad |= self.outcomes.failed_blocks()
        report = self.outcomes.report()
        if stale is not None:
            report = StepReport(report.loads if report else {}, stale=stale)
        self._settle(scheduled, by_name, bad)
        self._unpark(arrived, bad)
        # As in vLLM: requests end before the connector hears how this step's loads did.
        for request in list(self.running):
            if request.computed >= request.num_tokens:
                self._generated(request)
        if report is not None:
            self.side.heard(report)

    def run(self, steps: int = 3000) -> None:
        for _ in range(steps):
            if not (self.waiting or self.running or self.parked):
                # VLLM makes one step more, to tell its workers who has ended.
                self.step()
                return
            self.step()
            if not self.running:
                time.sleep(0.002)
        raise AssertionError("requests never end")

    def close(self) -> None:
        self.worker.close()
        self.side.close()

    # -- inside

    def _continue(self, scheduled: dict[str, tuple[int, int]], by_name: dict[str, Request]) -> None:
        for request in list(self.running):
            if request.state != "running":
                # It has made room for one before it.
                continue
            adds = min(CHUNK, request.num_tokens - request.computed)
            while not self._grow(request, request.computed + adds):
                victim = self.running[-1]
                if victim.request_id in scheduled:
                    del scheduled[victim.request_id]
                self.preempt()
                if victim is request:
                    break
            if request.state == "running":
                scheduled[request.request_id] = (request.computed, adds)
                by_name[request.request_id] = request

    def _admit(self, scheduled: dict[str, tuple[int, int]], by_name: dict[str, Request]) -> None:
        for request in list(self.waiting):
            hit: list[int] = []
            for key in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
                if key not in self.cached:
                    break
                hit.append(self.cached[key])
            local = len(hit) * SIZE
            self.asked += 1
            external, is_async = self.side.match(request, local)
            if external is None:
                # Passed over, and asked for again in the next step.
                continue
            assert external % SIZE == 0
            assert local + external <= request.num_tokens - (not is_async)
            adds = 0 if is_async else min(CHUNK, request.num_tokens - local - external)
            for block in hit:
                self._take(block)
            request.blocks = list(hit)
            if not self._grow(request, local + external + adds):
                self._give_back(request)
                return
            self.waiting.remove(request)
            if external:
                self.side.allocated(request, request.blocks, external)
            by_name[request.request_id] = request
            if is_async:
                request.computed, request.state = local, "parked"
                self.parked[request.request_id] = request
                continue
            # As in vLLM, blocks are found by others from the moment that they are promised.
            self._cache(request, local + external)
            request.computed, request.state = local + external, "running"
            self.running.append(request)
            scheduled[request.request_id] = (request.computed, adds)

    def _compute(self, request: Request, has: int, adds: int, bad: set[int]) -> None:
        self._forward(request.request_id, request.block_hashes, list(request.blocks), (has, adds), bad)
        request.computed = has + adds
        self._cache(request, request.computed)

    def _forward(
        self, name: str, keys: Sequence[bytes], blocks: list[int], span: tuple[int, int], bad: set[int]
    ) -> None:
        has, adds = span
        for index in range(has // SIZE):
            block = blocks[index]
            if block in bad:
                break
            for layer, tensor in enumerate(self.tensors):
                assert np.array_equal(tensor[block], content(keys[index], layer, self.weights)), (
                    f"{name} reads what is not its own in block {index}"
                )
        for index in range(has // SIZE, -(-(has + adds) // SIZE)):
            block = blocks[index]
            for layer, tensor in enumerate(self.tensors):
                is_full = (index + 1) * SIZE <= has + adds
                tensor[block] = content(keys[index], layer, self.weights) if is_full else 255

    def _settle(
        self, scheduled: dict[str, tuple[int, int]], by_name: dict[str, Request], bad: set[int]
    ) -> None:
        """Requests that read a block which did not arrive go back to before it; what they made of it is void."""
        if not bad:
            return
        self.invalid += bad
        for name in scheduled:
            request = by_name[name]
            index = next((i for i, block in enumerate(request.blocks) if block in bad), None)
            if index is None or index * SIZE >= request.computed:
                continue
            for block in request.blocks[index:]:
                self._uncache(block)
            request.computed = index * SIZE

    def _unpark(self, arrived: set[str], bad: set[int]) -> None:
        for name in arrived:
            request = self.parked.pop(name)
            if request.state == "aborted":
                self._give_back(request)
                request.state = "done"
                continue
            good = next((i for i, block in enumerate(request.blocks) if block in bad), len(request.blocks))
            request.computed = min(good * SIZE, request.num_tokens - 1)
            self._cache(request, good * SIZE)
            if request.computed == 0:
                self._give_back(request)
                request.state = "waiting"
                self.waiting.insert(0, request)
            else:
                request.state = "running"
                self.running.append(request)

    def _generated(self, request: Request) -> None:
        made = request.num_tokens - request.num_prompt_tokens
        if made < request.to_generate:
            request.all_token_ids.append(1 + sum(request.all_token_ids) % 7)
            return
        if request.is_prefill:
            request.all_token_ids.append(1)
        self.running.remove(request)
        request.answer = self.side.finished(request, request.blocks)
        self._give_back(request)
        request.state = "done"
        self.finished.append(request)

    def _grow(self, request: Request, tokens: int) -> bool:
        needed = -(-tokens // SIZE) - len(request.blocks)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            block, _ = self.free.popitem(last=False)
            self._uncache(block)
            self.refs[block] = 1
            request.blocks.append(block)
        return True

    def _take(self, block: int) -> None:
        self.free.pop(block, None)
        self.refs[block] += 1

    def _give_back(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self._drop(block)
        request.blocks = []

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        assert self.refs[block] >= 0
        if not self.refs[block]:
            self.free[block] = None

    def _cache(self, request: Request, tokens: int) -> None:
        for key, block in zip(request.block_hashes[: tokens // SIZE], request.blocks, strict=False):
            if key not in self.cached and block not in self.key_of:
                self.cached[key], self.key_of[block] = block, key

    def _uncache(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            self.cached.pop(key, None)
