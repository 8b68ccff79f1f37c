"""Several workers of one engine: a page is in place where each has its part, and what one says counts for all."""

from __future__ import annotations

import threading

import msgspec
import pytest
from fake_engine import FakeVllm, Request
from small import FACTS, SIZE

from workmem.core.layout import Namespace
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.facts import Scope
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.pending import PendingSaves
from workmem.engines.vllm.scheduler import SchedulerSide
from workmem.engines.vllm.steps import Loaded, LoadOp, StepPlan, StepReport
from workmem.engines.vllm.worker import WorkerSide
from workmem.store.contract import BlockId, PageWrite
from workmem.store.store import Store

PROMPT = list(range(100, 100 + 6 * SIZE + 1))
TWO = msgspec.structs.replace(FACTS, workers=2)


@pytest.mark.parametrize("turned", [False, True])
def test_what_came_to_one_and_not_to_another_did_not_come(turned):
    one = StepReport({"a": Loaded("a", 4), "b": Loaded("b", 1, "late"), "c": Loaded("c", 2)})
    two = StepReport({"a": Loaded("a", 3, "corrupt"), "b": Loaded("b", 5)}, off="a bug")
    joined = two.with_(one) if turned else one.with_(two)
    assert joined.loads == {
        "a": Loaded("a", 3, "corrupt"),
        "b": Loaded("b", 1, "late"),
        "c": Loaded("c", 2),
    }
    assert joined.off == "a bug"


@pytest.mark.parametrize("parts", [(6, 6), (6, 2), (2, 6), (6, 0)])
def test_a_block_is_a_hit_where_every_worker_has_its_part(store: Store, parts: tuple[int, int]):
    side = SchedulerSide(TWO, "w", store, VllmConfig())
    request = Request("a", PROMPT)
    for root, count in zip(side._namespaces.of(Scope())[1], parts, strict=True):
        parent, pages = root, []
        for depth, key in enumerate(request.block_hashes[:count]):
            tokens = tuple(PROMPT[depth * SIZE : (depth + 1) * SIZE])
            block = BlockId(key=key, parent=parent, tokens=tokens, depth=depth)
            pages.append(PageWrite(block=block, copy_into=lambda _: None, done=lambda _: None))
            parent = key
        store.save(root, pages)
    assert store.flush(5)
    side.arrives(request)
    assert side.match(request, 0) == (min(parts) * SIZE, False)
    side.close()


def test_each_worker_saves_and_loads_under_its_own_rank(store: Store, monkeypatch: pytest.MonkeyPatch):
    asked: list[bytes] = []
    lease = store.lease

    def noted(root: bytes, *args, **kwargs):
        asked.append(root)
        return lease(root, *args, **kwargs)

    monkeypatch.setattr(store, "lease", noted)
    space = Namespace(model_fingerprint="w", layout=TWO.layout(0))
    engine = FakeVllm(store, 4)
    blocks = engine.kv
    for rank in range(2):
        made = WorkerSide(store, blocks, LoadOutcomes(), rank=rank, load_s=1.0)
        key = Request("a", PROMPT).block_hashes[0]
        op = LoadOp(request="a", namespace=space, keys=(key,), blocks=(1,), is_async=False)
        made.load(StepPlan(loads=[op]))
        made.close()
    engine.close()
    assert asked == [space.root(), space.of_rank(1).root()]


def test_half_a_page_that_came_does_not_stay_in_its_block(store: Store, monkeypatch: pytest.MonkeyPatch):
    """It may read as NaN, and vLLM multiplies by it before it is masked."""
    made = FakeVllm(store, 16)
    made.add(Request("a", PROMPT))
    made.run()
    assert store.flush(5)
    made.reset()
    made.tensors[0][:] = 255
    copy = made.kv.copy_in
    monkeypatch.setattr(made.kv, "copy_in", lambda block, page: (*copy(block, page)[1:], 0))
    made.side.arrives(request := Request("b", PROMPT))
    assert made.side.match(request, 0)[0]
    made.side.allocated(request, list(range(7)), 6 * SIZE)
    made.worker.load(made.side.plan({}, lambda _: None))
    assert not made.tensors[0][0].any()
    made.close()


def test_sleep_waits_until_nothing_is_read_any_more():
    pending = PendingSaves()
    reading = type("Reading", (), {"fence": None})()
    assert pending.drain(0)
    pending.begin(3, reading)
    assert not pending.drain(0.01)
    threading.Timer(0.1, pending.end, (3, reading)).start()
    assert pending.drain(5)
