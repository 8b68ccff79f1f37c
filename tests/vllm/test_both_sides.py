"""Both sides of the connector under a small engine: no step ever reads a block that is not its own."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeVllm, Request
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from small import FACTS, SIZE, open_store

from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.facts import Scope
from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.scheduler import SchedulerSide
from workmem.engines.vllm.steps import NO_ROOM, Loaded, LoadOp, SaveOp, StepPlan, StepReport
from workmem.store.contract import BlockId, PageWrite
from workmem.store.store import Store


def engine(store: Store, blocks: int = 32, **more: object) -> FakeVllm:
    return FakeVllm(store, blocks, **more)


def tokens_of(request: Request) -> dict[str, int]:
    assert request.answer is not None
    return request.answer["workmem"]["tokens"]


def serve(made: FakeVllm, *requests: Request) -> None:
    for request in requests:
        made.add(request)
    made.run()


PROMPT = list(range(100, 100 + 6 * SIZE + 1))


def test_another_engine_loads_what_the_first_computed(store: Store):
    first, second = engine(store), engine(store)
    serve(first, Request("a", PROMPT))
    assert store.flush(5)
    again = Request("b", PROMPT)
    serve(second, again)
    assert tokens_of(again) == {"dram": 6 * SIZE, "computed": 1}
    first.close()
    second.close()


def test_an_engine_does_with_the_store_what_its_role_says(store: Store):
    consumer, producer = engine(store, may_save=False), engine(store, may_load=False)
    serve(consumer, Request("a", PROMPT))
    assert store.flush(5)
    alone = Request("b", PROMPT)
    serve(producer, alone)
    assert tokens_of(alone) == {"computed": 6 * SIZE + 1}
    assert store.flush(5)
    producer.reset()
    again, loads = Request("c", PROMPT), Request("d", [*PROMPT])
    serve(producer, again)
    assert tokens_of(again) == {"computed": 6 * SIZE + 1}
    consumer.reset()
    serve(consumer, loads)
    assert tokens_of(loads) == {"dram": 6 * SIZE, "computed": 1}
    consumer.close()
    producer.close()


def test_generated_tokens_are_saved_too(store: Store):
    first, second = engine(store), engine(store)
    made = Request("a", PROMPT, to_generate=2 * SIZE)
    serve(first, made)
    assert store.flush(5)
    longer = Request("b", made.all_token_ids)
    serve(second, longer)
    assert tokens_of(longer)["dram"] == 8 * SIZE
    first.close()
    second.close()


def test_pages_from_ssd_come_aside_and_a_whole_prompt_can_come(tmp_path: Path):
    before = open_store(tmp_path / "ssd")
    first = engine(before)
    serve(first, Request("a", PROMPT[:-1]))
    assert before.flush(5)
    first.close()
    before.close()
    after = open_store(tmp_path / "ssd")
    second = engine(after)
    # Without the prefetch at its arrival it would be told as all from ssd; with it, pages may be in dram by then.
    second.side._prefetching._share = 0
    again = Request("b", PROMPT[:-1])
    serve(second, again)
    assert tokens_of(again) == {"ssd": 6 * SIZE, "computed": 0}
    second.close()
    after.close()


def test_a_prefetch_brings_pages_to_dram_before_the_request_has_its_turn(tmp_path: Path):
    before = open_store(tmp_path / "ssd")
    first = engine(before)
    serve(first, Request("a", PROMPT))
    assert before.flush(5)
    first.close()
    before.close()
    after = open_store(tmp_path / "ssd")
    second = engine(after)
    again = Request("b", PROMPT)
    second.add(again)
    assert second.side.counts["prefetches"] == 1
    lease = second.side._requests["b"].prefetched[0]
    assert lease is not None
    settled = threading.Event()
    lease.on_settled(settled.set)
    assert settled.wait(5)
    second.run()
    assert tokens_of(again) == {"dram": 6 * SIZE, "computed": 1}
    assert second.side._prefetching.held_bytes == 0
    second.close()
    after.close()


def test_salts_never_meet(store: Store):
    made = engine(store)
    serve(made, Request("a", PROMPT, cache_salt="one"))
    assert store.flush(5)
    other = Request("b", PROMPT, cache_salt="two")
    serve(made, other)
    assert tokens_of(other) == {"computed": len(PROMPT)}
    assert other.answer["workmem"]["miss"] == "cold"
    made.close()


def test_a_salt_that_is_no_text_is_a_tenant_like_any_other(store: Store):
    made = engine(store)
    serve(made, Request("a", PROMPT, cache_salt="x\ud800"))
    assert store.flush(5)
    made.reset()
    again = Request("b", PROMPT, cache_salt="x\ud800")
    serve(made, again)
    assert tokens_of(again)["computed"] == 1
    made.close()


def test_a_new_epoch_hits_nothing_of_before(store: Store):
    made = engine(store)
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    made.side.start_epoch(1, is_empty=True)
    made.reset()
    again = Request("b", PROMPT)
    serve(made, again)
    assert tokens_of(again) == {"computed": len(PROMPT)}
    made.close()


def test_blocks_of_before_are_not_saved_in_a_new_epoch(store: Store):
    """Requests that run keep the engine from dropping its blocks: those are of the weights of before."""
    made = engine(store)
    serve(made, Request("a", PROMPT))
    made.side.start_epoch(1, is_empty=False)
    serve(made, Request("b", [*PROMPT, *range(900, 900 + 2 * SIZE)]))
    assert store.flush(5)
    made.reset()
    again = Request("c", PROMPT)
    serve(made, again)
    assert tokens_of(again) == {"computed": len(PROMPT)}
    made.reset()
    made.side.emptied()
    serve(made, Request("d", PROMPT))
    assert store.flush(5)
    made.reset()
    last = Request("e", PROMPT)
    serve(made, last)
    assert tokens_of(last)["computed"] == 1
    made.close()


def test_what_the_store_has_of_an_epoch_before_is_saved_anew(store: Store):
    """A request that waits through a reset was told that its blocks are there."""
    made = engine(store)
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    made.reset()
    made.add(Request("b", PROMPT))
    made.side.start_epoch(1, is_empty=True)
    made.run()
    assert store.flush(5)
    made.reset()
    last = Request("c", PROMPT)
    serve(made, last)
    assert tokens_of(last)["computed"] == 1
    made.close()


def promised(store: Store) -> tuple[FakeVllm, Request]:
    """A request that was promised pages and given blocks for them."""
    made = engine(store)
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    made.side.arrives(request := Request("b", PROMPT))
    assert made.side.match(request, 0) == (6 * SIZE, False)
    return made, request


def test_a_promise_is_told_as_broken_where_the_scheduler_goes_off_before_it_is_planned(store: Store):
    made, request = promised(store)
    made.side.allocated(request, list(range(20, 27)), 6 * SIZE)
    with pytest.raises(KeyError):
        # As a bug of ours: the loads must outlive it.
        made.side.plan({"b": (0, 1)}, {}.__getitem__)
    plan = made.side.plan_off()
    assert plan.is_off
    made.outcomes.fail(plan, "off")
    assert made.outcomes.failed_blocks() == set(range(20, 26))
    made.close()


def test_a_promise_is_told_as_broken_where_the_scheduler_went_off_between_it_and_the_blocks(store: Store):
    made, _ = promised(store)
    made.side.not_allocated("b", [20, 21])
    made.outcomes.fail(made.side.plan_off(), "off")
    assert made.outcomes.failed_blocks() == {20, 21}
    assert made.outcomes.arrived() == set(), "it does not wait aside"
    assert not made.side.plan_off().broken, "told once"
    made.close()


def test_what_is_being_saved_is_dropped_where_the_scheduler_goes_off(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    """It does not say any more which blocks are written to: a copy that is under way may be of two contexts."""
    made, gate = engine(store), threading.Event()
    copy = made.kv.copy_out

    def held(block: int, into: memoryview) -> tuple[int, ...]:
        assert gate.wait(10)
        return copy(block, into)

    monkeypatch.setattr(made.kv, "copy_out", held)
    serve(made, Request("a", PROMPT))
    made.worker.before_step(made.side.plan_off())
    for tensor in made.tensors:
        tensor[:] = 1
    gate.set()
    assert store.flush(5)
    keys = [BlockKey(key) for key in Request("a", PROMPT).block_hashes]
    assert store.lookup(made.side._namespaces.of(Scope())[1][0], keys).blocks == 0
    made.close()


def test_a_load_aside_says_itself_how_it_ends(store: Store):
    """Its blocks are written to until then: the engine must not have them back before."""
    op = aside("b")
    outcomes = LoadOutcomes()
    outcomes.goes_aside(op)
    outcomes.fail(StepPlan(loads=[op]), "off")
    assert outcomes.arrived() == set()
    assert outcomes.failed_blocks() == set()
    outcomes.end(op, 1, "late")
    assert outcomes.arrived() == {"b"}
    assert outcomes.failed_blocks() == {2}


def aside(request: str) -> LoadOp:
    layout = FACTS.layout(0)
    space = Namespace(model_fingerprint="", layout=layout)
    return LoadOp(request=request, blocks=(1, 2), is_async=True, namespace=space, keys=())


def test_an_idle_step_waits_for_a_load_no_longer_than_it_takes():
    outcomes = LoadOutcomes()
    begin = time.monotonic()
    assert outcomes.arrived(10.0) == set(), "nothing is on its way"
    outcomes.goes_aside(aside("b"))
    threading.Timer(0.05, lambda: outcomes.end(aside("b"), 2, "")).start()
    assert outcomes.arrived(10.0) == {"b"}
    assert 0.04 < time.monotonic() - begin < 5.0


def test_a_step_is_idle_where_nothing_is_computed_in_it(store: Store):
    made = engine(store)
    made.side.arrives(Request("a", PROMPT))
    assert made.side.plan({}, lambda _: None).is_idle
    assert not made.side.plan({"a": (0, 4)}, lambda _: [1, 2]).is_idle
    made.close()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("way", ["in the step", "aside"])
def test_a_load_that_fails_is_computed_and_not_promised_again(
    tmp_path: Path, at: int, way: str, monkeypatch: pytest.MonkeyPatch
):
    kept = open_store(tmp_path / "ssd")
    first = engine(kept)
    serve(first, Request("a", PROMPT))
    assert kept.flush(5)
    first.close()
    if way == "aside":
        kept.close()
        kept = open_store(tmp_path / "ssd")
    second = engine(kept, settings=VllmConfig(load_s=5, prefetch_share=0))
    copy, number = second.kv.copy_in, itertools.count()

    def damaged(block: int, page: memoryview) -> tuple[int, ...]:
        sums = copy(block, page)
        return tuple(one ^ 1 for one in sums) if next(number) == at else sums

    monkeypatch.setattr(second.kv, "copy_in", damaged)
    again = Request("b", PROMPT)
    serve(second, again)
    assert again.state == "done"
    assert tokens_of(again)["computed"] == len(PROMPT) - at * SIZE
    assert again.answer["workmem"]["miss"] == "corrupt"
    assert second.asked <= 3, "asked again and again: a livelock"
    # What was computed in its place is a hit once more.
    assert kept.flush(5)
    monkeypatch.setattr(second.kv, "copy_in", copy)
    second.reset()
    second.side._denied._until.clear()
    third = Request("c", PROMPT)
    serve(second, third)
    assert tokens_of(third)["computed"] == 1
    second.close()
    kept.close()


def test_a_block_that_failed_is_denied_to_others_for_a_while(store: Store):
    made = engine(store, settings=VllmConfig(deny_s=1000))
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    made.reset()
    made.side._denied.add(BlockKey(Request("x", PROMPT).block_hashes[3]))
    again = Request("b", PROMPT)
    serve(made, again)
    assert tokens_of(again) == {"dram": 3 * SIZE, "computed": len(PROMPT) - 3 * SIZE}
    made.close()


def test_the_block_that_failed_is_not_promised_to_the_next_one(store: Store, monkeypatch: pytest.MonkeyPatch):
    made = engine(store, settings=VllmConfig(deny_s=1000))
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    made.reset()
    copy = made.kv.copy_in
    monkeypatch.setattr(made.kv, "copy_in", lambda block, page: (*copy(block, page)[1:], 0))
    serve(made, Request("b", PROMPT))
    assert store.flush(5)
    made.reset()
    monkeypatch.setattr(made.kv, "copy_in", copy)
    again = Request("c", PROMPT)
    serve(made, again)
    # It was saved anew by then, but may be the same bad memory.
    assert tokens_of(again) == {"computed": len(PROMPT)}
    made.close()


def test_pages_are_not_loaded_into_a_block_that_is_still_being_saved(store: Store):
    made = engine(store)
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    reading = made.kv.begin_out(7, None)
    made.worker._pending.begin(7, reading)
    made.side.arrives(request := Request("b", PROMPT))
    made.side.match(request, 0)
    made.side.allocated(request, [7, 8, 9, 10, 11, 12], 6 * SIZE)
    plan = made.side.plan({}, lambda _: None)
    loading = threading.Thread(target=made.worker.load, args=(plan,))
    loading.start()
    loading.join(0.1)
    assert loading.is_alive()
    made.worker._pending.end(7, reading)
    loading.join(5)
    assert not loading.is_alive()
    made.close()


def full_blocks(saves: Sequence[SaveOp]) -> list[tuple[int, ...]]:
    return [save.blocks for save in saves]


def test_tokens_that_are_not_known_yet_are_not_saved(store: Store):
    """Where steps overlap, a step has tokens of the one before it that were not sampled yet."""
    made = engine(store)
    request = Request("a", PROMPT[: 2 * SIZE + 3])
    made.side.arrives(request)
    table = list(range(10, 20))
    assert full_blocks(made.side.plan({"a": (0, 2 * SIZE + 3)}, lambda _: table).saves) == [(10, 11)]
    # Computes a token of which nobody knows what it is, and with it fills the third block.
    assert made.side.plan({"a": (2 * SIZE + 3, 1)}, lambda _: table).saves == []
    request.all_token_ids.append(5)
    assert full_blocks(made.side.plan({"a": (3 * SIZE, 1)}, lambda _: table).saves) == [(12,)]
    made.close()


def test_what_drafts_may_write_again_is_not_taken_back_too_early(store: Store):
    """Drafts that may be turned down count as tokens that a request has, and are written behind those it computes."""
    made = engine(store)
    made.side.arrives(Request("a", PROMPT[: 2 * SIZE - 1]))
    plan = made.side.plan({"a": (2 * SIZE + 2, 1)}, lambda _: [10, 11, 12, 13])
    assert plan.written == [11, 12, 13]
    made.close()


def test_nothing_computed_on_a_load_is_saved_before_its_end_is_known(store: Store):
    made = engine(store)
    serve(made, Request("a", PROMPT[: 2 * SIZE + 1]))
    assert store.flush(5)
    made.reset()
    first, other = Request("b", PROMPT), Request("c", [*PROMPT[: 2 * SIZE], *range(6 * SIZE)])
    tables = {"b": list(range(10, 17)), "c": [10, 11, *range(20, 26)]}
    for request in (first, other):
        made.side.arrives(request)
    assert made.side.match(first, 0) == (2 * SIZE, False)
    made.side.allocated(first, tables["b"], 2 * SIZE)
    made.side.match(other, 2 * SIZE)
    steps = {"b": (2 * SIZE, 2 * SIZE), "c": (2 * SIZE, 2 * SIZE)}
    # Nor of the other one, which found in vLLM's own cache what is only promised.
    assert made.side.plan(steps, tables.get).saves == []
    # The next step is planned before the first one has ended.
    steps = {"b": (4 * SIZE, SIZE), "c": (4 * SIZE, SIZE)}
    assert made.side.plan(steps, tables.get).saves == []
    made.side.heard(StepReport({"b": Loaded("b", 1, "corrupt")}))
    steps = {"b": (SIZE, 2 * SIZE), "c": (SIZE, 2 * SIZE)}
    assert full_blocks(made.side.plan(steps, tables.get).saves) == [(11, 12), (20,)]
    made.close()


def test_blocks_are_saved_with_their_place_in_the_context(store: Store, monkeypatch: pytest.MonkeyPatch):
    saved: list[BlockId] = []
    save = store.save

    def spy(root: bytes, pages: Sequence[PageWrite]) -> None:
        saved.extend(page.block for page in pages)
        save(root, pages)

    monkeypatch.setattr(store, "save", spy)
    made = engine(store)
    serve(made, Request("a", PROMPT))
    keys = Request("a", PROMPT).block_hashes
    root = made.side._namespaces.of(Scope())[1][0]
    assert [block.depth for block in saved] == list(range(6))
    assert [block.parent for block in saved] == [root, *keys[:5]]
    assert [list(block.tokens) for block in saved] == [
        PROMPT[at : at + SIZE] for at in range(0, 6 * SIZE, SIZE)
    ]
    made.close()


def test_a_store_that_is_closed_is_a_miss(store: Store):
    made = engine(store)
    serve(made, Request("a", PROMPT))
    made.reset()
    store.close()
    again = Request("b", PROMPT)
    serve(made, again)
    assert tokens_of(again) == {"computed": len(PROMPT)}
    made.close()


def test_what_a_request_computed_itself_is_never_told_as_found(store: Store):
    """Preempted, it finds its own blocks, in the engine or in the store."""
    for forgets in (False, True):
        made = engine(store)
        request = Request(f"a{forgets}", [int(forgets), *PROMPT], to_generate=2)
        made.add(request)
        made.step()
        made.step()
        made.preempt()
        if forgets:
            assert store.flush(5)
            made.reset()
        made.run()
        assert tokens_of(request) == {"computed": len(PROMPT) + 1}
        made.close()


def test_what_was_found_is_told_once_however_often_it_is_loaded(store: Store):
    first, made = engine(store), engine(store)
    serve(first, Request("a", PROMPT))
    assert store.flush(5)
    request = Request("b", PROMPT, to_generate=3)
    made.add(request)
    made.step()
    made.preempt()
    made.reset()
    made.run()
    assert made.worker.counts["pages_loaded"] == 12
    assert tokens_of(request) == {"dram": 6 * SIZE, "computed": 1}
    first.close()
    made.close()


@pytest.mark.parametrize("why", ["unavailable", "corrupt"])
def test_a_store_that_went_away_does_not_cost_its_blocks_a_minute(store: Store, why: str):
    now = [0.0]
    made = engine(store)
    side = made.side = SchedulerSide(FACTS, "weights", store, VllmConfig(deny_s=60), lambda: now[0])
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    side.arrives(request := Request("b", PROMPT))
    assert side.match(request, 0) == (6 * SIZE, False)
    side.allocated(request, list(range(7)), 6 * SIZE)
    side.heard(StepReport({"b": Loaded("b", 0, why)}))
    side.arrives(other := Request("c", PROMPT))
    assert side.match(other, 0)[0] == 0
    now[0] = 5.0
    assert side.match(other, 0)[0] == (6 * SIZE if why == "unavailable" else 0)
    assert side.match(request, 0)[0] == 0, "the request that it failed is not promised it again"
    made.close()


@pytest.mark.parametrize("why", ["evicted", "cold", "expired", NO_ROOM])
def test_a_block_that_was_not_there_is_not_denied_once_it_is(store: Store, why: str):
    made = engine(store)
    serve(made, Request("a", PROMPT))
    assert store.flush(5)
    made.side.arrives(request := Request("b", PROMPT))
    made.side.match(request, 0)
    made.side.allocated(request, list(range(7)), 6 * SIZE)
    made.side.heard(StepReport({"b": Loaded("b", 0, why)}))
    made.side.arrives(other := Request("c", PROMPT))
    assert made.side.match(other, 0)[0] == 6 * SIZE
    made.close()


def test_loads_that_wait_for_one_that_does_not_come_wait_no_longer_than_it(tmp_path: Path):
    """One thread loads: each of many would wait its whole time behind the others."""
    kept = open_store(tmp_path / "ssd")
    made = engine(kept, settings=VllmConfig(load_s=0.4))

    class Never:
        keys, ready, failed = (b"",), 0, None

        def on_settled(self, callback: object) -> None:
            pass

        def release(self) -> None:
            pass

    made.worker._store = made.worker._loading._store = SimpleNamespace(
        lease=lambda *_, **__: Never(), register=lambda space: b""
    )
    space = Namespace(model_fingerprint="", layout=FACTS.layout(0))
    loads = [
        LoadOp(request=f"r{at}", blocks=(at,), is_async=True, namespace=space, keys=(BlockKey(bytes(32)),))
        for at in range(5)
    ]
    began = time.monotonic()
    made.worker.load(StepPlan(loads=loads))
    arrived: set[str] = set()
    while len(arrived) < 5:
        arrived |= made.outcomes.arrived()
        assert time.monotonic() - began < 1.2
        time.sleep(0.01)
    report = made.outcomes.report()
    assert report is not None
    assert {load.why_short for load in report.loads.values()} == {"late"}
    made.close()
    kept.close()


def test_what_another_connector_loads_is_told_as_its_own_and_saved_once_it_is_known_to_be_there(store: Store):
    """It may fail in the step that computes with it: a page of that would be a wrong answer for ever."""
    made = engine(store)
    side, worker, table = made.side, made.worker, list(range(10, 17))
    side.arrives(request := Request("a", PROMPT))
    side.arrives(other := Request("b", [*PROMPT[: 4 * SIZE], 1]))
    assert side.match(request, SIZE) == (0, False)
    side.match(other, 4 * SIZE)
    # Three blocks more than the engine has, in this step; the other request shares them.
    steps = {"a": (4 * SIZE, SIZE), "b": (4 * SIZE, 1)}
    plan = side.plan(steps, {"a": table, "b": [*table[:4], 20]}.get)
    assert plan.saves == []
    assert side.plan({"a": (5 * SIZE, SIZE)}, lambda _: table).saves == [], "steps overlap"
    worker.load(plan)
    report = made.outcomes.report()
    assert report is not None
    assert made.outcomes.failed_blocks() == set()
    side.heard(report)
    # The engine was told that the third did not come, and computes from there.
    assert full_blocks(side.plan({"a": (3 * SIZE, 2 * SIZE)}, lambda _: table).saves) == [
        tuple(range(10, 15))
    ]
    assert side.finished(request) == {
        "workmem": {
            "prompt_tokens": len(PROMPT),
            "tokens": {"peer": 3 * SIZE, "vram": SIZE, "computed": 2 * SIZE + 1},
            "miss": "cold",
        }
    }
    made.close()


class Traffic(RuleBasedStateMachine):
    """Any traffic on two engines over one store that is too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = open_store(self.folder, dram="512KiB")
        self.engines = [
            engine(self.store, blocks=14, settings=VllmConfig(load_s=5, deny_s=0.001)) for _ in "ab"
        ]
        self.numbers = itertools.count()
        self.asked: list[Request] = []

    @rule(
        which=st.integers(0, 1),
        head=st.integers(0, 2),
        length=st.integers(1, 9 * SIZE),
        generate=st.integers(0, 6),
        salt=st.sampled_from([None, "tenant"]),
    )
    def add(self, which: int, head: int, length: int, generate: int, salt: str | None) -> None:
        prompt = [1000 * head + index // (1 + head) for index in range(length)]
        request = Request(f"r{next(self.numbers)}", prompt, generate, salt)
        self.asked.append(request)
        self.engines[which].add(request)

    @rule(which=st.integers(0, 1), times=st.integers(1, 4))
    def step(self, which: int, times: int) -> None:
        for _ in range(times):
            self.engines[which].step()

    @rule(which=st.integers(0, 1))
    def preempt(self, which: int) -> None:
        self.engines[which].preempt()

    @rule(which=st.integers(0, 1))
    def reset(self, which: int) -> None:
        self.engines[which].reset()

    @rule(which=st.integers(0, 1), pick=st.integers(0, 30))
    def abort(self, which: int, pick: int) -> None:
        made = self.engines[which]
        alive = [*made.waiting, *made.running, *made.parked.values()]
        if alive:
            made.abort(alive[pick % len(alive)])

    @rule(which=st.integers(0, 1), pick=st.integers(0, 10**6))
    def rot(self, which: int, pick: int) -> None:
        """A bit of the arena turns."""
        arena = self.store.arena
        with arena.writable(0, arena.capacity_bytes) as memory:
            at = (pick * 4097) % len(memory)
            # Payload only: a header that rots is the store's own tests' matter.
            if at % 8192 >= 4096:
                memory[at] ^= 1

    @rule(which=st.integers(0, 1))
    def save_slowly(self, which: int) -> None:
        """The store's thread reads from blocks long after the step that completed them."""
        kv = self.engines[which].kv
        copy = KVBlocks.copy_out

        def late(block: int, into: memoryview) -> tuple[int, ...]:
            time.sleep(0.004)
            return copy(kv, block, into)

        kv.copy_out = late

    @rule()
    def flush(self) -> None:
        assert self.store.flush(10)

    @invariant()
    def the_ledger_is_exact(self) -> None:
        self.store.audit()

    def teardown(self) -> None:
        for made in self.engines:
            made.run()
            made.close()
        assert all(request.state == "done" for request in self.asked)
        self.store.flush(10)
        self.store.audit()
        self.store.close()
        shutil.rmtree(self.folder)


Traffic.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, phases=[Phase.explicit, Phase.generate]
)
TestTraffic = Traffic.TestCase


def test_adapters_never_meet_and_an_unknown_one_is_left_alone(store: Store):
    made = engine(store)
    for name, adapter, wanted in (
        ("a", "one:1", len(PROMPT)),
        ("b", "one:2", len(PROMPT)),
        ("c", "one:1", 1),
    ):
        made.reset()
        request = Request(name, PROMPT)
        made.side.arrives(request, adapter)
        made.waiting.append(request)
        made.run()
        assert store.flush(5)
        assert tokens_of(request)["computed"] == wanted
    made.reset()
    unknown = Request("d", PROMPT)
    made.side.arrives(unknown, None)
    made.waiting.append(unknown)
    made.run()
    assert unknown.state == "done"
    assert unknown.answer is None
    made.close()
