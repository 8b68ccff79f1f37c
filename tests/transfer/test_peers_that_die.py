"""Peers in processes of their own that are killed, or freeze, in the middle of a batch."""

from __future__ import annotations

import base64
import signal
import time
from contextlib import contextmanager

import pytest

from workmem.testing.transfer_peer import InTheMiddle, new_endpoint, new_mover, start
from workmem.testing.waiting import wait_until
from workmem.transfer.contract import Access, Outcome, Part
from workmem.transfer.region import RemoteWindow
from workmem.transfer.shared_memory import allocate

KINDS = pytest.mark.parametrize("kind", ["shared", "mooncake"])
SIZE = 40 * 2**20
"""More than one call of either mover."""
FILL, OTHER = 0x5A, 0xC3
WAIT_S, SHORT_S = 10.0, 0.2


@contextmanager
def endpoint_of(kind, mover=None):
    mover = new_mover(kind) if mover is None else mover
    endpoint = new_endpoint(kind, mover)
    memory = allocate(SIZE)
    try:
        yield endpoint, memory.view, endpoint.register(memory)
    finally:
        endpoint.close(SHORT_S)


@contextmanager
def process_of(kind, **more):
    peer = start(kind, SIZE, **more)
    try:
        yield peer
    finally:
        peer.end()


def has_begun(memory):
    return memory[0] == FILL


def ticket_of(window):
    return base64.b64encode(window.ticket).decode()


@KINDS
def test_a_writer_that_is_killed_is_gone_and_its_memory_free_once_nothing_can_arrive(kind, monkeypatch):
    mover = new_mover(kind)
    if kind == "mooncake":
        monkeypatch.setattr(mover, "drain_s", 0.5)
    with endpoint_of(kind, mover) as (endpoint, memory, region), process_of(kind, middle="SIGKILL") as peer:
        window = endpoint.grant(region, 0, SIZE, Access.WRITE)
        peer.tell(ticket=ticket_of(window), fill=FILL)
        assert window.wait(0, SIZE, WAIT_S) is Outcome.PEER_GONE
        assert has_begun(memory)
        assert memory[SIZE - 1] != FILL
        started = time.monotonic()
        assert window.close(WAIT_S) is Outcome.DONE
        if kind == "mooncake":
            assert time.monotonic() - started > 0.2
        memory[:] = bytes([OTHER]) * SIZE
        time.sleep(SHORT_S)
        assert memory.tobytes().count(OTHER) == SIZE


@KINDS
def test_a_writer_that_freezes_keeps_its_window_until_it_goes_on_and_harms_nobody_then(kind):
    with endpoint_of(kind) as (endpoint, memory, region), process_of(kind, middle="SIGSTOP") as peer:
        window = endpoint.grant(region, 0, SIZE, Access.WRITE)
        peer.tell(ticket=ticket_of(window), fill=FILL)
        wait_until(lambda: has_begun(memory), WAIT_S)
        assert window.wait(0, SIZE, SHORT_S) is Outcome.TIMED_OUT
        assert window.close(SHORT_S) is Outcome.TIMED_OUT
        assert endpoint.quarantined_bytes == SIZE
        assert endpoint.unregister(region) is Outcome.REFUSED
        peer.send(signal.SIGCONT)
        wait_until(lambda: window.is_free, WAIT_S)
        memory[:] = bytes([OTHER]) * SIZE
        assert peer.answer() == {"outcome": "refused"}
        time.sleep(SHORT_S)
        assert memory.tobytes().count(OTHER) == SIZE
        # It is as good as any other.
        again = endpoint.grant(region, 0, 4096, Access.WRITE)
        peer.tell(ticket=ticket_of(again), fill=FILL)
        assert peer.answer() == {"outcome": "done"}
        assert again.close(WAIT_S) is Outcome.DONE


@KINDS
@pytest.mark.parametrize("access", [Access.WRITE, Access.READ])
def test_an_owner_that_is_killed_is_gone_and_what_was_read_is_not_believed(kind, access, monkeypatch):
    with process_of(kind) as peer:
        mover = new_mover(kind)
        if kind == "mooncake":
            monkeypatch.setattr(mover, "settle_s", 0.3)
        killing = InTheMiddle(mover, 2, lambda: peer.send(signal.SIGKILL))
        with endpoint_of(kind, killing) as (endpoint, _, region):
            peer.tell(grant=SIZE, access=access)
            window = endpoint.open(base64.b64decode(peer.answer()["ticket"]), WAIT_S)
            assert isinstance(window, RemoteWindow)
            move = endpoint.write if access is Access.WRITE else endpoint.read
            moving = move(window, region, [Part(0, 0, SIZE)], WAIT_S)
            assert moving.wait() == (Outcome.PEER_GONE,)
            assert moving.wait_over(WAIT_S)
            assert move(window, region, [Part(0, 0, 8)], WAIT_S).wait() == (Outcome.PEER_GONE,)


@KINDS
@pytest.mark.parametrize("access", [Access.WRITE, Access.READ])
def test_an_owner_that_freezes_costs_one_deadline_and_others_nothing(kind, access, monkeypatch):
    with process_of(kind) as peer, process_of(kind) as other:
        mover = new_mover(kind)
        if kind == "mooncake":
            monkeypatch.setattr(mover, "settle_s", 0.3)
        freezing = InTheMiddle(mover, 2, lambda: peer.send(signal.SIGSTOP))
        with endpoint_of(kind, freezing) as (endpoint, _, region):
            peer.tell(grant=SIZE, access=access)
            other.tell(grant=4096, access=access)
            window = endpoint.open(base64.b64decode(peer.answer()["ticket"]), WAIT_S)
            healthy = endpoint.open(base64.b64decode(other.answer()["ticket"]), WAIT_S)
            assert isinstance(window, RemoteWindow)
            assert isinstance(healthy, RemoteWindow)
            move = endpoint.write if access is Access.WRITE else endpoint.read
            started = time.monotonic()
            moving = move(window, region, [Part(0, 0, SIZE)], 1.0)
            assert move(healthy, region, [Part(0, 0, 4096)], WAIT_S).wait() == (Outcome.DONE,)
            assert moving.wait() == (Outcome.TIMED_OUT,)
            assert time.monotonic() - started < 2.0
            if kind == "mooncake":
                # The engine itself still waits: the next batch does not, and memory is not one's own yet.
                assert not moving.is_over
                waited = time.monotonic()
                assert move(window, region, [Part(0, 0, 8)], 5.0).wait() == (Outcome.TIMED_OUT,)
                assert time.monotonic() - waited < 0.5
            peer.send(signal.SIGCONT)
            assert moving.wait_over(WAIT_S)
            assert moving.wait() == (Outcome.TIMED_OUT,)
