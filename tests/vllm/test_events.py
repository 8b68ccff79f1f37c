"""KV events reach the index whatever the network and the engine do in between."""

from __future__ import annotations

import msgspec
import pytest
from fake_publisher import CLEARED, FakeSockets, Publisher, removed, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.errors import ConfigError
from workmem.engines.vllm import event_stream
from workmem.engines.vllm.event_source import EventSource, zmq_sockets
from workmem.engines.vllm.event_stream import ANSWER_S, PROBE_S, EventStream, StreamState
from workmem.engines.vllm.events import decode_batch
from workmem.index.residency import Holder, Origin, ResidencyIndex

GPU = Holder("e")


class Listener:
    """A source on a fake network, under a clock that only this moves."""

    def __init__(self, publisher: Publisher, *, can_replay: bool = True) -> None:
        self.publisher = publisher
        self.now = 100.0
        self.index = ResidencyIndex()
        self.sockets = FakeSockets(publisher, can_replay=can_replay)
        self.stream = EventStream("e", self.index, can_replay=can_replay, now=self.now)
        self.source = EventSource(self.stream, self.sockets, lambda: self.now)

    def settle(self, seconds: float = 0.0) -> None:
        """Let `seconds` go by, and all that was sent arrive."""
        self.now += seconds
        for _ in range(50):
            taken = self.source.pump()
            self.sockets.serve()
            if not taken and not any(socket.inbox for socket in self.sockets.asking):
                break

    def held(self, medium: str = "GPU") -> set:
        holder = Holder("e", 0, medium)
        return {b.hash for b in self.index.held_by("e") if holder in self.index.holders_of(b)}

    def count(self, name: str) -> int:
        return self.stream.counts[name]


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


def test_what_is_published_is_known(publisher: Publisher):
    listener = Listener(publisher)
    listener.settle()
    publisher.publish(stored([1, 2]), stored([3], 2, session_id="s"))
    publisher.publish(stored([1], medium="STORAGE"))
    publisher.publish(removed([3]), stored([7], 2))
    listener.settle()
    assert listener.stream.state is StreamState.LIVE
    assert not listener.stream.is_partial
    assert listener.held() == {1, 2, 7}
    assert listener.index.match([1, 2, 7]) == {GPU: 3, Holder("e", 0, "STORAGE"): 1}
    publisher.publish(CLEARED)
    listener.settle()
    # The engine's own blocks are gone; those below it are not.
    assert listener.index.match([1, 2, 7]) == {Holder("e", 0, "STORAGE"): 1}


def test_who_comes_late_hears_it_all(publisher: Publisher):
    publisher.publish(stored([1, 2]))
    publisher.publish(stored([3], 2), removed([2]))
    listener = Listener(publisher)
    listener.settle()
    assert listener.held() == {1, 3}
    assert not listener.stream.is_partial


def test_who_comes_too_late_hears_what_is_left_and_says_so():
    publisher = Publisher(buffer=2)
    for name in range(1, 6):
        publisher.publish(stored([name]))
    listener = Listener(publisher)
    listener.settle()
    assert listener.held() == {4, 5}
    assert listener.stream.is_partial
    assert listener.count("joined_late") == 1
    assert listener.count("lost") == 0


def test_a_gap_is_closed_by_what_is_sent_again(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish(stored([1]))
    listener.settle()
    publisher.publish(removed([1]), is_lost=True)
    publisher.publish(stored([2]), is_lost=True)
    publisher.publish(stored([3]))
    publisher.publish(stored([4]))
    listener.settle()
    assert listener.held() == {2, 3, 4}
    assert listener.count("gaps") == 1
    assert listener.count("restarts") == listener.count("lost") == 0


def test_a_last_message_that_was_lost_is_found_when_it_is_quiet(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish(stored([1]))
    listener.settle()
    publisher.publish(removed([1]), is_lost=True)
    listener.settle()
    assert listener.held() == {1}
    listener.settle(PROBE_S)
    assert listener.held() == set()
    assert listener.count("restarts") == 0


def test_when_the_buffer_has_it_no_more_all_is_learnt_anew():
    publisher = Publisher(buffer=2)
    listener = Listener(publisher)
    publisher.publish(stored([1]))
    listener.settle()
    for name in (2, 3, 4):
        publisher.publish(stored([name]), is_lost=True)
    publisher.publish(stored([5]))
    listener.settle()
    assert listener.held() == {4, 5}
    assert listener.count("lost") == 1
    assert listener.count("blocks_forgotten") == 1
    assert listener.stream.is_partial
    publisher.publish(stored([6]))
    listener.settle()
    assert listener.held() == {4, 5, 6}


@pytest.mark.parametrize("messages", [1, 3, 4, 5])
def test_an_engine_that_starts_anew_holds_nothing_of_before(publisher: Publisher, messages: int):
    """Fewer, as many or more messages than the life before: the numbers alone do not tell."""
    listener = Listener(publisher)
    for name in (1, 2, 3):
        publisher.publish(stored([name]))
    listener.settle()
    publisher.start()
    for name in range(11, 11 + messages):
        publisher.publish(stored([name]), is_lost=name < 10 + messages)
    listener.settle(PROBE_S)
    listener.settle(PROBE_S)
    assert listener.held() == set(range(11, 11 + messages))
    assert listener.count("restarts") == 1


def test_an_engine_that_starts_anew_and_says_nothing_is_found_out(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish(stored([1]))
    listener.settle()
    publisher.start()
    listener.settle(PROBE_S)
    assert listener.held() == set()
    assert listener.count("restarts") == 1
    assert listener.stream.state is StreamState.LIVE


def test_without_a_replay_endpoint_a_gap_loses_all(publisher: Publisher):
    listener = Listener(publisher, can_replay=False)
    publisher.publish(stored([1]))
    publisher.publish(stored([2]), is_lost=True)
    publisher.publish(stored([3]))
    listener.settle()
    assert listener.held() == {3}
    assert listener.count("lost") == 1
    publisher.start()
    publisher.publish(stored([4]))
    listener.settle()
    assert listener.held() == {4}
    assert listener.count("restarts") == 1
    assert listener.stream.is_partial


def test_an_engine_that_is_down_is_silent_and_comes_back(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish(stored([1]))
    listener.settle()
    publisher.is_down = True
    for _ in range(12):
        listener.settle(PROBE_S)
    assert listener.stream.state is StreamState.SILENT
    # It may only be busy: nobody has said that its blocks are gone.
    assert listener.held() == {1}
    publisher.start()
    publisher.publish(stored([9]), is_lost=True)
    publisher.publish(stored([10]))
    listener.settle(PROBE_S)
    assert listener.held() == {9, 10}
    assert listener.stream.state is StreamState.LIVE


def test_a_replay_endpoint_that_never_answers_does_not_stop_the_rest(publisher: Publisher):
    publisher.is_down = True
    listener = Listener(publisher)
    publisher.publish(stored([1]), is_lost=True)
    publisher.publish(stored([2]))
    for _ in range(6):
        listener.settle(ANSWER_S)
    publisher.publish(stored([3]))
    listener.settle()
    assert listener.held() == {2, 3}
    assert listener.stream.is_partial
    assert listener.count("lost") == 0
    # Each attempt had a connection of its own: a late answer to one must not be taken for another's.
    assert sum(not socket.is_closed for socket in listener.sockets.asking) <= 1
    assert len(listener.sockets.asking) >= 3


def test_holes_in_an_answer_are_asked_for(publisher: Publisher):
    for name in range(1, 30):
        publisher.publish(stored([name]))
    publisher.answers_broken = 5
    listener = Listener(publisher)
    listener.settle()
    assert listener.held() == set(range(1, 30))
    assert listener.count("replays_torn") == 1
    assert listener.count("lost") == 0


def test_a_hole_in_the_buffer_itself_is_a_loss_and_no_endless_asking(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish(stored([1]))
    publisher.skip()
    publisher.publish(stored([2]))
    listener.settle()
    assert listener.held() == {2}
    assert listener.count("lost") == 1
    assert listener.count("replays") < 5


def test_what_waits_for_an_answer_is_bounded(publisher: Publisher, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_stream, "PENDING_MAX", 3)
    listener = Listener(publisher)
    listener.source.pump()
    for name in range(1, 9):
        publisher.publish(stored([name]))
    listener.source.pump()
    assert len(listener.stream._pending) <= 3
    listener.settle()
    assert listener.held() == set(range(1, 9))


def test_what_is_not_understood_is_counted_and_does_not_hide_the_rest(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish({"type": "BlockMoved", "x": 1}, stored([1], color="red"))
    publisher.send(b"\xc1")
    publisher.publish(stored([2]))
    listener.settle()
    listener.source._live.inbox.append([b"only one part"])
    listener.settle()
    assert listener.held() == {1, 2}
    assert listener.count("events_skipped") == 1
    assert listener.count("batches_malformed") == 1
    assert listener.count("messages_malformed") == 1


def test_hashes_may_be_numbers_or_bytes_and_ranks_and_groups_are_apart(publisher: Publisher):
    listener = Listener(publisher)
    publisher.publish(stored([2**64 - 1]), stored([b"digest"], group_idx=1, medium=None), rank=3)
    listener.settle()
    assert listener.index.match([2**64 - 1]) == {Holder("e", 3): 1}
    assert listener.index.match([b"digest"]) == {Holder("e", 3, "GPU", 1): 1}


@pytest.mark.parametrize(
    ("keys", "adapter", "wanted"),
    [
        (None, None, ""),
        ([["tenant"], None], None, "tenant"),
        ([["sql", "tenant"], ["sql"]], "sql", "tenant"),
        ([["sql"]], "sql", ""),
        ([[["image", 3], "tenant", b"digest"]], None, "tenant"),
    ],
)
def test_the_salt_is_told_from_what_else_decides_a_block(keys, adapter, wanted):
    event = stored([1, 2], extra_keys=keys, lora_name=adapter, session_id="s")
    publisher = Publisher()
    listener = Listener(publisher)
    publisher.publish(event)
    listener.settle()
    block = next(block for block in listener.index.held_by("e") if block.hash == 1)
    assert block.origin == Origin(wanted, adapter or "", "s")


def test_a_batch_without_a_rank_is_of_the_first():
    payload = msgspec.msgpack.encode([1.0, [CLEARED]])
    assert decode_batch(payload).rank == 0


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"\.\[events\]"):
        zmq_sockets("tcp://127.0.0.1:1")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("clear"), st.just(0), st.booleans()),
        st.tuples(st.just("restart"), st.just(0), st.just(False)),
        st.tuples(st.just("break"), st.integers(1, 4), st.just(False)),
        st.tuples(st.just("pump"), st.integers(1, 3), st.just(False)),
        st.tuples(st.just("serve"), st.just(0), st.just(False)),
        st.tuples(st.just("sleep"), st.integers(1, 12), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_in_the_end_the_index_has_what_the_engine_has(steps):
    publisher = Publisher()
    listener = Listener(publisher)
    for kind, value, is_lost in steps:
        if kind == "store":
            publisher.publish(stored([value]), is_lost=is_lost)
        elif kind == "remove":
            publisher.publish(removed([value]), is_lost=is_lost)
        elif kind == "clear":
            publisher.publish(CLEARED, is_lost=is_lost)
        elif kind == "restart":
            publisher.start()
        elif kind == "break":
            publisher.answers_broken = value
        elif kind == "pump":
            listener.source.pump(value)
        elif kind == "serve":
            listener.sockets.serve()
        else:
            listener.now += value
    publisher.answers_broken = 0
    for _ in range(4):
        listener.settle(PROBE_S)
    assert listener.stream.state is StreamState.LIVE
    assert listener.held() == publisher.truth.get("GPU", set())
