"""Handoffs and last saves on both sides of the connector, under the small engine."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_engine import FakeVllm, Request
from small import FACTS, SIZE

from workmem.core.keys import BlockKey
from workmem.core.outcomes import Lookup, MissReason
from workmem.engines.vllm.config import VllmConfig
from workmem.policy.order import Prospect
from workmem.prompt.hints import read_hints
from workmem.store.contract import BlockId
from workmem.store.host.client import HostStore
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store

PROMPT = list(range(100, 100 + 6 * SIZE + 1))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def handed_off(
    name: str, prompt: Sequence[int] = PROMPT, *, wait_s: float = 4.0, tokens: int = 0, **more: object
) -> Request:
    said = {"tokens": tokens or len(prompt), "wait_s": wait_s}
    return Request(name, list(prompt), kv_transfer_params={"workmem": {"handoff": said}}, **more)


@pytest.fixture
def make(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeVllm]]:
    """Engines over one store, with a clock that stands still unless told."""
    made: list[FakeVllm] = []

    def one(over: object = store, *, settings: VllmConfig | None = None, **role: bool) -> FakeVllm:
        engine = FakeVllm(over, 32, settings, **role)
        clock = Clock()
        engine.clock = clock
        engine.side._handoffs._clock = clock
        made.append(engine)
        return engine

    yield one
    for engine in made:
        engine.close()


def prefill(engine: FakeVllm, prompt: Sequence[int], store: Store, name: str = "p") -> None:
    request = Request(name, list(prompt))
    engine.add(request)
    engine.run()
    assert store.flush(5)


def told(request: Request) -> dict[str, object]:
    assert request.answer is not None
    return request.answer["workmem"]


def test_it_waits_for_what_comes_and_then_loads_it(make, store: Store):
    producer, consumer = make(), make()
    request = handed_off("d")
    consumer.add(request)
    for _ in range(3):
        consumer.step()
        consumer.clock.now += 0.1
    assert request.state == "waiting"
    prefill(producer, PROMPT, store)
    consumer.clock.now += 0.1
    consumer.run()
    assert told(request)["tokens"] == {"dram": 6 * SIZE, "computed": 1}
    assert told(request)["handoff"] == {"waited_s": pytest.approx(0.4), "tokens": 6 * SIZE}
    assert consumer.side.counts["handoffs_whole"] == 1
    assert consumer.side.counts["handoff_waited_ms"] == 400


def test_nothing_waits_where_all_is_there_or_no_handoff_is_known(make, store: Store):
    producer, consumer = make(), make()
    prefill(producer, PROMPT, store)
    ready, plain = handed_off("d"), Request("e", list(range(900, 900 + 3 * SIZE)))
    consumer.add(ready)
    consumer.add(plain)
    consumer.step()
    assert {ready.state, plain.state} == {"running", "done"} or ready.state == plain.state == "done"
    consumer.run()
    assert told(ready)["handoff"] == {"waited_s": 0.0, "tokens": 6 * SIZE}
    assert consumer.side.counts["handoffs_ready"] == 1
    assert "handoff" not in told(plain)


def test_others_run_while_one_waits(make):
    consumer = make()
    held = handed_off("held")
    consumer.add(held)
    for number in range(3):
        other = Request(f"o{number}", [1000 + number * 50 + n for n in range(2 * SIZE)], to_generate=SIZE)
        consumer.add(other)
        for _ in range(12):
            consumer.step()
        assert other.state == "done"
    assert held.state == "waiting"
    assert not held.blocks
    consumer.clock.now += 60
    consumer.run()
    assert told(held)["tokens"] == {"computed": len(PROMPT)}


def test_it_ends_when_nothing_new_comes(make, store: Store):
    producer, consumer = make(), make()
    request = handed_off("d", wait_s=4.0)
    consumer.add(request)
    consumer.step()
    consumer.clock.now += 0.9
    prefill(producer, PROMPT[: 3 * SIZE], store)
    consumer.step()
    consumer.clock.now += 0.9
    consumer.step()
    assert request.state == "waiting", "a part came: it waits on for a quarter of the time"
    consumer.clock.now += 0.2
    consumer.run()
    assert told(request)["tokens"] == {"dram": 3 * SIZE, "computed": 3 * SIZE + 1}
    assert told(request)["handoff"] == {"waited_s": pytest.approx(2.0), "tokens": 3 * SIZE}
    assert consumer.side.counts["handoffs_stalled"] == 1


def test_no_longer_than_the_setting_allows(make, store: Store):
    consumer = make(settings=VllmConfig(handoff_wait_max_s=0.2))
    request = handed_off("d", wait_s=3600.0)
    consumer.add(request)
    consumer.step()
    consumer.clock.now += 0.21
    consumer.run()
    assert told(request)["handoff"]["waited_s"] == pytest.approx(0.21)
    assert consumer.side.counts["handoffs_late"] == 1


def test_fewer_tokens_than_the_prompt_has(make, store: Store):
    producer, consumer = make(), make()
    prefill(producer, PROMPT[: 3 * SIZE], store)
    request = handed_off("d", tokens=3 * SIZE + 2)
    consumer.add(request)
    consumer.run()
    assert told(request)["handoff"] == {"waited_s": 0.0, "tokens": 3 * SIZE}


def test_a_block_that_ends_with_the_prompt_is_not_waited_for(make, store: Store):
    """Its last token is computed in any case."""
    producer, consumer = make(), make()
    prefill(producer, PROMPT[: 5 * SIZE], store)
    request = handed_off("d", PROMPT[: 6 * SIZE])
    consumer.add(request)
    consumer.run()
    assert told(request)["handoff"] == {"waited_s": 0.0, "tokens": 5 * SIZE}


def test_a_long_context_is_looked_for_where_it_goes_on(make, store: Store):
    away = Away(store)
    consumer = make(away)
    long = [n % 50 for n in range(90 * SIZE + 1)]
    asked: list[int] = []
    inner = away.lookup
    away.lookup = lambda root, keys: asked.append(len(keys)) or inner(root, keys)
    request = handed_off("d", long)
    consumer.add(request)
    consumer.step()
    keys = [BlockKey(key) for key in request.block_hashes]
    root = consumer.side._namespaces.of(consumer.side._requests["d"].scope)[1][0]
    for start, end in ((0, 20), (20, 88)):
        blocks = [
            BlockId(keys[n], keys[n - 1] if n else root, tuple(long[n * SIZE : (n + 1) * SIZE]), n)
            for n in range(start, end)
        ]
        store.put(root, [(block, bytes(FACTS.layout(0).page_bytes)) for block in blocks])
        del asked[:]
        consumer.clock.now += 0.1
        consumer.step()
        assert request.state == "waiting"
    assert asked == [64, 6], "of what is missing, a window at a time, as long as all of one is there"
    consumer.abort(request)
    consumer.step()


def test_what_the_engine_has_itself_counts(make, store: Store):
    consumer = make()
    prefill(consumer, PROMPT, store)
    request = handed_off("d")
    consumer.add(request)
    consumer.run()
    assert told(request)["handoff"] == {"waited_s": 0.0, "tokens": 0}
    assert told(request)["tokens"] == {"vram": 6 * SIZE, "computed": 1}


def test_less_than_is_worth_loading_is_not_waited_for(make, store: Store):
    consumer = make(settings=VllmConfig(load_min_blocks=4))
    prefill(consumer, PROMPT[: 4 * SIZE], store)
    request = handed_off("d")
    consumer.add(request)
    consumer.step()
    assert request.state != "waiting"
    consumer.run()


class Away:
    """A store that does not answer, once told so."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_away = False
        self.announced: list[tuple[bytes, tuple[BlockKey, ...], Prospect]] = []
        self.lookups = 0

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def lookup(self, root: bytes, keys: Sequence[BlockKey]) -> Lookup:
        self.lookups += 1
        return Lookup((), MissReason.UNAVAILABLE) if self.is_away else self._store.lookup(root, keys)

    def announce(self, root: bytes, keys: Sequence[BlockKey], prospect: Prospect) -> int:
        self.announced.append((root, tuple(keys), prospect))
        return self._store.announce(root, keys, prospect)


def test_it_ends_when_the_store_goes_away(make, store: Store):
    away = Away(store)
    consumer = make(away)
    request = handed_off("d")
    consumer.add(request)
    consumer.step()
    assert request.state == "waiting"
    away.is_away = True
    consumer.clock.now += 0.1
    consumer.run()
    assert told(request)["tokens"] == {"computed": len(PROMPT)}
    assert consumer.side.counts["handoffs_unavailable"] == 1
    assert told(request)["handoff"]["waited_s"] == pytest.approx(0.1)


def test_the_store_hears_what_is_waited_for(make, store: Store):
    away = Away(store)
    consumer = make(away)
    request = handed_off("d")
    consumer.add(request)
    for _ in range(10):
        consumer.step()
        consumer.clock.now += 0.06
    keys = [BlockKey(key) for key in request.block_hashes]
    assert {said[1:] for said in away.announced} == {((keys[0],), Prospect.EXPECTED)}
    assert 2 <= len(away.announced) <= 4, "now and then, and not with each look"


def test_an_engine_that_does_nothing_else_looks_seldom(make, store: Store):
    away = Away(store)
    consumer = make(away)
    consumer.add(handed_off("d"))
    plan_holds_back = []
    inner = consumer.side.plan
    consumer.side.plan = lambda *args: plan_holds_back.append((plan := inner(*args)).holds_back) or plan
    for _ in range(1000):
        consumer.step()
        consumer.clock.now += 0.0005
    assert all(plan_holds_back)
    assert away.lookups < 60


def test_many_that_wait_do_not_make_a_step_long(make, store: Store):
    away = Away(store)
    consumer = make(away)
    for number in range(40):
        consumer.add(handed_off(f"d{number}", [number * 100 + n for n in range(2 * SIZE)]))
    before = away.lookups
    consumer.step()
    assert away.lookups - before == 16
    consumer.step()
    consumer.step()
    assert away.lookups - before == 40, "all had their turn"
    consumer.clock.now += 60
    looks: list[list[object]] = [[]]
    handoffs = consumer.side._handoffs
    look = handoffs._look
    handoffs._look = lambda tracked, keys: looks[-1].append(tracked) or look(tracked, keys)
    for _ in range(1000):
        if len(consumer.finished) == 40:
            break
        looks.append([])
        consumer.step()
    assert len(consumer.finished) == 40
    # Nor does it where the time of all is up at once: they compute.
    assert max(map(len, looks)) <= 16
    assert consumer.side.counts["handoffs_late"] == 40


@pytest.mark.parametrize("role", ["producer", "apart"])
def test_where_nothing_of_others_is_a_hit_nobody_waits(make, store: Store, role: str):
    engine = make(may_load=False) if role == "producer" else make()
    if role == "apart":
        engine.side.start_epoch(7, is_empty=True)
    request = handed_off("d")
    engine.add(request)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert engine.side.counts["handoffs_unavailable"] == 1
    assert told(request)["handoff"] == {"waited_s": 0.0, "tokens": 0}


def test_a_reset_ends_the_wait(make, store: Store):
    engine = make()
    request = handed_off("d")
    engine.add(request)
    engine.step()
    assert request.state == "waiting"
    engine.side.start_epoch(7, is_empty=True)
    engine.step()
    assert request.state != "waiting"
    engine.run()


def test_a_denied_block_is_not_waited_for(make, store: Store):
    engine = make()
    request = handed_off("d")
    engine.side._denied.add(BlockKey(request.block_hashes[2]))
    engine.add(request)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert engine.side.counts["handoffs_unavailable"] == 1


def test_one_that_is_aborted_while_it_waits_leaves_nothing_behind(make, store: Store):
    engine = make()
    request = handed_off("d")
    engine.add(request)
    engine.step()
    assert engine.side._handoffs.holds_back
    engine.abort(request)
    assert not engine.side._handoffs.holds_back
    assert not engine.side._requests
    assert engine.side.counts["handoffs_left"] == 1


def test_one_that_is_preempted_does_not_wait_again(make, store: Store):
    producer, engine = make(), make()
    prefill(producer, PROMPT[: 3 * SIZE], store)
    request = handed_off("d", to_generate=3 * SIZE)
    engine.add(request)
    engine.step()
    engine.clock.now += 60
    engine.step()
    assert request.state == "running"
    engine.preempt()
    engine.step()
    assert request.state == "running"
    engine.run()
    assert sum(count for name, count in engine.side.counts.items() if name.startswith("handoffs_")) == 1


def test_a_waiting_request_takes_no_pins_and_no_blocks(make, store: Store):
    engine = make()
    asked: list[object] = []
    engine.side.levers.asks = lambda *args: asked.append(args)
    request = handed_off("d")
    engine.add(request)
    for _ in range(5):
        engine.step()
    assert not asked
    assert len(engine.free) == 32
    engine.clock.now += 60
    engine.run()


@pytest.mark.parametrize(
    "said",
    [7, "soon", [], {}, {"tokens": 5}, {"tokens": 0, "wait_s": 1}, {"tokens": 5, "wait_s": -1},
     {"tokens": "5", "wait_s": 1}, {"tokens": True, "wait_s": 1}, {"tokens": 5, "wait_s": math.nan},
     {"tokens": 5, "wait_s": math.inf}, {"tokens": 2**80, "wait_s": 1}],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_named_and_nothing_waits(make, store: Store, said: object):
    engine = make()
    request = Request("d", list(PROMPT), kv_transfer_params={"workmem": {"handoff": said}})
    engine.add(request)
    engine.run()
    assert "handoff" not in told(request)
    (outcome,) = told(request)["hints"]
    assert outcome["id"] == "kv_transfer_params.workmem.handoff"
    assert outcome["outcome"] == "rejected"
    assert outcome["why"]


def test_a_handoff_stands_beside_hints_and_what_is_newer():
    said = {"tokens": 5, "wait_s": 1, "from": "p1"}
    hints = read_hints(
        None, {"workmem": {"handoff": said, "session_id": "s", "priority": 3}, "other": 1}, None
    )
    assert hints.handoff is not None
    assert (hints.handoff.tokens, hints.handoff.wait_s) == (5, 1.0)
    assert (hints.session, hints.priority, hints.outcomes) == ("s", 3, [])
    assert read_hints(None, {"kv_hints": {"handoff": said}}, None).handoff is None


# -- last saves: what a prefill server computed is in the store at once, though it has nothing more to do


def test_the_tail_behind_a_hit_is_saved_though_one_step_computes_it(make, store: Store):
    """A request that loads its beginning, computes its end and has one token to say is over before loads are heard of."""
    first, second, third = make(), make(), make()
    prefill(first, PROMPT[: 3 * SIZE], store)
    # All that a step may compute: it is over with it.
    request = Request("p", PROMPT[: 6 * SIZE], is_prefill=True)
    second.add(request)
    second.run()
    assert told(request)["tokens"] == {"dram": 3 * SIZE, "computed": 3 * SIZE}
    assert store.flush(5)
    assert second.refs == [0] * 32, "what was held for it is free again"
    again = handed_off("d")
    third.add(again)
    third.run()
    assert told(again)["tokens"] == {"dram": 6 * SIZE, "computed": 1}


def test_blocks_of_last_saves_are_nobody_elses_until_they_are_copied(make, store: Store):
    first, second, third = make(), make(), make()
    prefill(first, PROMPT[: 3 * SIZE], store)
    copied = threading.Event()
    inner = second.kv.copy_out

    def late(block: int, into: memoryview) -> tuple[int, ...]:
        copied.wait(0.02)
        return inner(block, into)

    second.kv.copy_out = late
    for number in range(3):
        behind = range(number * 50, number * 50 + 3 * SIZE)
        second.add(Request(f"p{number}", [*PROMPT[: 3 * SIZE], *behind], is_prefill=True))
    # As many as the pool has blocks for, one behind the other: each takes those of the one before.
    for number in range(8):
        second.add(Request(f"q{number}", list(range(1000 + number * 50, 1000 + number * 50 + 5 * SIZE))))
    second.run()
    copied.set()
    assert store.flush(5)
    for number in range(3):
        again = Request(f"d{number}", [*PROMPT[: 3 * SIZE], *range(number * 50, number * 50 + 3 * SIZE + 1)])
        third.reset()
        third.add(again)
        third.run()
        assert told(again)["tokens"] == {"dram": 6 * SIZE, "computed": 1}


def test_nothing_is_saved_of_one_that_was_cut_off_or_may_not(make, store: Store):
    first, consumer = make(), make(may_save=False)
    prefill(first, PROMPT[: 3 * SIZE], store)
    request = Request("p", PROMPT[: 6 * SIZE], is_prefill=True)
    consumer.add(request)
    consumer.run()
    assert store.flush(5)
    assert not consumer.side._last_saves.holds
    root = consumer.side._namespaces.of(next(iter(consumer.side._namespaces._known)))[1][0]
    assert store.lookup(root, [BlockKey(key) for key in request.block_hashes]).blocks == 3


def test_a_reset_lets_go_of_blocks_that_wait_to_be_saved(make, store: Store):
    first, second = make(), make()
    prefill(first, PROMPT[: 3 * SIZE], store)
    request = Request("p", PROMPT[: 6 * SIZE], is_prefill=True)
    second.add(request)
    while request.state != "done":
        second.step()
    assert second.side._last_saves.holds
    assert second.side.is_short(), "they come free with the next step: nobody is to be preempted for them"
    second.side.release()
    assert second.refs == [0] * 32
    second.step()
    assert not second.side.is_short()


def test_another_process_has_it_within_a_moment_though_the_engine_idles(store: Store, tmp_path: Path):
    """Over the host's store, with the clients that engines have: nobody steps, flushes or asks after the answer is out."""
    path = tmp_path / "s"
    server = HostServer(store, path, HostLimits())
    try:
        with HostStore(path) as mine, HostStore(path) as theirs:
            engine = FakeVllm(mine, 32)
            request = Request("p", list(PROMPT), is_prefill=True)
            engine.add(request)
            while request.state != "done":
                engine.step()
            keys = [BlockKey(key) for key in request.block_hashes]
            space = engine.side._namespaces.of(next(iter(engine.side._namespaces._known)))[0]
            root = theirs.register(space)
            until = time.monotonic() + 5
            while theirs.lookup(root, keys[:6]).blocks < 6:
                assert time.monotonic() < until, "never"
                time.sleep(0.005)
            engine.close()
    finally:
        server.close()
