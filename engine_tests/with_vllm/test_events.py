"""KV events of a real vLLM, heard and answered: what the index has is what the engine's own block pool has."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import pytest
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.kv_cache_utils import get_block_hash

from workmem.engines.vllm import event_stream, events
from workmem.engines.vllm.event_source import EventSource, Socket, Sockets, zmq_sockets
from workmem.engines.vllm.event_stream import EventStream, StreamState
from workmem.engines.vllm.hashes import block_hashes, event_hash
from workmem.index.residency import Holder, ResidencyIndex

SIZE = 32
GPU, CPU, STORAGE = Holder("e"), Holder("e", 0, "CPU"), Holder("e", 0, "STORAGE")


class Lossy:
    """Loses what is published while `is_losing`."""

    def __init__(self, inner: Socket) -> None:
        self._inner = inner
        self.is_losing = False
        self.lost = 0

    def receive(self) -> list[bytes] | None:
        found = self._inner.receive()
        while found is not None and self.is_losing:
            self.lost += 1
            found = self._inner.receive()
        return found

    def __getattr__(self, name: str) -> Callable:
        return getattr(self._inner, name)


class LossySockets:
    can_replay = True

    def __init__(self, inner: Sockets) -> None:
        self._inner = inner

    def subscribe(self) -> Lossy:
        self.made = Lossy(self._inner.subscribe())
        return self.made

    def ask(self) -> Socket:
        return self._inner.ask()


class Listener:
    def __init__(self, endpoint: str, replay: str) -> None:
        self.index = ResidencyIndex()
        self.sockets = LossySockets(zmq_sockets(endpoint, replay, "kv"))
        self.stream = EventStream("e", self.index, can_replay=True, now=time.monotonic())
        self.source = EventSource(self.stream, self.sockets)

    def until(self, holds: Callable[[], bool], seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.source.pump()
            if holds():
                return True
            self.source.wait(0.02)
        return holds()

    def names(self, holder: Holder = GPU) -> set:
        return {b.hash for b in self.index.held_by("e") if holder in self.index.holders_of(b)}


class Engine(harness.Engine):
    """One that publishes, and a listener that was there from the start."""

    def __init__(self, host: harness.Host, model: Path) -> None:
        self.endpoint, self.replay = f"ipc://{host.folder}/e", f"ipc://{host.folder}/r"
        publishes = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay,
            "topic": "kv@pod0",
        }
        super().__init__(
            host, model, max_model_len=640, num_gpu_blocks_override=24, kv_events_config=publishes
        )
        self.listener = Listener(self.endpoint, self.replay)

    def truth(self) -> set[int]:
        """Names of the blocks in the engine's prefix cache."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return {event_hash(bytes(get_block_hash(key))) for key in pool.cached_block_hash_to_block._cache}

    def agrees(self, listener: Listener | None = None) -> bool:
        heard = listener or self.listener
        return heard.until(lambda: heard.names() == self.truth() and heard.stream.state is StreamState.LIVE)


def prompt(seed: int, blocks: int = 4) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000, 40000) for _ in range(blocks * SIZE + 3)]


@pytest.fixture(scope="module")
def engine(host: harness.Host, smollm2: Path) -> Iterator[Engine]:
    made = Engine(host, smollm2)
    assert not made.connector._guard.off
    yield made
    made.listener.source.close()
    made.llm.llm_engine.engine_core.shutdown()


def test_hashes_are_those_of_vllm_also_with_a_salt(engine: Engine):
    tokens = prompt(1)
    engine.ask(tokens, n=1)
    engine.ask(tokens, salt="tenant-ü", n=1)
    assert engine.agrees()
    for salt in ("", "tenant-ü"):
        names = [event_hash(full) for full in block_hashes(tokens, SIZE, salt=salt)]
        assert engine.listener.index.match(names)[GPU] == 4
        first = next(b for b in engine.listener.index.held_by("e") if b.hash == names[0])
        assert first.origin.salt == salt
        assert first.is_first
        assert list(first.tokens) == tokens[:SIZE]


def test_evicted_blocks_are_removed_and_the_ends_of_two_prompts_share_a_beginning(engine: Engine):
    shared = prompt(2, 3)[: 3 * SIZE]
    for seed in range(20, 24):
        engine.ask(shared + prompt(seed), n=1)
        assert engine.agrees()
    assert engine.listener.stream.counts["blocks_removed"] > 0
    names = [event_hash(full) for full in block_hashes(shared, SIZE)]
    assert engine.listener.index.match(names)[GPU] == 3


def test_who_comes_late_knows_the_same(engine: Engine):
    engine.ask(prompt(3), n=1)
    late = Listener(engine.endpoint, engine.replay)
    assert engine.agrees(late)
    assert late.stream.counts["batches"] > 0
    assert not late.stream.is_partial
    late.source.close()


def test_a_gap_is_closed_by_what_is_sent_again(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    # Nothing is asked for because it is quiet.
    monkeypatch.setattr(event_stream, "PROBE_S", 3600.0)
    listener = engine.listener
    engine.ask(prompt(4), n=1)
    assert engine.agrees()
    before = listener.stream.counts["gaps"]
    listener.sockets.made.is_losing = True
    for seed in range(40, 42):
        engine.ask(prompt(seed), n=1)
    assert listener.until(lambda: listener.sockets.made.lost > 0)
    listener.sockets.made.is_losing = False
    engine.ask(prompt(44), n=1)
    assert engine.agrees()
    assert listener.stream.counts["gaps"] == before + 1
    assert listener.stream.counts["lost"] == listener.stream.counts["restarts"] == 0


def test_a_reset_clears_what_is_the_engines_and_a_new_epoch_what_is_ours(engine: Engine):
    listener, tokens = engine.listener, prompt(5)
    names = [event_hash(full) for full in block_hashes(tokens, SIZE)]
    engine.ask(tokens, n=1)
    # What was saved behind it is published with steps of the engine.
    assert until(
        lambda: engine.ask(prompt(50, 1), n=1), lambda: listener.index.match(names).get(CPU) == 4, listener
    )
    assert engine.llm.reset_prefix_cache()
    engine.ask(prompt(51), n=1)
    assert engine.agrees()
    assert listener.index.match(names) == {CPU: 4}
    # Loaded back, it is the engine's again.
    engine.ask(tokens, n=1)
    assert engine.agrees()
    assert listener.index.match(names) == {CPU: 4, GPU: 4}
    # What dram held is on the ssd alone.
    engine.host.restart()
    harness.wait_until_attached(engine)
    assert until(
        lambda: engine.ask(prompt(53, 1), n=1),
        lambda: listener.index.match(names).get(STORAGE) == 4,
        listener,
    )
    assert CPU not in listener.index.match(names)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert until(lambda: engine.ask(prompt(52, 1), n=1), lambda: listener.index.match(names) == {}, listener)
    assert engine.connector._guard.off == ""


def until(act: Callable[[], object], holds: Callable[[], bool], listener: Listener) -> bool:
    for _ in range(20):
        act()
        if listener.until(holds, 0.3):
            return True
    return False


def test_every_field_of_vllms_events_that_is_read_here_is_one_of_its():
    for ours, theirs in (
        (events.BlockStored, BlockStored),
        (events.BlockRemoved, BlockRemoved),
        (events.AllBlocksCleared, AllBlocksCleared),
    ):
        assert set(ours.__struct_fields__) <= set(theirs.__struct_fields__)
        assert ours.__struct_config__.tag == theirs.__struct_config__.tag


def test_a_publisher_that_starts_anew_is_told_from_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(event_stream, "PROBE_S", 3600.0)
    endpoint, replay = f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/q"

    def start() -> ZmqEventPublisher:
        return ZmqEventPublisher(0, endpoint, replay, buffer_steps=3, topic="kv")

    def say(publisher: ZmqEventPublisher, name: int) -> None:
        event = BlockStored([name], None, [1, 2], 2, None, "GPU", None)
        publisher.publish(KVEventBatch(ts=time.time(), events=[event]))

    publisher = start()
    for name in range(1, 6):
        say(publisher, name)
    while not publisher._buffer or publisher._buffer[-1][0] < 4:
        time.sleep(0.01)
    listener = Listener(endpoint, replay)
    assert listener.until(lambda: listener.names() == {3, 4, 5})
    assert listener.stream.is_partial
    publisher.shutdown()
    publisher = start()
    for name in range(11, 14):
        say(publisher, name)
    assert listener.until(lambda: listener.names() == {11, 12, 13})
    assert listener.stream.counts["restarts"] == 1
    # More than the buffer has is lost: all is learnt anew from what it has.
    listener.sockets.made.is_losing = True
    for name in range(14, 20):
        say(publisher, name)
    assert listener.until(lambda: listener.sockets.made.lost >= 6)
    listener.sockets.made.is_losing = False
    say(publisher, 20)
    assert listener.until(lambda: listener.names() == {18, 19, 20})
    assert listener.stream.counts["lost"] == 1
    publisher.shutdown()
    listener.source.close()
